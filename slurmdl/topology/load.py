"""Load the zones: from an explicit file, else the file next to slurm.conf, else the controller."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from slurmdl.errors import InputError, SlurmdlError, UnavailableError, warn
from slurmdl.files import read_regular_file, read_text_limited
from slurmdl.slurm import process
from slurmdl.slurm.slurm_conf import topology_file_path
from slurmdl.topology import scontrol_topology, topology_conf
from slurmdl.topology.file_format import TopologyFormat, format_of_content, format_of_suffix
from slurmdl.topology.source import OnError, TopologySource
from slurmdl.topology.topology import Topology, TopologySet

MAX_JSON_BYTES = 16 * 2**20  # JSON names every node

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
    result = process.run_command(["scontrol", "-o"], stdin="show topoconf\nshow topology\n")
    text = "".join(f"{line}\n" for line in result.stdout.splitlines() if not line.startswith("scontrol:"))
    if not text.strip():
        raise UnavailableError(f"scontrol show topology: {result.first_error or 'no result'}")
    return scontrol_topology.parse_scontrol_topologies(text)


def load_sources(file: str | None, on_error: OnError, on_warning: OnWarning = warn) -> list[TopologySource]:
    """Like `load_topologies`, but return the declarations, and pass recoverable errors to `on_error`."""
    path = file if file is not None else topology_file_path()
    if path is None:
        return [TopologySource.from_topology(topology) for topology in query_topologies().topologies]
    text, format_name = "", format_of_suffix(path)
    if file is not None:
        text, format_name = _read_any(path, on_warning)
    if format_name == "saved":
        from slurmdl.topology import saved_topology  # lazy: a submission does not need it

        return saved_topology.declare_saved_topologies(text, path, on_warning)
    if format_name == "json":
        return [TopologySource.from_topology(topology) for topology in _load_json(path).topologies]
    if format_name == "conf":
        return [topology_conf.declare_topology_conf(path, on_error)]
    from slurmdl.topology import topology_yaml  # lazy: imports PyYAML

    return topology_yaml.declare_topology_yaml(read_text_limited(path), path, on_error)[0]


def load_topology_file(path: str, on_warning: OnWarning = warn) -> TopologySet:
    """Return the topologies in a file of any format that `format_of_content` recognizes.

    `on_warning` gets the lines of saved text that are skipped. Raises InputError if the file cannot be read, or is
    malformed.
    """
    text, format_name = _read_any(path, on_warning)
    if format_name == "saved":
        from slurmdl.topology import saved_topology  # lazy: a submission does not need it

        return saved_topology.parse_saved_topologies(text, path, on_warning)
    return _load_strict(path, format_name)


def load_slurm_topology_file() -> TopologySet | None:
    """Return the topologies of the file next to slurm.conf, read as Slurm does, or None if there is no such file."""
    path = topology_file_path()
    return None if path is None else _load_strict(path, format_of_suffix(path))


def _read_any(path: str, on_warning: OnWarning) -> tuple[str, TopologyFormat]:
    """Return text and format of a file; the readers of configuration files read again, with their own checks."""
    from slurmdl.slurm.saved_output import MAX_SAVED_BYTES, decode_saved_text

    data = read_regular_file(path, MAX_SAVED_BYTES)
    text = data.decode("utf-8-sig", errors="replace")
    format_name = format_of_content(text, path)
    return decode_saved_text(data, path, on_warning) if format_name == "saved" else "", format_name


def _load_strict(path: str, format_name: TopologyFormat) -> TopologySet:
    if format_name == "conf":
        return TopologySet.single(topology_conf.parse_topology_conf(path))
    if format_name == "json":
        return _load_json(path)
    from slurmdl.topology import topology_yaml  # lazy: imports PyYAML

    return topology_yaml.parse_topology_yaml(read_text_limited(path), path)


def _load_json(path: str) -> TopologySet:
    try:
        return TopologySet.from_json(json.loads(read_text_limited(path, MAX_JSON_BYTES)))
    except (ValueError, RecursionError) as error:
        raise InputError(f"is not JSON ({error})", file=path) from error
    except InputError as error:
        raise InputError(str(error), file=path) if error.file is None else error from error
