"""Files in YAML: what is wrong with one is one line, with the file and the line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from slurmdl.errors import InputError, SlurmdlError, sort_by_similarity

#: bytes of the largest file that is read: PyYAML takes about a second for them
MAX_YAML_BYTES = 65536


def load_yaml_file(path: str, parse: Callable[[str], Any] | None = None) -> Any:
    """What a file holds.

    Parameters
    ----------
    parse : makes it of the file's text; None for plain YAML data.

    Raises
    ------
    InputError : the file cannot be read, is too large, or is not YAML; whatever else is wrong with what it holds.
    """
    import yaml

    try:
        with open(path, "rb") as file:
            content = file.read(MAX_YAML_BYTES + 1)
        if len(content) > MAX_YAML_BYTES:
            raise InputError(f"is too large; valid: at most {MAX_YAML_BYTES} bytes", path)
        return (parse or _load_yaml)(content.decode("utf-8"))
    except SlurmdlError:
        raise
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror})", path) from error
    except UnicodeDecodeError as error:
        raise InputError("is not UTF-8 text", path) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        raise InputError(f"is not YAML ({getattr(error, 'problem', None) or error})", path,
                         mark.line + 1 if mark else None) from error
    except RecursionError as error:
        raise InputError("is nested too deeply", path) from error
    except Exception as error:
        raise InputError(f"cannot be understood ({type(error).__name__}: {error})", path) from error


def _load_yaml(text: str) -> Any:
    """yaml.safe_load, with the line of a value that PyYAML cannot convert: the month 13, an empty !!int."""
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
    """A value of a file in a message, shortened: with aliases a small file can hold a value of any size."""
    import reprlib

    short = reprlib.Repr()
    short.maxlevel, short.maxstring, short.maxlong, short.maxother = 2, 100, 100, 100
    try:
        return short.repr(value)
    except ValueError:  # Python writes no numbers of more than 4300 digits
        return "a number of too many digits"


def check_keys(data: Any, valid: Sequence[str], path: str, prefix: str) -> dict[str, Any]:
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
            near = sort_by_similarity(str(key)[:100], valid)
            raise InputError(f"unknown key {prefix}{key}; valid: {', '.join(prefix + name for name in near)}", path)
    return data
