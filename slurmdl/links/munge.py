"""MUNGE credentials that prove to the collector which user of the cluster sent which samples.

MUNGE (https://dun.github.io/munge) is Slurm's authentication service. Its daemon puts the uid into the credential,
which is valid for five minutes and accepted once per host.
"""

from __future__ import annotations

import ctypes
import hmac
from functools import cache
from hashlib import sha256

from slurmdl.errors import InputError, UnavailableError

#: soname of all releases since 2007
_LIBRARY = "libmunge.so.2"
#: munge.h: status codes of an invalid credential; other errors concern the library, the daemon or its socket
_MIN_CREDENTIAL_STATUS, _MAX_CREDENTIAL_STATUS = 8, 18
#: prevents credentials made for other purposes from being accepted
_PAYLOAD_PREFIX = b"slurmdl samples sha256:"


def create_credential(data: bytes) -> str:
    """Create a credential of the calling user for the encoded samples.

    Raises UnavailableError if MUNGE is not installed, or its daemon does not answer.
    """
    library, credential = _load_library(), ctypes.c_char_p()
    payload = _payload(data)
    status = library.munge_encode(ctypes.byref(credential), None, payload, len(payload))
    try:
        if status:
            raise UnavailableError(f"munge: {_error_text(status)}")
        return (credential.value or b"").decode()
    finally:
        _free(credential)


def verify_credential(credential: str, data: bytes) -> int:
    """Return the uid of the user who created the credential for these samples.

    Raises InputError if the credential is forged, expired, replayed or for other samples; UnavailableError if MUNGE
    is not installed, or its daemon does not answer.
    """
    library, buffer = _load_library(), ctypes.c_void_p()
    size, uid, gid = ctypes.c_int(), ctypes.c_uint32(), ctypes.c_uint32()
    status = library.munge_decode(credential.encode(), None, ctypes.byref(buffer), ctypes.byref(size),
                                  ctypes.byref(uid), ctypes.byref(gid))
    try:
        if status:
            kind = InputError if _MIN_CREDENTIAL_STATUS <= status <= _MAX_CREDENTIAL_STATUS else UnavailableError
            raise kind(f"munge: {_error_text(status)}")
        payload = ctypes.string_at(buffer, size.value) if buffer and size.value > 0 else b""
    finally:
        _free(buffer)
    if not hmac.compare_digest(payload, _payload(data)):
        raise InputError("munge: the credential is for other samples")
    return uid.value


def is_munge_available() -> bool:
    """Whether MUNGE's daemon answers on this host."""
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
        raise UnavailableError(f"munge: {_LIBRARY} is not installed on this host") from error


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
