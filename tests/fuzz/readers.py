"""Fuzz a reader: any bytes result in a value that round-trips or in a one-line InputError.

    python tests/fuzz/readers.py conf [libFuzzer options] [corpus directory]

atheris (https://github.com/google/atheris) guides libFuzzer by the coverage of the readers' Python code.
"""

from __future__ import annotations

import io
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["slurmdl.topology", "slurmdl.links", "slurmdl.slurm.hostlist",
                                         "slurmdl.slurm.output", "slurmdl.cluster", "slurmdl.files",
                                         "slurmdl.yaml_input", "slurmdl.train.trainer.options", "slurmdl.history"]):
    from slurmdl import records
    from slurmdl.cluster.load import load_cluster_file
    from slurmdl.cluster.snapshot import ClusterSnapshot
    from slurmdl.errors import InputError, UsageError
    from slurmdl.history.accounting import read_accounting_stream
    from slurmdl.links import aggregate, capacity, prometheus
    from slurmdl.links.link_scores import LinkScores
    from slurmdl.links.samples import LinkSample, format_sample_lines, parse_sample_lines
    from slurmdl.links.score_sources import parse_scores
    from slurmdl.slurm import hostlist
    from slurmdl.slurm.output import split_output
    from slurmdl.topology import check, load, scontrol_topology, topology_conf, write
    from slurmdl.topology.topology import Topology, TopologySet
    from slurmdl.train.trainer.options import parse_train_options

_DIRECTORY = tempfile.TemporaryDirectory()


def _file(name: str) -> Callable[[bytes], TopologySet]:
    path = Path(_DIRECTORY.name, name)

    def reader(data: bytes) -> TopologySet:
        path.write_bytes(data)
        return load.load_topology_file(str(path))

    return reader


def _check(data: bytes) -> None:
    """Fuzz the linter, which continues after an error and so reads zones that the reader rejects."""
    path = Path(_DIRECTORY.name, "checked.conf")
    path.write_bytes(data)
    errors: list[InputError] = []
    declared = topology_conf.parse_topology_conf(str(path), errors.append)
    for finding in check.check_declarations(declared, ["n1", "n2"]):
        assert "\n" not in finding.text
    assert all("\n" not in str(error) for error in errors)


def _hostlist(data: bytes) -> None:
    names = hostlist.expand_hostlist(data.decode(errors="replace"))
    assert len(names) <= hostlist.MAX_NAMES
    if len(names) < 1000 and not any(set(name) & set("[]{}, \t\r\n") for name in names):
        assert hostlist.expand_hostlist(write.checked_hostlist(names)) == names


def _train(data: bytes) -> None:
    """Fuzz a file of trainer options; invalid combinations are also rejected in one line."""
    path = Path(_DIRECTORY.name, "train.yaml")
    path.write_bytes(data)
    try:
        parse_train_options(["--config", str(path)], {})
    except UsageError as error:
        assert len(str(error).splitlines()) == 1, str(error)


#: current time for the readers of link scores, in the middle of the valid range
NOW = 1.8e9


def _scores(data: bytes) -> None:
    """Fuzz link score files; the first byte selects CSV. Every format round-trips."""
    link_scores = parse_scores(data[1:].decode(errors="replace"), NOW, is_csv=data[:1] == b"c")
    assert LinkScores.from_json(json.loads(json.dumps(records.to_json(link_scores)))) == link_scores
    parse_scores(link_scores.to_text(), max(NOW, link_scores.time))
    text = prometheus.exposition_text(link_scores)
    assert len(text.splitlines()) == text.count("\n")
    for row in capacity.link_rows(link_scores, Topology.flat(())):
        assert 0 < row.slowdown < float("inf"), row


def _samples(data: bytes) -> None:
    """Fuzz JSON lines of samples: each line is a sample or an error; scores of valid samples are finite."""
    results = list(parse_sample_lines(data.decode(errors="replace").splitlines()))
    valid = [result for result in results if isinstance(result, LinkSample)]
    assert all("\n" not in str(result) for result in results if isinstance(result, InputError))
    assert list(parse_sample_lines(format_sample_lines(valid).splitlines())) == valid
    aggregated = aggregate.aggregate_scores(valid, NOW)
    assert LinkScores.from_json(records.to_json(aggregated)) == aggregated
    assert sum(score.samples for links in (aggregated.nodes, aggregated.inter_leaf)
               for score in links.values()) <= len(set(valid))


def _prometheus(data: bytes) -> None:
    for sample in prometheus.parse_instant_vector(data, "loss", "instance"):
        assert 0 <= sample.loss <= 1 and sample.name


def _saved_cluster(data: bytes) -> None:
    """Fuzz saved text of scontrol and sinfo: nodes, and warnings of one line that name the file."""
    warnings: list[str] = []
    path = Path(_DIRECTORY.name, "nodes.txt")
    path.write_bytes(data)
    snapshot = load_cluster_file(str(path), warnings.append)
    assert all(warning.startswith(f"{path}:") and "\n" not in warning for warning in warnings), warnings
    assert ClusterSnapshot.from_json(json.loads(json.dumps(snapshot.to_json()))).nodes == snapshot.nodes


def _sacct(data: bytes) -> None:
    """Fuzz records of sacct, as text and JSON: each is used, or counted as a problem of one line."""
    table = read_accounting_stream(io.BufferedReader(io.BytesIO(data)), "jobs")
    assert all(len(str(problem).splitlines()) == 1 for problem in table.problems)
    assert ((table.end_s < 0) | (table.end_s >= table.start_s)).all()
    "".join((*table.users, *table.partitions, *table.states, *table.hostlists)).encode()


READERS: dict[str, Callable[[bytes], TopologySet | None]] = {
    "conf": _file("topology.conf"), "yaml": _file("topology.yaml"), "json": _file("topology.json"),
    "saved": _file("topology.txt"), "saved-cluster": _saved_cluster,
    "scontrol": lambda data: scontrol_topology.read_topologies(split_output(data.decode(errors="replace"))),
    "hostlist": _hostlist, "check": _check, "train": _train,
    "sacct": _sacct, "scores": _scores, "samples": _samples, "prometheus": _prometheus,
}


def fuzz_one(reader: Callable[[bytes], TopologySet | None], data: bytes) -> None:
    try:
        topologies = reader(data)
    except InputError as error:
        assert len(str(error).splitlines()) == 1, str(error)
        return
    if topologies is not None:
        as_json = json.loads(json.dumps(topologies.to_json()))
        assert TopologySet.from_json(as_json).to_json() == topologies.to_json()
        for topology in topologies.topologies:
            assert int(topology.node_count[topology.parent < 0].sum()) == int((topology.leaf >= 0).sum())


if __name__ == "__main__":
    name = sys.argv.pop(1)
    atheris.Setup(sys.argv, lambda data: fuzz_one(READERS[name], data))
    atheris.Fuzz()
