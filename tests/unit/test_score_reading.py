"""--dl-link-scores: files and Prometheus, and all the ways in which neither helps. Nothing of it may cost a choice."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from slurmdl import config
from slurmdl.config import Config, LinkScoresConfig
from slurmdl.errors import InputError
from slurmdl.launch import cluster_state
from slurmdl.links import aggregate, prometheus_query, score_files
from slurmdl.links.link_scores import LinkScore, LinkScores
from slurmdl.links.samples import LinkSample, format_sample_lines
from slurmdl.links.score_sources import load_from_sources, user_probe_file

NOW = 1.8e9
ONE = LinkScores(nodes={"n1": LinkScore(1e8, 1e-4, 0.01, 5.0, 3, 2e-4, False, "probe")},
                 zones={"z1": LinkScore(rtt=1e-3)}, inter_leaf={"a|b": LinkScore(5e8)}, time=NOW)


def test_json_round_trips() -> None:
    assert LinkScores.from_json(json.loads(json.dumps(ONE.to_json()))) == ONE
    assert score_files.parse_scores(ONE.to_text(), NOW) == ONE
    assert score_files.parse_scores("{}", NOW) == LinkScores()
    assert score_files.parse_scores(ONE.to_text(), NOW + 60).nodes["n1"].age == 65


@pytest.mark.parametrize(("text", "says"), [
    ("", "is not JSON"), ("{", "is not JSON"), ("[]", "expected an object"), ("null", "expected an object"),
    ("<html>", "is not JSON"), ("[" * 100_000, "is not JSON"), ('{"nodes": {"a": {}, "a": {}}}', "'a': duplicate key"),
    ('{"node": {}}', "unknown key 'node'; expected .*nodes"), ('{"nodes": []}', "nodes: expected an object"),
    ('{"nodes": {"n": 5}}', "n: expected an object"), ('{"nodes": {"": {}}}', "a node name"),
    ('{"nodes": {"n": {"speed": 1}}}', "unknown key 'speed'; expected throughput"),
    ('{"nodes": {"n": {"throughput": 0}}}', "throughput 0: expected"),
    ('{"nodes": {"n": {"throughput": -1}}}', "throughput -1: expected"),
    ('{"nodes": {"n": {"throughput": true}}}', "True: expected"),
    ('{"nodes": {"n": {"throughput": NaN}}}', "nan: expected"),
    ('{"nodes": {"n": {"throughput": Infinity}}}', "inf: expected"),
    ('{"nodes": {"n": {"throughput": 1%s}}}' % ("0" * 400), ": expected a number above 0"),
    ('{"nodes": {"n": {"throughput": "1"}}}', "'1': expected"),
    ('{"nodes": {"n": {"loss": 1.1}}}', "a number from 0 to 1"),
    ('{"nodes": {"n": {"rtt": -1}}}', "a number from 0 to 60"),
    ('{"nodes": {"n": {"age": -1}}}', "age -1: expected"),
    ('{"nodes": {"n": {"samples": 1.5}}}', "an integer from 1"),
    ('{"nodes": {"n": {"samples": 0}}}', "an integer from 1"),
    ('{"nodes": {"n": {"rdma": 1}}}', "expected true or false"),
    ('{"nodes": {"n": {"source": "rumour"}}}', "expected probe, serve"),
    ('{"inter_leaf": {"b|a": {}}}', "in sorted order"), ('{"inter_leaf": {"a": {}}}', "in sorted order"),
    ('{"inter_leaf": {"|": {}}}', "in sorted order"), ('{"default_zone_bandwidth": 5}', "expected a list"),
    ('{"default_zone_bandwidth": [0]}', "default_zone_bandwidth 0: expected"), ('{"default_node_bandwidth": null}', "default_node_bandwidth"),
    ('{"weights": {"speed": 1}}', "weights"), ('{"weights": 5}', "weights"),
    ('{"weights": {"loss": "1"}}', "weights"),
    ('{"time": 1800000100}', "100 s in the future"),
    ('{"kind": "node"', "is not JSON"), ('{"kind": "node", "name": "n"}', "time is missing"),
])
def test_what_is_malformed_is_named(text: str, says: str) -> None:
    with pytest.raises(InputError, match=says) as error:
        score_files.parse_scores(text, NOW)
    assert len(str(error.value).splitlines()) == 1 and len(str(error.value)) < 700


def test_csv() -> None:
    text = ("kind,name,throughput,rtt,loss,age,samples\nnode,n1,1e8,0.0001,0.01,5,3\nzone,z1,,0.001,,,\n"
            'inter_leaf,"a|b",5e8,,,,\n')
    found = score_files.parse_scores(text, NOW, is_csv=True)
    assert found.nodes == {"n1": LinkScore(1e8, 1e-4, 0.01, 5.0, 3)}
    assert (found.zones, found.inter_leaf) == ({"z1": LinkScore(rtt=1e-3)}, {"a|b": LinkScore(5e8)})
    assert score_files.parse_scores("name,loss\nn1,0.5\n", NOW, is_csv=True).nodes == {"n1": LinkScore(loss=0.5)}


@pytest.mark.parametrize(("text", "says"), [
    ("", "including name"), ("loss\n1\n", "including name"), ("name,name\na,b\n", "each once"),
    ("name,speed\nn,1\n", "unknown column 'speed'; expected kind, name"), ("name,loss\nn1\n", "line 2: expected 2 columns"),
    ("name,loss\nn1,0,0\n", "line 2: expected 2 columns"), ("name,loss\nn1,x\n", "line 2: 'x': expected a number"),
    ("name,loss\nn1,nan\n", "loss nan: expected"), ("name,loss\nn1,0\nn1,0\n", "line 3: node 'n1': duplicate"),
    ("kind,name\nlink,n\n", "line 2: kind 'link'"), ("kind,name\ninter_leaf,b|a\n", "in sorted order"),
    ('name\n"n', "is not CSV"), ("name\na\0b\n", "line 2|is not CSV"),
])
def test_csv_that_is_malformed_is_named(text: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        score_files.parse_scores(text, NOW, is_csv=True)


def test_samples_are_read_as_scores() -> None:
    text = format_sample_lines([LinkSample("node", "n1", NOW - i, "probe", throughput=1e8) for i in range(3)])
    told: list[str] = []
    found = score_files.parse_scores(text + "half a li", NOW, on_reject=told.append)
    assert (found.nodes["n1"].throughput, found.nodes["n1"].samples) == (1e8, 3)
    assert told == ["line 4: 'half a li': is not JSON (JSONDecodeError)"]


def answer(**values: float) -> bytes:
    return json.dumps({"status": "success", "data": {"resultType": "vector", "result": [
        {"metric": {"instance": name.replace("_", ".")}, "value": [time.time(), str(value)]}
        for name, value in values.items()]}}).encode()


Reply = Callable[[BaseHTTPRequestHandler, str], None]


@contextmanager
def server(reply: Reply) -> Iterator[str]:
    """A web server on this machine that answers as `reply` does; its URL."""
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with suppress(OSError):  # who asked has given up
                reply(self, parse_qs(urlsplit(self.path).query)["query"][0])

        def log_message(self, *_: object) -> None:
            pass

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    running.daemon_threads = True
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{running.server_address[1]}"
    finally:
        running.shutdown()
        running.server_close()


def says(body: bytes, status: int = 200) -> Reply:
    def reply(handler: BaseHTTPRequestHandler, query: str) -> None:
        handler.send_response(status)
        handler.end_headers()
        handler.wfile.write(body)
    return reply


def drips(handler: BaseHTTPRequestHandler, query: str) -> None:
    handler.send_response(200)
    handler.end_headers()
    for byte in answer(n1=1e8) * 60:
        handler.wfile.write(bytes([byte]))
        handler.wfile.flush()
        time.sleep(0.01)


def floods(handler: BaseHTTPRequestHandler, query: str) -> None:
    handler.send_response(200)
    handler.end_headers()
    for _ in range(prometheus_query.MAX_ANSWER_BYTES // 2**20 + 2):
        handler.wfile.write(b" " * 2**20)


def hangs(handler: BaseHTTPRequestHandler, query: str) -> None:
    time.sleep(60)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place that is trusted, and none of this machine's own scores."""
    tmp_path.chmod(0o755)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


def test_prometheus_gives_figures_by_node(site: Path) -> None:
    def reply(handler: BaseHTTPRequestHandler, query: str) -> None:
        figures = {"speed": answer(n1=2e8), "lost": answer(n1=0.02, n2=0.0), "rtt": answer(n1=1e-3)}
        says(figures[query])(handler, query)

    with server(reply) as url:
        given = Config(
    link_scores=LinkScoresConfig(
        prometheus_url=url,
        prometheus_queries={
            "throughput": "speed",
            "loss": "lost",
             "rtt": "rtt"}))
        found = load_from_sources(given, "auto", os.environ)
    assert found.warnings == ()
    score = found.scores.nodes["n1"]
    assert (score.throughput, score.rtt, score.loss, score.source) == (2e8, 1e-3, 0.02, "prometheus")
    assert found.scores.nodes["n2"].throughput is None


def test_shipped_queries_are_asked_where_none_are_given(site: Path) -> None:
    asked = []

    def reply(handler: BaseHTTPRequestHandler, query: str) -> None:
        asked.append(query)
        says(answer(n1=1.25e9) if "speed" in query else answer(n1=0.0))(handler, query)

    with server(reply) as url:
        found = load_from_sources(Config(), url, os.environ)
    assert asked == list(prometheus_query.DEFAULT_QUERIES.values())
    assert found.scores.nodes["n1"].source == "counters"  # an interface's speed is no measurement


@pytest.mark.parametrize(("instance", "node"), [
    ("n1", "n1"), ("n1:9100", "n1"), ("n1.cluster.example:9100", "n1"), ("10.0.0.7:9100", "10.0.0.7"),
    ("fe80::1", "fe80::1"), ("[fe80::1]:9100", "fe80::1")])
def test_the_label_names_the_node(instance: str, node: str) -> None:
    text = json.dumps({"status": "success", "data": {"resultType": "vector", "result": [
        {"metric": {"instance": instance}, "value": [1.0, "0.5"]}]}}).encode()
    assert [sample.name for sample in prometheus_query.parse_instant_vector(text, "loss", "instance")] == [node]


def test_values_that_no_link_has_are_passed_over() -> None:
    found = prometheus_query.parse_instant_vector(
    answer(
        n1=float("nan"),
        n2=-1,
        n3=0.5,
        n4=float("inf")),
        "loss",
         "instance")
    assert [sample.name for sample in found] == ["n3"]


@pytest.mark.parametrize(("reply", "why"), [
    (says(b"<html><body>Log in</body></html>"), "not JSON"), (says(b"", 500), "HTTP status 500"),
    (says(b"", 404), "HTTP status 404"), (says(b"{}"), "malformed"), (says(b"[]"), "malformed"),
    (says(b""), "not JSON"),
    (says(b'{"status": "error", "error": "parse error"}'), "malformed|parse error"),
    (says(b'{"status": "success", "data": {"resultType": "matrix", "result": []}}'), "matrix"),
    (says(b'{"status": "success", "data": {"resultType": "vector", "result": [5]}}'), "malformed"),
    (says(answer()), "no result has a node name"), (says(b"[" * 10_000_000), "not JSON"),
    (floods, "more than|not complete|no response|no answer"), (drips, "not complete|no response|no answer"), (hangs, "no response|no answer"),
], ids=["html", "500", "404", "empty-object", "list", "nothing", "error", "matrix", "odd", "no-node", "nested",
        "floods", "drips", "hangs"])
def test_a_server_that_does_not_help_costs_a_second_at_most_and_one_line(site: Path, reply: Reply, why: str) -> None:
    said: list[str] = []
    with server(reply) as url:
        began = time.monotonic()
        found = cluster_state.load_link_scores(Config(link_scores=LinkScoresConfig(prometheus_url=url)), "auto", said.append)
        took = time.monotonic() - began
    assert found.link_count == 0
    assert len(said) == 1 and len(said[0].splitlines()) == 1
    assert re.search(why, said[0]) and said[0].endswith("the topology alone decides")
    assert took < 30  # on an idle machine below 1 s; those that hang or drip go on for a minute and more


def test_a_server_that_is_not_there_or_takes_no_connection(site: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    for url in (f"http://127.0.0.1:{port}", "http://no-such-host.invalid:9090", "http://[::1"):
        found = load_from_sources(Config(), url, os.environ)
        assert found.scores.link_count == 0 and len(found.warnings) == 1, url


def write(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o644)
    return str(path)


def test_sources_are_joined_link_by_link(site: Path) -> None:
    now = time.time()
    snapshot = LinkScores(nodes={"n1": LinkScore(1e8, age=100.0, source="probe"), "n2": LinkScore(2e8, age=1.0)},
                          default_node_bandwidth=3e9, time=now, tolerance=0.25)
    write(Path(user_probe_file(os.environ)), format_sample_lines(
        [LinkSample("node", "n1", now, "probe", rtt=1e-3)]))
    given = Config(link_scores=LinkScoresConfig(file=write(site / "scores.json", snapshot.to_text())))
    found = load_from_sources(given, "auto", os.environ).scores
    assert (found.nodes["n1"].rtt, found.nodes["n1"].throughput) == (1e-3, 1e8)
    assert found.nodes["n1"].age < 50 and found.nodes["n2"].throughput == 2e8
    assert (found.default_node_bandwidth, found.tolerance, found.half_life) == (3e9, 0.25, 300.0)
    assert load_from_sources(given, "off", os.environ).scores.link_count == 0


def test_stale_scores_are_not_read_and_one_says_so(site: Path) -> None:
    old = LinkScores(nodes={"n1": LinkScore(1e8)}, time=time.time() - 1000)
    given = Config(link_scores=LinkScoresConfig(file=write(site / "scores.json", old.to_text()), max_age=900))
    said: list[str] = []
    assert cluster_state.load_link_scores(given, "auto", said.append).link_count == 0
    assert len(said) == 1 and "stale, the newest score is 100" in said[0]
    with pytest.raises(InputError, match="stale"):
        cluster_state.load_link_scores(given, "auto", said.append, strict=True)


def test_scores_that_are_old_in_part_are_read_in_part(site: Path) -> None:
    both = LinkScores(nodes={"n1": LinkScore(1e8, age=1000.0), "n2": LinkScore(1e8)}, time=time.time())
    found = load_from_sources(Config(), write(site / "scores.json", both.to_text()), os.environ)
    assert (list(found.scores.nodes), found.warnings) == (["n2"], ())


@pytest.mark.parametrize(("make", "why"), [
    (lambda path: None, "No such file"), (lambda path: path.mkdir(), "directory"), (os.mkfifo, "not a regular file"),
    (lambda path: path.write_text("{"), "is not JSON"), (lambda path: path.write_bytes(b"\xff"), "UTF-8"),
    (lambda path: (path.write_text("{}"), path.chmod(0o666)), "others may write it")],
    ids=["missing", "directory", "pipe", "half", "binary", "open"])
def test_a_file_that_does_not_help_is_one_line(site: Path, make: Callable[[Path], object], why: str) -> None:
    make(site / "scores.json")
    if (site / "scores.json").is_file() and why != "others may write it":
        (site / "scores.json").chmod(0o644)
    said: list[str] = []
    for wanted in ("auto", str(site / "scores.json")):
        found = cluster_state.load_link_scores(
    Config(
        link_scores=LinkScoresConfig(
            file=str(
                site /
                "scores.json"))),
                wanted,
                 said.append)
        assert found.link_count == 0
    assert len(said) == 2 and all(why in line and str(site) in line for line in said)


def test_a_file_system_that_hangs_costs_a_second_at_most(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reading itself hangs, as in a call of a file system whose server is gone."""
    from slurmdl import file_trust

    monkeypatch.setattr(file_trust, "read_trusted_text", lambda *_: time.sleep(5))
    found = load_from_sources(Config(), str(site / "scores.json"), os.environ)
    assert found.warnings == (f"{site}/scores.json: no answer within 0.9 s",)


def test_where_nothing_is_configured_nothing_is_said(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LinkScoresConfig, "file", str(site / "none.json"))
    assert load_from_sources(
    Config(
        link_scores=LinkScoresConfig(
            file=str(
                site /
                "none.json"))),
                "auto",
                 os.environ).warnings == ()


@pytest.mark.parametrize(("text", "says"), [
    ("link_scores: {fil: x}", "unknown key link_scores.fil; expected link_scores.file"), ("link_scores: {file: x}", "an absolute path"),
    ("link_scores: {max_age: 0}", "greater than 0"), ("link_scores: {half_life: -1}", "0 or more"), ("link_scores: {tolerance: x}", "0 or more"),
    ("link_scores: {cost_model: best}", "tcp, weighted"), ("link_scores: {weights: {speed: 1}}", "expected link_scores.weights."),
    ("link_scores: {weights: {loss: 0, rtt: 0, throughput: 0}}", "at least one greater than 0"),
    ("link_scores: 5", "expected a mapping"),
    ("link_scores: {prometheus: {url: ftp://x}}", "http://HOST"), ("link_scores: {prometheus: {node_label: 'a b'}}", "a label"),
    ("link_scores: {prometheus: {queries: {speed: x}}}", "queries.throughput"), ("link_scores: {trusted_owner: ''}", "a user name"),
    ("link_scores: {prometheus: {queries: {loss: 5}}}", "PromQL"),
])
def test_the_configuration_of_scores_is_checked(site: Path, text: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        config.load_config([write(site / "slurmdl.yaml", text)])


def test_the_configuration_of_scores(site: Path) -> None:
    text = ("link_scores: {file: /x/s.json, trusted_owner: 17, max_age: 60, half_life: 0, tolerance: 0.1, cost_model: weighted, "
            "weights: {loss: 2}, prometheus: {url: 'http://p', node_label: node, queries: {rtt: q}}}")
    own = write(site / "own.yaml", "link_scores: {weights: {rtt: 3}}")
    found = config.load_config([write(site / "slurmdl.yaml", text), own])
    assert found.link_scores == LinkScoresConfig("/x/s.json", "17", 60, 0, 0.1, "weighted", {"loss": 2, "rtt": 3}, "http://p",
                                  "node", {"rtt": "q"})
    weights = load_from_sources(found, "off", os.environ).scores.weights
    assert weights is not None and (weights.loss, weights.rtt, weights.throughput) == (2, 3, 1)


def test_rules_of_the_configuration_hold(site: Path) -> None:
    rules = aggregate.AggregationRules(60, 30, 0.1)
    text = format_sample_lines([LinkSample("node", "n1", NOW - 61, "probe", loss=0.1),
                     LinkSample("node", "n2", NOW - 59, "probe", loss=0.1)])
    found = score_files.parse_scores(text, NOW, rules=rules)
    assert (list(found.nodes), found.tolerance) == (["n2"], 0.1)


def test_a_file_that_was_named_and_holds_nothing_is_said(site: Path) -> None:
    for text in ("{}", format_sample_lines([LinkSample("node", "n1", time.time() - 1e6, "probe", loss=0.1)])):
        found = load_from_sources(Config(), write(site / "scores.json", text), os.environ)
        assert found.warnings == (f"{site}/scores.json: no score of the last 900 s",)
    only_assumed = write(site / "scores.json", '{"default_zone_bandwidth": [1e9]}')
    found = load_from_sources(Config(), only_assumed, os.environ)
    assert (found.warnings, found.scores.default_zone_bandwidth) == ((), (1e9,))


@pytest.mark.parametrize(("name", "text", "says"), [
    ("s.json", '{"nodes": {"n1": {"throughput": -1}, "n2": {"loss": 0.1}, "": {}}, "inter_leaf": {"b|a": {}}}',
     "3 rejected, the first: n1: throughput -1: expected"),
    ("s.csv", "name,loss\nn1,7\nn2,0.1\nn3,x\nn2,0.2\n", "3 rejected, the first: line 2: n1: loss 7.0: expected"),
    ("s.jsonl", '{"kind":"node","name":"n2","time":NOW,"source":"probe","loss":0.1}\nhalf',
     "1 rejected, the first: line 2: 'half'"),
])
def test_one_absurd_score_costs_only_itself(site: Path, name: str, text: str, says: str) -> None:
    said: list[str] = []
    text = text.replace("NOW", str(time.time()))
    found = cluster_state.load_link_scores(Config(), write(site / name, text), said.append)
    assert list(found.nodes) == ["n2"] and found.nodes["n2"].loss == 0.1
    assert len(said) == 1 and says in said[0] and said[0].endswith("the other scores decide")
