"""Valid combinations of options: the table, its error messages, and a run of each."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from strategy_harness import noise, run_strategy, sum_error

from slurmdl.comm_layout import COMPRESSION_NAMES
from slurmdl.errors import InvalidRunError
from slurmdl.plan import COMM_PATTERNS
from slurmdl.train import strategy_config
from slurmdl.train.strategy_config import StrategyConfig

ALL_CONFIGS = [StrategyConfig(strategy, pattern, compression=compression, asynchronous=asynchronous)
               for strategy, patterns in COMM_PATTERNS.items() for pattern, compression, asynchronous in
               itertools.product(patterns, COMPRESSION_NAMES, (False, True))]


def is_valid(config: StrategyConfig) -> bool:
    try:
        strategy_config.check_compatibility(config)
    except InvalidRunError as error:
        message = str(error)
        assert message.startswith("--") and "; expected " in message and "\n" not in message
        return False
    return True


@pytest.mark.parametrize("strategy", COMM_PATTERNS)
def test_valid_configs_match_table_and_run(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slurmdl.train.triggers.MAX_WARMUP_STEPS", 3)
    accepted = {config for config in ALL_CONFIGS if config.strategy == strategy and is_valid(config)}
    listed = {StrategyConfig(strategy, pattern, compression=compression, asynchronous=asynchronous)
              for row in strategy_config.COMBINATIONS if strategy in row.strategies
              for pattern, compression, asynchronous in itertools.product(row.comm_pattern, row.compression,
                                                                          row.asynchronous)}
    assert accepted == listed
    if strategy in ("allreduce", "ps"):
        return
    for config in accepted:
        workers = run_strategy(replace(config, period=None if strategy == "adaptive-gossip" else 2), 4, 12,
                               update=noise(0.1), zones="aabb")
        assert sum(worker.strategy.exchanges for worker in workers) > 0, config
        if "gossip" in strategy:
            assert sum_error(workers) < 1e-5, config


@pytest.mark.parametrize("config, option, facts", [
    (StrategyConfig("gossip", "random-matching", compression="int4"), "--compression int4",
     ("random partners", "gossip --comm-pattern random-matching",
      "expected --compression none, fp16; or --comm-pattern one-peer-exponential, base-2, zone-aware")),
    (StrategyConfig("gossip", "base-2", compression="int4", asynchronous=True), "--compression int4",
     ("whole models", "gossip --comm-pattern base-2 --async",
      "expected --compression none, fp16; or no --async")),
    (StrategyConfig("adaptive-gossip", "one-peer-exponential"), "--comm-pattern one-peer-exponential",
     ("receives from another", "expected --comm-pattern base-2, zone-aware; or --comm-pattern random-matching")),
    (StrategyConfig("adaptive-gossip", "base-2", asynchronous=True), "--async", ("agree on each", "no --async")),
    (StrategyConfig("adaptive-gossip", "base-2", shared_memory=True), "--shared-memory",
     ("only gossip with a period",)),
    (StrategyConfig("allreduce", "hierarchical", compression="int8"), "--compression int8", ("partial sum",)),
    (StrategyConfig("local-sgd", "hierarchical", compression="int8"), "--compression int8",
     ("within and between zones",)),
    (StrategyConfig("local-sgd", "ring", shared_memory=True), "--shared-memory", ("only gossip",)),
    (StrategyConfig("adaptive-gossip", "base-2", period=3), "--period", ("strategy adaptive-gossip", "local-sgd")),
    (StrategyConfig("gossip", "base-2", comm_budget=0.1), "--comm-budget", ("strategy gossip", "adaptive-gossip")),
    (StrategyConfig("allreduce", "ring", period=4), "--period", ("strategy allreduce",)),
    (StrategyConfig("ps", "shards", compression="fp16"), "--compression fp16", ("uncompressed",))])
def test_conflict_message_names_option_reason_and_valid_choices(config: StrategyConfig, option: str,
                                                                facts: tuple[str, ...]) -> None:
    with pytest.raises(InvalidRunError) as error:
        strategy_config.check_compatibility(config)
    message = str(error.value)
    assert message.startswith(f"{option}: ")
    assert [fact for fact in facts if fact not in message] == []


def test_manual_table_matches_code() -> None:
    manual = Path(__file__).parents[2] / "docs" / "train.md"
    assert combinations_table() in manual.read_text()


def combinations_table() -> str:
    """COMBINATIONS as a Markdown table."""
    def code(names: tuple[str, ...]) -> str:
        return ", ".join(f"`{name}`" for name in names)
    lines = ["| strategy | `--comm-pattern` | `--compression` | switches |",
             "| --- | --- | --- | --- |"]
    for row in strategy_config.COMBINATIONS:
        switches = [f"`{option}`{' or not' * (False in choices)}" for option, choices in (
            ("--async", row.asynchronous), ("--shared-memory", row.shared_memory)) if True in choices]
        lines.append(f"| {code(row.strategies)} | {code(row.comm_pattern)} | "
                     f"{code(row.compression)} | {', '.join(switches)} |")
    return "\n".join(lines)
