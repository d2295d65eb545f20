"""YAML input files; errors are one line with file and line number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from slurmdl.errors import InputError, SlurmdlError, sort_by_similarity
from slurmdl.files import read_limited

if TYPE_CHECKING:
    import yaml

MAX_YAML_BYTES = 65536  # PyYAML needs about a second for a file of this size
#: bounds of what a file of this size expands to: its aliases, and the entries that all merge keys (`<<`) insert
MAX_ALIASES, MAX_MERGED_ENTRIES = 1000, 10_000


def load_yaml_file(path: str, parse: Callable[[str, type[yaml.SafeLoader]], Any] | None = None) -> Any:
    """Data of a YAML file, by `parse` (default yaml.load) of its text with a loader; InputError if it is unreadable,
    not valid, or has more than MAX_ALIASES aliases or MAX_MERGED_ENTRIES merged entries.
    """
    import yaml

    try:
        with open(path, "rb") as file:
            text = read_limited(file, path, MAX_YAML_BYTES).decode()
        return (parse or yaml.load)(text, _bounded_loader(path))
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


def _bounded_loader(path: str) -> type[yaml.SafeLoader]:
    """yaml.SafeLoader with bounded expansion, that reports the line of values that PyYAML cannot convert.

    Such values are for example the month 13 or an empty !!int.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        def __init__(self, stream: str) -> None:
            super().__init__(stream)
            self.aliases_left, self.merged_left = MAX_ALIASES, MAX_MERGED_ENTRIES

        def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
            if self.check_event(yaml.AliasEvent):
                self.aliases_left -= 1
                if self.aliases_left < 0:
                    raise InputError(f"has more than {MAX_ALIASES} aliases", path,
                                     self.peek_event().start_mark.line + 1)  # type: ignore[no-untyped-call]
            return super().compose_node(parent, index)

        def flatten_mapping(self, node: yaml.MappingNode) -> None:
            """Insert the entries of merge keys; nested ones double their number per level, so they are counted first.

            A mapping that is flattened has no merge keys, so that each is counted once.
            """
            for key, value in node.value:
                if key.tag != "tag:yaml.org,2002:merge":
                    continue
                for merged in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                    if isinstance(merged, yaml.MappingNode):
                        self.flatten_mapping(merged)
                        self.merged_left -= len(merged.value)
                    if self.merged_left < 0:
                        raise InputError(f"merge keys (<<) insert more than {MAX_MERGED_ENTRIES} entries", path,
                                         key.start_mark.line + 1)
            super().flatten_mapping(node)

        def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
            try:
                return super().construct_object(node, deep)
            except (yaml.YAMLError, SlurmdlError, RecursionError):
                raise
            except Exception as error:
                problem = f"{short_repr(node.value)}: {error}"
                raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from error

    return Loader


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
