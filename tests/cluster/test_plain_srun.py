"""Steps of `slurmdl srun` compared with plain srun: variables, unmapped MPI programs, failing tasks."""

from __future__ import annotations

import re
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path

import pytest
from jobs import MPI_PROGRAM, slurm_release

REFERENCE = Path(__file__).parents[2] / "docs/reference.md"

#: options of the job -> options of its steps
STEPS = {
    "-N 6 --exclusive": ["", "-n 9", "--ntasks-per-node=2", "--tasks-per-node=1", "-c 2",
                         "-n 6 -c 1 --cpu-bind=none", "-n 6 -J other"],
    "-N 6 --ntasks-per-node=2": ["", "--ntasks-per-node=2"],
    "-n 6 -c 2": ["", "-n 6 --mpi=none"],
}
#: the same with more options, for the nightly tests
MORE_STEPS = {
    **STEPS,
    "-N 6 --exclusive": [*STEPS["-N 6 --exclusive"], "-n 6", "-N 6 -n 12 --exact", "-n 12 --ntasks-per-node=2"],
    "-N 6 --ntasks-per-node=2": [*STEPS["-N 6 --ntasks-per-node=2"], "-n 12"],
    "-n 6 -c 2": [*STEPS["-n 6 -c 2"], "-c 2"],
}
#: as documented; Slurm 22.05 does not set the last one
VARIABLES_OF_PMIX = ("SLURM_MPI_TYPE", "SLURM_PMIX*", "PMIX_*", "OMPI_MCA_orte_precondition_transports")
#: each step runs twice with plain srun, to detect differences between any two steps, and once with slurmdl srun
KINDS = ("srun", "srun", "slurmdl srun")


def documented_variables() -> set[str]:
    """Return the variables that docs/reference.md lists as different."""
    table = REFERENCE.read_text().partition("### Differences from plain srun")[2].partition("\n| option |")[0]
    rows = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def read_variables(directory: Path) -> dict[str, dict[str, str]]:
    """Return node and local rank of a task -> its environment variables."""
    return {file.name: dict(pair.split("=", 1) for pair in file.read_text().split("\0") if pair)
            for file in directory.iterdir()}


def differences(left: dict[str, dict[str, str]], right: dict[str, dict[str, str]]) -> set[str]:
    """Return the variables that differ between two steps in at least one task."""
    assert left.keys() == right.keys()
    return {name for task in left for name in left[task].keys() | right[task].keys()
            if left[task].get(name) != right[task].get(name)}


@pytest.mark.parametrize("steps", [pytest.param(STEPS, id="few"),
                                   pytest.param(MORE_STEPS, id="more", marks=pytest.mark.nightly)])
def test_variables_differ_from_plain_srun_as_documented(cluster, steps):
    noise, differing = set(), {}
    for job, options in steps.items():
        lines = []
        for number, option in enumerate(options):
            for kind, command in enumerate(KINDS):
                lines += [f"mkdir {number}.{kind}", f"{command} {option} sh -c 'env -0 > "
                          f"{number}.{kind}/$SLURMD_NODENAME.$SLURM_LOCALID' || exit 1"]
        script = cluster.script("\n".join(lines))
        cluster.job_output(script, *job.split(), program="sbatch", timeout=120)
        for number, option in enumerate(options):
            if option == "-n 9" and slurm_release(cluster) >= (26, 5):
                continue  # other nodes get the uneven tasks, see docs/reference.md
            plain, repeated, mapped = (read_variables(script.parent / f"{number}.{kind}") for kind in range(3))
            noise |= differences(plain, repeated)
            differing[job, option] = differences(plain, mapped)
    documented = documented_variables()
    for step, names in differing.items():
        unlisted = {name for name in names - noise if not any(fnmatch(name, pattern) for pattern in documented)}
        assert not unlisted, step
    observed = set().union(*differing.values())
    equal = {pattern for pattern in documented if not any(fnmatch(name, pattern) for name in observed)}
    if cluster.launcher:  # its srun has no PMIx, so that --mpi is not added
        equal -= set(VARIABLES_OF_PMIX)
    elif slurm_release(cluster) < (24, 11):
        equal.discard(VARIABLES_OF_PMIX[-1])
    assert not equal, "documented as different"


def expected_rank_lines(size: int) -> Counter[str]:
    return Counter(f"rank {rank} of {size} total {size * (size + 1) / 2}" for rank in range(size))


def lines(text: str) -> Counter[str]:
    return Counter(line for line in text.splitlines() if line.startswith("rank "))


@pytest.fixture
def mpi(cluster):
    """A cluster whose srun can start MPI programs, and the directory of an MPI program."""
    if cluster.launcher:
        pytest.skip("Slurm has no PMIx here")
    directory = cluster.directory()
    (directory / "plain_mpi.py").write_text(MPI_PROGRAM)
    return cluster, directory


def test_mpi_program_runs_in_an_unmapped_step(mpi):
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
        stderr = (directory / f"{name}.err").read_text()
        assert stderr.count("the step runs in srun's own order") == 1, (name, stderr)
        assert lines((directory / name).read_text()) == expected_rank_lines(size), (name, stderr)


def test_step_over_components_of_a_heterogeneous_job_ends(mpi):
    """Before Slurm 24.11, `srun --mpi=pmix` can hang at the end of such a step, so --mpi is not added."""
    cluster, directory = mpi
    has_mpi = slurm_release(cluster) >= (24, 11)
    program = "python plain_mpi.py" if has_mpi else "sh -c 'echo rank $SLURM_PROCID of $SLURM_NTASKS total 10.0'"
    script = cluster.script(f"slurmdl srun --het-group=0,1 {program} > out 2> err\n")
    cluster.wait(cluster.submit(["sbatch", "-n", "2", ":", "-n", "2", str(script)], directory=directory))
    stderr = (directory / "err").read_text()
    assert lines((directory / "out").read_text()) == expected_rank_lines(4), stderr
    assert "--het-group: prevents rank mapping" in stderr
    assert ("without --mpi=pmix" in stderr) != has_mpi


@pytest.mark.parametrize(("end", "status"), [pytest.param("exit 3", "3", marks=pytest.mark.nightly),
                                             ("kill -9 $$", "137")])
def test_tasks_continue_when_one_fails(cluster, end, status):
    """The output is that of plain srun, with any MPI in PATH."""
    task = f"[ $SLURM_PROCID = 1 ] && {end}; sleep 2; echo task $SLURM_PROCID continues"
    outputs = []
    for command in ("srun", "slurmdl srun"):
        text = cluster.job_output(f"{command} -n 4 sh -c '{task}' 2> /dev/null; echo status $?", "-N4",
                                  program="sbatch")
        outputs.append(sorted(text.splitlines()))
    assert outputs[0] == outputs[1]
    assert outputs[0] == [f"status {status}", *(f"task {rank} continues" for rank in (0, 2, 3))]
