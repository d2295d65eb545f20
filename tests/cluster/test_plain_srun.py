"""Steps of `slurmdl srun` beside those of plain srun: variables, MPI programs without a map, tasks that fail."""

from __future__ import annotations

import re
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path

import pytest
from jobs import MPI_PROGRAM

REFERENCE = Path(__file__).parents[2] / "docs/reference.md"

#: options of the job -> options of its steps
STEPS = {
    "-N 6 --exclusive": ["", "-n 6", "-n 9", "-N 6 -n 12 --exact", "--ntasks-per-node=2", "--tasks-per-node=1",
                         "-n 12 --ntasks-per-node=2", "-c 2", "-n 6 -c 1 --cpu-bind=none", "-n 6 -J other"],
    "-N 6 --ntasks-per-node=2": ["", "-n 12", "--ntasks-per-node=2"],
    "-n 6 -c 2": ["", "-c 2", "-n 6 --mpi=none"],
}
#: each step twice by plain srun, which shows what differs from step to step, and once by slurmdl
KINDS = ("srun", "srun", "slurmdl srun")


def listed() -> set[str]:
    """The variables that docs/reference.md says differ."""
    table = REFERENCE.read_text().partition("### Differences from plain srun")[2].partition("\n| option |")[0]
    rows = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def variables(folder: Path) -> dict[str, dict[str, str]]:
    """Node and number of a task on it -> its variables."""
    return {file.name: dict(pair.split("=", 1) for pair in file.read_text().split("\0") if pair)
            for file in folder.iterdir()}


def differences(one: dict[str, dict[str, str]], other: dict[str, dict[str, str]]) -> set[str]:
    assert one.keys() == other.keys()
    return {name for task in one for name in one[task].keys() | other[task].keys()
            if one[task].get(name) != other[task].get(name)}


def test_variables_are_plain_sruns_but_for_those_that_are_listed(cluster):
    noise, found = set(), {}
    for job, options in STEPS.items():
        directory = cluster.directory()
        lines = []
        for number, option in enumerate(options):
            for kind, command in enumerate(KINDS):
                lines += [f"mkdir {number}.{kind}", f"{command} {option} sh -c 'env -0 > "
                          f"{number}.{kind}/$SLURMD_NODENAME.$SLURM_LOCALID' || exit 1"]
        script = cluster.script("\n".join(lines))
        cluster.output(cluster.submit(["sbatch", *job.split(), str(script)], directory=directory), timeout=120)
        for number, option in enumerate(options):
            plain, again, ours = (variables(directory / f"{number}.{kind}") for kind in range(len(KINDS)))
            noise |= differences(plain, again)
            found[job, option] = differences(plain, ours)
    names = listed()
    for each, different in found.items():
        unlisted = {name for name in different - noise if not any(fnmatch(name, known) for known in names)}
        assert not unlisted, each
    seen = set().union(*found.values())
    assert {known for known in names if not any(fnmatch(name, known) for name in seen)} == set(), "listed in vain"


def ranks(size: int) -> Counter[str]:
    return Counter(f"rank {rank} of {size} total {size * (size + 1) / 2}" for rank in range(size))


def lines(text: str) -> Counter[str]:
    return Counter(line for line in text.splitlines() if line.startswith("rank "))


@pytest.fixture
def mpi(cluster):
    """A cluster whose srun starts MPI programs, and the folder of one."""
    if cluster.launcher:
        pytest.skip("Slurm has no PMIx here")
    directory = cluster.directory()
    (directory / "plain_mpi.py").write_text(MPI_PROGRAM)
    return cluster, directory


def test_an_mpi_program_runs_where_its_step_is_not_mapped(mpi):
    cluster, directory = mpi
    program = "python plain_mpi.py"
    (directory / "slurmdl").mkdir()
    (directory / "slurmdl/slurmdl.yaml").write_text("no_such_key: 1\n")
    script = cluster.script(f"""
slurmdl srun -N 2 -n 2 --exact {program} > first 2> first.err &
slurmdl srun -N 2 -n 2 --exact {program} > second 2> second.err &
wait
slurmdl srun --overcommit -N 2 -n 4 {program} > overcommit 2> overcommit.err
slurmdl srun --dl-ps=9 -N 4 {program} > servers 2> servers.err
XDG_CONFIG_HOME=$PWD slurmdl srun -n 4 {program} > configuration 2> configuration.err
""")
    cluster.output(cluster.submit(["sbatch", "-N", "4", "--exclusive", str(script)], directory=directory), 120)
    for name, size in (("first", 2), ("second", 2), ("overcommit", 4), ("servers", 4), ("configuration", 4)):
        said = (directory / f"{name}.err").read_text()
        assert said.count("the step runs in srun's own order") == 1, (name, said)
        assert lines((directory / name).read_text()) == ranks(size), (name, said)


def test_an_mpi_program_runs_in_a_heterogeneous_job(mpi):
    cluster, directory = mpi
    script = cluster.script("slurmdl srun --het-group=0,1 python plain_mpi.py > out 2> err\n")
    cluster.wait(cluster.submit(["sbatch", "-n", "2", ":", "-n", "2", str(script)], directory=directory))
    assert lines((directory / "out").read_text()) == ranks(4)
    assert "--het-group: steps with it are not mapped" in (directory / "err").read_text()


@pytest.mark.parametrize(("end", "status"), [("exit 3", "3"), ("kill -9 $$", "137")])
def test_tasks_go_on_where_one_fails(cluster, end, status):
    """As under plain srun, whatever MPI is in PATH: not every program is an MPI program."""
    task = f"[ $SLURM_PROCID = 1 ] && {end}; sleep 2; echo task $SLURM_PROCID goes on"
    found = []
    for command in ("srun", "slurmdl srun"):
        script = cluster.script(f"{command} -n 4 sh -c '{task}' 2> /dev/null; echo status $?")
        text = cluster.output(cluster.submit(["sbatch", "-N", "4", str(script)]))
        found.append(sorted(text.splitlines()))
    assert found[0] == found[1]
    assert found[0] == [f"status {status}", *(f"task {rank} goes on" for rank in (0, 2, 3))]
