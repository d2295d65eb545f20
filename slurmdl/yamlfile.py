"""Files in YAML: what is wrong with one is one line, with the file and the line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TextIO

from slurmdl.errors import InputError, nearest_first


def read(path: str, parse: Callable[[TextIO], Any]) -> Any:
    """What `parse` makes of a file, e.g. yaml.safe_load.

    Raises
    ------
    InputError : the file cannot be read or is not YAML.
    """
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            return parse(file)
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror})", path) from error
    except UnicodeDecodeError as error:
        raise InputError("is not UTF-8 text", path) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise InputError(f"is not YAML ({getattr(error, 'problem', None) or error})", path,
                         mark.line + 1 if mark else None) from error


def keys(data: Any, valid: Sequence[str], path: str, prefix: str) -> dict[str, Any]:
    """A mapping of a file that holds none but these keys; `prefix` is where it stands in the file, e.g. "links.".

    Raises
    ------
    InputError : it is no mapping, or has another key.
    """
    if not isinstance(data, dict):
        raise InputError(f"{prefix.rstrip('.') or 'the file'} must hold keys with values, "
                         f"not {type(data).__name__}", path)
    for key in data:
        if key not in valid:
            near = nearest_first(str(key), valid)
            raise InputError(f"unknown key {prefix}{key}; valid: {', '.join(prefix + name for name in near)}", path)
    return data
