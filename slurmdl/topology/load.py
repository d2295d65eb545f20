"""Load the zones: from an explicit file, else the file next to slurm.conf, else the controller."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from slurmdl.errors import InputError, SlurmdlError, UnavailableError
from slurmdl.files import read_text_limited
from slurmdl.slurm import process
from slurmdl.slurm.slurm_conf import topology_file_path
from slurmdl.topology import scontrol_topology, topology_conf
from slurmdl.topology.source import OnError, TopologySource
from slurmdl.topology.topology import Topology, TopologySet

MAX_JSON_BYTES = 16 * 2**20  # JSON names every node
_YAML_SUFFIXES = (".yaml", ".yml")


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


def load_sources(file: str | None, on_error: OnError) -> list[TopologySource]:
    """Like `load_topologies`, but return the declarations, and pass recoverable errors to `on_error`."""
    path = file if file is not None else topology_file_path()
    if path is None or path.endswith(".json"):
        return [TopologySource.from_topology(topology) for topology in load_topologies(path).topologies]
    if not path.endswith(_YAML_SUFFIXES):
        return [topology_conf.declare_topology_conf(path, on_error)]
    from slurmdl.topology import topology_yaml

    return topology_yaml.declare_topology_yaml(read_text_limited(path), path, on_error)[0]


def load_topology_file(path: str) -> TopologySet:
    """Return the topologies in a topology.conf, a topology.yaml, or a JSON file of `to_json`."""
    if path.endswith(_YAML_SUFFIXES):
        from slurmdl.topology import topology_yaml  # lazy: imports PyYAML

        return topology_yaml.parse_topology_yaml(read_text_limited(path), path)
    if not path.endswith(".json"):
        return TopologySet.single(topology_conf.parse_topology_conf(path))
    try:
        return TopologySet.from_json(json.loads(read_text_limited(path, MAX_JSON_BYTES)))
    except (ValueError, RecursionError) as error:
        raise InputError(f"is not JSON ({error})", file=path) from error
    except InputError as error:
        raise InputError(str(error), file=path) if error.file is None else error from error


def load_slurm_topology_file() -> TopologySet | None:
    """Return the topologies of the file next to slurm.conf, or None if there is no such file."""
    path = topology_file_path()
    return None if path is None else load_topology_file(path)
