"""Where the zones are read: an explicit file, else beside slurm.conf, else from the controller."""

from __future__ import annotations

import json

from slurmdl import process
from slurmdl.errors import InputError, UnavailableError
from slurmdl.slurm.conf_files import topology_file_path
from slurmdl.topology import conf, scontrol
from slurmdl.topology.contents import Contents, OnFault
from slurmdl.topology.files import text_of
from slurmdl.topology.model import Topology
from slurmdl.topology.topologies import Topologies

#: bytes; JSON names every node and is read faster than the other formats
MAX_JSON_BYTES = 16 * 2**20
_YAML = (".yaml", ".yml")


def read(file: str | None = None, name: str | None = None) -> Topology:
    """One topology of those that `read_all` finds: the one of that name, else the default.

    Raises
    ------
    InputError, UnavailableError : as `read_all`; InputError where there is none of that name.
    """
    return read_all(file).of(name)


def read_all(file: str | None = None) -> Topologies:
    """The topologies of `file`, else of the file beside slurm.conf, else of one bounded call of scontrol.

    Raises
    ------
    InputError : the file or the answer is malformed, or there is no zone in it.
    UnavailableError : there is no file, and scontrol is missing, hangs or fails.
    """
    if file is not None:
        return from_file(file)
    found = from_files()
    if found is not None:
        return found
    return from_controller()


def from_controller() -> Topologies:
    """The topologies as the controller holds them, from one bounded call of scontrol.

    Raises
    ------
    UnavailableError : scontrol is missing, hangs or fails.
    InputError : its answer is malformed, or holds no zone.
    """
    answer = process.ask(["scontrol", "-o"], stdin="show topoconf\nshow topology\n")
    text = "".join(f"{line}\n" for line in answer.out.splitlines() if not line.startswith("scontrol:"))
    if not text.strip():
        raise UnavailableError(f"scontrol show topology: {answer.first_error or 'no answer'}")
    return scontrol.parse_all(text)


def declared(file: str | None, on_fault: OnFault) -> list[Contents]:
    """What the source that `read_all` would take declares, with its faults to `on_fault` where reading can go on.

    Raises
    ------
    InputError, UnavailableError : as `read_all`, where reading cannot go on.
    """
    path = file if file is not None else topology_file_path()
    if path is None or path.endswith(".json"):
        return [Contents.of(topology) for topology in read_all(path).each]
    if not path.endswith(_YAML):
        return [conf.declare(path, on_fault)]
    from slurmdl.topology import yamlfile

    return yamlfile.declare(text_of(path, MAX_JSON_BYTES), path, on_fault)[0]


def from_file(path: str) -> Topologies:
    """The topologies in a topology.conf, a topology.yaml, or a JSON file as `to_json` writes it."""
    if path.endswith(_YAML):
        # PyYAML is imported only where there is a file for it
        from slurmdl.topology import yamlfile

        return yamlfile.parse_file(path)
    if not path.endswith(".json"):
        return Topologies.one(conf.parse_file(path))
    try:
        return Topologies.from_json(json.loads(text_of(path, MAX_JSON_BYTES)))
    except (ValueError, RecursionError) as error:
        raise InputError(f"is not JSON ({error})", file=path) from error
    except InputError as error:
        raise InputError(str(error), file=path) if error.file is None else error from error


def from_files(slurm_conf: str | None = None) -> Topologies | None:
    """The topologies in the directory of slurm.conf, None where there is no file of them."""
    path = topology_file_path(slurm_conf)
    return None if path is None else from_file(path)
