"""A run's options in one YAML file: the same names as on the command line."""

from __future__ import annotations

import argparse
import difflib
from typing import Any

from slurmdl import yaml_input
from slurmdl.errors import InputError, UsageError

_TRUE_WORDS, _FALSE_WORDS = ("true", "yes", "on"), ("false", "no", "off")


def read_options(path: str, parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Values of a parser's options from a file, by their names in the parser's result.

    A value is text as on the command line; a list stands for its entries with commas between them, and an option
    without a value is `true` or `false`.

    Raises
    ------
    InputError : the file cannot be read, is not YAML, or holds an unknown key or a value that is not valid; with the
        line.
    """
    import yaml

    options = {word.removeprefix("--"): action for action in _actions(parser) for word in action.option_strings
               if word.startswith("--") and word not in ("--help", "--config")}
    top = yaml_input.load_yaml_file(path, lambda text: yaml.compose(text, yaml.SafeLoader))
    if top is None:
        return {}
    if not isinstance(top, yaml.MappingNode):
        raise InputError("OPTION: VALUE expected, e.g. lr: 0.1", path, top.start_mark.line + 1)
    found: dict[str, Any] = {}
    for key, value in top.value:
        line, name = key.start_mark.line + 1, str(key.value)
        if name not in options:
            near = difflib.get_close_matches(name, options) or sorted(options)
            raise InputError(f"unknown option; {'near' if len(near) < len(options) else 'valid'}: {', '.join(near)}",
                             path, line, name)
        action = options[name]
        if action.dest in found:
            raise InputError("given twice", path, line, name)
        word = _scalar_text(value)
        if word is None:
            raise InputError("one value, or a list of values, expected", path, line, name)
        if action.nargs == 0:
            if word.lower() not in (*_TRUE_WORDS, *_FALSE_WORDS):
                raise InputError(f"{word!r} is not one of true, false", path, line, name)
            found[action.dest] = word.lower() in _TRUE_WORDS
            continue
        try:
            found[action.dest] = getattr(parser.parse_args([f"--{name}={word}"]), action.dest)
        except UsageError as error:
            # argparse's words, without the command's and the option's names
            raise InputError(str(error).partition(f"--{name}: ")[2].partition(" (slurmdl train")[0] or str(error),
                             path, line, name) from error
    return found


def _actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return parser._actions


def _scalar_text(node: Any) -> str | None:
    """What a scalar or a list of scalars says, None for anything else."""
    items = node.value if node.id == "sequence" else [node]
    if not all(isinstance(item.value, str) and item.tag != "tag:yaml.org,2002:null" for item in items):
        return None
    return ",".join(item.value for item in items)
