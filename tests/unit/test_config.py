"""slurmdl.yaml: settings are merged and checked; the example and the reference describe each of them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from slurmdl import config, dl_options
from slurmdl.config import (
    BadNodesConfig,
    Config,
    LinkDefaults,
    LinkScoresConfig,
    MetricQueries,
    PrometheusConfig,
    Weights,
)
from slurmdl.errors import InputError
from slurmdl.links.score_sources import load_from_sources
from slurmdl.options import Kind

ROOT = Path(__file__).parents[2]
EXAMPLE = (ROOT / "etc/slurmdl.yaml").read_text()
REFERENCE = (ROOT / "docs/reference.md").read_text()


def load(directory: Path, *texts: str) -> Config:
    paths = [directory / f"{i}.yaml" for i in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    return config.load_config([*map(str, paths), str(directory / "absent")])


def settings(section: object, prefix: str = "") -> Iterator[tuple[str, object, tuple[Kind, str, object, str]]]:
    """Yield key, value and description (kind, meaning, default, shown default) of each setting."""
    for field in fields(section):  # type: ignore[arg-type]
        value = getattr(section, field.name)
        if is_dataclass(value):
            yield from settings(value, f"{prefix}{field.name}.")
        elif "option" in field.metadata:
            yield f"{prefix}{field.name}", value, field.metadata["option"][:4]


def uncommented() -> str:
    """The example with all keys uncommented: prose has one blank after #, keys have none or an indent."""
    lines = [line for line in EXAMPLE.splitlines() if not re.match(r"# \S|#$", line)]
    return "\n".join(line.removeprefix("#") for line in lines)


def test_reference_and_example_have_every_setting(tmp_path: Path) -> None:
    comments = re.sub(r"\n# +# ", " ", EXAMPLE)
    shown = dict(re.findall(r"^\| `([a-z_.]+)` \| (.*) \|$", REFERENCE.partition("\n## Settings\n")[2], re.MULTILINE))
    loaded = {key: value for key, value, _ in settings(load(tmp_path, uncommented()))}
    rows = list(settings(Config()))
    assert rows and list(shown) == [key for key, *_ in rows]
    for key, default, (_, meaning, _, shown_default) in rows:
        assert shown[key] == f"{shown_default} | {meaning}"
        assert f"# {meaning}" in comments, key
        if shown_default == str(default) or re.fullmatch(r"[0-9.]+", shown_default):
            assert loaded[key] == (default or float(shown_default)), key
    assert load(tmp_path, EXAMPLE) == Config()
    options = {name: value for name, value in load(tmp_path, uncommented()).options.items() if name != "zone"}
    assert dl_options.merge_layers(options) == dl_options.DlOptions()


def test_example_has_every_section() -> None:
    def keys(data: Any, prefix: str = "") -> Iterator[str]:
        for key, value in data.items():
            yield from keys(value, f"{prefix}{key}.") if isinstance(value, dict) else [f"{prefix}{key}"]

    assert {key for key in keys(yaml.safe_load(uncommented())) if not key.startswith("options.")} == {
        key for key, *_ in settings(Config())}


def test_later_file_overrides_key_by_key(tmp_path: Path) -> None:
    loaded = load(
        tmp_path, "options: {strategy: ps, node-binding: off, explain: false}\nplan_dir: /y\nbad_nodes:\n"
        "link_defaults: {node_bandwidth: 1e9, rails: 8, zone_bandwidth: [1.0e8, 2.0e8]}\n"
        "link_scores: {file: /x/s.json, trusted_owner: 17, max_age: 60, half_life: 0, tolerance: 0.1, "
        "cost_model: weighted, weights: {loss: 2}, "
        "prometheus: {url: 'http://p', node_label: node, queries: {rtt: q}}}",
        "options: {node-binding: auto, strict: true, zone: [a, b]}\nnodes_max_age: 0\ncluster_backend: scontrol\n"
        "link_defaults: {latency: 1.0e-4, leaf_bandwidth: 9e11}\nplan_dir:\nlink_scores: {weights: {rtt: 3}}\n"
        "bad_nodes: {features: bad-ib, comment: '^x', file: /f, prometheus_query: up}")
    assert loaded == Config(
        {"strategy": "ps", "node_binding": "auto", "strict": "", "zone": "a,b"},
        LinkDefaults(1e9, 9e11, 8, (1e8, 2e8), 1e-4),
        LinkScoresConfig("/x/s.json", "17", 60, 0, 0.1, "weighted", Weights(1, 3, 2),
                         PrometheusConfig("http://p", "node", MetricQueries(rtt="q"))),
        BadNodesConfig("/f", ("bad-ib",), "^x", "up"), "", "scontrol", 0)
    scores = load_from_sources(loaded, "off", os.environ).scores
    assert scores.weights is not None and vars(scores.weights) == vars(loaded.link_scores.weights)
    assert (scores.default_node_bandwidth, scores.default_leaf_bandwidth, scores.default_rails,
            scores.default_zone_bandwidth, scores.default_latency, scores.half_life) == (
        1e9, 9e11, 8, (1e8, 2e8), 1e-4, None)
    tcp = replace(loaded, link_scores=LinkScoresConfig())
    assert load_from_sources(tcp, "off", os.environ).scores.weights is None


@pytest.mark.parametrize(("text", "message"), [
    ("option: {}", "unknown key option; expected options, "),
    ("- 1", "expected a mapping, found list"), ("a: [1\nb: 2", ":2: is not YAML"),
    ("options: {node-bindng: off}", "unknown key options.node-bindng; expected options.node-binding, "),
    ("options: {node-binding: of}", "options.node-binding: invalid value 'of'; expected off, "),
    ("options: {strict: 1}", "options.strict: invalid value 1; expected true or false"),
    ("options: {zone: [[a]]}", "options.zone: invalid value [['a']]; expected NAME,..."),
    ("options: {strategy: gossip, ps: 1}", "options: --dl-ps=1: the strategy gossip has no parameter servers"),
    *((f"link_defaults: {{{key}: {value}}}", f"link_defaults.{key}: invalid value {shown}; expected a {expected}")
      for key, value, shown, expected in (
        ("node_bandwidth", "fast", "'fast'", "number greater than 0"), ("latency", "0", "0", "number greater than 0"),
        ("leaf_bandwidth", "true", "True", "number greater than 0"), ("latency", ".inf", "inf", "number greater"),
        ("rails", "1.5", "1.5", "whole number greater than 0"), ("rails", "0", "0", "whole number"),
        ("zone_bandwidth", "[1, x]", "[1, 'x']", "number greater than 0, or a list of them"),
        ("zone_bandwidth", "[0]", "[0]", "number greater than 0, or a list"))),
    ("link_scores: 5", "link_scores: expected a mapping, found int"),
    ("link_scores: {fil: x}", "unknown key link_scores.fil; expected link_scores.file"),
    ("link_scores: {file: x}", "link_scores.file: invalid value 'x'; expected an absolute path"),
    ("link_scores: {max_age: 0}", "link_scores.max_age: invalid value 0; expected a number greater than 0"),
    ("link_scores: {half_life: -1}", "link_scores.half_life: invalid value -1; expected a number, 0 or more"),
    ("link_scores: {tolerance: x}", "expected a number, 0 or more"),
    ("link_scores: {cost_model: best}", "link_scores.cost_model: invalid value 'best'; expected "),
    ("link_scores: {trusted_owner: ''}", "invalid value ''; expected a user name or uid"),
    ("link_scores: {weights: {speed: 1}}", "expected link_scores.weights."),
    ("link_scores: {weights: {loss: 0, rtt: 0, throughput: 0}}", "weights: all are 0; expected at least one greater"),
    ("link_scores: {prometheus: {url: ftp://x}}", "expected http://HOST[:PORT]"),
    ("link_scores: {prometheus: {node_label: 'a b'}}", "expected a label name"),
    ("link_scores: {prometheus: {queries: {speed: x}}}", "expected link_scores.prometheus.queries."),
    ("link_scores: {prometheus: {queries: {loss: 5}}}", "invalid value 5; expected a PromQL query"),
    ("bad_nodes: {features: [1]}", "bad_nodes.features: invalid value [1]; expected names of node features"),
    ("bad_nodes: {features: ''}", "expected names of node features"),
    ("bad_nodes: {comment: '('}", "bad_nodes.comment: invalid value '('; expected a regular expression"),
    ("bad_nodes: {comment: ''}", "expected a regular expression"),
    ("bad_nodes: {file: here}", "bad_nodes.file: invalid value 'here'; expected an absolute path"),
    ("bad_nodes: {feature: x}", "unknown key bad_nodes.feature; expected bad_nodes.features"),
    ('bad_nodes: {file: "/a\\0"}', "expected an absolute path"),
    ("plan_dir: here", "plan_dir: invalid value 'here'; expected an absolute path"),
    ("cluster_backend: slurm", "cluster_backend: invalid value 'slurm'; expected pyslurm, "),
    ("nodes_max_age: -1", "nodes_max_age: invalid value -1; expected a number, 0 or more"),
])
def test_invalid_setting_is_rejected(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        load(tmp_path, text)
    assert str(error.value).startswith(f"{tmp_path}/0.yaml:")
    assert message in str(error.value)


def test_pipe_and_unexpected_failures_are_input_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="pipe: is not a regular file"):
        config.load_config([str(tmp_path / "pipe")])
    monkeypatch.setattr(dl_options, "merge_layers", lambda _: 1 / 0)
    with pytest.raises(InputError, match=r"0\.yaml: cannot be used \(ZeroDivisionError"):
        load(tmp_path, "options: {}")
