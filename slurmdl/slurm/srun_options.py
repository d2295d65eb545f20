"""Options of srun (srun(1), Slurm 22.05 to 26.05): whether they take a value, and their effect on the layout."""

from __future__ import annotations

from slurmdl.slurm.getopt import SBATCH_LONG_OPTIONS, SBATCH_SHORT_OPTIONS, HasArg

_SHORT_NOT_IN_SBATCH = {
    "E": "preserve-env", "I": "immediate", "K": "kill-on-bad-exit", "T": "threads", "X": "disable-status",
    "Z": "no-allocate", "l": "label", "r": "relative", "u": "unbuffered",
}
#: letter -> long name
SHORT_OPTIONS = {letter: name for letter, name in SBATCH_SHORT_OPTIONS.items() if letter != "a"} \
    | _SHORT_NOT_IN_SBATCH

_ONLY_IN_SBATCH = """array batch export-file external get-user-env ignore-pbs kill-on-invalid-dep no-requeue requeue
    runtime wait-all-nodes wrap"""
_NO_ARG = """async debugger-test disable-status exact interactive label multi-prog no-allocate preserve-env
    quit-on-interrupt unbuffered wait-for-children whole"""
_OPTIONAL_ARG = "bcast compress external-launcher immediate kill-on-bad-exit overlap pty send-libs x11"
_REQUIRED_ARG = """accel-bind bcast-exclude container-type cpu-bind cpu_bind epilog het-group ignore-signals jobid mpi
    msg-timeout pack-group prolog relative slurmd-debug task-epilog task-prolog threads treewidth wait"""

#: long name -> whether it takes a value
LONG_OPTIONS: dict[str, HasArg] = {
    **{name: has_arg for name, has_arg in SBATCH_LONG_OPTIONS.items() if name not in _ONLY_IN_SBATCH.split()},
    **dict.fromkeys(_NO_ARG.split(), "no"), **dict.fromkeys(_OPTIONAL_ARG.split(), "optional"),
    **dict.fromkeys(_REQUIRED_ARG.split(), "required")}

#: with these options srun starts no step
PASSTHROUGH = frozenset({"help", "usage", "version", "test-only", "autocomplete"})

#: options of slurmdl besides --dl-*
WRAPPER_OPTIONS = frozenset({"step-starter", "print-rank-map"})

#: decide the layout; the host file replaces them
LAYOUT_OPTIONS = frozenset({"ntasks", "nodes", "ntasks-per-node", "tasks-per-node", "relative", "nodelist",
                            "exclude", "distribution"})

#: values of --distribution by which a step has the layout that it has without the option
DEFAULT_DISTRIBUTIONS = frozenset({"block", "block:*", "block:cyclic", "block,nopack", "block:cyclic,nopack"})

#: read for the layout and passed to srun
LAYOUT_INPUTS = frozenset({"cpus-per-task", "exact", "exclusive", "overlap", "multi-prog", "mpi", "job-name",
                           "chdir"})

#: may limit the tasks of a node by something other than CPUs; passed to srun
TASK_LIMITING = frozenset({"gpus", "gpus-per-task", "gpus-per-node", "gpus-per-socket", "cpus-per-gpu", "gres",
                           "hint", "mem-per-cpu", "mem-per-gpu", "ntasks-per-core", "ntasks-per-socket",
                           "threads-per-core"})

#: change neither the nodes of a step nor the tasks per node; srun ignores those of jobs
_LAYOUT_NEUTRAL = """accel-bind account acctg-freq bb begin comment compress contiguous cpu-bind cpu_bind cpu-freq
    deadline debugger-test delay-boot dependency disable-status epilog error export extra gpu-bind gpu-freq gres-flags
    hold ignore-signals immediate input kill-on-bad-exit label licenses mail-type mail-user mcs-label mem mem-bind
    mem-update mincpus msg-timeout network nice no-kill oom-kill-step open-mode output oversubscribe partition power
    prefer priority profile prolog propagate pty qos quiet quit-on-interrupt reboot reservation resv-ports send-libs
    signal slurmd-debug switches task-epilog task-prolog threads time time-min tmp tres-bind treewidth unbuffered
    verbose wait wait-for-children wckey whole"""
LAYOUT_NEUTRAL = frozenset(_LAYOUT_NEUTRAL.split())

#: change the layout in ways that are not modeled
LAYOUT_CHANGING = frozenset({"constraint", "overcommit", "extra-node-info", "sockets-per-node", "cores-per-socket",
                             "ntasks-per-gpu", "ntasks-per-tres", "tres-per-task", "core-spec", "thread-spec",
                             "spread-job", "use-min-nodes", "segment", "spread-segments", "consolidate-segments",
                             "resources"})

#: options of unmapped steps whose tasks still can be the ranks, rank 0 on the first node
ORDERED_BY_SRUN = (LAYOUT_OPTIONS | LAYOUT_INPUTS | TASK_LIMITING | LAYOUT_NEUTRAL | LAYOUT_CHANGING) - {
    "pty", "multi-prog"}

#: environment variables of options that cannot be mapped
UNSUPPORTED_ENV = ("SLURM_HOSTFILE", "SLURM_OVERCOMMIT", "SLURM_NTASKS_PER_GPU", "SLURM_NTASKS_PER_TRES",
                   "SLURM_SPREAD_JOB", "SLURM_USE_MIN_NODES", "SLURM_CONSTRAINT", "SLURM_BCAST")

#: environment variables of steps whose tasks are not (see ORDERED_BY_SRUN)
NOT_ORDERED_BY_SRUN_ENV = ("SLURM_HOSTFILE", "SLURM_BCAST", "SLURM_CONTAINER", "SRUN_CONTAINER", "SLURM_HET_SIZE")

#: environment variables of TASK_LIMITING
TASK_LIMITING_ENV = ("SLURM_GPUS", "SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_TASK", "SLURM_GPUS_PER_SOCKET",
                     "SLURM_CPUS_PER_GPU", "SLURM_MEM_PER_GPU", "SLURM_STEP_GRES", "SLURM_HINT",
                     "SLURM_NTASKS_PER_CORE", "SLURM_NTASKS_PER_SOCKET", "SLURM_THREADS_PER_CORE")
