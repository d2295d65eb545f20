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
from slurmdl.train import compatibility
from slurmdl.train.strategy_config import TRIGGER_NAMES, StrategyConfig

ALL_CONFIGS = [StrategyConfig(strategy, pattern, compression=compression, trigger=trigger, asynchronous=asynchronous)
               for strategy, patterns in COMM_PATTERNS.items() for pattern, compression, trigger, asynchronous in
               itertools.product(patterns, COMPRESSION_NAMES, TRIGGER_NAMES, (False, True))]


def is_valid(config: StrategyConfig) -> bool:
    try:
        compatibility.check_compatibility(config)
    except InvalidRunError as error:
        message = str(error)
        assert message.startswith("--") and "; expected " in message and "\n" not in message
        return False
    return True


@pytest.mark.parametrize("strategy", COMM_PATTERNS)
def test_valid_configs_match_table_and_run(strategy: str) -> None:
    accepted = {config for config in ALL_CONFIGS if config.strategy == strategy and is_valid(config)}
    listed = {StrategyConfig(strategy, pattern, compression=compression, trigger=trigger, asynchronous=asynchronous)
              for row in compatibility.COMBINATIONS if strategy in row.strategies
              for pattern, compression,
              trigger in itertools.product(row.comm_patterns, row.compressions, row.triggers)
              for asynchronous in row.asynchronous}
    assert accepted == listed
    if strategy in ("allreduce", "ps"):
        return
    for config in accepted:
        workers = run_strategy(replace(config, trigger_warmup=3, period=2 if config.trigger == "period" else None), 4,
                               12,
                       update=noise(0.1), zones="aabb")
        assert sum(worker.strategy.exchanges for worker in workers) > 0, config
        if "gossip" in strategy:
            assert sum_error(workers) < 1e-5, config


@pytest.mark.parametrize("config, option, facts", [
    (StrategyConfig("gossip", "random-matching", compression="int4"), "--compression int4",
     ("random partners", "gossip --comm-pattern random-matching --trigger period",
      "expected --compression none, fp16; or --comm-pattern one-peer-exponential; "
      "or --comm-pattern base-2, zone-aware")),
    (StrategyConfig("gossip", "base-2", compression="int4", asynchronous=True), "--compression int4",
     ("whole models", "gossip --comm-pattern base-2 --trigger period --async",
      "expected --compression none, fp16; or no --async")),
    (StrategyConfig("adaptive-gossip", "one-peer-exponential"), "--trigger drift", ("receives from another",)),
    (StrategyConfig("allreduce", "hierarchical", compression="int8"), "--compression int8", ("partial sum",)),
    (StrategyConfig("local-sgd", "hierarchical", compression="int8"), "--compression int8",
     ("within and between zones",)),
    (StrategyConfig("local-sgd", "ring", shared_memory=True), "--shared-memory", ("only gossip",)),
    (StrategyConfig("gossip", "base-2", period=3, comm_budget=0.1), "--period", ("strategy gossip, trigger drift",)),
    (StrategyConfig("gossip", "base-2", trigger="period", drift_threshold=0.1), "--drift-threshold",
     ("trigger drift",)),
    (StrategyConfig("allreduce", "ring", period=4), "--period", ("strategy allreduce",)),
    (StrategyConfig("ps", "shards", compression="fp16"), "--compression fp16", ("uncompressed",))])
def test_conflict_message_names_option_reason_and_valid_choices(config: StrategyConfig, option: str,
                                                                facts: tuple[str, ...]) -> None:
    with pytest.raises(InvalidRunError) as error:
        compatibility.check_compatibility(config)
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
    lines = ["| strategy | `--comm-pattern` | `--trigger` | `--compression` | `--load-balance` | switches |",
             "| --- | --- | --- | --- | --- | --- |"]
    for row in compatibility.COMBINATIONS:
        switches = [f"`{option}`{' or not' * (False in choices)}" for option, choices in (
            ("--async", row.asynchronous), ("--shared-memory", row.shared_memory)) if True in choices]
        lines.append(f"| {code(row.strategies)} | {code(row.comm_patterns)} | {code(row.triggers)} | "
                     f"{code(row.compressions)} | {code(row.load_balance_modes)} | {', '.join(switches)} |")
    return "\n".join(lines)
