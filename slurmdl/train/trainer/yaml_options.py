"""Options of a run in a YAML file, with the names of the command line."""

from __future__ import annotations

import argparse
import difflib
from typing import Any

from slurmdl import yaml_input
from slurmdl.errors import InputError, UsageError

_TRUE_WORDS, _FALSE_WORDS = ("true", "yes", "on"), ("false", "no", "off")


def read_options(path: str, parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Read values of a parser's options from a file; keys are the options' destinations.

    A value is text as on the command line. A list is joined with commas, and a flag is `true` or `false`.

    Raises
    ------
    InputError : the file is unreadable or not YAML, or has an unknown key or an invalid value; with the line.
    """
    import yaml

    options = {name.removeprefix("--"): action for action in parser._actions for name in action.option_strings
               if name.startswith("--") and name not in ("--help", "--config")}
    top = yaml_input.load_yaml_file(path, lambda text: yaml.compose(text, yaml.SafeLoader))
    if top is None:
        return {}
    if not isinstance(top, yaml.MappingNode):
        raise InputError("expected OPTION: VALUE, e.g. lr: 0.1", path, top.start_mark.line + 1)
    values: dict[str, Any] = {}
    for key_node, value_node in top.value:
        line, name = key_node.start_mark.line + 1, str(key_node.value)
        if name not in options:
            near = difflib.get_close_matches(name, options) or sorted(options)
            raise InputError(f"unknown option; {'near' if len(near) < len(options) else 'valid'}: {', '.join(near)}",
                             path, line, name)
        action = options[name]
        if action.dest in values:
            raise InputError("given twice", path, line, name)
        text = _scalar_text(value_node)
        if text is None:
            raise InputError("expected one value, or a list of values", path, line, name)
        if action.nargs == 0:
            if text.lower() not in (*_TRUE_WORDS, *_FALSE_WORDS):
                raise InputError(f"{text!r} is not one of true, false", path, line, name)
            values[action.dest] = text.lower() in _TRUE_WORDS
            continue
        try:
            values[action.dest] = getattr(parser.parse_args([f"--{name}={text}"]), action.dest)
        except UsageError as error:
            # the message of argparse, without the names of command and option
            raise InputError(str(error).partition(f"--{name}: ")[2].partition(" (slurmdl train")[0] or str(error),
                             path, line, name) from error
    return values


def _scalar_text(node: Any) -> str | None:
    """The text of a scalar, or of a list of scalars joined with commas; None for other nodes."""
    items = node.value if node.id == "sequence" else [node]
    if not all(isinstance(item.value, str) and item.tag != "tag:yaml.org,2002:null" for item in items):
        return None
    return ",".join(item.value for item in items)
