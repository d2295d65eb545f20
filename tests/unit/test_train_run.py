"""The trainer on several MPI ranks: training, plans and invalid input."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from mpi import mpirun, needs_mpi, python

from slurmdl.plan import Plan, encode_plan
from slurmdl.train.strategy_config import StrategyConfig
from slurmdl.train.transports.mpi import open_mpi_major
from slurmdl.train.world import World

TRAIN = ("-m", "slurmdl.train")
#: four nodes that alternate between two leaves, as in the environment of Slurm's tasks
ON_NODES = ("export SLURMD_NODENAME=n$R SLURM_TOPOLOGY_ADDR_PATTERN=switch.switch.node;"
            "case $R in 0|2) SLURM_TOPOLOGY_ADDR=core.leafA.n$R;; *) SLURM_TOPOLOGY_ADDR=core.leafB.n$R;; esac;"
            "export SLURM_TOPOLOGY_ADDR")
WRONG_PLAN = encode_plan(Plan("ps", ("n0", "n9", "n2"), ("ps", "worker", "worker"), {}))
WRONG_NODE = "rank 1 runs on n1, planned n9"
PARAMETERS = 64 * 64 + 64 + 64 * 10 + 10


def lines(text: str) -> list[str]:
    """Lines of slurmdl on stderr."""
    return [line for line in text.splitlines() if line.startswith("slurmdl:")]


@needs_mpi
@pytest.mark.parametrize("strategy", ["allreduce", *(pytest.param(name, marks=pytest.mark.nightly)
                                                     for name in ("gossip", "ps"))])
def test_training_on_digits(strategy: str, tmp_path: Path) -> None:
    ranks, steps = (3, 40) if strategy == "allreduce" else (4, 80)
    default = strategy == "allreduce"  # with a plan for other nodes, which is ignored
    words, environ = ((), {"SLURMDL_PLAN": WRONG_PLAN}) if default else (("--strategy", strategy), {})
    proc = mpirun(ranks, *TRAIN, *words, "--steps", str(steps), "--model", "mlp:64", "--log-every", "20",
                  "--metrics", str(tmp_path / "metrics"), "--summary", str(tmp_path / "summary"), per_rank=ON_NODES,
                  environ=environ)
    assert proc.returncode == 0, proc.stderr
    assert [WRONG_NODE in line for line in lines(proc.stderr)] == [True] * default
    summary = json.loads((tmp_path / "summary").read_text())
    first = "ps" if strategy == "ps" else "worker"
    places = [f"0 n0 (leafA {first})", "1 n1 (leafB worker)", "2 n2 (leafA worker)", "3 n3 (leafB worker)"][:ranks]
    assert proc.stdout.splitlines()[0] == f"ranks: {', '.join(places)}"
    assert f"step {steps} of {steps}: loss" in proc.stdout
    assert summary["test_accuracy"] >= 0.9
    assert (summary["strategy"], summary["num_nodes"], summary["num_zones"], summary["steps"]) == (strategy, ranks, 2,
                                                                                                   steps)
    assert summary["parameters"] == PARAMETERS
    assert summary["rank_map"][1] == {"rank": 1, "node": "n1", "zone": "leafB", "role": "worker"}

    bytes_ = summary["bytes_sent"]
    vector = 4 * PARAMETERS
    assert bytes_["intra_node"] == 0
    if strategy == "allreduce":
        # the two ranks of a zone exchange halves twice within the zone, and once with the other zone
        assert (bytes_["intra_zone"], bytes_["inter_zone"]) == (2 * vector * steps, 2 * vector * steps)
        assert summary["consensus_distance"] == 0
    if strategy == "gossip":  # the final average passes the ring once
        assert bytes_["intra_zone"] + bytes_["inter_zone"] == 4 * vector * steps + 6 * vector
        assert 0 < bytes_["intra_zone"] < bytes_["inter_zone"]
        assert 0 < summary["consensus_distance"] < 1
        assert summary["spectral_gap"] == pytest.approx(1 - 3 ** -0.5)
        assert "spectral gap 0.423" in " ".join(proc.stdout.split())
    if strategy == "ps":  # one of three workers shares the server's leaf
        pushed_and_pulled = (2 * vector * steps, 4 * vector * steps)
        assert (bytes_["intra_zone"], bytes_["inter_zone"]) > pushed_and_pulled  # plus message headers
        assert (bytes_["intra_zone"], bytes_["inter_zone"]) == pytest.approx(pushed_and_pulled, rel=2e-3)

    records = [json.loads(line) for line in (tmp_path / "metrics").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, steps + 1))
    assert records[-1]["loss"] < records[0]["loss"]
    for record in records:
        assert record["compute_seconds"] > 0
        assert record["compute_seconds"] + record["exposed_comm_seconds"] == pytest.approx(record["seconds"])


@needs_mpi
def test_plan_sets_strategy_roles_and_zones(tmp_path: Path) -> None:
    """With a parameter server that is not the first rank, and one of two workers in its zone."""
    steps = 40
    plan = Plan("ps", ("n0", "n1", "n2"), ("worker", "ps", "worker"),
                {f"n{i}": ("top", "left" if i < 2 else "right") for i in range(3)})
    proc = mpirun(3, *TRAIN, "--steps", str(steps), "--model", "mlp:64", "--summary", str(tmp_path / "summary"),
                  environ={"SLURMDL_PLAN": encode_plan(plan)}, per_rank=ON_NODES)
    assert proc.returncode == 0, proc.stderr
    assert proc.stdout.splitlines()[0] == "ranks: 0 n0 (left worker), 1 n1 (left ps), 2 n2 (right worker)"
    assert lines(proc.stderr) == ["slurmdl: 3 of 3 ranks on their planned nodes"]
    summary = json.loads((tmp_path / "summary").read_text())
    assert (summary["strategy"], summary["num_servers"], summary["num_zones"]) == ("ps", 1, 2)
    assert summary["test_accuracy"] >= 0.9
    bytes_, pushed_and_pulled = summary["bytes_sent"], 2 * 4 * PARAMETERS * steps
    assert bytes_["intra_node"] == 0
    for level in ("intra_zone", "inter_zone"):  # plus message headers
        assert pushed_and_pulled < bytes_[level] < 1.002 * pushed_and_pulled


@needs_mpi
@pytest.mark.nightly  # also in tests/cluster/test_train.py, with real counters
def test_plan_sets_comm_pattern(tmp_path: Path) -> None:
    """The zones differ in size: 2 N (Z - 1) cross them in each step, with a flat ring 2 N (Z - 1) 3 / 2."""
    steps = 3
    plan = Plan("allreduce", ("n0", "n1", "n2", "n3"), ("worker",) * 4,
                {f"n{i}": ("top", "left" if i < 3 else "right") for i in range(4)}, comm_pattern="hierarchical")
    proc = mpirun(4, *TRAIN, "--steps", str(steps), "--model", "mlp:64", "--summary", str(tmp_path / "summary"),
                  environ={"SLURMDL_PLAN": encode_plan(plan)}, per_rank=ON_NODES)
    assert proc.returncode == 0, proc.stderr
    summary = json.loads((tmp_path / "summary").read_text())
    assert (summary["strategy"], summary["comm_pattern"]) == ("allreduce", "hierarchical")
    vector = 4 * PARAMETERS
    assert summary["bytes_sent"] == {"intra_node": 0, "intra_zone": 4 * vector * steps,
                                     "inter_zone": 2 * vector * steps}
    assert summary["consensus_distance"] == 0
    assert "allreduce, hierarchical" in proc.stdout


@needs_mpi
@pytest.mark.nightly  # the first is also in test_training_on_digits
@pytest.mark.parametrize("text, reason", [
    (encode_plan(Plan("ps", ("n0", "n9"), ("ps", "worker"), {})), WRONG_NODE),
    ("nonsense", "SLURMDL_PLAN is not a plan")])
def test_mismatched_plan_is_ignored(text: str, reason: str) -> None:
    proc = mpirun(2, *TRAIN, "--steps", "2", environ={"SLURMDL_PLAN": text}, per_rank=ON_NODES)
    assert proc.returncode == 0, proc.stderr
    assert proc.stdout.splitlines()[0] == "ranks: 0 n0 (leafA worker), 1 n1 (leafB worker)"
    assert len(lines(proc.stderr)) == 1
    assert reason in proc.stderr


@needs_mpi
def test_single_mpi_rank_in_several_slurm_tasks_is_rejected() -> None:
    mpi = (*TRAIN, "--steps", "2", "--backend", "mpi")
    proc = python(*mpi, environ={"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"})
    assert proc.returncode == 76
    hint, refusal = lines(proc.stderr)
    assert "4 tasks without PMIx" in hint
    assert "MPI has 1 rank where Slurm has 4 tasks" in refusal
    assert "--mpi=pmix" in refusal
    quiet = python(*mpi, environ={"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1"})
    assert (quiet.returncode, quiet.stderr) == (76, "")


@needs_mpi
@pytest.mark.parametrize("environ, word", [({}, "sent"), ({"OMPI_MCA_btl_tcp_eager_limit": "65536"}, "waits")])
def test_open_mpi_sends_chunks_eagerly_over_tcp(environ: dict[str, str], word: str) -> None:
    proc = mpirun(2, "-c", """
import time
import numpy as np
from slurmdl.train.transports.transport import CHUNK_BYTES
from slurmdl.train.world import init_mpi
transport, chunk, word = init_mpi(), np.ones(CHUNK_BYTES, np.uint8), np.zeros(1, np.uint8)
if transport.rank == 0:
    request, end = transport.isend(1, chunk, 1), time.monotonic() + 3
    while not (sent := transport.testall([request])) and time.monotonic() < end:
        time.sleep(0.001)
    print("sent" if sent else "waits")
    transport.waitall([request, transport.isend(1, word, 2)])
else:
    transport.waitall([transport.irecv(0, word, 2)])
    transport.waitall([transport.irecv(0, chunk, 1)])
""", environ=environ)
    assert (proc.returncode, proc.stdout) == (0, word + "\n"), proc.stderr


@needs_mpi
def test_single_rank_trains() -> None:
    proc = python(*TRAIN, "--steps", "10", "--model", "mlp:16")
    assert proc.returncode == 0, proc.stderr
    assert "accuracy" in proc.stdout


@needs_mpi
@pytest.mark.parametrize("arguments, per_rank, status, text", [
    (("--strategy", "gosip"), "", 64, "'gosip' is not one of allreduce, ps, gossip, adaptive-gossip, local-sgd"),
    (("--strategy", "ps", "--ps", "2"), "", 64, "2 parameter servers in 2 ranks"),
    # on virtual ranks in test_train_simulate.py
    *(pytest.param(words, "", 64, text, marks=pytest.mark.nightly) for words, text in (
        (("--strategy", "gossip", "--comm-pattern", "ring"), "strategy gossip has random-matching, one-peer"),
        (("--batch-size", "800"), "only 718 samples"))),
    ((), 'set -- "$@" --lr 0.$((R + 1))', 64, "rank 1 has --lr 0.2 but rank 0 has 0.1")])
def test_error_of_all_ranks_is_reported_once(arguments: tuple[str, ...], per_rank: str, status: int,
                                            text: str) -> None:
    proc = mpirun(2, *TRAIN, "--steps", "2", *arguments, per_rank=per_rank)
    assert proc.returncode == status
    assert len(lines(proc.stderr)) == 1
    assert text in proc.stderr
    assert "Traceback" not in proc.stderr


@needs_mpi
def test_different_data_are_rejected(tmp_path: Path) -> None:
    """The second rank's scikit-learn has other digits."""
    folder = tmp_path / "sklearn" / "datasets" / "data"
    folder.mkdir(parents=True)
    (tmp_path / "sklearn" / "__init__.py").touch()
    table = np.random.default_rng(1).integers(0, 10, (1797, 65))
    np.savetxt(folder / "digits.csv.gz", table, delimiter=",", fmt="%d")
    proc = mpirun(2, *TRAIN, "--steps", "2",
                  per_rank=f"{ON_NODES}; if [ $R = 1 ]; then export PYTHONPATH={tmp_path}; fi")
    assert proc.returncode == 76
    [line] = lines(proc.stderr)
    assert re.fullmatch("slurmdl: rank 1 on n1 has data digits [0-9a-f]+ where rank 0 has data digits [0-9a-f]+: all "
                        "ranks need the same model, optimizer and data", line)


@needs_mpi
@pytest.mark.parametrize("arguments, text", [
    (("--metrics", "/nowhere/metrics"), "rank 0 on n0: /nowhere/metrics: No such file or directory"),
    # on virtual ranks in test_train_simulate.py
    *(pytest.param(("--summary", path), f"rank 0 on n0: --summary {path}: cannot be written ({reason}",
                   marks=pytest.mark.nightly)
      for path, reason in (("/nowhere/summary", "No such file"), ("/etc", "Is a directory)"))),
    # also in test_train_scripts.py, with a script
    pytest.param(("--lr", "1e30"), "has infinite or NaN entries; expected finite ones", marks=pytest.mark.nightly)])
def test_failure_of_one_rank_ends_all(arguments: tuple[str, ...], text: str) -> None:
    proc = mpirun(2, *TRAIN, "--steps", "1000", *arguments, per_rank=ON_NODES)
    assert proc.returncode == 76
    assert text in proc.stderr
    assert "Traceback" not in proc.stderr


def test_world_lists_many_ranks_in_groups() -> None:
    nodes = tuple(f"n{rank // 4}" for rank in range(40))
    zones = tuple("A" if rank < 20 else "" for rank in range(40))
    world = World(SimpleNamespace(rank=0), StrategyConfig("ps", "shards"), nodes, zones,
                  ("ps",) * 4 + ("worker",) * 36, {})
    assert str(world) == ("0 to 3 on n0 (A ps), 4 to 19 on 4 nodes from n1 to n4 (A worker), "
                          "20 to 39 on 5 nodes from n5 to n9 (worker)")


@pytest.mark.parametrize(("words", "first"), [
    ("Open MPI v4.1.4, package: Debian OpenMPI, ident: 4.1.4", 4), ("Open MPI v5.0.8, package: x", 5),
    ("Open MPI vmaster, package: x", 0), ("MPICH Version:      4.0.2", 0),
    ("Intel(R) MPI Library 2021.9 for Linux", 0)])
def test_open_mpi_major(words: str, first: int) -> None:
    assert open_mpi_major(SimpleNamespace(Get_library_version=lambda: words)) == first
