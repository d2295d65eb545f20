"""Options of srun (srun(1), Slurm 22.05 to 26.05): whether they take a value, and their effect on the layout."""

from __future__ import annotations

from slurmdl.slurm.getopt import HasArg

SHORT_OPTIONS = {
    "A": "account", "B": "extra-node-info", "C": "constraint", "D": "chdir", "E": "preserve-env", "F": "nodefile",
    "G": "gpus", "H": "hold", "I": "immediate", "J": "job-name", "K": "kill-on-bad-exit", "L": "licenses",
    "M": "clusters", "N": "nodes", "O": "overcommit", "Q": "quiet", "S": "core-spec", "T": "threads",
    "V": "version", "W": "wait", "X": "disable-status", "Z": "no-allocate", "b": "begin", "c": "cpus-per-task",
    "d": "dependency", "e": "error", "h": "help", "i": "input", "k": "no-kill", "l": "label", "m": "distribution",
    "n": "ntasks", "o": "output", "p": "partition", "q": "qos", "r": "relative", "s": "oversubscribe", "t": "time",
    "u": "unbuffered", "v": "verbose", "w": "nodelist", "x": "exclude",
}

_NO_ARG = """async consolidate-segments contiguous debugger-test disable-status exact help hold interactive label
    multi-prog no-allocate overcommit oversubscribe parsable preserve-env quiet quit-on-interrupt reboot
    spread-job spread-segments stepmgr test-only unbuffered usage use-min-nodes verbose version
    wait-for-children whole"""
_OPTIONAL_ARG = """bcast compress exclusive external-launcher immediate kill-on-bad-exit nice no-kill oom-kill-step
    overlap propagate pty resv-ports send-libs x11"""
_REQUIRED_ARG = """accel-bind account acctg-freq autocomplete bb bbf bcast-exclude begin chdir cluster
    cluster-constraint clusters comment constraint container container-id container-type context core-spec
    cores-per-socket cpu-bind cpu-freq cpu_bind cpus-per-gpu cpus-per-task deadline delay-boot dependency
    distribution epilog error exclude export extra extra-node-info gid gpu-bind gpu-freq gpus gpus-per-node
    gpus-per-socket gpus-per-task gres gres-flags het-group hint ignore-signals input job-name jobid licenses
    mail-type mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu mem-update mincpus mpi msg-timeout
    network nodefile nodelist nodes ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket
    ntasks-per-tres open-mode output pack-group partition power prefer priority profile prolog qos relative
    reservation resources segment signal slurmd-debug sockets-per-node switches task-epilog task-prolog
    tasks-per-node thread-spec threads threads-per-core time time-min tmp tres-bind tres-per-task treewidth
    uid wait wckey"""

#: long name -> whether it takes a value
LONG_OPTIONS: dict[str, HasArg] = {
    **dict.fromkeys(_NO_ARG.split(), "no"), **dict.fromkeys(_OPTIONAL_ARG.split(), "optional"),
    **dict.fromkeys(_REQUIRED_ARG.split(), "required")}

#: with these options srun starts no step
PASSTHROUGH = frozenset({"help", "usage", "version", "test-only", "autocomplete"})

#: options of slurmdl besides --dl-*
WRAPPER_OPTIONS = frozenset({"launcher", "print-rank-map"})

#: decide the layout; the host file replaces them
LAYOUT_OPTIONS = frozenset({"ntasks", "nodes", "ntasks-per-node", "tasks-per-node", "relative", "nodelist",
                            "exclude"})

#: read for the layout and passed to srun
LAYOUT_INPUTS = frozenset({"cpus-per-task", "exact", "exclusive", "overlap", "multi-prog", "mpi", "job-name",
                           "chdir"})

#: may limit the tasks of a node by something other than CPUs; passed to srun
TASK_LIMITING = frozenset({"gpus-per-task", "gpus-per-node", "gres", "hint", "threads-per-core"})

#: change neither the nodes of a step nor the tasks per node
_LAYOUT_NEUTRAL = """accel-bind account acctg-freq comment compress cpu-bind cpu_bind cpu-freq debugger-test
    disable-status epilog error export extra gpu-bind gpu-freq gres-flags ignore-signals immediate input
    kill-on-bad-exit label mem mem-bind mem-update msg-timeout network nice no-kill oom-kill-step open-mode output
    priority profile prolog propagate pty qos quiet quit-on-interrupt resv-ports send-libs signal slurmd-debug
    task-epilog task-prolog threads time time-min tres-bind treewidth unbuffered verbose wait wait-for-children
    wckey whole"""
LAYOUT_NEUTRAL = frozenset(_LAYOUT_NEUTRAL.split())

#: environment variables of options that cannot be mapped
UNSUPPORTED_ENV = ("SLURM_HOSTFILE", "SLURM_DISTRIBUTION", "SLURM_OVERCOMMIT", "SLURM_NTASKS_PER_CORE",
                   "SLURM_NTASKS_PER_SOCKET", "SLURM_NTASKS_PER_GPU", "SLURM_NTASKS_PER_TRES", "SLURM_SPREAD_JOB",
                   "SLURM_USE_MIN_NODES", "SLURM_CONSTRAINT", "SLURM_BCAST")

#: environment variables of TASK_LIMITING
TASK_LIMITING_ENV = ("SLURM_GPUS", "SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_TASK", "SLURM_GPUS_PER_SOCKET",
                     "SLURM_CPUS_PER_GPU", "SLURM_MEM_PER_GPU", "SLURM_STEP_GRES", "SLURM_HINT",
                     "SLURM_THREADS_PER_CORE")
