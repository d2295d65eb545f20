"""Sources of link scores, their failures, which must never prevent a placement, and the table of the scores."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from placing import two_level

from slurmdl.cli.main import main
from slurmdl.config import Config, LinkScoresConfig, MetricQueries, PrometheusConfig
from slurmdl.errors import InputError, UnavailableError
from slurmdl.launch import cluster_state
from slurmdl.links import capacity, prometheus, samples
from slurmdl.links.link_scores import LinkScore, LinkScores
from slurmdl.links.samples import LinkSample, format_sample_lines
from slurmdl.links.score_sources import load_from_sources, parse_scores, user_probe_file

NOW = 1.8e9
ONE = LinkScores(nodes={"n1": LinkScore(1e8, 1e-4, 0.01, 5.0, 3, 2e-4, False, "probe")},
                 zones={"z1": LinkScore(rtt=1e-3)}, inter_leaf={"a|b": LinkScore(5e8)}, time=NOW)


@pytest.mark.parametrize(("text", "is_csv", "now", "expected"), [
    (ONE.to_text(), False, NOW, ONE), ("{}", False, NOW, LinkScores()),
    (ONE.to_text(), False, NOW + 60, ONE.with_current_ages(NOW + 60)),
    ("kind,name,throughput,rtt,loss,age,samples\nnode,n1,1e8,0.0001,0.01,5,3\nzone,z1,,0.001,,,\n"
     'inter_leaf,"a|b",5e8,,,,\n', True, NOW, LinkScores({"n1": LinkScore(1e8, 1e-4, 0.01, 5.0, 3)}, {
         "z1": LinkScore(rtt=1e-3)}, inter_leaf={"a|b": LinkScore(5e8)})),
    ("name,loss\nn1,0.5\n", True, NOW, LinkScores({"n1": LinkScore(loss=0.5)})),
])
def test_scores_are_parsed(text: str, is_csv: bool, now: float, expected: LinkScores) -> None:
    parsed = parse_scores(text, now, is_csv=is_csv)
    assert (parsed.nodes, parsed.zones, parsed.inter_leaf) == (expected.nodes, expected.zones, expected.inter_leaf)
    assert is_csv or replace(parsed, time=0.0) == replace(expected, time=0.0)


def node_score(value: str) -> str:
    return f'{{"nodes": {{"n": {{{value}}}}}}}'


@pytest.mark.parametrize(("text", "message"), [
    *((text, "is not JSON") for text in ("", "{", "<html>", "[" * 100_000, '{"kind": "node"')),
    ("[]", "expected an object"), ("null", "expected an object"),
    ('{"nodes": {"a": {}, "a": {}}}', "'a': duplicate key"),
    ('{"node": {}}', "unknown key 'node'; expected .*nodes"), ('{"nodes": []}', "nodes: expected an object"),
    ('{"nodes": {"n": 5}}', "n: expected an object"), ('{"nodes": {"": {}}}', "a node name"),
    (node_score('"speed": 1'), "unknown key 'speed'; expected throughput"),
    *((node_score(f'"throughput": {value}'), message) for value, message in (
        ("0", "throughput 0: expected"), ("-1", "throughput -1: expected"), ("true", "True: expected"),
        ("NaN", "nan: expected"), ("Infinity", "inf: expected"), ('"1"', "'1': expected"),
        ("1" + "0" * 400, ": expected a number above 0"))),
    (node_score('"loss": 1.1'), "a number from 0 to 1"), (node_score('"rtt": -1'), "a number from 0 to 60"),
    (node_score('"age": -1'), "age -1: expected"), (node_score('"samples": 1.5'), "an integer from 1"),
    (node_score('"samples": 0'), "an integer from 1"), (node_score('"rdma": 1'), "expected true or false"),
    (node_score('"source": "rumour"'), "expected probe, job"),
    *((f'{{"inter_leaf": {{"{name}": {{}}}}}}', "in sorted order") for name in ("b|a", "a", "|")),
    ('{"default_zone_bandwidth": 5}', "expected a list"),
    ('{"default_zone_bandwidth": [0]}', r"default_zone_bandwidth\[0\] 0: expected"),
    ('{"default_node_bandwidth": null}', "default_node_bandwidth"), ('{"weights": {"speed": 1}}', "weights"),
    ('{"weights": 5}', "weights"), ('{"weights": {"loss": "1"}}', "weights"),
    ('{"default_rails": 0.5}', "default_rails 0.5: expected a whole number"),
    ('{"time": 1800000100}', "100 s in the future"), ('{"kind": "node", "name": "n"}', "time is missing"),
    ("csv:", "including name"), ("csv:loss\n1\n", "including name"), ("csv:name,name\na,b\n", "each once"),
    ("csv:name,speed\nn,1\n", "unknown column 'speed'; expected kind, name"),
    ("csv:name,loss\nn1\n", "line 2: expected 2 columns"), ("csv:name,loss\nn1,0,0\n", "line 2: expected 2 columns"),
    ("csv:name,loss\nn1,x\n", "line 2: 'x': expected a number"), ("csv:name,loss\nn1,nan\n", "loss nan: expected"),
    ("csv:name,loss\nn1,0\nn1,0\n", "line 3: node 'n1': duplicate"),
    ("csv:kind,name\nlink,n\n", "line 2: kind 'link'"), ("csv:kind,name\ninter_leaf,b|a\n", "in sorted order"),
    ('csv:name\n"n', "is not CSV"),
    ("csv:name\na\0b\n", "line 2|is not CSV"),
], ids=lambda text: text[:30])
def test_malformed_scores_are_reported_in_one_line(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        parse_scores(text.removeprefix("csv:"), NOW, is_csv=text.startswith("csv:"))
    assert len(str(error.value).splitlines()) == 1 and len(str(error.value)) < 700


def test_sample_lines_are_aggregated_into_scores() -> None:
    text = format_sample_lines([LinkSample("node", "n1", NOW - i, "probe", throughput=1e8) for i in range(3)])
    rejected: list[str] = []
    loaded = parse_scores(text + "half a li", NOW, on_reject=rejected.append)
    assert (loaded.nodes["n1"].throughput, loaded.nodes["n1"].samples) == (1e8, 3)
    assert rejected == ["line 4: 'half a li': is not JSON (JSONDecodeError)"]


def vector_response(**values: float) -> bytes:
    return json.dumps({"status": "success", "data": {"resultType": "vector", "result": [
        {"metric": {"instance": name.replace("_", ".")}, "value": [time.time(), str(value)]}
        for name, value in values.items()]}}).encode()


Reply = Callable[[BaseHTTPRequestHandler, str], None]


@contextmanager
def running_server(reply: Reply) -> Iterator[str]:
    """Run a web server that answers with `reply`; yield its URL."""
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with suppress(OSError):  # the client has disconnected
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


def respond(body: bytes, status: int = 200) -> Reply:
    def reply(handler: BaseHTTPRequestHandler, query: str) -> None:
        handler.send_response(status)
        handler.end_headers()
        handler.wfile.write(body)
    return reply


def send_slowly(handler: BaseHTTPRequestHandler, query: str) -> None:
    handler.send_response(200)
    handler.end_headers()
    for byte in vector_response(n1=1e8) * 60:
        handler.wfile.write(bytes([byte]))
        handler.wfile.flush()
        time.sleep(0.01)


def send_header_slowly(handler: BaseHTTPRequestHandler, query: str) -> None:
    handler.wfile.write(b"HTTP/1.0 200 OK\r\n")
    for _ in range(4000):
        handler.wfile.write(b"X")
        handler.wfile.flush()
        time.sleep(0.01)


def send_too_much(handler: BaseHTTPRequestHandler, query: str) -> None:
    handler.send_response(200)
    handler.end_headers()
    for _ in range(prometheus.MAX_ANSWER_BYTES // 2**20 + 2):
        handler.wfile.write(b" " * 2**20)


def hang(handler: BaseHTTPRequestHandler, query: str) -> None:
    time.sleep(60)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A trusted directory, without the scores of this host."""
    tmp_path.chmod(0o755)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


def test_prometheus_metrics_are_read_by_node(site: Path) -> None:
    def reply(handler: BaseHTTPRequestHandler, query: str) -> None:
        responses = {"speed": vector_response(n1=2e8), "lost": vector_response(n1=0.02, n2=0.0),
                     "rtt": vector_response(n1=1e-3)}
        respond(responses[query])(handler, query)

    with running_server(reply) as url:
        queries = MetricQueries("speed", "rtt", "lost")
        settings = Config(link_scores=LinkScoresConfig(prometheus=PrometheusConfig(url, queries=queries)))
        loaded = load_from_sources(settings, "auto", os.environ)
    assert loaded.warnings == ()
    score = loaded.scores.nodes["n1"]
    assert (score.throughput, score.rtt, score.loss, score.source) == (2e8, 1e-3, 0.02, "prometheus")
    assert loaded.scores.nodes["n2"].throughput is None


def test_default_queries_are_sent_without_configuration(site: Path) -> None:
    queries = []

    def reply(handler: BaseHTTPRequestHandler, query: str) -> None:
        queries.append(query)
        respond(vector_response(n1=1.25e9) if "speed" in query else vector_response(n1=0.0))(handler, query)

    with running_server(reply) as url:
        loaded = load_from_sources(Config(), url, os.environ)
    assert queries == list(prometheus.DEFAULT_QUERIES.values())
    assert loaded.scores.nodes["n1"].source == "counters"  # the speed of an interface is no measurement


@pytest.mark.parametrize(("instance", "node"), [
    ("n1", "n1"), ("n1:9100", "n1"), ("n1.cluster.example:9100", "n1"), ("10.0.0.7:9100", "10.0.0.7"),
    ("fe80::1", "fe80::1"), ("[fe80::1]:9100", "fe80::1")])
def test_node_name_is_taken_from_the_label(instance: str, node: str) -> None:
    text = json.dumps({"status": "success", "data": {"resultType": "vector", "result": [
        {"metric": {"instance": instance}, "value": [1.0, "0.5"]}]}}).encode()
    assert [sample.name for sample in prometheus.parse_instant_vector(text, "loss", "instance")] == [node]


def test_implausible_prometheus_values_are_skipped() -> None:
    text = vector_response(n1=float("nan"), n2=-1, n3=0.5, n4=float("inf"))
    loaded = prometheus.parse_instant_vector(text, "loss", "instance")
    assert [sample.name for sample in loaded] == ["n3"]


def write(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o644)
    return str(path)


@pytest.mark.parametrize(("reply", "reason"), [
    (respond(b"<html><body>Log in</body></html>"), "not JSON"), (respond(b"", 500), "HTTP status 500"),
    (respond(b"", 404), "HTTP status 404"), (respond(b"{}"), "malformed"), (respond(b"[]"), "malformed"),
    (respond(b""), "not JSON"),
    (respond(b'{"status": "error", "error": "parse error"}'), "malformed|parse error"),
    (respond(b'{"status": "success", "data": {"resultType": "matrix", "result": []}}'), "matrix"),
    (respond(b'{"status": "success", "data": {"resultType": "vector", "result": [5]}}'), "malformed"),
    (respond(vector_response()), "no result has a node name"), (respond(b"[" * 10_000_000), "not JSON"),
    (send_too_much, "more than|no response|no answer"),
    (send_slowly, "no response|no answer"), (hang, "no response|no answer"),
], ids=["html", "500", "404", "empty-object", "list", "nothing", "error", "matrix", "odd", "no-node", "nested",
        "sends_too_much", "sends_slowly", "hangs"])
def test_bad_server_gives_one_warning_in_bounded_time(site: Path, reply: Reply, reason: str) -> None:
    with running_server(reply) as url:
        start = time.monotonic()
        assert_one_warning(Config(link_scores=LinkScoresConfig(prometheus=PrometheusConfig(url))), "auto", reason)
    assert time.monotonic() - start < 30  # below 1 s on an idle host; without the limit a minute or more


def closed_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize(("source", "create", "reason"), [
    (closed_port(), None, "refused"), ("http://no-such-host.invalid:9090", None, "no-such-host"),
    ("http://[::1", None, ""), ("file", lambda path: None, "No such file"), ("file", Path.mkdir, "directory"),
    ("file", os.mkfifo, "not a regular file"), ("file", lambda path: write(path, "{"), "is not JSON"),
    ("file", lambda path: (path.write_bytes(b"\xff"), path.chmod(0o644)), "UTF-8"),
    ("file", lambda path: (path.write_text("{}"), path.chmod(0o666)), "others may write it"),
    ("file", lambda path: write(path, "{}"), r"scores.json: no score of the last 900 s"),
    ("file", lambda path: write(path, format_sample_lines([LinkSample("node", "n1", 1e9, "probe", loss=0.1)])),
     r"scores.json: no score of the last 900 s"),
], ids=["closed", "unknown-host", "no-url", "missing", "directory", "pipe", "half", "binary", "open", "empty", "old"])
def test_bad_source_gives_one_warning(site: Path, source: str, create: Callable[[Path], object] | None,
                                      reason: str) -> None:
    if create is None:
        assert_one_warning(Config(), source, reason)
        return
    file = site / "scores.json"
    create(file)
    for configured, named in ((str(file), "auto"), (str(file), str(file)), ("", str(file))):
        settings = Config(link_scores=LinkScoresConfig(file=configured)) if configured else Config()
        if "no score" not in reason or named != "auto":
            assert_one_warning(settings, named, reason)


def assert_one_warning(settings: Config, source: str, reason: str) -> None:
    warnings: list[str] = []
    loaded = cluster_state.load_link_scores(settings, source, warnings.append)
    assert loaded.link_count == 0 and len(warnings) == 1 and len(warnings[0].splitlines()) == 1
    assert re.search(reason, warnings[0]) and warnings[0].endswith("the topology alone decides"), warnings


def test_sources_are_merged_per_link(site: Path) -> None:
    now = time.time()
    snapshot = LinkScores(nodes={"n1": LinkScore(1e8, age=100.0, source="probe"), "n2": LinkScore(2e8, age=1.0)},
                          default_node_bandwidth=3e9, time=now, tolerance=0.25)
    write(Path(user_probe_file(os.environ, "here")), format_sample_lines(
        [LinkSample("node", "n1", now, "probe", rtt=1e-3)]))
    settings = Config(link_scores=LinkScoresConfig(file=write(site / "scores.json", snapshot.to_text())))
    loaded = load_from_sources(settings, "auto", os.environ, lambda: "here").scores
    assert (loaded.nodes["n1"].rtt, loaded.nodes["n1"].throughput) == (1e-3, 1e8)
    assert loaded.nodes["n1"].age < 50 and loaded.nodes["n2"].throughput == 2e8
    assert (loaded.default_node_bandwidth, loaded.tolerance, loaded.half_life) == (3e9, 0.25, 300.0)
    assert load_from_sources(settings, "off", os.environ).scores.link_count == 0


def test_own_probes_of_other_clusters_are_not_read(site: Path) -> None:
    def no_answer() -> str:
        raise UnavailableError("scontrol: no answer within 5 s")

    for cluster in ("here", ""):
        write(Path(user_probe_file(os.environ, cluster)), format_sample_lines(
            [LinkSample("node", f"n{cluster}", time.time(), "probe", rtt=1e-3)]))
    found = {get_cluster: [*load_from_sources(Config(), "auto", os.environ, get_cluster).scores.nodes]
             for get_cluster in (lambda: "here", lambda: "there", str, no_answer)}
    assert [*found.values()] == [["nhere"], [], [], []]


MERGE = """
import sys, time
from slurmdl.links.samples import LinkSample, merge_into_sample_file
for i in range(20):
    merge_into_sample_file(sys.argv[1], [LinkSample("node", f"n{sys.argv[2]}-{i}", time.time(), "probe", rtt=1e-3)])
"""


def test_concurrent_probes_lose_no_sample(tmp_path: Path) -> None:
    file = tmp_path / "probe.jsonl"
    probes = [subprocess.Popen([sys.executable, "-c", MERGE, str(file), str(number)]) for number in range(4)]
    assert [probe.wait() for probe in probes] == [0] * 4
    assert len(file.read_text().splitlines()) == 80


def test_oldest_samples_of_a_huge_file_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "probe.jsonl"
    old, new = (format_sample_lines([LinkSample("node", name, time.time(), "probe", rtt=1e-3)]) for name in "ab")
    file.write_text(old * 1000 + new * 10)
    monkeypatch.setattr(samples, "_MAX_MERGED_BYTES", len(new) * 20)
    samples.merge_into_sample_file(str(file), [LinkSample("node", "c", time.time(), "probe", rtt=1e-3)])
    names = [json.loads(line)["name"] for line in file.read_text().splitlines()]
    assert names[-11:] == ["b"] * 10 + ["c"] and 0 < names.count("a") < 10


def test_stale_scores_are_ignored_with_a_warning(site: Path) -> None:
    old = LinkScores(nodes={"n1": LinkScore(1e8)}, time=time.time() - 1000)
    settings = Config(link_scores=LinkScoresConfig(file=write(site / "scores.json", old.to_text()), max_age=900))
    warnings: list[str] = []
    assert cluster_state.load_link_scores(settings, "auto", warnings.append).link_count == 0
    assert len(warnings) == 1 and "stale, the newest score is 100" in warnings[0]
    with pytest.raises(InputError, match="stale"):
        cluster_state.load_link_scores(settings, "auto", warnings.append, strict=True)


def test_expired_scores_are_dropped_individually(site: Path) -> None:
    both = LinkScores(nodes={"n1": LinkScore(1e8, age=1000.0), "n2": LinkScore(1e8)}, time=time.time())
    loaded = load_from_sources(Config(), write(site / "scores.json", both.to_text()), os.environ)
    assert (list(loaded.scores.nodes), loaded.warnings) == (["n2"], ())


def test_hung_file_system_times_out(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from slurmdl import files

    monkeypatch.setattr(files, "read_trusted_text", lambda *_: time.sleep(5))
    loaded = load_from_sources(Config(), str(site / "scores.json"), os.environ)
    assert loaded.warnings == (f"{site}/scores.json: no answer within 0.9 s",)


def test_missing_default_file_gives_no_warning(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LinkScoresConfig, "file", str(site / "none.json"))
    settings = Config(link_scores=LinkScoresConfig(file=str(site / "none.json")))
    assert load_from_sources(settings, "auto", os.environ).warnings == ()


def test_configured_rules_apply_to_samples(site: Path) -> None:
    settings = LinkScoresConfig(max_age=60, half_life=30, tolerance=0.1)
    text = format_sample_lines([LinkSample("node", "n1", NOW - 61, "probe", loss=0.1),
                     LinkSample("node", "n2", NOW - 59, "probe", loss=0.1)])
    loaded = parse_scores(text, NOW, settings=settings)
    assert (list(loaded.nodes), loaded.tolerance) == (["n2"], 0.1)


def test_defaults_alone_give_no_warning(site: Path) -> None:
    defaults_only = write(site / "scores.json", '{"default_zone_bandwidth": [1e9]}')
    loaded = load_from_sources(Config(), defaults_only, os.environ)
    assert (loaded.warnings, loaded.scores.default_zone_bandwidth) == ((), (1e9,))


@pytest.mark.parametrize(("name", "text", "message"), [
    ("s.json", '{"nodes": {"n1": {"throughput": -1}, "n2": {"loss": 0.1}, "": {}}, "inter_leaf": {"b|a": {}}}',
     "3 rejected, the first: n1: throughput -1: expected"),
    ("s.csv", "name,loss\nn1,7\nn2,0.1\nn3,x\nn2,0.2\n", "3 rejected, the first: line 2: n1: loss 7.0: expected"),
    ("s.jsonl", '{"kind":"node","name":"n2","time":NOW,"source":"probe","loss":0.1}\nhalf',
     "1 rejected, the first: line 2: 'half'"),
])
def test_invalid_score_is_rejected_and_others_are_kept(site: Path, name: str, text: str, message: str) -> None:
    warnings: list[str] = []
    text = text.replace("NOW", str(time.time()))
    loaded = cluster_state.load_link_scores(Config(), write(site / name, text), warnings.append)
    assert list(loaded.nodes) == ["n2"] and loaded.nodes["n2"].loss == 0.1
    assert len(warnings) == 1 and message in warnings[0] and warnings[0].endswith("the other scores decide")


SIX = two_level(("n1", "n2"), ("n3", "n4"), ("n5", "n6"))
MEASURED = LinkScores(
    nodes={"n1": LinkScore(1.25e9, 4e-5), "n2": LinkScore(1.25e8, 4e-5), "n5": LinkScore(loss=0.02)},
    zones={"z2": LinkScore(1e8)}, inter_leaf={"z0|z1": LinkScore(6.25e8, 8e-5)}, time=1e9)


def test_rows_are_sorted_by_slowdown() -> None:
    rows = capacity.link_rows(MEASURED, SIX)
    assert [(row.kind, row.name) for row in rows] == [
        ("node", "n5"), ("zone", "z2"), ("node", "n2"), ("inter_leaf", "z0|z1"), ("node", "n1")]
    assert [row.zone for row in rows] == ["z2", "root", "z0", "", "z0"]
    # a MB at a tenth of 1.25e9 bytes/s, and 2 x 20 us
    assert rows[2].slowdown == pytest.approx((8e-3 + 4e-5) / (8e-4 + 4e-5), rel=1e-3)
    assert rows[-1].slowdown == 1.0


def test_show_prints_the_table_or_json(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    topology = write(site / "topology.conf", "SwitchName=z0 Nodes=n[1-2]\nSwitchName=z1 Nodes=n[3-4]\n"
                                             "SwitchName=z2 Nodes=n[5-6]\nSwitchName=root Switches=z0,z1,z2\n")
    scores = write(site / "scores.json", replace(MEASURED, time=time.time()).to_text())
    show = ["links", "show", f"--link-scores={scores}", f"--topology={topology}"]
    assert main(show) == 0
    output = capsys.readouterr()
    assert output.err == ""
    assert "3 of 6 nodes (50.0%) with a link score younger than 15 min" in output.out
    assert output.out.index("n5 ") < output.out.index("z2    ") < output.out.index("n1 ")
    assert "2.00%" in output.out and "1 Gbit/s" in output.out
    assert main([*show, "--json"]) == 0
    matrix = json.loads(capsys.readouterr().out)
    assert [link["name"] for link in matrix["links"]] == ["n5", "z2", "n2", "z0|z1", "n1"]
    assert (matrix["nodes"], matrix["nodes_with_score"]) == (6, 3)
    Path(scores).unlink()
    assert main(show) == 65
    output = capsys.readouterr()
    assert output.err.count("\n") == 1 and "No such file" in output.err


@pytest.mark.parametrize(("seconds", "expected"), [(0, "0 s"), (59.4, "59 s"), (200, "3 min"), (7200, "2 h"),
                                               (2e5, "2 d")])
def test_format_age_uses_the_largest_unit(seconds: float, expected: str) -> None:
    assert capacity.format_age(seconds) == expected
