"""YAML input files; errors are one line with file and line number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from slurmdl.errors import InputError, SlurmdlError, sort_by_similarity
from slurmdl.files import read_limited

if TYPE_CHECKING:
    import yaml

MAX_YAML_BYTES = 65536  # PyYAML needs about a second for a file of this size


def load_yaml_file(path: str, parse: Callable[[str], Any] | None = None) -> Any:
    """Data of a YAML file, by `parse` of its text if given; InputError if it is unreadable or not valid."""
    import yaml

    try:
        with open(path, "rb") as file:
            text = read_limited(file, path, MAX_YAML_BYTES).decode()
        return (parse or _load_yaml)(text)
    except SlurmdlError:
        raise
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror})", path) from error
    except UnicodeDecodeError as error:
        raise InputError("is not UTF-8 text", path) from error
    except yaml.YAMLError as error:
        raise yaml_syntax_error(error, path) from error
    except RecursionError as error:
        raise InputError("is nested too deeply", path) from error
    except Exception as error:
        raise InputError(f"cannot be parsed ({type(error).__name__}: {error})", path) from error


def yaml_syntax_error(error: yaml.YAMLError, path: str) -> InputError:
    mark = getattr(error, "problem_mark", None)
    return InputError(f"is not YAML ({getattr(error, 'problem', None) or error})", path,
                      mark.line + 1 if mark else None)


def _load_yaml(text: str) -> Any:
    """yaml.safe_load that reports the line of values PyYAML cannot convert, e.g. the month 13 or an empty !!int."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
            try:
                return super().construct_object(node, deep)
            except (yaml.YAMLError, RecursionError):
                raise
            except Exception as error:
                problem = f"{short_repr(node.value)}: {error}"
                raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from error

    return yaml.load(text, Loader)


def short_repr(value: Any) -> str:
    """Shortened repr of a value; with aliases a small file can hold a value of any size."""
    import reprlib

    shortener = reprlib.Repr()
    shortener.maxlevel, shortener.maxstring, shortener.maxlong, shortener.maxother = 2, 100, 100, 100
    try:
        return shortener.repr(value)
    except ValueError:  # Python formats numbers of up to 4300 digits
        return "a number with too many digits"


def check_keys(data: Any, valid: Sequence[str], path: str, prefix: str) -> dict[str, Any]:
    """Return `data`; InputError unless it is a mapping with `valid` keys only. `prefix`: its key, e.g. "options."."""
    if not isinstance(data, dict):
        location = f"{prefix.rstrip('.')}: " if prefix else ""
        raise InputError(f"{location}expected a mapping, found {type(data).__name__}", path)
    for key in data:
        if key not in valid:
            similar = ", ".join(prefix + name for name in sort_by_similarity(str(key)[:100], valid))
            raise InputError(f"unknown key {prefix}{key}; expected {similar}", path)
    return data
