"""slurmdl.yaml: settings of the site (/etc/slurmdl) and of the user, merged key by key; the user's file wins.

Each setting is described once, by its field; docs/reference.md and etc/slurmdl.yaml show all of them. PyYAML is
imported only if a file exists.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, TypeVar

from slurmdl import dl_options, yaml_input
from slurmdl.errors import InputError, SlurmdlError, UsageError, debug
from slurmdl.options import Kind, choice, option

SITE_CONFIG_FILE = "/etc/slurmdl/slurmdl.yaml"
DEFAULT_SCORES_FILE = "/var/lib/slurmdl/scores.json"

Section = TypeVar("Section")


def _is_pattern(text: str) -> bool:
    try:
        re.compile(text)
    except (re.error, OverflowError, RecursionError):
        return False
    return bool(text)


def _to_number(value: Any) -> float | None:
    try:
        number = float(value)  # YAML 1.1 reads 1e9, which has no point, as text
    except (TypeError, ValueError, OverflowError):
        return None
    return number if 0 <= number < float("inf") and not isinstance(value, bool) else None


def _to_positive_numbers(value: Any) -> tuple[float, ...] | None:
    numbers = [_to_number(each) for each in (value if isinstance(value, list) else [value])]
    return tuple(filter(None, numbers)) if all(numbers) else None


def _to_names(value: Any) -> tuple[str, ...] | None:
    names = value if isinstance(value, list) else [value]
    return tuple(names) if all(isinstance(name, str) and name for name in names) else None


def _kind(expected: str, parse: Callable[[Any], Any]) -> Kind:
    return Kind("yaml", expected, parse, lambda _: expected)


def _text(expected: str, is_valid: Callable[[str], object]) -> Kind:
    return _kind(expected, lambda value: value if isinstance(value, str) and "\0" not in value and is_valid(value)
                 else None)


_ABSOLUTE_PATH = _text("an absolute path", os.path.isabs)
_QUERY = _text("a PromQL query", str.strip)
_NUMBER = _kind("a number, 0 or more", _to_number)
_POSITIVE = _kind("a number greater than 0", lambda value: _to_number(value) or None)


@dataclass(frozen=True)
class LinkDefaults:
    """Assumed values of links that were not measured; None and () have the default of LinkScores."""

    node_bandwidth: float | None = option(None, _POSITIVE, "bytes/s of a node's link, all adapters together",
                                          "1.25e9, 10 Gbit/s")
    leaf_bandwidth: float | None = option(None, _POSITIVE, "bytes/s between nodes of one leaf zone over a network of "
                                          "its own, such as NVLink", "over the node's link")
    rails: int | None = option(None, _kind("a whole number greater than 0", lambda value: int(number) if (
        number := _to_number(value)) and number == int(number) else None),
        "adapters that share the node's link; rank i of a node uses adapter i modulo rails", "1")
    zone_bandwidth: tuple[float, ...] = option(
        (), _kind("a number greater than 0, or a list of them", _to_positive_numbers),
        "bytes/s of a zone's uplink by level, leaf zones first; the last value holds for all above",
        "half of the bandwidth of the nodes below")
    latency: float | None = option(None, _POSITIVE, "seconds per message and level crossed", "2e-5")


@dataclass(frozen=True)
class MetricQueries:
    """PromQL by metric, in base units; "" for the default."""

    throughput: str = option("", _QUERY, "bytes/s of each node's link", "speed of node_exporter's interfaces")
    rtt: str = option("", _QUERY, "round-trip time to each node in seconds", "none")
    loss: str = option("", _QUERY, "fraction of packets lost on each node's link", "node_exporter's retransmissions")


@dataclass(frozen=True)
class PrometheusConfig:
    """A Prometheus server as a source of link scores."""

    url: str = option("", _text("http://HOST[:PORT]", lambda url: url.startswith(("http://", "https://"))),
                      "Prometheus server that is queried at each submission", "none")
    node_label: str = option("instance", _text("a label name", str.isidentifier), "label that holds the node's name")
    queries: MetricQueries = MetricQueries()


@dataclass(frozen=True)
class Weights:
    """Weights of the metrics in the weighted cost model."""

    throughput: float = option(1.0, _NUMBER, "weight of the throughput with `cost_model: weighted`", "1")
    rtt: float = option(1.0, _NUMBER, "weight of the round-trip time", "1")
    loss: float = option(1.0, _NUMBER, "weight of the loss", "1")


@dataclass(frozen=True)
class LinkScoresConfig:
    """Sources of link scores, trust in them, and the model that turns them into link costs."""

    file: str = option(DEFAULT_SCORES_FILE, _ABSOLUTE_PATH,
                       "published by the collector; on a file system that submitting hosts can read")
    trusted_owner: str = option("", _kind("a user name or uid", lambda value: str(value) if type(value) in (int, str)
                                          and str(value).strip() and "\0" not in str(value) else None),
                                "user that may write the file, in addition to root and the reader", "none")
    max_age: float = option(900.0, _POSITIVE, "seconds after which scores are ignored", "900")
    half_life: float = option(300.0, _NUMBER, "seconds after which a score weighs half as much as the assumed value; "
                              "0: no decay", "300")
    tolerance: float = option(0.25, _NUMBER, "links whose values differ by less, as a fraction, count as equal")
    cost_model: str = option("tcp", choice("tcp", "weighted"), "from throughput, round-trip time and loss to the "
                             "cost of a link: TCP's behaviour, or a weighted sum")
    weights: Weights = Weights()
    prometheus: PrometheusConfig = PrometheusConfig()


@dataclass(frozen=True)
class BadNodesConfig:
    """Results of other health checks; "" and () for a source that is not read."""

    file: str = option("", _ABSOLUTE_PATH, "hostlist and reason per line", "none")
    features: tuple[str, ...] = option((), _kind("names of node features", _to_names), "node features in Slurm",
                                       "none")
    comment: str = option("", _text("a regular expression", _is_pattern),
                          "regular expression for the nodes' Comment and Extra in Slurm", "none")
    prometheus_query: str = option("", _QUERY, "nodes in the answer of the server of link_scores", "none")


@dataclass(frozen=True)
class Config:
    """Merged settings of the configuration files.

    `options` maps a field of DlOptions to its value as text (see dl_options.merge_layers).
    """

    options: Mapping[str, str] = field(default_factory=dict)
    link_defaults: LinkDefaults = LinkDefaults()
    link_scores: LinkScoresConfig = LinkScoresConfig()
    bad_nodes: BadNodesConfig = BadNodesConfig()
    plan_dir: str = option("", _kind("an absolute path", lambda value: "" if value is None else
                                     _ABSOLUTE_PATH.parse(value)),
                           "directory shared by all nodes, mode 1777, for plans too long for the environment",
                           ".slurmdl in the directory that the job was submitted from")
    cluster_backend: str = option("auto", choice("auto", "scontrol", "pyslurm"), "reader of nodes, partitions and "
                                  "reservations; auto is scontrol, PySlurm must be built for each release of Slurm")
    nodes_max_age: float = option(15.0, _NUMBER, "seconds for which a user's next submissions use the same answer "
                                  "about the nodes, if Slurm confirms that the job waits, or starts on the chosen "
                                  "nodes; 0: never", "15")


def config_paths(environ: Mapping[str, str]) -> tuple[str, str]:
    """Paths of the site's file and of the user's file."""
    return SITE_CONFIG_FILE, os.path.join(user_dir(environ, "config"), "slurmdl.yaml")


def user_dir(environ: Mapping[str, str], kind: str) -> str:
    """slurmdl's directory for the user's "config" or "state" (XDG Base Directory Specification)."""
    default = os.path.join(environ.get("HOME") or os.path.expanduser("~"),
                           {"config": ".config", "state": ".local/state"}[kind])
    return os.path.join(environ.get(f"XDG_{kind.upper()}_HOME") or default, "slurmdl")


def exclusions_file(environ: Mapping[str, str]) -> str:
    """File of the nodes that the user's jobs leave out, JSON lines (health.exclusions)."""
    return os.path.join(user_dir(environ, "state"), "exclusions.jsonl")


def load_config(paths: Sequence[str] | None = None) -> Config:
    """Read the files that exist; later ones override earlier ones. InputError if one is unreadable or not valid."""
    config = Config()
    for path in config_paths(os.environ) if paths is None else paths:
        if os.path.exists(path):
            debug("configuration: %s", path)
            try:
                if not os.path.isfile(path):  # opening a pipe without a writer blocks
                    raise InputError("is not a regular file", path)
                config = _read_section(config, yaml_input.load_yaml_file(path) or {}, path)
                if not any(vars(config.link_scores.weights).values()):
                    raise InputError("link_scores.weights: all are 0; expected at least one greater than 0", path)
            except SlurmdlError:
                raise
            except Exception as error:  # malformed in a way that no check covers
                raise InputError(f"cannot be used ({type(error).__name__}: {error})", path) from error
    return config


def _read_section(base: Section, data: Any, path: str, prefix: str = "") -> Section:
    """Return the settings of a section, overridden by the ones in a file; `prefix` is its key and a dot."""
    kinds = {each.name: each.metadata["option"][0] if "option" in each.metadata else None
             for each in fields(base)}  # type: ignore[arg-type]
    changes: dict[str, Any] = {}
    for key, value in yaml_input.check_keys(data, tuple(kinds), path, prefix).items():
        current, kind = getattr(base, key), kinds[key]
        if kind:
            changes[key] = kind.parse(value)
            if changes[key] is None:
                raise _invalid_value(f"{prefix}{key}", value, kind, path)
        elif is_dataclass(current):
            changes[key] = _read_section(current, value or {}, path, f"{prefix}{key}.")
        else:
            changes[key] = _read_options(current, value or {}, path)
    return replace(base, **changes)  # type: ignore[type-var]


def _read_options(base: Mapping[str, str], data: Any, path: str) -> dict[str, str]:
    entries = {entry.name: entry for entry in dl_options.OPTIONS}
    settings = {}
    for name, value in yaml_input.check_keys(data, tuple(entries), path, "options.").items():
        entry = entries[name]
        if entry.is_flag:
            if not isinstance(value, bool):
                raise _invalid_value(f"options.{name}", value, _kind("true or false", bool), path)
            if value:
                settings[entry.field] = ""
            continue
        parts = value if isinstance(value, list) else [value]
        if any(isinstance(part, (list, dict, set)) for part in parts):
            raise _invalid_value(f"options.{name}", value, _kind(entry.kind.values, str), path)
        # YAML reads a bare `off` as False
        text = "off" if value is False else ",".join(map(str, parts))
        try:
            entry.parse(text, f"options.{name}")
        except UsageError as error:
            raise InputError(str(error), path) from error
        settings[entry.field] = text
    merged = dl_options.overlay_settings(dict(base), settings)
    try:
        dl_options.merge_layers(merged)
    except UsageError as error:
        raise InputError(f"options: {error}", path) from error
    return merged


def _invalid_value(name: str, value: Any, kind: Kind, path: str) -> InputError:
    shown = yaml_input.short_repr(value)
    return InputError(f"{name}: invalid value {shown}; expected {kind.expected(shown)}", path)
