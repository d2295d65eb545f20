"""Bad nodes by other health checks: files, node records of Slurm, Prometheus, and their place in a submission."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler

import pytest
from test_score_sources import respond, running_server, send_header_slowly, send_slowly, vector_response

from slurmdl.config import BadNodesConfig, Config, LinkScoresConfig, PrometheusConfig
from slurmdl.errors import InputError
from slurmdl.health import site_checks
from slurmdl.health.site_checks import find_bad_records, load_site_reasons, parse_bad_nodes
from slurmdl.slurm.output import split_output

#: two nodes as Slurm 22.05 prints them; values may have blanks, and a reason lines
RECORDS = """\
NodeName=n1 Arch=x86_64 CoresPerSocket=1
   AvailableFeatures=ib,bad-ib
   ActiveFeatures=ib,bad-ib
   State=IDLE ThreadsPerCore=1
   Reason=not nhc: FAIL Comment=nhc: WARN [root@2026-11-29T00:02:57]
             Comment=nhc: WARN
   Comment=checked at=10:00 by nhc
   Extra=ok

NodeName=n2 Arch=x86_64
   AvailableFeatures=bad-ib
   ActiveFeatures=ib
   State=IDLE
   Reason=x ActiveFeatures=bad-ib
   Comment=nhc: FAIL gpu=3
   Extra=

NodeName=n3 Arch=x86_64
   State=IDLE
   Extra=gpu 7
"""


def fail(error: InputError) -> None:
    raise error


def test_file_with_reasons_lists_and_names():
    text = "# of today\nn[3-4]  bad cable # ask Kim\n\nn7.cluster.example\nn1,n2\n"
    assert dict(parse_bad_nodes(text, "/f", fail)) == {
        "n3": "bad cable (/f)", "n4": "bad cable (/f)", "n7.cluster.example": "listed in /f", "n7": "listed in /f",
        "n1": "listed in /f", "n2": "listed in /f"}


def test_invalid_lines_are_reported_once_and_lose_no_other():
    errors: list[InputError] = []
    assert [node for node, _ in parse_bad_nodes("n[1\nn2\n]\nn3\n", "/f", errors.append)] == ["n2", "n3"]
    [error] = errors
    assert str(error).startswith("/f:1: hostlist")


@pytest.mark.parametrize("text", [RECORDS, "\n".join(" ".join(record.split("\n   ")) for record in
                                                      RECORDS.strip().split("\n\n"))], ids=["lines", "one line"])
@pytest.mark.parametrize(("features", "comment", "reasons"), [
    (("bad-ib",), "", {"n1": "has the node feature bad-ib"}),
    ((), r"nhc: (FAIL|WARN)", {"n2": "its comment in Slurm is 'nhc: FAIL gpu=3'"}),
    ((), "^ok$", {"n1": "its comment in Slurm is 'ok'"}),
    ((), "^gpu 7$|x86", {"n3": "its comment in Slurm is 'gpu 7'"}), (("gpu",), "", {})])
def test_features_and_comments_of_nodes(text, features, comment, reasons):
    assert dict(find_bad_records(split_output(text), features, comment)) == reasons


def test_nodes_in_the_answer_of_prometheus():
    with running_server(respond(vector_response(n1=0.0, n2_cluster=1.0))) as url:
        config = Config(bad_nodes=BadNodesConfig(prometheus_query="up == 0"),
                        link_scores=LinkScoresConfig(prometheus=PrometheusConfig(url)))
        reason = "in the answer of Prometheus to up == 0"
        assert load_site_reasons(config, pytest.fail) == {"n1": reason, "n2": reason}


def test_failed_sources_are_warnings_and_the_others_count(tmp_path):
    path = tmp_path / "bad"
    path.write_text("n5\n")
    with running_server(respond(b"no", status=500)) as url:
        config = Config(bad_nodes=BadNodesConfig(file=str(path), prometheus_query="up == 0"),
                        link_scores=LinkScoresConfig(prometheus=PrometheusConfig(url)))
        warnings: list[str] = []
        assert load_site_reasons(config, warnings.append) == {"n5": f"listed in {path}"}
    assert len(warnings) == 1 and "HTTP status 500" in warnings[0]
    for bad_nodes, message in ((BadNodesConfig(file=f"{path}.absent"), "cannot be read (No such file"),
                               (BadNodesConfig(prometheus_query="up"), "prometheus_query: no server")):
        warnings.clear()
        assert not load_site_reasons(Config(bad_nodes=bad_nodes), warnings.append)
        assert len(warnings) == 1 and message in warnings[0]


@pytest.mark.parametrize("reply", [send_slowly, send_header_slowly])
def test_slow_server_is_given_up_before_it_has_answered(monkeypatch, reply):
    """The whole response has a limit, whatever the server sends until then."""
    monkeypatch.setattr(site_checks, "_QUERY_TIMEOUT_S", 0.1)
    answered: list[str] = []

    def answer(handler: BaseHTTPRequestHandler, query: str) -> None:
        reply(handler, query)
        answered.append(query)

    warnings: list[str] = []
    with running_server(answer) as url:
        config = Config(bad_nodes=BadNodesConfig(prometheus_query="up"),
                        link_scores=LinkScoresConfig(prometheus=PrometheusConfig(url)))
        assert not load_site_reasons(config, warnings.append)
    assert not answered
    assert warnings == [f"bad_nodes: prometheus: {url}: no response in time"]


def test_nothing_configured_asks_nobody(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    assert not load_site_reasons(Config(), pytest.fail)
