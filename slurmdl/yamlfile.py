"""Files in YAML: what is wrong with one is one line, with the file and the line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TextIO

from slurmdl.errors import InputError


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
