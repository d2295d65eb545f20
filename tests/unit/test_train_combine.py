"""Which choices go together: the table, what it refuses, and that all of the rest runs."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from training import lost, noise, play

from slurmdl.errors import InvalidRunError
from slurmdl.plan import COMM_PATTERNS
from slurmdl.train import compatibility
from slurmdl.train.strategy_config import COMPRESSION_NAMES, TRIGGER_NAMES, StrategyConfig

EVERY = [StrategyConfig(strategy, traffic, compression=compress, trigger=trigger, asynchronous=asynchronous, uses_mpi_allreduce=library)
         for strategy, patterns in COMM_PATTERNS.items() for traffic, compress, trigger, asynchronous, library in
         itertools.product(patterns, COMPRESSION_NAMES, TRIGGER_NAMES, (False, True), (False, True))]


def legal(method: StrategyConfig) -> bool:
    try:
        compatibility.check_compatibility(method)
    except InvalidRunError as refusal:
        text = str(refusal)
        assert text.startswith("--") and "valid: " in text and "\n" not in text
        return False
    return True


@pytest.mark.parametrize("strategy", COMM_PATTERNS)
def test_what_is_legal_is_what_the_rows_say_and_runs(strategy: str) -> None:
    found = {method for method in EVERY if method.strategy == strategy and legal(method)}
    listed = {StrategyConfig(strategy, traffic, compression=compress, trigger=trigger, asynchronous=waits_not, uses_mpi_allreduce=library)
              for row in compatibility.COMBINATIONS if strategy in row.strategies
              for traffic, compress, trigger in itertools.product(row.comm_patterns, row.compressions, row.triggers)
              for waits_not in (False, True) if row.asynchronous in (None, waits_not)
              for library in (False, True) if row.uses_mpi_allreduce in (None, library)}
    assert found == listed
    if strategy in ("allreduce", "ps"):
        return
    for method in found:
        played = play(replace(method, warm_up=3, period=2 if method.trigger == "period" else None), 4, 12,
                      update=noise(0.1), zones="aabb")
        assert sum(its.strategy.exchanges for its in played) > 0, method
        if "gossip" in strategy:
            assert lost(played) < 1e-5, method


@pytest.mark.parametrize("method, text", [
    (StrategyConfig("gossip", "random", compression="int4"),
     "--compress int4: partners that are drawn keep no copies of each other, so that only whole models can be sent; "
     "asked for with gossip --traffic random --trigger period; valid: --compress none, fp16; or --traffic "
     "exponential; or --traffic base, zones"),
    (StrategyConfig("gossip", "base", compression="int4", asynchronous=True), "--compress int4: a model that is pushed goes "
     "whole, since nobody keeps a copy of it; asked for with gossip --traffic base --trigger period --async; "
     "valid: --compress none, fp16; or no --async"),
    (StrategyConfig("adaptive-gossip", "exponential"), "--trigger drift: who sends to one and receives from another"),
    (StrategyConfig("allreduce", "hierarchical", uses_mpi_allreduce=True), "--library: a library's own sum follows no zones"),
    (StrategyConfig("allreduce", "hierarchical", compression="int8"), "--compress int8: each sum on the way would"),
    (StrategyConfig("allreduce", "ring", compression="fp16", uses_mpi_allreduce=True), "--compress fp16: a library's own sum is"),
    (StrategyConfig("local-sgd", "hierarchical", compression="int8"), "--compress int8: sums in and between zones"),
    (StrategyConfig("local-sgd", "ring", shared_memory=True), "--shared-memory: only gossip mixes"),
    (StrategyConfig("gossip", "base", period=3, comm_budget=0.1), "--period: not valid with strategy gossip, trigger"),
    (StrategyConfig("gossip", "base", trigger="period", drift_threshold=0.1), "--threshold: not valid with"),
    (StrategyConfig("gossip", "base", global_average_every=3, asynchronous=True), "--global-every: not valid with"),
    (StrategyConfig("allreduce", "ring", period=4), "--period: not valid with strategy allreduce"),
    (StrategyConfig("local-sgd", "ring", max_staleness=2), "--staleness: not valid with strategy local-sgd"),
    (StrategyConfig("ps", "shards", compression="fp16"), "--compress fp16: gradients are sent as they are")])
def test_what_is_refused_is_told_in_one_sentence_with_what_is_valid(method: StrategyConfig, text: str) -> None:
    with pytest.raises(InvalidRunError) as refused:
        compatibility.check_compatibility(method)
    assert str(refused.value).startswith(text)


def test_the_table_of_the_manual_is_the_one_of_the_code() -> None:
    manual = Path(__file__).parents[2] / "docs" / "train.md"
    assert compatibility.to_markdown() in manual.read_text()
