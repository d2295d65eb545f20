"""Label skew: its value in the summary, and the warning."""

from __future__ import annotations

import pytest

from slurmdl.train.trainer.options import parse_train_options
from slurmdl.train.trainer.trainer import train


@pytest.mark.parametrize(("words", "warns"), [
    ("--strategy gossip --dirichlet-alpha 0.1", True), ("--strategy local-sgd --dirichlet-alpha 0.1", True),
    ("--strategy allreduce --dirichlet-alpha 0.1", False),
    ("--strategy gossip --dirichlet-alpha 1000", False), ("--strategy gossip", False)],
    ids=["skewed", "local-sgd", "allreduce", "nearly alike", "alike"])
def test_label_skew_is_reported_and_warned_about(words: str, warns: bool, capsys: pytest.CaptureFixture[str]) -> None:
    summary = train(parse_train_options([*words.split(), "--virtual-ranks", "4", "--steps", "2", "--model",
                    "mlp:8"], {}))
    assert summary is not None
    stderr = capsys.readouterr().err
    assert ("label skew of the workers is 0." in stderr) == warns
    assert (summary["label_skew"] > 0.4) == ("0.1" in words)
