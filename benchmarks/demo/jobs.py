"""The jobs of the demo, their scripts for each way of submission, and the results of their runs."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slurmdl.dl_options import DlOptions

PLAIN, LEAF, PLACED, CONTROL = "plain", "leaf order", "slurmdl", "control"
VARIANTS = (PLAIN, LEAF, PLACED)
SEED = 1
MODEL = "mlp:256,128"
PARAMETERS = 64 * 256 + 256 + 256 * 128 + 128 + 128 * 10 + 10
#: steps between two exchanges of islands, and first steps of a training that are not measured
PERIOD = 16
_MESH_PROGRAM = Path(__file__).with_name("mesh_program.py")
#: makes torch start in half of the time, with the same steps
_FAST_START = Path(__file__).resolve().parents[1] / "fast_start"
_HEADER = "#!/bin/sh\n#SBATCH -N {ranks} --ntasks-per-node=1 --no-requeue -J {name} -o {name}.log -t 5\n"
_ORDERED = """\
python - {order} > hosts.$SLURM_JOB_ID <<'END'
{program}
END
SLURM_HOSTFILE=hosts.$SLURM_JOB_ID exec srun -K --mpi=pmix -n {ranks} -m arbitrary {command}
"""
#: prints the job's nodes in leaf order, or in the worst of 30 random orders for the traffic of the options
_ORDER_PROGRAM = """\
import json, os, random, sys
import numpy
from slurmdl import config
from slurmdl.dl_options import DlOptions
from slurmdl.launch.cluster_state import load_link_scores
from slurmdl.placement.iteration_cost import network_links, predict_cost
from slurmdl.placement.rank_orders import leaf_order
from slurmdl.traffic import Traffic
from slurmdl.slurm.hostlist import expand_hostlist
from slurmdl.topology.load import load_topology
network = network_links(expand_hostlist(os.environ["SLURM_JOB_NODELIST"]), load_topology(),
                        load_link_scores(config.load_config(), "off"))
orders = [list(leaf_order(network))]
if sys.argv[1] != "leaf":
    shuffle = random.Random(1)
    orders = [shuffle.sample(orders[0], len(orders[0])) for _ in range(30)]
    traffic = DlOptions(**json.loads(sys.argv[1])).traffic.phases(len(orders[0]))
    orders.sort(key=lambda order: -predict_cost(traffic, network, numpy.array(order)).seconds)
print(*(network.nodes[i] for i in orders[0]), sep="\\n")
"""


@dataclass(frozen=True)
class Job:
    """One job of the demo, which runs with one rank on each of its nodes.

    Attributes:
        key: name in tables, files and metrics.
        command: program and arguments; `--summary` and `--metrics` files are added.
        dl: options of placement.
        warmup: first steps that are not measured.
        steps: all steps.
        period: steps between two exchanges, which a measurement must contain as a whole.
        variants: ways of submission that run.
        baseline: key of the job whose plain and leaf order runs are the comparison; "" for its own.
        control: "order": the worst of 30 random rank orders in the cost model, which must be slower; a command, which
            must be slower; "" for another control or none.
        can_gain: whether slurmdl is expected to be faster than leaf order.
    """

    key: str
    ranks: int
    command: str
    options: DlOptions
    warmup: int
    steps: int
    period: int = 1
    variants: tuple[str, ...] = VARIANTS
    baseline: str = ""
    control: str = "order"
    can_gain: bool = True

    def script(self, variant: str) -> str:
        """The job script for a way of submission; it writes NAME.log, NAME.json and NAME.steps."""
        name = self.file_name(variant)
        command = self.control if variant == CONTROL and self.control not in ("", "order") else self.command
        # programs that take the two files as options or as arguments
        files = (f"{name}.json", f"{name}.steps")
        command += f" {files[0]} {files[1]}" if _MESH_PROGRAM.name in command else \
            f" --summary {files[0]} --metrics {files[1]}"
        text = _HEADER.format(ranks=self.ranks, name=name)
        start = f"export PYTHONPATH={_FAST_START}\n"
        if self.is_placed(variant):
            options = "".join(f"#DL --dl-{key.replace('_', '-')}={value}\n" for key, value in self._options().items())
            return f"{text}{options}{start}slurmdl srun -K --mpi=pmix {command}\n"
        if variant == LEAF or (variant == CONTROL and self.control == "order"):
            order = "leaf" if variant == LEAF else f"'{json.dumps(self._options())}'"
            return text + start + _ORDERED.format(order=order, program=_ORDER_PROGRAM, ranks=self.ranks,
                                                  command=command)
        return f"{text}{start}exec srun -K --mpi=pmix {command}\n"

    def step_seconds(self, seconds: Sequence[float]) -> float:
        """Seconds per step from the times of all steps: the median of the mean of each measured period."""
        measured = seconds[self.warmup:]
        return statistics.median(statistics.fmean(measured[begin:begin + self.period])
                                 for begin in range(0, len(measured), self.period))

    def is_placed(self, variant: str) -> bool:
        """Whether slurmdl submits the run."""
        return variant == PLACED or (variant == CONTROL and self.control not in ("", "order"))

    def file_name(self, variant: str) -> str:
        return f"{self.key}-{variant}".replace(" ", "-")

    def _options(self) -> dict[str, str | int | float]:
        default = vars(DlOptions())
        return {key: value for key, value in vars(self.options).items() if value != default[key]}


@dataclass
class Outcome:
    """Results of the runs of one job with one way of submission.

    Attributes:
        rank_nodes: node of each rank.
        zones: number of leaf zones of the nodes.
        seconds: per step, of each run (Job.step_seconds).
        inter_zone_bytes: of each run, counted by the routers of the zones.
        accuracy: of the trained model on test data; None without one.
    """

    rank_nodes: Sequence[str] = ()
    zones: int = 0
    seconds: list[float] = field(default_factory=list)
    inter_zone_bytes: list[float] = field(default_factory=list)
    accuracy: float | None = None

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)


#: (key of a job, way of submission) -> its results
Outcomes = dict[tuple[str, str], Outcome]


def mesh_command(mesh: str, volumes: str, steps: int) -> str:
    return f"python {_MESH_PROGRAM} {mesh} {volumes} {steps}"


def train_command(arguments: str, steps: int) -> str:
    return (f"python -m slurmdl.train {arguments} --model {MODEL} --steps {steps} --seed {SEED} "
            f"--log-every {PERIOD}")


_MESH, _VOLUMES, _MESH_STEPS = "dp=4,tp=2", "dp=50000,tp=1000000", 6
MESH = Job("mesh", 8, mesh_command(_MESH, _VOLUMES, _MESH_STEPS), DlOptions(mesh=_MESH, bytes=_VOLUMES), 1,
           _MESH_STEPS)
_GRADIENTS, _LINK_STEPS = 4_000_000, 9
BAD_LINK = Job("bad link", 3, mesh_command("dp=3", f"dp={_GRADIENTS}", _LINK_STEPS),
               DlOptions(bytes=str(_GRADIENTS)), 1, _LINK_STEPS, control="")
PS = Job("ps", 6, train_command("--strategy ps --ps 2", 2 * PERIOD),
         DlOptions(strategy="ps", ps=2, bytes=str(4 * PARAMETERS)), PERIOD, 2 * PERIOD)
ALLREDUCE = Job("allreduce", 6, train_command("--strategy allreduce --comm-pattern ring", 2 * PERIOD),
                DlOptions(bytes=str(4 * PARAMETERS)), PERIOD, 2 * PERIOD, can_gain=False)
_ISLANDS = "--strategy local-sgd --islands zone"
ISLANDS = Job("islands", 6, train_command(f"{_ISLANDS} --period {PERIOD} --compression int4", 2 * PERIOD),
              DlOptions(strategy="local-sgd", islands="zone", bytes=str(4 * PARAMETERS)), PERIOD, 2 * PERIOD,
              PERIOD, (PLACED,), ALLREDUCE.key, train_command(f"{_ISLANDS} --period 1", 2 * PERIOD))
JOBS = (MESH, BAD_LINK, PS, ALLREDUCE, ISLANDS)
