"""A Slurm step with one task on each of some nodes, inside a job or as a job of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slurmdl.slurm import hostlist

#: variables of a job that would change the step
_CONFLICTING_VARIABLES = ("SLURM_HOSTFILE", "SLURM_DISTRIBUTION", "SLURM_ARBITRARY_NODELIST", "SLURM_LABELIO",
                          "SLURM_MULTI_PROG", "SLURM_STDOUTMODE", "SLURM_STDINMODE", "SLURM_STDERRMODE",
                          "SLURM_NTASKS_PER_NODE", "SLURM_CPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_MEM_PER_CPU",
                          "SLURM_MEM_PER_NODE", "SLURM_MEM_PER_GPU", "SLURM_OVERCOMMIT")


def node_step_argv(nodes: Sequence[str], environ: Mapping[str, str], job_name: str,
                   options: Sequence[str] = ()) -> list[str]:
    """srun's command line without the program. In a job the step takes no CPU and no memory from other steps.

    The end of one task ends no other task. `job_name` is the name of the job if this starts one.
    """
    count = str(len(nodes))
    argv = ["srun", "--input=0", "--no-kill", "--kill-on-bad-exit=0", "--unbuffered", f"--nodes={count}",
            f"--ntasks={count}", "--ntasks-per-node=1", f"--nodelist={hostlist.fold_hostlist(nodes)}"]
    return [*argv, *(["--overlap", "--mem=0"] if "SLURM_JOB_ID" in environ else [f"--job-name={job_name}"]), *options]


def node_step_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of the step: without the variables of a job that would change it."""
    return {name: value for name, value in environ.items() if name not in _CONFLICTING_VARIABLES}
