"""Where the zones are read: an explicit file, else beside slurm.conf, else from the controller."""

from __future__ import annotations

import json
import os

from slurmdl import process
from slurmdl.errors import InputError
from slurmdl.topology import conf, scontrol
from slurmdl.topology.model import Topology

DEFAULT_SLURM_CONF = "/etc/slurm/slurm.conf"


def read(file: str | None = None) -> Topology:
    """The topology of `file`, else of the file beside slurm.conf, else of one bounded call of scontrol.

    Raises
    ------
    InputError : the file or the answer is malformed, or there is no zone in it.
    UnavailableError : there is no file, and scontrol is missing, hangs or fails.
    """
    if file is not None:
        return from_file(file)
    return from_files() or scontrol.parse(process.query(["scontrol", "-o", "show", "topology"]))


def from_file(path: str) -> Topology:
    """The topology in a topology.conf, or in a JSON file as `Topology.to_json` writes it."""
    if not path.endswith(".json"):
        return conf.parse_file(path)
    try:
        with open(path, encoding="utf-8") as file:
            return Topology.from_json(json.load(file))
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror})", file=path) from error
    except ValueError as error:
        raise InputError(f"is not JSON ({error})", file=path) from error


def from_files(slurm_conf: str | None = None) -> Topology | None:
    """The topology.conf in the directory of slurm.conf, None where it is not there.

    A topology.yaml in that directory makes Slurm ignore topology.conf, so then it is None, too.
    """
    directory = os.path.dirname(slurm_conf or os.environ.get("SLURM_CONF") or DEFAULT_SLURM_CONF)
    path = os.path.join(directory, "topology.conf")
    if os.path.exists(os.path.join(directory, "topology.yaml")) or not os.path.exists(path):
        return None
    return conf.parse_file(path)
