"""Allreduce with shared memory inside nodes: exact sums, which bytes travel, and what replaces missing memory."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi import mpirun, needs_mpi

from slurmdl.plan import group_ranks
from slurmdl.train.collectives import AllreduceOp, NodeAllreduceOp, NodeVectors
from slurmdl.train.p2p import MeteredP2P
from slurmdl.train.transports import virtual

TRAIN = ("-m", "slurmdl.train", "--strategy", "allreduce", "--steps", "30", "--model", "mlp:16", "--batch-size", "8")


def node_means(nodes: str, zones: str, size: int, rounds: int) -> list[tuple[Any, dict[str, int]]]:
    """Vectors of all ranks after some means, in two buckets, and the bytes that each rank sent."""
    def level(source: int, target: int) -> str:
        return "intra_node" if nodes[source] == nodes[target] else \
            "intra_zone" if zones[source] == zones[target] else "inter_zone"

    def rank(transport: virtual.VirtualTransport) -> tuple[Any, dict[str, int]]:
        count, own = len(nodes), transport.rank
        p2p = MeteredP2P(transport, [level(own, peer) for peer in range(count)])
        node_ranks, groups = group_ranks(range(count), nodes), group_ranks(range(count), zones)
        members = next(ranks for ranks in node_ranks if own in ranks)
        vectors = NodeVectors(transport.allocate_shared, own, members, [slice(0, size // 3), slice(size // 3, size)])
        ops = [NodeAllreduceOp(p2p, vectors, bucket, node_ranks, groups,
                               lambda groups, vector: AllreduceOp(p2p, groups, vector)) for bucket in range(2)]
        vectors.vector[:] = values(own, size)
        for number in range(rounds):
            if number:
                vectors.vector *= 1 + own  # as a training step: changed at once after the exchange
            for op in ops:
                p2p.run_to_completion(op.coroutine(count))
        result = vectors.vector.copy()
        vectors.close()
        return result, p2p.bytes_sent

    return virtual.run_virtual_ranks(len(nodes), rank)


def values(rank: int, size: int) -> Any:
    return np.random.default_rng(rank).standard_normal(size).astype(np.float32)


@pytest.mark.parametrize(("nodes", "zones"), [
    ("a", "x"), ("aa", "xx"), ("aaa", "xxx"), ("aabb", "xxxx"), ("aabb", "xxyy"), ("abab", "xyxy"),
    ("aaabb", "xxxxx"), ("aaabbc", "xxxyyy"), ("aabbccdd", "xxxxyyyy")])
@pytest.mark.parametrize("size", [1, 2, 7, 1000, 70_003])
def test_means_are_exact_and_identical(nodes: str, zones: str, size: int) -> None:
    count, rounds = len(nodes), 3
    expected = np.mean([values(rank, size) for rank in range(count)], axis=0, dtype=np.float64)
    expected *= np.mean(range(1, count + 1)) ** (rounds - 1)
    results = node_means(nodes, zones, size, rounds)
    for vector, _ in results:
        assert np.array_equal(vector, results[0][0])
        assert np.abs(vector - expected).max() <= 1e-5 * np.abs(expected).max()


def test_messages_are_sent_between_nodes_only() -> None:
    """Two nodes send each other one vector, whatever their number of ranks."""
    sent = [bytes_sent for _, bytes_sent in node_means("aabb", "xxxx", 1200, 1)]
    assert [levels["intra_node"] for levels in sent] == [0] * 4
    assert sum(levels["intra_zone"] for levels in sent) == 2 * 4 * 1200


def train(path: Path, **options: Any) -> tuple[dict[str, Any], list[str]]:
    proc = mpirun(3, *TRAIN, "--summary", str(path), **options)
    assert proc.returncode == 0, proc.stderr
    return json.loads(path.read_text()), [line for line in proc.stderr.splitlines() if "shared memory" in line]


@needs_mpi
@pytest.mark.parametrize("options", [
    pytest.param({"environ": {"OMPI_MCA_osc": "^sm"}}, marks=pytest.mark.nightly),
    pytest.param({"shm_size": "1m"}, marks=pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount"))])
def test_ranks_without_shared_memory_exchange_messages(options: dict[str, Any], tmp_path: Path) -> None:
    """Open MPI cannot share memory, or has too little of it (where it would wait forever)."""
    expected, no_messages = train(tmp_path / "shared")
    summary, [message] = train(tmp_path / "messages", **options)
    assert not no_messages
    assert "cannot share" in message and "/dev/shm" in message
    assert expected["bytes_sent"]["intra_node"] == 0 < summary["bytes_sent"]["intra_node"]
    assert summary["consensus_distance"] == expected["consensus_distance"] == 0
