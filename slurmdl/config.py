"""slurmdl.yaml: what a site or a user sets once. First /etc/slurmdl, then the user's own, key by key.

The keys, all optional::

    options:              # defaults of the --dl-* options, weaker than #DL lines, SLURMDL_OPT_* and options
      strategy: gossip
      bind: auto
    links:                # assumed where nothing is measured
      node: 1.25e9        # bytes/s of a node's link
      zone: [1.25e10]     # bytes/s of a zone's uplink, by level, leaf first; the last serves all above
      delay: 2.0e-5       # seconds that a message takes at each level crossed
    scores:               # of links, see docs/scores.md
      file: /shared/slurmdl/scores.json    # what the collector publishes
      owner: slurmdl      # the user that may write it, beside root
      max_age: 900        # seconds after which scores are not read any more
      half_life: 300      # seconds after which a score counts half as much as what is assumed; 0: for no decay
      margin: 0.25        # links whose measured figures differ by less count as equal
      scoring: physical   # or weighted, by
      weights: {throughput: 1, delay: 1, loss: 1}
      prometheus:
        url: http://prometheus:9090
        label: instance   # that names the node
        queries: {throughput: ..., delay: ..., loss: ...}    # PromQL; node_exporter's metrics where not given
    plan_dir: /home/shared/slurmdl    # a directory that all nodes share, for plans too long for the environment
    cluster_backend: auto     # who reads nodes, partitions and reservations: auto (scontrol), scontrol, pyslurm

Without a file nothing is read and no YAML reader is imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from slurmdl import dl_options, yaml_input
from slurmdl.errors import InputError, SlurmdlError, UsageError

SITE_CONFIG_FILE = "/etc/slurmdl/slurmdl.yaml"
DEFAULT_SCORES_FILE = "/var/lib/slurmdl/scores.json"
COST_MODELS = ("physical", "weighted")
#: who may read nodes, partitions and reservations (cluster.read.from_controller)
CLUSTER_BACKENDS = ("auto", "scontrol", "pyslurm")
#: what is measured of a link, by the names of the weights and of the queries
METRICS = ("throughput", "delay", "loss")


@dataclass(frozen=True)
class LinkScoresConfig:
    """Where scores of links are found, whom to trust with them, and how they count.

    Attributes
    ----------
    file : what the collector publishes.
    owner : name or number of the user that may write it beside root, "" for no other.
    max_age : seconds after which scores are not read any more.
    half_life : seconds after which a score counts half as much as what is assumed of its link; 0 for no decay.
    margin : fraction; links whose figures differ by less count as equal.
    scoring : "physical" or "weighted".
    weights : figure -> its weight, where scoring is weighted.
    url : of a Prometheus server, "" for none.
    label : of its answers, that names the node.
    queries : figure -> PromQL, for those that are not the shipped ones.
    """

    file: str = DEFAULT_SCORES_FILE
    trusted_owner: str = ""
    max_age: float = 900.0
    half_life: float = 300.0
    tolerance: float = 0.25
    cost_model: str = "physical"
    weights: Mapping[str, float] = field(default_factory=dict)
    prometheus_url: str = ""
    prometheus_node_label: str = "instance"
    prometheus_queries: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Config:
    """What the files set; the defaults where they are silent.

    Attributes
    ----------
    options : settings of --dl-* options, field -> value as text (see dl_options.merge).
    node_speed : bytes/s of a node's link; None for the default of network.model.LinkScores.
    zone_speed : bytes/s of a zone's uplink by level, () for that default.
    delay : seconds, None for that default.
    plan_dir : directory that all nodes share, None where not given.
    scores : see Scores.
    cluster_backend : one of BACKENDS.
    """

    options: Mapping[str, str] = field(default_factory=dict)
    node_bandwidth: float | None = None
    zone_bandwidth: tuple[float, ...] = ()
    latency: float | None = None
    plan_dir: str | None = None
    link_scores: LinkScoresConfig = field(default_factory=LinkScoresConfig)
    cluster_backend: str = "auto"


def config_paths(environ: Mapping[str, str]) -> tuple[str, str]:
    """The site's file and the user's file (XDG Base Directory Specification)."""
    base = environ.get("XDG_CONFIG_HOME") or os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".config")
    return SITE_CONFIG_FILE, os.path.join(base, "slurmdl", "slurmdl.yaml")


def load_config(paths: Sequence[str] | None = None) -> Config:
    """Read the files that exist, the later before the earlier.

    Raises
    ------
    InputError : a file cannot be read, is not YAML, or holds an unknown key or a value that is not valid.
    """
    config = Config()
    for path in config_paths(os.environ) if paths is None else paths:
        if os.path.exists(path):
            try:
                config = _merge_config(config, _read_config_file(path), path)
            except SlurmdlError:
                raise
            except Exception as error:  # a file that is wrong in a way that no check below knows
                raise InputError(f"cannot be used ({type(error).__name__}: {error})", path) from error
    return config


def _read_config_file(path: str) -> dict[str, Any]:
    if not os.path.isfile(path):  # the writer of a pipe may never come
        raise InputError("is not a regular file", path)
    data = yaml_input.load_yaml_file(path)
    return yaml_input.check_keys(data or {}, ("options", "links", "plan_dir", "scores", "cluster_backend"), path, "")


def _merge_config(base: Config, data: dict[str, Any], path: str) -> Config:
    links = yaml_input.check_keys(data.get("links") or {}, ("node", "zone", "delay"), path, "links.")
    zone = links.get("zone", base.zone_bandwidth)
    plan_dir = data.get("plan_dir")
    return Config(
        options=_parse_options(base.options, data.get("options") or {}, path),
        node_bandwidth=_checked_number(links["node"], "links.node", path) if "node" in links else base.node_bandwidth,
        zone_bandwidth=tuple(_checked_number(speed, "links.zone", path)
                         for speed in (zone if isinstance(zone, (list, tuple)) else [zone])),
        latency=_checked_number(links["delay"], "links.delay", path) if "delay" in links else base.latency,
        plan_dir=base.plan_dir if plan_dir is None else
        _checked_text(plan_dir, "plan_dir", path, os.path.isabs, "an absolute path"),
        link_scores=_parse_link_scores(base.link_scores, data.get("scores") or {}, path),
        cluster_backend=_checked_text(data.get("cluster_backend", base.cluster_backend), "cluster_backend", path,
                              CLUSTER_BACKENDS.__contains__, ", ".join(CLUSTER_BACKENDS)))


def _parse_link_scores(base: LinkScoresConfig, data: Any, path: str) -> LinkScoresConfig:
    keys = ("file", "owner", "max_age", "half_life", "margin", "scoring", "weights", "prometheus")
    data = yaml_input.check_keys(data, keys, path, "scores.")
    found: dict[str, Any] = {}
    if "file" in data:
        found["file"] = _checked_text(data["file"], "scores.file", path, os.path.isabs, "an absolute path")
    if "owner" in data:
        owner = str(data["owner"]) if isinstance(data["owner"], int) else data["owner"]
        found["owner"] = _checked_text(owner, "scores.owner", path, str.strip, "a user's name or number")
    for key, zero in (("max_age", False), ("half_life", True), ("margin", True)):
        if key in data:
            found[key] = _checked_number(data[key], f"scores.{key}", path, zero)
    if "scoring" in data:
        found["scoring"] = _checked_text(
    data["scoring"],
    "scores.scoring",
    path,
    COST_MODELS.__contains__,
     ", ".join(COST_MODELS))
    if "weights" in data:
        weights = yaml_input.check_keys(data["weights"], METRICS, path, "scores.weights.")
        found["weights"] = {**base.weights, **{key: _checked_number(value, f"scores.weights.{key}", path, allow_zero=True)
                                                for key, value in weights.items()}}
        if not any(found["weights"].get(key, 1.0) for key in METRICS):
            raise InputError("scores.weights: all are 0; valid: one at least above 0", path)
    prometheus = yaml_input.check_keys(
    data.get("prometheus") or {},
    ("url",
    "label",
    "queries"),
    path,
     "scores.prometheus.")
    if "url" in prometheus:
        found["url"] = _checked_text(prometheus["url"], "scores.prometheus.url", path,
                             lambda url: url.startswith(("http://", "https://")), "http://HOST[:PORT]")
    if "label" in prometheus:
        found["label"] = _checked_text(
    prometheus["label"],
    "scores.prometheus.label",
    path,
    str.isidentifier,
     "a label")
    if "queries" in prometheus:
        queries = yaml_input.check_keys(prometheus["queries"], METRICS, path, "scores.prometheus.queries.")
        found["queries"] = {**base.prometheus_queries, **{
            key: _checked_text(value, f"scores.prometheus.queries.{key}", path, str.strip, "PromQL")
            for key, value in queries.items()}}
    return replace(base, **found)


def _checked_text(value: Any, name: str, path: str, is_valid: Callable[[str], object], expected: str) -> str:
    if not isinstance(value, str) or "\0" in value or not is_valid(value):
        raise InputError(f"{name}: {yaml_input.short_repr(value)} is not valid; valid: {expected}", path)
    return value


def _parse_options(base: Mapping[str, str], data: Any, path: str) -> dict[str, str]:
    named = {option.name: option for option in dl_options.OPTIONS}
    found = {}
    for name, value in yaml_input.check_keys(data, tuple(named), path, "options.").items():
        option = named[name]
        if option.kind == "flag":
            if value is True:
                found[option.field] = ""
            elif value is not False:
                raise InputError(
    f"options.{name}: {yaml_input.short_repr(value)} is not valid; valid: true, false", path)
            continue
        parts = value if isinstance(value, list) else [value]
        if any(isinstance(part, (list, dict, set)) for part in parts):
            raise InputError(
    f"options.{name}: {yaml_input.short_repr(value)} is not valid; valid: {option.values}", path)
        # YAML takes a bare `off` for False: the options know it as a word
        text = "off" if value is False else ",".join(map(str, parts))
        try:
            option.parse(text, f"options.{name}")
        except UsageError as error:
            raise InputError(str(error), path) from error
        found[option.field] = text
    try:
        return dl_options.overlay_settings(base, found)
    except UsageError as error:
        raise InputError(f"options: {error}", path) from error


def _checked_number(value: Any, name: str, path: str, allow_zero: bool = False) -> float:
    try:
        number = float(value)  # YAML 1.1 reads 1e9, which has no point, as text
    except (TypeError, ValueError, OverflowError):
        number = -1.0
    if isinstance(value, bool) or not 0 <= number < float("inf") or (not number and not allow_zero):
        raise InputError(f"{name}: {yaml_input.short_repr(value)} is not valid; valid: a number "
                         f"{'from' if allow_zero else 'above'} 0", path)
    return number
