"""Objects as bytes: plain values, arrays and tensors, and the few dataclasses that ranks exchange.

Unlike a pickle, the bytes cannot run code: whoever reaches a port of a rank may be another user.
"""

from __future__ import annotations

import json
import sys
from base64 import b64decode, b64encode
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmdl.errors import SlurmdlError, TrainError

#: dataclasses that ranks exchange -> module
_DATACLASSES: Mapping[str, str] = {
    "Plan": "slurmdl.plan", "Manifest": "slurmdl.train.library.checkpoint",
    "RankReport": "slurmdl.train.meters", "StepTotals": "slurmdl.train.meters"}
#: type -> its name in the text, which is a list of the name and the items
_COLLECTIONS: Mapping[type[Collection[Any]], str] = {list: "list", tuple: "tuple", set: "set", frozenset: "frozenset"}
#: kinds of dtypes whose items are no pointers
_ARRAY_KINDS = "biufcSUmM"


def encode_object(obj: Any) -> bytes:
    """Encode an object as text; a subclass of a plain type, e.g. OrderedDict, arrives as the plain type.

    Raises TrainError if it contains anything else than numbers, strings, bytes, None, NumPy arrays, tensors,
    dataclasses of _DATACLASSES, and lists, tuples, sets and dicts of them.
    """
    return json.dumps(_to_json(obj)).encode()


def decode_object(data: bytes | npt.NDArray[np.uint8]) -> Any:
    """Inverse of `encode_object`, with tensors in host memory; TrainError if the data is not valid."""
    try:
        return _from_json(json.loads(bytes(data)))
    except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RuntimeError, SlurmdlError) as error:
        raise TrainError("malformed message from another rank; expected the same version of slurmdl on all "
                              "ranks, and no other program on their ports") from error


def _to_json(obj: Any) -> Any:
    if isinstance(obj, np.generic):
        return ["scalar", *_array_to_json(np.asarray(obj))]
    if obj is None or isinstance(obj, (bool, int, float, str)):
        return obj
    if isinstance(obj, (bytes, bytearray)):
        return ["bytes", b64encode(obj).decode()]
    if isinstance(obj, complex):
        return ["complex", obj.real, obj.imag]
    if isinstance(obj, np.ndarray):
        return ["array", *_array_to_json(obj)]
    if isinstance(obj, Mapping):
        return ["dict", *(_to_json(part) for item in obj.items() for part in item)]
    for collection, name in _COLLECTIONS.items():
        if isinstance(obj, collection):
            return [name, *(_to_json(item) for item in obj)]
    name = type(obj).__name__
    if _DATACLASSES.get(name) == type(obj).__module__:
        return [name, *(_to_json(getattr(obj, field.name)) for field in fields(obj))]
    torch = sys.modules.get("torch")
    if torch and isinstance(obj, torch.Tensor):
        flat = obj.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return ["tensor", str(obj.dtype).removeprefix("torch."), list(obj.shape), b64encode(flat.numpy()).decode()]
    raise TrainError(f"{type(obj).__module__}.{name}: not an object that ranks can exchange; expected numbers, "
                          "strings, bytes, arrays, tensors, or lists, tuples, sets and dicts of them")


def _array_to_json(array: Any) -> list[Any]:
    if array.dtype.kind not in _ARRAY_KINDS:
        raise TrainError(f"array of {array.dtype}: not an object that ranks can exchange; expected an array of "
                              "numbers or strings")
    return [array.dtype.str, list(array.shape), b64encode(np.ascontiguousarray(array).tobytes()).decode()]


def _from_json(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    name, *items = value
    if name in _DATACLASSES:
        return getattr(import_module(_DATACLASSES[name]), name)(*map(_from_json, items))
    return _READERS[name](items)


def _array_from_json(items: list[Any]) -> Any:
    dtype, shape, data = items
    dtype = np.dtype(dtype)
    if dtype.kind not in _ARRAY_KINDS:
        raise ValueError(dtype)
    return np.frombuffer(b64decode(data), dtype).reshape(shape).copy()


def _tensor_from_json(items: list[Any]) -> Any:
    import torch

    name, shape, data = items
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(name)
    raw = b64decode(data)
    flat = torch.zeros(len(raw), dtype=torch.uint8)
    flat[:] = torch.from_numpy(np.frombuffer(raw, np.uint8).copy())
    return flat.view(dtype).reshape(shape)


def _dict_from_json(items: list[Any]) -> dict[Any, Any]:
    parts = list(map(_from_json, items))
    return dict(zip(parts[::2], parts[1::2], strict=True))


_READERS: Mapping[str, Callable[[list[Any]], Any]] = {
    "bytes": lambda items: b64decode(items[0]), "complex": lambda items: complex(*items),
    "array": _array_from_json, "scalar": lambda items: _array_from_json(items)[()], "tensor": _tensor_from_json,
    "dict": _dict_from_json, "list": lambda items: list(map(_from_json, items)),
    "tuple": lambda items: tuple(map(_from_json, items)), "set": lambda items: set(map(_from_json, items)),
    "frozenset": lambda items: frozenset(map(_from_json, items))}
