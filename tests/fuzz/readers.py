"""Fuzz a reader: whatever the bytes are, it ends in a topology that round-trips, or in an InputError of one line.

    python tests/fuzz/readers.py conf [options of libFuzzer] [corpus directory]

atheris (https://github.com/google/atheris) drives libFuzzer with the coverage of the readers' Python code.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["slurmdl.topology", "slurmdl.train.data"]):
    from slurmdl.errors import InputError
    from slurmdl.topology import check, conf, hostlist, read, scontrol, write
    from slurmdl.topology.topologies import Topologies
    from slurmdl.train.data.cifar import read as read_cifar
    from slurmdl.train.data.idx import read as read_idx

_DIRECTORY = tempfile.TemporaryDirectory()


def _file(name: str) -> Callable[[bytes], Topologies]:
    path = Path(_DIRECTORY.name, name)

    def reader(data: bytes) -> Topologies:
        path.write_bytes(data)
        return read.from_file(str(path))

    return reader


def _check(data: bytes) -> None:
    """The linter goes on after a fault, and so sees zones that the reader would have refused."""
    path = Path(_DIRECTORY.name, "checked.conf")
    path.write_bytes(data)
    faults: list[InputError] = []
    for finding in check.check(conf.declare(str(path), faults.append), ["n1", "n2"]):
        assert "\n" not in finding.text
    assert all("\n" not in str(fault) for fault in faults)


def _hostlist(data: bytes) -> None:
    names = hostlist.expand(data.decode(errors="replace"))
    assert len(names) <= hostlist.MAX_NAMES
    if len(names) < 1000 and not any(set(name) & set("[]{}, \t\r\n") for name in names):
        assert hostlist.expand(write.hostlist(names)) == names


def _idx(data: bytes) -> None:
    path = Path(_DIRECTORY.name, "images.gz" if data[:2] == b"\x1f\x8b" else "images")
    path.write_bytes(data)
    assert read_idx(str(path), 3).ndim == 3


def _cifar(data: bytes) -> None:
    """Shorter files of shorter images, so that whole ones are found."""
    path = Path(_DIRECTORY.name, "train.bin")
    path.write_bytes(data)
    labels, images = read_cifar(str(path), 1, 10, image=(3, 1, 1))
    assert len(labels) == len(images) == len(data) // 4


READERS: dict[str, Callable[[bytes], Topologies | None]] = {
    "conf": _file("topology.conf"), "yaml": _file("topology.yaml"), "json": _file("topology.json"),
    "scontrol": lambda data: scontrol.parse_all(data.decode(errors="replace")), "hostlist": _hostlist,
    "check": _check, "idx": _idx, "cifar": _cifar,
}


def one(reader: Callable[[bytes], Topologies | None], data: bytes) -> None:
    try:
        found = reader(data)
    except InputError as error:
        assert len(str(error).splitlines()) == 1, str(error)
        return
    if found is not None:
        told = json.loads(json.dumps(found.to_json()))
        assert Topologies.from_json(told).to_json() == found.to_json()
        for topology in found.each:
            assert int(topology.size[topology.parent < 0].sum()) == int((topology.leaf >= 0).sum())


if __name__ == "__main__":
    name = sys.argv.pop(1)
    atheris.Setup(sys.argv, lambda data: one(READERS[name], data))
    atheris.Fuzz()
