"""The plugin's core: its own tests, and that it says what Python and the tasks' shell say."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmdl import dl_options
from slurmdl.errors import UsageError
from slurmdl.launch import step_command
from slurmdl.plan import Plan

ROOT = Path(__file__).parents[2]
HEADER = Path("/usr/include/slurm/spank.h")
OFFERED = [option for option in dl_options.OPTIONS if option.name not in ("explain", "dry-run")]
bounded = settings(max_examples=300, derandomize=True)

Ask = Callable[..., str]


def needs(there: bool, what: str) -> None:
    if not there:
        assert os.environ.get("SLURMDL_REQUIRE_CLUSTER") != "1", f"{what} is missing"
        pytest.skip(f"{what} is missing")


def make(target: str, build: Path) -> str:
    needs(bool(shutil.which("make") and shutil.which("cc")), "a C compiler")
    done = subprocess.run(["make", "-C", ROOT / "spank", target, f"build={build}"], capture_output=True, text=True,
                          check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, str]:
    """The directory with the built core, and what its tests said."""
    build = tmp_path_factory.mktemp("spank")
    return build, make("check", build)


@pytest.fixture(scope="module")
def ask(built) -> Iterator[Ask]:
    """Ask the core: fields of a request in, its answer out."""
    process = subprocess.Popen([built[0] / "core"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                               encoding="utf-8")
    assert process.stdin is not None and process.stdout is not None

    def one(*fields: object) -> str:
        process.stdin.write("\t".join(map(str, fields)) + "\n")
        process.stdin.flush()
        return process.stdout.readline().rstrip("\n")

    with process:
        yield one
        process.stdin.close()
    assert process.returncode == 0


@pytest.fixture(scope="module")
def plugin(tmp_path_factory) -> Path:
    needs(HEADER.exists(), "libslurm-dev")
    build = tmp_path_factory.mktemp("plugin")
    make("all", build)
    return build / "slurmdl.so"


def test_its_own_checks(built):
    checks, failed = (int(word) for word in built[1].replace(",", "").split() if word.isdigit())
    assert failed == 0 and checks > 100


def test_the_table_of_options_is_current():
    done = subprocess.run([sys.executable, ROOT / "tools/gen-spank-options", "--check"], capture_output=True, text=True,
                          check=False, timeout=60)
    assert done.returncode == 0, done.stderr


def says(option: dl_options.DlOption, value: str) -> str:
    try:
        option.parse(value, f"--dl-{option.name}")
    except UsageError as error:
        return str(error)
    return "valid"


VALUES = st.one_of(
    st.text("0123456789.eE+-kKMGTiB,|", max_size=8),
    st.sampled_from([word for option in OFFERED for word in option.values.split("|")]),
    st.text(st.characters(exclude_characters="\t\n\0", exclude_categories=("Cs",)), max_size=6),
    st.from_regex(r"\A[0-9.]{1,4}(e[+-]?[0-9]{1,3})?([kKMGT]i?)?B?\Z"))


@bounded
@given(st.sampled_from(OFFERED), VALUES)
def test_a_value_is_valid_where_it_is_for_python(ask, option, value):
    assert (ask("option", f"dl-{option.name}", value) == "valid") == (says(option, value) == "valid")


@pytest.mark.parametrize("option", OFFERED, ids=lambda option: option.name)
def test_messages_are_those_of_python(ask, option):
    """Apart from the order of what is valid: there is no search for the nearest here."""
    for value in ("-x", ""):
        expected, said = says(option, value), ask("option", f"dl-{option.name}", value)
        why, _, valid = said.partition("valid: ")
        expected_why, _, expected_valid = expected.partition("valid: ")
        assert not value or why == expected_why
        assert sorted(valid.split(", ")) == sorted(expected_valid.split(", "))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    roles = draw(st.lists(st.sampled_from(("ps", "worker")), min_size=1, max_size=12))
    nodes = [f"n{draw(st.integers(0, 4))}" for _ in roles]
    zones = {f"n{i}": ("core", f"zone{i % 3}") if i else () for i in range(5)}
    return Plan("ps", tuple(nodes), tuple(roles), zones)


def by_shell(variables: dict[str, str], size: int) -> list[str]:
    """What the shell before each task makes of the same variables."""
    body = (ROOT / "slurmdl/launch/task.sh").read_text().partition("# SLURMDL_EXPORTED names")[0]
    text = f"""_dl_rank=0
while [ $_dl_rank -lt {size} ]; do
{body}
echo "$SLURMDL_ROLE $SLURMDL_ROLE_RANK $SLURMDL_ZONE"
_dl_rank=$((_dl_rank + 1))
done"""
    return subprocess.run(["/bin/sh", "-c", text], env=variables, capture_output=True, text=True, check=True,
                          timeout=20).stdout.splitlines()


@settings(bounded, max_examples=100)
@given(plans())
def test_roles_and_zones_are_those_of_the_plan_and_of_the_shell(ask, plan):
    variables = step_command.task_variables(plan, 12345)
    found = [ask("role", len(plan), rank, variables["SLURMDL_PS_RANKS"], variables["SLURMDL_ZONE_RANKS"])
             for rank in range(len(plan))]
    assert found == [f"{plan.roles[rank]} {plan.roles[:rank].count(plan.roles[rank])} {plan.zone(rank)}"
                     for rank in range(len(plan))]
    assert found == by_shell(variables, len(plan))


@bounded
@given(st.lists(st.tuples(st.from_regex(r"\A[a-z][a-z0-9.-]{0,5}\Z"), st.integers(1, 3)), min_size=1, max_size=8))
def test_the_node_of_each_rank(ask, groups):
    text = ",".join(name if repeats == 1 else f"{name}(x{repeats})" for name, repeats in groups)
    nodes = [name for name, repeats in groups for _ in range(repeats)]
    assert [ask("nodes", rank, text) for rank in range(len(nodes) + 1)] == [f"node {name}" for name in (*nodes, "")]


def test_only_what_slurm_looks_for_is_exported(plugin):
    text = subprocess.run(["nm", "-D", "--defined-only", plugin], capture_output=True, text=True, check=True).stdout
    assert {line.split()[-1] for line in text.splitlines()} == {
        "plugin_name", "plugin_type", "plugin_version", "spank_plugin_version",
        "slurm_spank_init", "slurm_spank_init_post_opt", "slurm_spank_task_init"}


def test_every_callback_in_every_context(tmp_path):
    """Under AddressSanitizer and UBSan; tests/harness.c says what is checked."""
    needs(HEADER.exists(), "libslurm-dev")
    assert "10000 rounds in 6 contexts" in make("harness", tmp_path)


def test_it_is_hardened(plugin):
    needs(bool(shutil.which("readelf")), "readelf")
    dynamic = subprocess.run(["readelf", "-dlW", plugin], capture_output=True, text=True, check=True).stdout
    assert "BIND_NOW" in dynamic and "GNU_RELRO" in dynamic
    stack = next(line for line in dynamic.splitlines() if "GNU_STACK" in line)
    assert " RW " in stack
    wanted = subprocess.run(["nm", "-D", "-u", plugin], capture_output=True, text=True, check=True).stdout
    assert "__stack_chk_fail" in wanted and "__snprintf_chk" in wanted
