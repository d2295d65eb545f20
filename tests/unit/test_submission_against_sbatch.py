"""Parsed submissions compared with sbatch.

No controller is needed: `sbatch -vv --test-only` prints its options before it fails to reach one.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from slurmdl.launch import submission
from slurmdl.slurm import getopt

pytestmark = pytest.mark.skipif(shutil.which("sbatch") is None, reason="needs the program sbatch (slurm-client)")

LETTER = {name: letter for letter, name in getopt.SBATCH_SHORT_OPTIONS.items()}
VALUES = {
    "nodes": ["1", "2-4", "16"], "ntasks": ["16", "32"], "ntasks-per-node": ["2", "3"], "cpus-per-task": ["1", "4"],
    "mem": ["1G", "300"], "mem-per-cpu": ["100", "1G"], "partition": ["p", "p,q"],
    "constraint": ["fast", "fast&big", "[a|b]", "a b"], "job-name": ["a", "it's", 'say "x"', "#1", "a#b", "-N", ""],
    "exclude": ["n1", "n[1-2]"], "distribution": ["block", "cyclic:block"], "reservation": ["r"],
    "comment": ["--wrap", "--", "two  blanks", "back\\slash"], "qos": ["q"], "gpus-per-node": ["2", "a100:1"],
    "hold": None, "overcommit": None, "contiguous": None, "requeue": None, "no-requeue": None, "wait": None,
    "spread-job": None, "exclusive": ["user", None], "nice": ["5"], "no-kill": [None], "chdir": ["/tmp"],
    "network": ["x"], "batch": ["f"], "bb": ["capacity=1"], "cluster-constraint": ["c"],
}
VARIABLES = {"SBATCH_PARTITION": ["q"], "SBATCH_CONSTRAINT": ["slow"], "SBATCH_MEM_PER_NODE": ["77"],
             "SBATCH_EXCLUSIVE": ["", "user"], "SBATCH_NO_REQUEUE": ["", "no", "1"], "SBATCH_REQUEUE": ["yes", "0"],
             "SBATCH_SPREAD_JOB": ["", "no"], "SBATCH_RESERVATION": ["s"], "SBATCH_DISTRIBUTION": ["cyclic"],
             "SLURM_HINT": ["nomultithread"], "SBATCH_OVERCOMMIT": ["", "no", "1"], "SBATCH_NETWORK": ["y"],
             "SBATCH_BATCH": ["g"], "SBATCH_BURST_BUFFER": ["capacity=2"], "SBATCH_CLUSTER_CONSTRAINT": ["d"]}
#: variables of sbatch whose options do not change the choice of nodes
WITHOUT_INFLUENCE = """ACCOUNT ACCTG_FREQ CONSOLIDATE_SEGMENTS CONTAINER CONTAINER_ID CONTAINER_TYPE
    CPU_FREQ_REQ DEBUG DELAY_BOOT ERROR GET_USER_ENV GPU_BIND GPU_FREQ GRES_FLAGS INPUT JOB_NAME MEM_BIND
    NO_KILL OPEN_MODE OUTPUT POWER PROFILE QOS SIGNAL TIMELIMIT TRES_BIND USE_MIN_NODES WAIT WAIT4SWITCH
    WAIT_ALL_NODES WCKEY"""
SHOWN = tuple(VALUES)


@st.composite
def args(draw) -> list[str]:
    """One option in a random spelling of getopt_long."""
    name = draw(st.sampled_from(SHOWN))
    values = VALUES[name]
    value = draw(st.sampled_from(values)) if values else None
    required = getopt.SBATCH_LONG_OPTIONS[name] == "required"
    letter = LETTER.get(name)
    if letter and draw(st.booleans()):
        if value is None:
            return [f"-{letter}"]
        return [f"-{letter}{value}"] if value and (not required or draw(st.booleans())) else [f"-{letter}", value]
    spelled = "--" + name[:draw(st.integers(max(2, len(name) - 3), len(name)))]
    if value is None:
        return [spelled]
    return [spelled, value] if required and draw(st.booleans()) else [f"{spelled}={value}"]


def quote_blanks(word: str) -> str:
    # a blank is quoted: before 24.05 an escaped blank ends the argument
    return "".join("\\" + c if c in "\\\"'#" else "' '" if c == " " else c for c in word) if word else '""'


@st.composite
def scripts(draw) -> str:
    lines = ["#!/bin/sh"]
    for group in draw(st.lists(st.lists(args(), max_size=2), max_size=4)):
        lines.append("#SBATCH" + draw(st.sampled_from([" ", "\t ", ""]) if not group else st.just(" "))
                     + " ".join(quote_blanks(word) for option in group for word in option)
                     + draw(st.sampled_from(["", " # -N 9", "  "])))
        lines += draw(st.sampled_from([[], ["# comment"], [""], ["   #SBATCH -N 7"], ["# SBATCH -N 7"]]))
    return "\n".join([*lines, "true", "#SBATCH --nodes=13", ""])


@pytest.fixture(scope="module")
def unreachable(tmp_path_factory):
    directory = tmp_path_factory.mktemp("slurm")
    (directory / "slurm.conf").write_text(
        "ClusterName=none\nSlurmctldHost=localhost(127.0.0.1)\nSlurmctldPort=1\nMessageTimeout=1\n"
        "NodeName=n[1-4] CPUs=4\nPartitionName=p Nodes=ALL Default=YES\n")
    return directory


def query_sbatch(directory, argv, script, environ) -> dict[str, str] | None:
    """The options that sbatch prints; None if it rejects them."""
    proc = subprocess.run(["sbatch", "-vv", "--test-only", *argv], input=script, text=True, timeout=120, check=False,
                          capture_output=True, env={"PATH": os.environ["PATH"], "LC_ALL": "C", **environ,
                                                    "SLURM_CONF": f"{directory}/slurm.conf"})
    if "defined options" not in proc.stderr:
        return None
    pairs = (line.removeprefix("sbatch: ").split(": ", 1) for line in proc.stderr.splitlines() if " : " in line)
    # both names of the setting show the value of the later one
    names = ((name.strip(), value) for name, value in pairs)
    return {"requeue" if name == "no-requeue" else name: value for name, value in names
            if name in SHOWN and value != "unset"}


def format_settings(job: submission.Submission) -> dict[str, str]:
    """The parsed settings in the form of sbatch's output."""
    out = {name: value if getopt.SBATCH_LONG_OPTIONS[name] == "required" or value else "set"
           for name, value in job.settings.items() if name in SHOWN}
    if out.pop("no-requeue", None):
        out["requeue"] = "no-requeue"
    elif "requeue" in out:
        out["requeue"] = "requeue"
    if "exclusive" in job.settings:
        out["exclusive"] = job.settings["exclusive"] or "exclusive"
    return out


def parse(argv, environ):
    return submission.parse_submission(submission.SbatchCall.from_argv(argv), environ)


@settings(max_examples=150, deadline=None)
@given(script=scripts(), options=st.lists(args(), max_size=4), arguments=st.sampled_from([[], ["-N", "9"]]),
       environ=st.fixed_dictionaries({}, optional={k: st.sampled_from(v) for k, v in VARIABLES.items()}))
def test_options_equal_sbatch(unreachable, script, options, arguments, environ):
    path = unreachable / "job.sh"
    path.write_text(script)
    argv = [word for option in options for word in option] + [str(path), *arguments]
    expected = query_sbatch(unreachable, argv, "", environ)
    parsed = parse(argv, environ)
    assume(expected is not None)  # sbatch rejects it also at the submission
    assert parsed.call.sbatch_args() == argv
    if parsed.request.unplaceable_reason.endswith("is not understood"):
        # an abbreviation that is ambiguous in newer releases
        assert any(word.startswith("--spread") for word in [*argv, *script.split()])
        return
    assert format_settings(parsed) == expected


@pytest.mark.parametrize("argv", [["--ntasks-per-n", "2"], ["--mem-per-c=1G"], ["-Hc4"], ["-HN", "2-3"],
                                  ["--exclusi=user"], ["-N2", "--", "job.sh"], ["--tasks-per-node=3"], ["-k", "-N1"]])
def test_spellings_equal_sbatch(unreachable, argv, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.sh").write_text("#!/bin/sh\ntrue\n")
    args = argv if argv[-1] == "job.sh" else [*argv, "job.sh"]
    expected = query_sbatch(unreachable, args, "", {})
    assert expected
    parsed = parse(args, {})
    assert format_settings(parsed) == expected


@settings(max_examples=60, deadline=None)
@given(options=st.lists(args(), max_size=4), end=st.sampled_from([[], ["--"]]), added=st.lists(
    st.sampled_from(["--exclude=n3", "--exclude=n4", "--constraint=big", "--nodes=2-3", "--ntasks=8",
                     "--ntasks-per-node=4"]), min_size=1, max_size=3))
def test_inserted_options_override_as_at_the_end(unreachable, options, end, added):
    path = unreachable / "job.sh"
    path.write_text("#!/bin/sh\n#SBATCH -N9 -n9 -x n2 -C slow --ntasks-per-node=9\ntrue\n")
    argv = [word for option in options for word in option]
    expected = query_sbatch(unreachable, [*argv, *added, *end, str(path)], "", {})
    call = submission.SbatchCall.from_argv([*argv, *end, str(path)])
    assert query_sbatch(unreachable, call.sbatch_args(added), "", {}) == expected


@pytest.mark.parametrize("argv", [["--wrap", "true"], ["--wrap=true", "-N2"], ["-N2", "--wra", "--", "-n4"]])
def test_wrap_reads_no_script(unreachable, argv):
    assert format_settings(parse(argv, {})) == query_sbatch(unreachable, argv, "", {})


@pytest.mark.parametrize(("nodes", "tasks"), [("4", "2"), ("2-4", "3"), ("2-4", "1"), ("2-4", "4"), ("2", "8")])
def test_node_range_is_limited_by_tasks(unreachable, nodes, tasks):
    argv = ["-N", nodes, "-n", tasks, "--wrap=true"]
    min_nodes, _, max_nodes = query_sbatch(unreachable, argv, "", {})["nodes"].partition("-")
    assert parse(argv, {}).request.nodes == (int(min_nodes), int(max_nodes or min_nodes))


def test_every_variable_of_sbatch_is_read_or_known_to_have_no_influence():
    binary = Path(shutil.which("sbatch") or "").read_bytes()
    variables = {name.decode() for name in re.findall(rb"\0(SBATCH_[A-Z0-9_]+)(?=\0)", binary)}
    assert len(variables) > 50
    known = {f"SBATCH_{name}" for name in WITHOUT_INFLUENCE.split()}
    assert not known & getopt.ENV_VARIABLES.keys()
    assert variables <= known | getopt.ENV_VARIABLES.keys()
