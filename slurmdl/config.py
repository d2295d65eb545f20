"""slurmdl.yaml: settings of the site (/etc/slurmdl) and of the user, merged key by key; the user's file wins.

The keys, all optional::

    options:              # defaults of the --dl-* options; weaker than #DL lines, SLURMDL_OPT_* and options
      strategy: gossip
      node-binding: auto
    link_defaults:        # assumed for links that were not measured
      node_bandwidth: 1.25e9      # bytes/s of a node's link, all adapters together
      leaf_bandwidth: 9.0e11      # bytes/s between nodes of one leaf zone over a network of its own, e.g. NVLink
      rails: 8            # adapters of a node; rank i of a node uses adapter i modulo rails
      zone_bandwidth: [1.25e10]   # bytes/s of a zone's uplink by level, leaf first; the last value repeats
      latency: 2.0e-5     # seconds per message and level crossed
    link_scores:          # see docs/links.md
      file: /shared/slurmdl/scores.json    # published by the collector
      trusted_owner: slurmdl      # user that may write the file, in addition to root
      max_age: 900        # seconds after which scores are ignored
      half_life: 300      # seconds after which a score weighs half as much as the assumed value; 0: no decay
      tolerance: 0.25     # links whose measured values differ by less count as equal
      cost_model: tcp     # or weighted, by
      weights: {throughput: 1, rtt: 1, loss: 1}
      prometheus:
        url: http://prometheus:9090
        node_label: instance      # label that holds the node's name
        queries: {throughput: ..., rtt: ..., loss: ...}    # PromQL; default: queries of node_exporter's metrics
    bad_nodes:            # results of other health checks: jobs leave these nodes out, see docs/health.md
      file: /shared/bad_nodes.txt      # hostlist and reason per line
      features: [bad-ib]        # node features in Slurm
      comment: "^unhealthy"     # regular expression for the nodes' Comment and Extra in Slurm
      prometheus_query: node_health == 0    # nodes in the answer of the server of link_scores
    plan_dir: /home/shared/slurmdl    # shared directory for plans too long for the environment
    cluster_backend: auto     # reader of nodes, partitions and reservations: auto (scontrol), scontrol, pyslurm
    nodes_max_age: 15         # seconds for which the user's next submissions use the same answer; 0: not at all

PyYAML is imported only if a file exists.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from slurmdl import dl_options, yaml_input
from slurmdl.errors import InputError, SlurmdlError, UsageError, debug

SITE_CONFIG_FILE = "/etc/slurmdl/slurmdl.yaml"
DEFAULT_SCORES_FILE = "/var/lib/slurmdl/scores.json"
COST_MODELS = ("tcp", "weighted")
#: readers of nodes, partitions and reservations (cluster.load.query_cluster)
CLUSTER_BACKENDS = ("auto", "scontrol", "pyslurm")
#: measured properties of a link; keys of `weights` and `queries`
METRICS = ("throughput", "rtt", "loss")


def _is_pattern(text: str) -> bool:
    try:
        re.compile(text)
    except (re.error, OverflowError, RecursionError):
        return False
    return True


#: key of a text -> predicate of valid values, and the expected value for messages
_TEXT_SETTINGS: Mapping[str, tuple[Callable[[str], object], str]] = {
    "plan_dir": (os.path.isabs, "an absolute path"),
    "cluster_backend": (CLUSTER_BACKENDS.__contains__, ", ".join(CLUSTER_BACKENDS)),
    "link_scores.file": (os.path.isabs, "an absolute path"),
    "link_scores.trusted_owner": (str.strip, "a user name or uid"),
    "link_scores.cost_model": (COST_MODELS.__contains__, ", ".join(COST_MODELS)),
    "link_scores.prometheus.url": (lambda url: url.startswith(("http://", "https://")), "http://HOST[:PORT]"),
    "link_scores.prometheus.node_label": (str.isidentifier, "a label name"),
    **{f"link_scores.prometheus.queries.{metric}": (str.strip, "a PromQL query") for metric in METRICS},
    "bad_nodes.file": (os.path.isabs, "an absolute path"),
    "bad_nodes.comment": (lambda pattern: bool(pattern) and _is_pattern(pattern), "a regular expression"),
    "bad_nodes.prometheus_query": (str.strip, "a PromQL query"),
}
#: keys of numbers that may be 0
_ZERO_SETTINGS = ("nodes_max_age", "link_scores.half_life", "link_scores.tolerance",
                  *(f"link_scores.weights.{metric}" for metric in METRICS))


@dataclass(frozen=True)
class LinkScoresConfig:
    """Sources of link scores, trust in them, and the model that turns them into link costs: keys of `link_scores`."""

    file: str = DEFAULT_SCORES_FILE
    trusted_owner: str = ""
    max_age: float = 900.0
    half_life: float = 300.0
    tolerance: float = 0.25
    cost_model: str = "tcp"
    weights: Mapping[str, float] = field(default_factory=dict)
    prometheus_url: str = ""
    prometheus_node_label: str = "instance"
    prometheus_queries: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class BadNodesConfig:
    """Results of other health checks: keys of `bad_nodes`; "" and () for a source that is not read."""

    file: str = ""
    features: tuple[str, ...] = ()
    comment: str = ""
    prometheus_query: str = ""


@dataclass(frozen=True)
class Config:
    """Merged settings of the configuration files.

    `options` maps a field of DlOptions to its value as text (see dl_options.merge_layers). Numbers that are None
    or () have the default of LinkScores.
    """

    options: Mapping[str, str] = field(default_factory=dict)
    node_bandwidth: float | None = None
    leaf_bandwidth: float | None = None
    rails: float | None = None
    zone_bandwidth: tuple[float, ...] = ()
    latency: float | None = None
    plan_dir: str | None = None
    link_scores: LinkScoresConfig = field(default_factory=LinkScoresConfig)
    bad_nodes: BadNodesConfig = field(default_factory=BadNodesConfig)
    cluster_backend: str = "auto"
    nodes_max_age: float = 15.0


def config_paths(environ: Mapping[str, str]) -> tuple[str, str]:
    """Paths of the site's file and of the user's file."""
    return SITE_CONFIG_FILE, os.path.join(user_dir(environ, "config"), "slurmdl.yaml")


def user_dir(environ: Mapping[str, str], kind: str) -> str:
    """slurmdl's directory for the user's "config" or "state" (XDG Base Directory Specification)."""
    default = os.path.join(environ.get("HOME") or os.path.expanduser("~"),
                           {"config": ".config", "state": ".local/state"}[kind])
    return os.path.join(environ.get(f"XDG_{kind.upper()}_HOME") or default, "slurmdl")


def load_config(paths: Sequence[str] | None = None) -> Config:
    """Read the files that exist; later ones override earlier ones. InputError if one is unreadable or not valid."""
    config = Config()
    for path in config_paths(os.environ) if paths is None else paths:
        if os.path.exists(path):
            debug("configuration: %s", path)
            try:
                config = _merge_config(config, _read_config_file(path), path)
            except SlurmdlError:
                raise
            except Exception as error:  # malformed in a way that no check below covers
                raise InputError(f"cannot be used ({type(error).__name__}: {error})", path) from error
    return config


def _read_config_file(path: str) -> dict[str, Any]:
    if not os.path.isfile(path):  # opening a pipe without a writer blocks
        raise InputError("is not a regular file", path)
    data = yaml_input.load_yaml_file(path)
    keys = ("options", "link_defaults", "link_scores", "bad_nodes", "plan_dir", "cluster_backend",
            "nodes_max_age")
    return yaml_input.check_keys(data or {}, keys, path, "")


def _merge_config(base: Config, data: dict[str, Any], path: str) -> Config:
    links = _parse_section(data.get("link_defaults") or {}, "link_defaults.",
                           ("node_bandwidth", "leaf_bandwidth", "rails", "zone_bandwidth", "latency"), path)
    others = {key: _checked_setting(data[key], key, path) for key in ("plan_dir", "cluster_backend", "nodes_max_age")
             if key in data and not (key == "plan_dir" and data[key] is None)}
    return replace(base, **links, **others, options=_parse_options(base.options, data.get("options") or {}, path),
                   link_scores=_parse_link_scores(base.link_scores, data.get("link_scores") or {}, path),
                   bad_nodes=_parse_bad_nodes(base.bad_nodes, data.get("bad_nodes") or {}, path))


def _parse_section(data: Any, prefix: str, keys: Sequence[str], path: str) -> dict[str, Any]:
    """Checked values of a mapping; `prefix` is its key and a dot."""
    return {key: _checked_setting(value, f"{prefix}{key}", path)
            for key, value in yaml_input.check_keys(data, keys, path, prefix).items()}


def _parse_link_scores(base: LinkScoresConfig, data: Any, path: str) -> LinkScoresConfig:
    prefix = "link_scores."
    keys = ("file", "trusted_owner", "max_age", "half_life", "tolerance", "cost_model")
    data = yaml_input.check_keys(data, (*keys, "weights", "prometheus"), path, prefix)
    if isinstance(data.get("trusted_owner"), int):
        data["trusted_owner"] = str(data["trusted_owner"])
    changes: dict[str, Any] = {key: _checked_setting(data[key], f"{prefix}{key}", path)
                               for key in keys if key in data}
    if "weights" in data:
        changes["weights"] = {**base.weights, **_parse_section(data["weights"], f"{prefix}weights.", METRICS, path)}
        if not any(changes["weights"].get(key, 1.0) for key in METRICS):
            raise InputError(f"{prefix}weights: all are 0; expected at least one greater than 0", path)
    prefix = "link_scores.prometheus."
    data = yaml_input.check_keys(data.get("prometheus") or {}, ("url", "node_label", "queries"), path, prefix)
    changes |= {f"prometheus_{key}": _checked_setting(data[key], f"{prefix}{key}", path)
                for key in ("url", "node_label") if key in data}
    if "queries" in data:
        queries = _parse_section(data["queries"], f"{prefix}queries.", METRICS, path)
        changes["prometheus_queries"] = {**base.prometheus_queries, **queries}
    return replace(base, **changes)


def _parse_bad_nodes(base: BadNodesConfig, data: Any, path: str) -> BadNodesConfig:
    prefix, keys = "bad_nodes.", ("file", "comment", "prometheus_query")
    data = yaml_input.check_keys(data, (*keys, "features"), path, prefix)
    changes: dict[str, Any] = {key: _checked_setting(data[key], f"{prefix}{key}", path)
                               for key in keys if key in data}
    if "features" in data:
        features = data["features"] if isinstance(data["features"], list) else [data["features"]]
        if not all(isinstance(feature, str) and feature for feature in features):
            raise _invalid_value(f"{prefix}features", data["features"], "names of node features", path)
        changes["features"] = tuple(features)
    return replace(base, **changes)


def _parse_options(base: Mapping[str, str], data: Any, path: str) -> dict[str, str]:
    options = {option.name: option for option in dl_options.OPTIONS}
    settings = {}
    for name, value in yaml_input.check_keys(data, tuple(options), path, "options.").items():
        option = options[name]
        if option.is_flag:
            if value is True:
                settings[option.field] = ""
            elif value is not False:
                raise _invalid_value(f"options.{name}", value, "true or false", path)
            continue
        parts = value if isinstance(value, list) else [value]
        if any(isinstance(part, (list, dict, set)) for part in parts):
            raise _invalid_value(f"options.{name}", value, option.kind.values, path)
        # YAML reads a bare `off` as False
        text = "off" if value is False else ",".join(map(str, parts))
        try:
            option.parse(text, f"options.{name}")
        except UsageError as error:
            raise InputError(str(error), path) from error
        settings[option.field] = text
    merged = dl_options.overlay_settings(dict(base), settings)
    try:
        dl_options.merge_layers(merged)
    except UsageError as error:
        raise InputError(f"options: {error}", path) from error
    return merged


def _checked_setting(value: Any, name: str, path: str) -> Any:
    """The value of a key: a text of _TEXT_SETTINGS, numbers by level, or a number."""
    if name in _TEXT_SETTINGS:
        is_valid, expected = _TEXT_SETTINGS[name]
        if not isinstance(value, str) or "\0" in value or not is_valid(value):
            raise _invalid_value(name, value, expected, path)
        return value
    if name == "link_defaults.zone_bandwidth":
        return tuple(_checked_number(level, name, path) for level in (value if isinstance(value, list) else [value]))
    return _checked_number(value, name, path)


def _checked_number(value: Any, name: str, path: str) -> float:
    allow_zero = name in _ZERO_SETTINGS
    try:
        number = float(value)  # YAML 1.1 reads 1e9, which has no point, as text
    except (TypeError, ValueError, OverflowError):
        number = -1.0
    if name == "link_defaults.rails" and number != int(number):
        raise _invalid_value(name, value, "a whole number greater than 0", path)
    if isinstance(value, bool) or not 0 <= number < float("inf") or (not number and not allow_zero):
        raise _invalid_value(name, value, "a number, 0 or more" if allow_zero else "a number greater than 0", path)
    return number


def _invalid_value(name: str, value: Any, expected: str, path: str) -> InputError:
    return InputError(f"{name}: invalid value {yaml_input.short_repr(value)}; expected {expected}", path)
