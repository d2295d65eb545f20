"""The plugin's C core: its unit tests, and agreement with Python and with the task shell."""

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
from slurmdl.options import Option
from slurmdl.plan import Plan

ROOT = Path(__file__).parents[2]
HEADER = Path("/usr/include/slurm/spank.h")
SPANK_OPTIONS = [option for option in dl_options.OPTIONS if option.name not in ("explain", "dry-run")]
bounded = settings(max_examples=300, derandomize=True)

Query = Callable[..., str]


def require(is_available: bool, name: str) -> None:
    if not is_available:
        assert os.environ.get("SLURMDL_REQUIRE_CLUSTER") != "1", f"{name} is missing"
        pytest.skip(f"{name} is missing")


def make(target: str, build: Path) -> str:
    require(bool(shutil.which("make") and shutil.which("cc")), "a C compiler")
    proc = subprocess.run(["make", "-C", ROOT / "spank", target, f"build={build}"], capture_output=True, text=True,
                          check=False, timeout=120)
    assert proc.returncode == 0, proc.stdout + proc.stderr
    return proc.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, str]:
    """The build directory of the core, and the output of its unit tests."""
    build = tmp_path_factory.mktemp("spank")
    return build, make("check", build)


@pytest.fixture(scope="module")
def query(built) -> Iterator[Query]:
    """Function that sends the fields of a request to the core and returns its answer."""
    process = subprocess.Popen([built[0] / "core"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                               encoding="utf-8")
    assert process.stdin is not None and process.stdout is not None

    def send(*fields: object) -> str:
        process.stdin.write("\t".join(map(str, fields)) + "\n")
        process.stdin.flush()
        return process.stdout.readline().rstrip("\n")

    with process:
        yield send
        process.stdin.close()
    assert process.returncode == 0


@pytest.fixture(scope="module")
def plugin(tmp_path_factory) -> Path:
    require(HEADER.exists(), "libslurm-dev")
    build = tmp_path_factory.mktemp("plugin")
    make("all", build)
    return build / "slurmdl.so"


def test_unit_tests_of_the_core_pass(built):
    checks, failed = (int(word) for word in built[1].replace(",", "").split() if word.isdigit())
    assert failed == 0 and checks > 100


def test_table_of_options_is_current():
    proc = subprocess.run([sys.executable, ROOT / "tools/gen-spank-options", "--check"], capture_output=True,
                          text=True, check=False, timeout=60)
    assert proc.returncode == 0, proc.stderr


def python_message(option: Option, value: str) -> str:
    try:
        option.parse(value, f"--dl-{option.name}")
    except UsageError as error:
        return str(error)
    return "valid"


VALUES = st.one_of(
    st.text("0123456789.eE+-kKMGTiB,|", max_size=8),
    st.sampled_from([word for option in SPANK_OPTIONS for word in option.kind.values.split("|")]),
    st.text(st.characters(exclude_characters="\t\n\0", exclude_categories=("Cs",)), max_size=6),
    st.from_regex(r"\A[0-9.]{1,4}(e[+-]?[0-9]{1,3})?([kKMGT]i?)?B?\Z"))


@bounded
@given(st.sampled_from(SPANK_OPTIONS), VALUES)
def test_validity_of_values_agrees_with_python(query, option, value):
    assert (query("option", f"dl-{option.name}", value) == "valid") == (python_message(option, value) == "valid")


@pytest.mark.parametrize("option", SPANK_OPTIONS, ids=lambda option: option.name)
def test_messages_agree_with_python(query, option):
    """Only Python sorts the valid values by similarity."""
    for value in ("-x", ""):
        problem, _, valid = query("option", f"dl-{option.name}", value).partition("; expected ")
        python_problem, _, python_valid = python_message(option, value).partition("; expected ")
        assert problem == python_problem
        assert sorted(valid.split(", ")) == sorted(python_valid.split(", "))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    roles = draw(st.lists(st.sampled_from(("ps", "worker", "trainer-1")), min_size=1, max_size=12))
    nodes = [f"n{draw(st.integers(0, 4))}" for _ in roles]
    zones = {f"n{i}": ("core", f"zone{i % 3}") if i else () for i in range(5)}
    return Plan("ps", tuple(nodes), tuple(roles), zones)


def shell_roles(variables: dict[str, str], size: int) -> list[str]:
    """Roles and zones computed by the task shell."""
    body = (ROOT / "slurmdl/launch/task.sh").read_text().partition("# SLURMDL_EXPORTED names")[0]
    text = f"""_dl_rank=0
while [ $_dl_rank -lt {size} ]; do
{body}
echo "$SLURMDL_ROLE $SLURMDL_ROLE_RANK $SLURMDL_ZONE"
_dl_rank=$((_dl_rank + 1))
done"""
    return subprocess.run(["/bin/sh", "-c", text], env=variables, capture_output=True, text=True, check=True,
                          timeout=120).stdout.splitlines()


@settings(bounded, max_examples=100)
@given(plans())
def test_roles_and_zones_agree_with_the_plan_and_the_shell(query, plan):
    variables = step_command.task_variables(plan, 12345)
    lines = [query("role", len(plan), rank, variables["SLURMDL_ROLE_RANKS"], variables["SLURMDL_ZONE_RANKS"])
             for rank in range(len(plan))]
    assert lines == [f"{plan.roles[rank]} {plan.roles[:rank].count(plan.roles[rank])} {plan.leaf_zone(rank)}"
                     for rank in range(len(plan))]
    assert lines == shell_roles(variables, len(plan))


@bounded
@given(st.lists(st.tuples(st.from_regex(r"\A[a-z][a-z0-9.-]{0,5}\Z"), st.integers(1, 3)), min_size=1, max_size=8))
def test_node_of_each_rank(query, groups):
    text = ",".join(name if repeats == 1 else f"{name}(x{repeats})" for name, repeats in groups)
    nodes = [name for name, repeats in groups for _ in range(repeats)]
    assert [query("nodes", rank, text) for rank in range(len(nodes) + 1)] == [f"node {name}" for name in (*nodes, "")]


def test_only_symbols_of_the_spank_api_are_exported(plugin):
    text = subprocess.run(["nm", "-D", "--defined-only", plugin], capture_output=True, text=True, check=True).stdout
    assert {line.split()[-1] for line in text.splitlines()} == {
        "plugin_name", "plugin_type", "plugin_version", "spank_plugin_version",
        "slurm_spank_init", "slurm_spank_init_post_opt", "slurm_spank_task_init"}


def test_every_callback_in_every_context(tmp_path):
    """Under AddressSanitizer and UBSan; tests/harness.c lists the invariants."""
    require(HEADER.exists(), "libslurm-dev")
    assert "10000 rounds in 6 contexts" in make("harness", tmp_path)


def test_plugin_is_hardened(plugin):
    require(bool(shutil.which("readelf")), "readelf")
    dynamic = subprocess.run(["readelf", "-dlW", plugin], capture_output=True, text=True, check=True).stdout
    assert "BIND_NOW" in dynamic and "GNU_RELRO" in dynamic
    stack = next(line for line in dynamic.splitlines() if "GNU_STACK" in line)
    assert " RW " in stack
    undefined = subprocess.run(["nm", "-D", "-u", plugin], capture_output=True, text=True, check=True).stdout
    assert "__stack_chk_fail" in undefined and "__snprintf_chk" in undefined
