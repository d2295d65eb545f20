"""Seconds of a training step, from what is sent and from the links that it is sent over."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from slurmdl import process
from slurmdl.errors import UnavailableError, UsageError
from slurmdl.placement.cost import FloatArray, IntArray, Links
from slurmdl.simulate.flows import Flows, phases
from slurmdl.simulate.messages import count, programs
from slurmdl.simulate.network import Network
from slurmdl.simulate.training import Training

#: the Python that Debian's python3-simgrid is for
PYTHON = "/usr/bin/python3"
INSTALL = "apt install python3-simgrid"
ENGINE = Path(__file__).with_name("engine.py")
#: seconds that SimGrid may take
LIMIT = 600.0
#: messages up to which each is simulated, where nothing else is asked for; and flows of a phase at most
MOST_MESSAGES, MOST_FLOWS = 10_000, 400_000


@dataclass(frozen=True)
class Prediction:
    """What a step takes.

    Attributes
    ----------
    seconds : of a step, mean over the steps, of the slowest worker.
    communication : share of them in which it does not compute, 0 to 1.
    bytes_across_zones : sent from one leaf zone to another, mean over the steps, all ranks together.
    steps : that were simulated.
    detail : "messages" or "flows".
    """

    seconds: float
    communication: float
    bytes_across_zones: float
    steps: int
    detail: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def predict(training: Training, links: Links, place: IntArray, steps: int = 0, detail: str = "auto") -> Prediction:
    """The step time of one placement.

    Parameters
    ----------
    place : shape (ranks,), entry i is the index in `links.nodes` of the node of rank i.
    steps : that are simulated, whole periods of gossip; 0 for as many as say enough.
    detail : "messages", "flows" or "auto": message by message, phase by phase (see flows), or what is possible.

    Raises
    ------
    UsageError : this cannot be simulated; the text names the option.
    UnavailableError : SimGrid is not there, or fails.
    """
    training.check(len(place))
    zones = zones_of(links, place)
    steps = steps or training.exchanges(zones) * training.period
    if steps % training.period:
        raise UsageError(f"--steps {steps}: an exchange comes in every {training.period}th step; "
                         f"valid: multiples of {training.period}")
    if detail == "auto":
        detail = "messages" if count(training, len(place), steps) <= MOST_MESSAGES else "flows"
    network = Network(links)
    exchanges = steps // training.period if training.gossips else 1
    sent = phases(training, links, network, place, zones, exchanges)
    across = sum(phase.across for phase in sent) / (steps if training.gossips else 1)
    seconds = float(ends(training, links, place, steps)[training.ps:, -1].max()) / steps \
        if detail == "messages" else _together(training, network, sent, steps)
    return Prediction(seconds, max(0.0, 1 - training.compute / seconds) if seconds else 0.0, across, steps, detail)


def zones_of(links: Links, place: IntArray) -> list[str]:
    """Leaf zone of each rank, "" where its node has none."""
    return ["" if leaf < 0 else links.zones[leaf] for leaf in links.leaf[place].tolist()]


def ends(training: Training, links: Links, place: IntArray, steps: int) -> FloatArray:
    """Seconds at the end of each step, message by message; shape (ranks, steps)."""
    network = Network(links)
    nodes = place.tolist()
    told: list[list[list[Any]]] = []
    used: set[tuple[int, int]] = set()
    for rank, program in enumerate(programs(training, nodes, zones_of(links, place), steps)):
        told.append([])
        for step in program:
            told[rank].append([])
            for action in step:
                if isinstance(action, float):
                    told[rank][-1].append(action)
                    continue
                sends, receives = action
                used |= {(nodes[rank], nodes[peer]) for peer, _ in sends}
                delay = network.delay(place[receives], place[[rank]]).max(initial=0.0) if receives else 0.0
                told[rank][-1].append([sends, receives, float(delay)])
    return np.array(_ask({**network.work(used), "places": nodes, "programs": told}), float)


def _together(training: Training, network: Network, sent: Sequence[Flows], steps: int) -> float:
    """Seconds of a step, mean over the steps, phase by phase."""
    moving = [_moving(network, list(alike)) for _, alike in groupby(sent, key=lambda phase: phase.times.tobytes())]
    lasts = np.concatenate([np.zeros(0), *moving])
    delays = np.array([phase.delay for phase in sent])
    if training.gossips:
        return training.compute + float((lasts + delays).sum()) / steps
    if training.strategy == "ps":
        return training.compute + float((lasts + delays).sum())
    now = 0.0
    for _, elements, ready in training.buckets():
        now = max(now, ready) + float((lasts * elements / training.parameters + delays).sum())
    return max(now, training.compute)


def _moving(network: Network, sent: Sequence[Flows]) -> npt.NDArray[np.float64]:
    """Seconds of each phase without the delays of its messages; the phases stand for the same nodes."""
    most = max(len(phase.size) for phase in sent)
    if most > MOST_FLOWS:
        raise UsageError(f"{most} flows at once are too many; valid: up to {MOST_FLOWS}, by fewer --ps or ranks")
    flows = [list(zip(phase.source.tolist(), phase.target.tolist(), np.rint(phase.size).astype(int).tolist(),
                      strict=True)) for phase in sent]
    used = {(source, target) for phase in flows for source, target, _ in phase}
    return np.array(_ask({**network.work(used, sent[0].times), "phases": flows}), float)


def version() -> str:
    """Of SimGrid."""
    return process.query([PYTHON, "-I", "-c", "import simgrid; print(simgrid.simgrid_version)"], timeout=60).strip()


def _ask(work: Mapping[str, Any]) -> Any:
    """The answer of `engine`, in a process of its own."""
    answer = process.ask([PYTHON, "-I", str(ENGINE)], stdin=json.dumps(work), timeout=LIMIT)
    if "No module named 'simgrid'" in answer.err:
        raise UnavailableError(f"{PYTHON} has no SimGrid; install it: {INSTALL}")
    if answer.status:
        lines = answer.err.strip().splitlines() or ["no message"]
        raise UnavailableError(f"SimGrid: exit status {answer.status}: {lines[-1]}")
    return json.loads(answer.out)
