"""Which choices go together: the table, what it refuses, and that all of the rest runs."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from training import lost, noise, play

from slurmdl.errors import Refused
from slurmdl.plan import PATTERNS
from slurmdl.train import combine
from slurmdl.train.method import COMPRESSORS, TRIGGERS, Method

EVERY = [Method(strategy, traffic, compress=compress, trigger=trigger, asynchronous=asynchronous, library=library)
         for strategy, patterns in PATTERNS.items() for traffic, compress, trigger, asynchronous, library in
         itertools.product(patterns, COMPRESSORS, TRIGGERS, (False, True), (False, True))]


def legal(method: Method) -> bool:
    try:
        combine.check(method)
    except Refused as refusal:
        text = str(refusal)
        assert text.startswith("--") and "valid: " in text and "\n" not in text
        return False
    return True


@pytest.mark.parametrize("strategy", PATTERNS)
def test_what_is_legal_is_what_the_rows_say_and_runs(strategy: str) -> None:
    found = {method for method in EVERY if method.strategy == strategy and legal(method)}
    listed = {Method(strategy, traffic, compress=compress, trigger=trigger, asynchronous=waits_not, library=library)
              for row in combine.ROWS if strategy in row.strategies
              for traffic, compress, trigger in itertools.product(row.traffic, row.compressors, row.triggers)
              for waits_not in (False, True) if row.asynchronous in (None, waits_not)
              for library in (False, True) if row.library in (None, library)}
    assert found == listed
    if strategy in ("allreduce", "ps"):
        return
    for method in found:
        played = play(replace(method, warm_up=3, period=2 if method.trigger == "period" else None), 4, 12,
                      update=noise(0.1), zones="aabb")
        assert sum(its.strategy.fired for its in played) > 0, method
        if "gossip" in strategy:
            assert lost(played) < 1e-5, method


@pytest.mark.parametrize("method, text", [
    (Method("gossip", "random", compress="int4"),
     "--compress int4: partners that are drawn keep no copies of each other, so that only whole models can be sent; "
     "asked for with gossip --traffic random --trigger period; valid: --compress none, fp16; or --traffic "
     "exponential; or --traffic base, zones"),
    (Method("gossip", "base", compress="int4", asynchronous=True), "--compress int4: a model that is pushed goes "
     "whole, since nobody keeps a copy of it; asked for with gossip --traffic base --trigger period --async; "
     "valid: --compress none, fp16; or no --async"),
    (Method("adaptive-gossip", "exponential"), "--trigger drift: who sends to one and receives from another"),
    (Method("allreduce", "hierarchical", library=True), "--library: a library's own sum follows no zones"),
    (Method("allreduce", "hierarchical", compress="int8"), "--compress int8: each sum on the way would"),
    (Method("allreduce", "ring", compress="fp16", library=True), "--compress fp16: a library's own sum is"),
    (Method("local-sgd", "hierarchical", compress="int8"), "--compress int8: sums in and between zones"),
    (Method("local-sgd", "ring", shared_memory=True), "--shared-memory: only gossip mixes"),
    (Method("gossip", "base", period=3, comm_budget=0.1), "--period: not valid with strategy gossip, trigger"),
    (Method("gossip", "base", trigger="period", threshold=0.1), "--threshold: not valid with"),
    (Method("gossip", "base", global_every=3, asynchronous=True), "--global-every: not valid with"),
    (Method("allreduce", "ring", period=4), "--period: not valid with strategy allreduce"),
    (Method("local-sgd", "ring", staleness=2), "--staleness: not valid with strategy local-sgd"),
    (Method("ps", "shards", compress="fp16"), "--compress fp16: gradients are sent as they are")])
def test_what_is_refused_is_told_in_one_sentence_with_what_is_valid(method: Method, text: str) -> None:
    with pytest.raises(Refused) as refused:
        combine.check(method)
    assert str(refused.value).startswith(text)


def test_the_table_of_the_manual_is_the_one_of_the_code() -> None:
    manual = Path(__file__).parents[2] / "docs" / "train.md"
    assert combine.table() in manual.read_text()
