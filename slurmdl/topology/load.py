"""Where the zones are read: an explicit file, else beside slurm.conf, else from the controller."""

from __future__ import annotations

import json

from slurmdl.errors import InputError, UnavailableError
from slurmdl.files import read_text_limited
from slurmdl.slurm import process
from slurmdl.slurm.slurm_conf import topology_file_path
from slurmdl.topology import scontrol_topology, topology_conf
from slurmdl.topology.source import OnError, TopologySource
from slurmdl.topology.topology import Topology, TopologySet

#: bytes; JSON names every node and is read faster than the other formats
MAX_JSON_BYTES = 16 * 2**20
_YAML_SUFFIXES = (".yaml", ".yml")


def load_topology(file: str | None = None, name: str | None = None) -> Topology:
    """One topology of those that `read_all` finds: the one of that name, else the default.

    Raises
    ------
    InputError, UnavailableError : as `read_all`; InputError where there is none of that name.
    """
    return load_topologies(file).get(name)


def load_topologies(file: str | None = None) -> TopologySet:
    """The topologies of `file`, else of the file beside slurm.conf, else of one bounded call of scontrol.

    Raises
    ------
    InputError : the file or the answer is malformed, or there is no zone in it.
    UnavailableError : there is no file, and scontrol is missing, hangs or fails.
    """
    if file is not None:
        return load_topology_file(file)
    found = load_slurm_topology_file()
    if found is not None:
        return found
    return query_topologies()


def query_topologies() -> TopologySet:
    """The topologies as the controller holds them, from one bounded call of scontrol.

    Raises
    ------
    UnavailableError : scontrol is missing, hangs or fails.
    InputError : its answer is malformed, or holds no zone.
    """
    answer = process.run_command(["scontrol", "-o"], stdin="show topoconf\nshow topology\n")
    text = "".join(f"{line}\n" for line in answer.stdout.splitlines() if not line.startswith("scontrol:"))
    if not text.strip():
        raise UnavailableError(f"scontrol show topology: {answer.first_error or 'no answer'}")
    return scontrol_topology.parse_scontrol_topologies(text)


def load_sources(file: str | None, on_error: OnError) -> list[TopologySource]:
    """What the source that `read_all` would take declares, with its faults to `on_fault` where reading can go on.

    Raises
    ------
    InputError, UnavailableError : as `read_all`, where reading cannot go on.
    """
    path = file if file is not None else topology_file_path()
    if path is None or path.endswith(".json"):
        return [TopologySource.from_topology(topology) for topology in load_topologies(path).topologies]
    if not path.endswith(_YAML_SUFFIXES):
        return [topology_conf.declare_topology_conf(path, on_error)]
    from slurmdl.topology import topology_yaml

    return topology_yaml.declare_topology_yaml(read_text_limited(path, MAX_JSON_BYTES), path, on_error)[0]


def load_topology_file(path: str) -> TopologySet:
    """The topologies in a topology.conf, a topology.yaml, or a JSON file as `to_json` writes it."""
    if path.endswith(_YAML_SUFFIXES):
        # PyYAML is imported only where there is a file for it
        from slurmdl.topology import topology_yaml

        return topology_yaml.load_topology_yaml(path)
    if not path.endswith(".json"):
        return TopologySet.single(topology_conf.parse_topology_conf(path))
    try:
        return TopologySet.from_json(json.loads(read_text_limited(path, MAX_JSON_BYTES)))
    except (ValueError, RecursionError) as error:
        raise InputError(f"is not JSON ({error})", file=path) from error
    except InputError as error:
        raise InputError(str(error), file=path) if error.file is None else error from error


def load_slurm_topology_file(slurm_conf: str | None = None) -> TopologySet | None:
    """The topologies in the directory of slurm.conf, None where there is no file of them."""
    path = topology_file_path(slurm_conf)
    return None if path is None else load_topology_file(path)
