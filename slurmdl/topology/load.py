"""Load the zones: from an explicit file of any format, else the file next to slurm.conf, else the controller."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Literal

from slurmdl.errors import InputError, OnError, SlurmdlError, UnavailableError, raise_error, warn
from slurmdl.files import read_regular_file, read_text_limited
from slurmdl.slurm import process
from slurmdl.slurm.output import (
    MAX_SAVED_BYTES,
    TOPOCONF_BEGIN,
    Problems,
    SlurmOutput,
    decode_saved_text,
    split_output,
)
from slurmdl.slurm.slurm_conf import topology_file_path
from slurmdl.topology import scontrol_topology, topology_conf
from slurmdl.topology.source import ZoneDeclarations, build_topologies
from slurmdl.topology.topology import Topology, TopologySet

MAX_JSON_BYTES = 16 * 2**20  # JSON names every node

#: "conf": topology.conf; "yaml": topology.yaml; "json": slurmdl's own; "saved": text of scontrol
TopologyFormat = Literal["conf", "yaml", "json", "saved"]

ACCEPTED_FORMATS = ("topology.conf, topology.yaml, JSON of `slurmdl topology show --json`, or the saved text of "
                    "`scontrol show topology` or `show topoconf`")

_CONF_LINE = re.compile(r"^[ \t]*(?:SwitchName|BlockName|RingName|BlockSizes|Include)\b",
                        re.MULTILINE | re.IGNORECASE)
_TOPOCONF_LINE = re.compile(rf"^{TOPOCONF_BEGIN.pattern}", re.MULTILINE)
_YAML_START = re.compile(r"%YAML|---|- |[\w\"']+:(\s|$)")
_OTHER_SAVED_OUTPUT = re.compile(r"^[ \t]*(?:(?:Node|Partition|Reservation)Name=|scontrol:)", re.MULTILINE)

OnWarning = Callable[[str], None]


def load_topology(file: str | None = None, name: str | None = None) -> Topology:
    """Return the topology of that name, else the default; raise as `load_topologies`, InputError if there is none."""
    return load_topologies(file).get(name)


def topology_or_flat(nodes: Sequence[str], load: Callable[[], Topology] = load_topology) -> tuple[Topology, str]:
    """Return the loaded topology and ""; if that fails, a flat one and the reason."""
    try:
        return load(), ""
    except SlurmdlError as error:
        return Topology.flat(nodes), str(error)


def load_topologies(file: str | None = None) -> TopologySet:
    """Return the topologies of `file`, else of the file next to slurm.conf, else of the controller.

    Raises InputError if the file or the output of scontrol is malformed or has no zone, UnavailableError if there is
    no file and scontrol is missing, hangs or fails.
    """
    return (load_topology_file(file) if file is not None else load_slurm_topology_file()) or query_topologies()


def query_topologies() -> TopologySet:
    """Query the topologies of the controller; raise as `load_topologies`."""
    return scontrol_topology.read_topologies(_query_output())


def _query_output() -> SlurmOutput:
    answer = process.run_command(["scontrol", "-o"], stdin="show topoconf\nshow topology\n")
    output = split_output(answer.stdout)
    if not output.has_zones and not output.unknown:
        raise UnavailableError(f"scontrol show topology: {answer.first_error or 'no result'}")
    return output


def load_declarations(file: str | None, on_error: OnError, on_warning: OnWarning = warn) -> list[ZoneDeclarations]:
    """Like `load_topologies`, but return the declarations, and pass recoverable errors to `on_error`."""
    path = file if file is not None else topology_file_path()
    if path is None:
        return scontrol_topology.parse_declarations(_query_output(), on_error)[0]
    text, format_name = _read_any(path, on_warning) if file is not None else ("", _format_of_suffix(path))
    if format_name == "json":
        return [ZoneDeclarations.from_topology(topology) for topology in _load_json(path).topologies]
    return _read_declarations(path, format_name, text, on_error, on_warning)[0]


def load_topology_file(path: str, on_warning: OnWarning = warn) -> TopologySet:
    """Return the topologies in a file of any format that `_format_of_content` recognizes.

    `on_warning` gets the lines of saved text that are skipped. Raises InputError if the file cannot be read, or is
    malformed.
    """
    text, format_name = _read_any(path, on_warning)
    return _load_json(path) if format_name == "json" else \
        build_topologies(*_read_declarations(path, format_name, text, on_warning=on_warning))


def load_slurm_topology_file() -> TopologySet | None:
    """Return the topologies of the file next to slurm.conf, read as Slurm does, or None if there is no such file."""
    path = topology_file_path()
    return None if path is None else build_topologies(*_read_declarations(path, _format_of_suffix(path)))


def _read_any(path: str, on_warning: OnWarning) -> tuple[str, TopologyFormat]:
    """Return text and format of a file; the readers of configuration files read again, with their own checks."""
    data = read_regular_file(path, MAX_SAVED_BYTES)
    text = data.decode("utf-8-sig", errors="replace")
    format_name = _format_of_content(text, path)
    return decode_saved_text(data, path, on_warning) if format_name == "saved" else "", format_name


def _read_declarations(path: str, format_name: TopologyFormat, text: str = "", on_error: OnError = raise_error,
                       on_warning: OnWarning = warn) -> tuple[list[ZoneDeclarations], str]:
    """Return the declarations of a file and the name of the default topology; `text`: of a file of saved output."""
    if format_name == "conf":
        source = topology_conf.parse_topology_conf(path, on_error)
        return [source], source.name
    if format_name == "yaml":
        from slurmdl.topology import topology_yaml  # lazy: imports PyYAML

        return topology_yaml.parse_topology_yaml(read_text_limited(path), path, on_error)
    output = split_output(text, path)
    problems = Problems(output)
    declared = scontrol_topology.parse_declarations(output, problems)
    problems.report(on_warning)
    return declared


def _load_json(path: str) -> TopologySet:
    try:
        return TopologySet.from_json(json.loads(read_text_limited(path, MAX_JSON_BYTES)))
    except (ValueError, RecursionError) as error:
        raise InputError(f"is not JSON ({error})", file=path) from error
    except InputError as error:
        raise InputError(str(error), file=path) if error.file is None else error from error


def _format_of_suffix(path: str) -> TopologyFormat:
    """Return the format that the name of a file tells, as Slurm reads its own files."""
    return "yaml" if path.endswith((".yaml", ".yml")) else "json" if path.endswith(".json") else "conf"


def _format_of_content(text: str, path: str) -> TopologyFormat:
    """Return the format of a text; its file's name decides only if the text is in no format, or empty.

    Raises InputError for the text of other commands, and for a text that neither has a line of any format, nor a name
    that tells one.
    """
    if scontrol_topology.SHOWN_ZONE.search(text):
        return "saved"
    first = next((line for line in map(str.strip, text.split("\n")) if line and not line.startswith("#")), "")
    if first.startswith("{"):  # possibly YAML, too
        return "json" if '"zones"' in text or '"topologies"' in text else _format_of_suffix(path)
    if _YAML_START.match(first):
        return "yaml"
    if _CONF_LINE.search(text):
        return _format_of_suffix(path)
    if _TOPOCONF_LINE.search(text):
        return "saved"
    suffix = _format_of_suffix(path)
    if _OTHER_SAVED_OUTPUT.search(text) or (first and suffix == "conf" and not path.endswith(".conf")):
        raise InputError(f"has no topology; expected {ACCEPTED_FORMATS}", file=path)
    return suffix
