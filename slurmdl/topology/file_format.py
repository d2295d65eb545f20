"""Format of a topology file, recognized by its content."""

from __future__ import annotations

import re
from typing import Literal

from slurmdl.errors import InputError
from slurmdl.slurm.output import TOPOCONF_BEGIN

#: "conf": topology.conf; "yaml": topology.yaml; "json": slurmdl's own; "saved": text of scontrol
TopologyFormat = Literal["conf", "yaml", "json", "saved"]

ACCEPTED_FORMATS = ("topology.conf, topology.yaml, JSON of `slurmdl topology show --json`, or the saved text of "
                    "`scontrol show topology` or `show topoconf`")

_CONF_LINE = re.compile(r"^[ \t]*(?:SwitchName|BlockName|RingName|BlockSizes|Include)\b",
                        re.MULTILINE | re.IGNORECASE)
_TOPOCONF_LINE = re.compile(rf"^{TOPOCONF_BEGIN.pattern}", re.MULTILINE)
_YAML_START = re.compile(r"%YAML|---|- |[\w\"']+:(\s|$)")
_OTHER_SAVED_OUTPUT = re.compile(r"^[ \t]*(?:(?:Node|Partition|Reservation)Name=|scontrol:)", re.MULTILINE)


def format_of_suffix(path: str) -> TopologyFormat:
    """Return the format that the name of a file tells, as Slurm reads its own files."""
    return "yaml" if path.endswith((".yaml", ".yml")) else "json" if path.endswith(".json") else "conf"


def format_of_content(text: str, path: str) -> TopologyFormat:
    """Return the format of a text; its file's name decides only if the text is in no format, or empty.

    Raises InputError for the text of other commands, and for a text that neither has a line of any format, nor a name
    that tells one.
    """
    from slurmdl.topology.scontrol_topology import has_shown_topology  # lazy: a submission does not need it

    if has_shown_topology(text):
        return "saved"
    first = next((line for line in map(str.strip, text.split("\n")) if line and not line.startswith("#")), "")
    if first.startswith("{"):  # possibly YAML, too
        return "json" if '"zones"' in text or '"topologies"' in text else format_of_suffix(path)
    if _YAML_START.match(first):
        return "yaml"
    if _CONF_LINE.search(text):
        return format_of_suffix(path)
    if _TOPOCONF_LINE.search(text):
        return "saved"
    suffix = format_of_suffix(path)
    if _OTHER_SAVED_OUTPUT.search(text) or (first and suffix == "conf" and not path.endswith(".conf")):
        raise InputError(f"has no topology; expected {ACCEPTED_FORMATS}", file=path)
    return suffix
