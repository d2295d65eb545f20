"""What all tests share: golden files, and the example cluster."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest

# how long an example takes is the machine's affair
hypothesis.settings.register_profile("slurmdl", hypothesis.settings(), deadline=None)
hypothesis.settings.load_profile("slurmdl")

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true",
                     help="rewrite the golden files with what the code gives now; read the diff before you commit it")
    parser.addoption("--cluster", choices=["sandbox", "compose"], default="sandbox",
                     help="what the cluster tests run on: namespaces of this machine, or the containers of "
                          "docker-compose.yml")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("SLURMDL_NIGHTLY") != "1":
        for item in items:
            if item.get_closest_marker("nightly"):
                item.add_marker(pytest.mark.skip(reason="takes longer than CI may: SLURMDL_NIGHTLY=1"))


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with tests/golden/NAME; with --update-golden write it there instead."""
    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            return
        assert path.exists(), f"{path} is missing; pytest --update-golden writes it"
        assert text == path.read_text(encoding="utf-8"), f"{path} differs; pytest --update-golden rewrites it"

    return compare
