"""Munge credentials of samples: they prove on another host of the cluster which user sent which samples.

MUNGE (https://dun.github.io/munge) is what Slurm itself authenticates with. Its daemon writes the user's number into
the credential; one is valid for five minutes, and each host accepts it once.
"""

from __future__ import annotations

import ctypes
import hmac
from functools import cache
from hashlib import sha256

from slurmdl.errors import InputError, UnavailableError

#: of which release the library is, by the name that all of them have had since 2007
_LIBRARY = "libmunge.so.2"
#: munge.h: statuses of a credential that is not valid; other errors are of the library, the daemon or its socket
_MIN_CREDENTIAL_STATUS, _MAX_CREDENTIAL_STATUS = 8, 18
#: keeps a credential that was made for something else from being taken for one of samples
_PAYLOAD_PREFIX = b"slurmdl samples sha256:"


def create_credential(data: bytes) -> str:
    """A credential of this process's user for the samples that are sent with it.

    Raises
    ------
    UnavailableError : munge is not on this host, or its daemon does not answer.
    """
    library, made = _load_library(), ctypes.c_char_p()
    payload = _payload(data)
    status = library.munge_encode(ctypes.byref(made), None, payload, len(payload))
    try:
        if status:
            raise UnavailableError(f"munge: {_error_text(status)}")
        return (made.value or b"").decode()
    finally:
        _free(made)


def verify_credential(credential: str, data: bytes) -> int:
    """The number of the user who made a credential for these samples.

    Raises
    ------
    InputError : the credential is forged, too old, was shown before, or is not of these samples.
    UnavailableError : munge is not on this host, or its daemon does not answer.
    """
    library, payload = _load_library(), ctypes.c_void_p()
    size, user, group = ctypes.c_int(), ctypes.c_uint32(), ctypes.c_uint32()
    status = library.munge_decode(credential.encode(), None, ctypes.byref(payload), ctypes.byref(size), ctypes.byref(user),
                                  ctypes.byref(group))
    try:
        if status:
            kind = InputError if _MIN_CREDENTIAL_STATUS <= status <= _MAX_CREDENTIAL_STATUS else UnavailableError
            raise kind(f"munge: {_error_text(status)}")
        found = ctypes.string_at(payload, size.value) if payload and size.value > 0 else b""
    finally:
        _free(payload)
    if not hmac.compare_digest(found, _payload(data)):
        raise InputError("munge: the credential is not of these samples")
    return user.value


def is_munge_available() -> bool:
    """Whether munge's daemon answers on this host."""
    try:
        verify_credential(create_credential(b""), b"")
    except (InputError, UnavailableError):
        return False
    return True


def _payload(data: bytes) -> bytes:
    return _PAYLOAD_PREFIX + sha256(data).hexdigest().encode()


@cache
def _load_library() -> ctypes.CDLL:
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise UnavailableError(f"munge: {_LIBRARY} is not on this host") from error


def _error_text(status: int) -> str:
    function = _load_library().munge_strerror
    function.restype = ctypes.c_char_p
    return (function(status) or b"?").decode(errors="replace")


@cache
def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    library.free.argtypes, library.free.restype = [ctypes.c_void_p], None
    return library


def _free(memory: ctypes.c_char_p | ctypes.c_void_p) -> None:
    _libc().free(memory)
