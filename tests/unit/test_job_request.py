"""JobRequest from sbatch options, `#DL` lines, variables and slurmdl.yaml."""

import os
from dataclasses import replace

import pytest

from slurmdl import dl_options, records
from slurmdl.dl_options import DlOptions
from slurmdl.errors import PlacementError, UsageError
from slurmdl.job_request import JobRequest, JobSize, build_request, resolve_job_size
from slurmdl.launch import submission, submission_record


def read(*argv, script="true", environ=None, defaults=None, program=""):
    """Parse a submission whose script has these lines; sbatch has the plugin unless `program` is one without it."""
    call = submission.SbatchCall.from_argv(argv, program, f"#!/bin/sh\n{script}\n".encode)
    return submission.parse_submission(call, environ or {}, defaults)


def options(*argv, **layers) -> DlOptions:
    return read(*argv, **layers).request.options


@pytest.mark.parametrize(("argv", "layers", "ps"), [
    ([], {"defaults": {"ps": "1"}}, 1), ([], {"defaults": {"ps": "1"}, "script": "#DL --dl-ps=2"}, 2),
    ([], {"script": "#DL --dl-ps=2", "environ": {"SLURMDL_OPT_PS": "3"}}, 3),
    (["--dl-ps=4"], {"script": "#DL --dl-ps=2", "environ": {"SLURMDL_OPT_PS": "3"}}, 4),
    # lines of the plugin are weaker than #DL lines
    ([], {"script": "#SBATCH -N2 --dl-ps 5"}, 5), ([], {"script": "#SBATCH --dl-ps=5\n#DL --dl-ps=2"}, 2),
    ([], {"script": "#SBATCH --dl-ps=5", "environ": {"SLURMDL_OPT_PS": "3"}}, 3),
    (["--dl-ps=4"], {"script": "#SBATCH --dl-ps=5", "environ": {"SLURMDL_OPT_PS": "3"}}, 4),
    ([], {"script": "#SBATCH --job-name --dl-ps=2"}, 0)])
def test_precedence_site_script_environment_command_line(argv, layers, ps):
    assert options(*argv, **layers).ps == ps


EVERY_OPTION = {
    "parameter servers": (
        {"strategy": "ps", "ps": "3", "node_binding": "nodelist", "zone": "a,b",
         "bytes": "1.5G", "comm_pattern": "shards", "link_scores": "off", "rank0": "any",
         "launcher": "torchrun:8", "preflight": "20",
         "on_bad_nodes": "wait", "on_slow": "exclude"},
        DlOptions(strategy="ps", ps=3, node_binding="nodelist", zone=("a", "b"), bytes="1.5G",
                  comm_pattern="shards", link_scores="off", rank0="any", launcher="torchrun:8",
                  preflight=20, on_bad_nodes="wait", on_slow="exclude")),
    "islands": ({"strategy": "gossip", "islands": "node"}, DlOptions("gossip", islands="node")),
    "mesh": (
        {"mesh": "dp=2,tp=4", "model": "params=1B,hidden=64,layers=2,seq=8", "bytes": "tp=2G"},
        DlOptions(mesh="dp=2,tp=4", model="params=1B,hidden=64,layers=2,seq=8", bytes="tp=2G")),
    "groups": (
        {"groups": "a=2,b=1", "bytes": "b=1G,a:b=2G,tp=1M", "mesh": "a:dp=2,tp=4"},
        DlOptions(groups="a=2,b=1", bytes="b=1G,a:b=2G,tp=1M", mesh="a:dp=2,tp=4"))}


@pytest.mark.parametrize(("values", "expected"), EVERY_OPTION.values(), ids=EVERY_OPTION)
def test_option_in_every_layer(values, expected):
    words = [f"--dl-{name.replace('_', '-')}={value}" for name, value in values.items()]
    assert options(*words) == expected
    assert options(*(part for word in words for part in word.split("=", 1))) == expected
    assert options(script="\n".join(f"#DL {word}" for word in words)) == expected
    assert options(environ={f"SLURMDL_OPT_{name.upper()}": value for name, value in values.items()}) == expected


def test_every_option_is_tested():
    tested = {name for values, _ in EVERY_OPTION.values() for name in values}
    assert tested | {"explain", "dry_run", "strict"} == {option.field for option in dl_options.OPTIONS}


@pytest.mark.parametrize(("argv", "environ", "expected"), [
    # a strategy, servers, a mesh or groups replace the traffic of weaker layers, but for the size of a replica
    ("--dl-strategy=gossip", {"PS": "2", "BYTES": "1M"}, DlOptions("gossip", bytes="1M")),
    ("--dl-strategy=gossip", {"MESH": "dp=2", "MODEL": "x", "BYTES": "dp=1G"}, DlOptions("gossip")),
    ("--dl-strategy=ps", {"STRATEGY": "gossip", "COMM_PATTERN": "base-2"}, DlOptions("ps", ps=1)),
    ("--dl-strategy=gossip", {"ISLANDS": "zone"}, DlOptions("gossip")),
    ("--dl-mesh=dp=2,tp=2", {"STRATEGY": "gossip", "BYTES": "1M"}, DlOptions(mesh="dp=2,tp=2")),
    ("--dl-groups=a=1,b=1", {"ISLANDS": "zone", "BYTES": "1M"}, DlOptions(groups="a=1,b=1", bytes="1M")),
    # the others describe it further
    ("--dl-bytes=1M", {"STRATEGY": "gossip", "BYTES": "2M"}, DlOptions("gossip", bytes="1M")),
    ("--dl-comm-pattern=base-2", {"STRATEGY": "gossip"}, DlOptions("gossip", comm_pattern="base-2")),
    ("--dl-islands=zone", {"STRATEGY": "gossip"}, DlOptions("gossip", islands="zone")),
    ("--dl-islands=zone", {}, DlOptions("local-sgd", islands="zone")),
    ("--dl-ps=2", {}, DlOptions("ps", ps=2)),
    ("--dl-ps=2", {"STRATEGY": "gossip", "COMM_PATTERN": "base-2"}, DlOptions("ps", ps=2)),
    ("--dl-ps=2", {"STRATEGY": "ps", "BYTES": "1M"}, DlOptions("ps", ps=2, bytes="1M"))])
def test_stronger_layer_replaces_the_traffic_or_describes_it(argv, environ, expected):
    assert options(argv, environ={f"SLURMDL_OPT_{name}": value for name, value in environ.items()}) == expected
    assert options(argv, defaults={name.lower(): value for name, value in environ.items()}) == expected


@pytest.mark.parametrize(("argv", "message"), [
    ("--dl-mesh=dp=2 --dl-strategy=gossip", "--dl-mesh=dp=2: not valid with --dl-strategy=gossip"),
    ("--dl-mesh=dp=2 --dl-ps=1", "--dl-mesh=dp=2: not valid with --dl-strategy=ps"),
    ("--dl-mesh=dp=2 --dl-comm-pattern=hierarchical", "not valid with --dl-comm-pattern=hierarchical"),
    ("--dl-mesh=dpp=2", r"--dl-mesh=dpp=2: unknown dimension 'dpp'; expected .*dp"),
    ("--dl-islands=zone --dl-mesh=dp=2", "--dl-mesh=dp=2: not valid with --dl-strategy=local-sgd"),
    ("--dl-islands=zone --dl-strategy=allreduce", "--dl-islands=zone: not valid with .*; expected --dl-strategy=loc"),
    ("--dl-islands=zone --dl-ps=1", "--dl-islands=zone: not valid with the strategy ps"),
    ("--dl-ps=2 --dl-strategy=gossip", "--dl-ps=2: the strategy gossip .*expected --dl-strategy=ps")])
def test_traffic_that_contradicts_itself(argv, message):
    with pytest.raises(UsageError, match=message):
        options(*argv.split())


def test_options_of_a_submission_apply_to_its_steps():
    """Also against settings of the site, which are weaker, and weakened by no default of the submission."""
    submitted = options("--dl-bytes=2M", "--dl-zone=a", "--dl-strict", "--dl-preflight=20",
                        "--dl-launcher=torchrun:2")
    site = {"strategy": "gossip", "comm_pattern": "base-2", "launcher": "none", "rank0": "any"}
    assert dl_options.merge_layers(site, submitted.step_settings()) == replace(submitted, zone=())
    assert records.from_json(DlOptions, records.to_json(submitted)) == submitted


@pytest.mark.parametrize(("value", "on"), [("", True), ("yes", True), ("1", True), ("no", False), ("0", False)])
def test_flags_in_the_environment_follow_sbatch(value, on):
    assert options(environ={"SLURMDL_OPT_STRICT": value}).strict is on


@pytest.mark.parametrize(("argv", "message"), [
    (["--dl-strategi=ps"], r"unknown option --dl-strategi; expected --dl-strategy, .*--dl-strict"),
    (["--dl-s=ps"], "unknown option --dl-s;"),
    (["--dl-node-binding=nodlist"],
     "--dl-node-binding: invalid value 'nodlist'; expected nodelist, auto, zone, late, off"),
    (["--dl-ps=-1"], "--dl-ps: invalid value '-1'; expected a whole number"),
    (["--dl-ps"], "--dl-ps needs a value: N"),
    (["--dl-strict=1"], "--dl-strict takes no value"),
    (["--dl-bytes=0"], "--dl-bytes: .*expected bytes greater than 0"),
    (["--dl-bytes=1..2"], "expected bytes greater than 0"),
    (["--dl-preflight=3"], "--dl-preflight=3: expected 0, or 5 to 3600 seconds"),
    (["--dl-launcher=none:2"], "--dl-launcher: invalid value 'none:2'; expected auto, none, torchrun, .*NAME:N"),
    (["--dl-launcher=torchrun:0"], "--dl-launcher: invalid value"),
    (["--dl-model=params=7B"], "--dl-model=params=7B: expected also --dl-mesh"),
    (["--dl-bytes=tp=1G"], "--dl-bytes: invalid value 'tp=1G'; expected bytes"),
    (["--dl-comm-pattern=base-2"], "base-2: not valid with the strategy allreduce; expected ring, .*, a file,"),
    (["--dl-groups=a=1,b=1", "--dl-bytes=a:c=1G"], "--dl-bytes=a:c=1G: unknown group 'c'; expected a, b"),
    (["--dl-groups=tp=1,b=1"], "--dl-groups=tp=1,b=1: tp is a reserved name"),
    (["--dl-preflight=x"], "--dl-preflight: invalid value 'x'; expected a whole number"),
    (["--dl-on-bad-nodes=go"], "--dl-on-bad-nodes: invalid value 'go'; expected"),
    (["--dl-zone=,"], "expected names separated by commas"),
])
def test_invalid_options_raise_usage_error_with_valid_options(argv, message):
    with pytest.raises(UsageError, match=message):
        read(*argv)


@pytest.mark.parametrize(("script", "message"), [
    ("\n#DL --dl-nothing", "standard input:3: unknown option --dl-nothing; expected"),
    ("#DL strategy=ps", "standard input:2: 'strategy=ps' is invalid after #DL"),
    ("#DL -N 2", "standard input:2: '-N' is invalid after #DL"),
    ("#DL --dl-ps=2 --dl-zone='x", "standard input:2: .*quote ' is not closed"),
    ("#SBATCH -N 2 --dl-dry-run", "2: '--dl-dry-run' is not an option of sbatch; expected #DL --dl-dry-run"),
    ("#SBATCH --dl-pss=2", "'--dl-pss=2' is not an option of sbatch"), ("#SBATCH --dl-ps=two", "whole number")])
def test_invalid_directives_raise_usage_error_with_the_line(script, message):
    with pytest.raises(UsageError, match=message):
        read(script=script)


def test_lines_of_the_plugin_need_the_plugin(fake_slurm):
    program = str(fake_slurm.command("sbatch"))
    assert read(script="#SBATCH -N2 -J --dl-ps\n#DL --dl-ps=1", program=program).request.options.ps == 1
    assert not fake_slurm.calls(), "without such lines"
    with pytest.raises(UsageError, match=r"2: '--dl-ps=2' in a #SBATCH line needs the plugin .* #DL --dl-ps=2"):
        read(script="#SBATCH -N2 --dl-ps=2", program=program)
    assert fake_slurm.calls() == ["sbatch --help"]
    fake_slurm.command("sbatch", "echo --dl-ps")
    assert read(script="#SBATCH -N2 --dl-ps=2", program=program).request.options.ps == 2


def test_environment_has_typed_options_only():
    """The wrapper removes typed options from the command line and passes them to the plugin in the environment."""
    job = read("--dl-ps=3", "--dl-explain", script="#SBATCH --dl-ps=2 --dl-rank0=any")
    command = submission.build_submit_command(job, {})
    exported = {name: value for name, value in command.env.items() if name.startswith("SLURMDL_OPT_")}
    assert exported == {"SLURMDL_OPT_PS": "3"}
    record = submission_record.parse_record(command.env[submission_record.ENV_VARIABLE])
    in_job = {**exported, "SLURMDL_OPT_RANK0": "any", "SLURMDL_OPT_STRATEGY": "gossip"}
    assert record.options.ps == 3 and record.options.rank0 == "any"
    assert record.environ_without_inputs(in_job) == {"SLURMDL_OPT_STRATEGY": "gossip"}
    command = submission.build_submit_command(read("--dl-ps=3", script="#DL --dl-ps=2"), {})
    assert set(command.env) == {submission_record.ENV_VARIABLE}, "without lines of the plugin"


def test_unknown_variable_raises_usage_error_with_similar_names():
    with pytest.raises(UsageError, match="unknown variable SLURMDL_OPT_STRATEGI; expected SLURMDL_OPT_STRATEGY,"):
        read(environ={"SLURMDL_OPT_STRATEGI": "ps"})


def test_directives_end_at_the_first_command_and_comments_are_ignored():
    script = "#DLang\n# DL --dl-ps=9\n #DL --dl-ps=9\n\n#DL\t--dl-ps=2 # why\nx=1\n#DL --dl-ps=5\n"
    assert options(script=script).ps == 2


@pytest.mark.parametrize(("text", "number"), [("1e8", 1e8), ("400M", 4e8), ("1.5Gi", 1.5 * 2**30), ("7kB", 7e3)])
def test_bytes(text, number):
    assert options(f"--dl-bytes={text}").model_bytes == number


def test_request_holds_placement_inputs():
    job = read("-N", "2-4", "-n8", "--ntasks-per-node=4", "-c", "2", "--mem=2G", "-p", "a,b", "-C", "x&y", "-x",
               "n[1-2],n4", "--gres=gpu:a100:2,tmp:1", "--exclusive", "--no-requeue").request
    assert (job.nodes, job.ntasks, job.ntasks_per_node, job.cpus_per_task) == ((2, 4), 8, 4, 2)
    assert (job.memory_per_node_mb, job.partitions, job.constraint) == (2048, ("a", "b"), "x&y")
    assert job.exclude == ("n1", "n2", "n4")
    assert job.gres_per_node == {"gpu:a100": 2, "tmp": 1}
    assert job.exclusive
    assert not job.requeue
    assert not job.unplaceable_reason
    assert not job.start_unknown_reason


@pytest.mark.parametrize(("settings", "gres"), [
    ({"gpus-per-node": "2"}, {"gpu": 2}), ({"gpus-per-node": "h100:2"}, {"gpu:h100": 2}),
    ({"gpus-per-node": "2", "gres": "gpu:4,tmp:1"}, {"gpu": 4, "tmp": 1}), ({"gres": "gpu"}, {"gpu": 1}),
    ({"gres": "none"}, {}),
])
def test_gpus_per_node(settings, gres):
    assert build_request(settings, DlOptions()).gres_per_node == gres


@pytest.mark.parametrize(("text", "nodes"), [
    ("3", (3, 3)), ("2-4", (2, 4)), ("2-", (2, None)), ("-4", (1, 4)), ("1k", (1024, 1024)),
    ("1K-2m", (1024, 2 * 1024**2)), ("3km", (3 * 1024**3, 3 * 1024**3))])
def test_node_counts(text, nodes):
    assert build_request({"nodes": text}, DlOptions()).nodes == nodes


def test_first_nodes_take_the_remainder_of_the_tasks():
    assert [JobSize(2, 5).tasks_on_node(i) for i in range(2)] == [3, 2]
    assert [JobSize(3, 8).tasks_on_node(i) for i in range(3)] == [3, 3, 2]
    assert JobSize(3, 8).max_tasks_per_node == 3


def test_job_without_nodes_has_no_size():
    with pytest.raises(PlacementError, match="1 task do not fill 0 nodes"):
        resolve_job_size(JobRequest(nodes=(0, 0), ntasks=1))


@pytest.mark.parametrize(("settings", "gpus"), [
    ({"gpus-per-node": "4"}, 4), ({"gres": "gpu:a100:2,tmp:9"}, 2), ({"nodes": "2", "gpus": "5"}, 3), ({}, 0),
    ({"nodes": "2", "gpus-per-node": "1", "mem-per-gpu": "1"}, 1)])
def test_gpus_of_each_node(settings, gpus):
    assert build_request(settings, DlOptions()).gpus_per_node == gpus


@pytest.mark.parametrize(("settings", "megabytes"), [
    ({"mem": "1024K"}, 1), ({"mem": "1025K"}, 2), ({"mem": "7"}, 7), ({"mem": "1T"}, 1 << 20), ({"mem": "0"}, 0)])
def test_memory_units(settings, megabytes):
    assert build_request(settings, DlOptions()).memory_per_node_mb == megabytes


#: attribute of the request -> arguments or lines of the script, and a part of the reason
REASONS = {
    "unplaceable_reason": [
        (["-a", "1-3"], "array"), (["-N1", ":", "-N2"], "heterogeneous"), (["-w", "n1"], "-w is given"),
        (["--prefer=a"], "--prefer"), (["--spread-job"], "--spread-job"), (["-M", "other"], "-M"),
        (["--container-image", "x.sqsh"], "--container-image is not understood"), (["-Z"], "-Z is not understood"),
        (["-N", "x"], "--nodes=x is not understood"), (["-m", "arbitrary"], "arbitrary"),
        (["-x", "n[1-"], "hostlist"), (["/no/such/script"], "cannot be read"),
        (["-x", "n[1-1000000]"], "a range has at most 65536 names"),
        (["-w", ",".join(f"n{i}x[1-50000]" for i in range(20))], "more than 262144 names in all"),
        ("#SBATCH -N 1\n#SBATCH hetjob\n#SBATCH -N 2\n", "heterogeneous"), ("#SBATCH packjob\n", "heterogeneous"),
        ("#PBS -l nodes=4\n", "standard input:2: #PBS lines are translated by sbatch")],
    "start_unknown_reason": [(["-H"], "--hold"), (["-d", "afterok:1"], "--dependency"),
                             (["-b", "now+1hour"], "--begin decides when the job starts")],
    "unmodelled_reason": [
        (["--reservation=r,s"], "several reservations"), (["--tmp=1G"], "--tmp is not modelled"),
        (["--hint=nomultithread"], "--hint"), (["--gpus-per-socket=1"], "the sockets of the nodes are unknown"),
        (["--tres-per-task=license/x=1,cpu=2"], "only CPUs and one type of GPU are")]}


@pytest.mark.parametrize(("field", "given", "reason"),
                         [(field, *case) for field, cases in REASONS.items() for case in cases])
def test_options_that_decide_elsewhere_give_a_reason(field, given, reason):
    request = read(script=given).request if isinstance(given, str) else read(*given).request
    reasons = {name: getattr(request, name) for name in REASONS}
    assert reason in reasons.pop(field)
    assert field == "unplaceable_reason" or not any(reasons.values())


def test_export_of_the_first_component_that_has_it_counts():
    script = "#SBATCH -N1\n#SBATCH hetjob\n#SBATCH --export=A\n#SBATCH hetjob\n#SBATCH --export=B\n"
    assert read(script=script).settings == {"export": "A"}
    assert read("-N1", ":", "--export=A", ":", "--export=B").settings["export"] == "A"


def test_ignored_pbs_lines_have_no_effect():
    script = "#SBATCH --ignore-pbs\n#PBS -l nodes=4\n"
    assert not read("--ignore-pbs", script=script).request.unplaceable_reason


def test_one_reservation_is_modelled():
    request = read("--reservation=r").request
    assert (request.reservation, request.unmodelled_reason) == ("r", "")


def test_arguments_pass_unchanged():
    argv = ["-vN2", "--dl-ps", "2", "--comment", "--dl-ps", "-J=x", "--dl-strict", "--", "/no/script",
            "--dl-ps=9", ":"]
    job = read(*argv)
    assert job.call.sbatch_args() == ["-vN2", "--comment", "--dl-ps", "-J=x", "--", "/no/script", "--dl-ps=9", ":"]
    added = ["--nodes=1", "--comment=x", "--job-name=y", "--mem=1"]
    assert job.call.sbatch_args(added) == ["--mem=1", "-vN2", "--nodes=1", "--comment", "--dl-ps", "--comment=x",
                                           "-J=x", "--job-name=y", "--", "/no/script", "--dl-ps=9", ":"]


def test_script_in_a_pipe_is_unplaceable(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert "cannot be read" in read(str(tmp_path / "pipe")).request.unplaceable_reason


def test_script_is_searched_as_by_sbatch(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    for directory in ("bin", "."):
        (tmp_path / directory / f"job{directory.strip('.')}").write_text(f"#!/bin/sh\n#DL --dl-zone={directory}\n")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert options("jobbin").zone == ("bin",)
    assert options("-D", str(tmp_path), "job").zone == (".",)
    monkeypatch.chdir(tmp_path)
    assert options("job").zone == (".",)
    assert options("./bin/jobbin").zone == ("bin",)
