"""What goes together: one table of strategies, graphs, triggers, compressors and ways to run them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from slurmdl.errors import BadOptions
from slurmdl.graphs import GRAPHS
from slurmdl.train.method import BALANCES, COMPRESSORS, TRIGGERS, Method

_GOSSIP = ("gossip", "adaptive-gossip")
_DRAWN = tuple(name for name, graph in GRAPHS.items() if not graph.fixed)
_PAIRED = tuple(name for name, graph in GRAPHS.items() if graph.fixed and graph.paired)
_WHOLE = ("none", "fp16")
#: what can be shared out where each step takes all workers
_IN_STEP = ("off", "batch")


@dataclass(frozen=True)
class Row:
    """Choices that go together, each with each.

    Attributes
    ----------
    asynchronous, shared_memory, library : with --async, --shared-memory, --library or without; None for both.
    balance : what is shared out by speed.
    because : option -> why there are no more choices of it, where that is this row's own.
    """

    strategies: tuple[str, ...]
    traffic: tuple[str, ...]
    triggers: tuple[str, ...]
    compressors: tuple[str, ...]
    because: Mapping[str, str] = field(default_factory=dict)
    asynchronous: bool | None = False
    shared_memory: bool | None = False
    library: bool | None = False
    balance: tuple[str, ...] = BALANCES

    def misfits(self, method: Method) -> dict[str, str]:
        """Options that the method asks for and this row does not have -> what it has instead."""
        words = {"--traffic": (method.traffic, self.traffic), "--trigger": (method.when, self.triggers),
                 "--compress": (method.compress, self.compressors), "--balance": (method.balance, self.balance)}
        found = {option: f"{option} {', '.join(valid)}" for option, (asked, valid) in words.items()
                 if asked not in valid}
        switches = {"--async": (method.asynchronous, self.asynchronous), "--library": (method.library, self.library),
                    "--shared-memory": (method.shared_memory, self.shared_memory)}
        return found | {option: f"{'' if valid else 'no '}{option}" for option, (asked, valid) in switches.items()
                        if valid not in (None, asked)}


#: all that is legal
ROWS = (
    Row(("allreduce",), ("ring",), ("period",), ("none",), {"--compress": "a library's own sum is one of fp32"},
        library=True, balance=_IN_STEP),
    Row(("allreduce",), ("ring", "hierarchical"), ("period",), _WHOLE,
        {"--compress": "each sum on the way would have to be compressed again",
         "--library": "a library's own sum follows no zones, and is one of fp32"}, balance=_IN_STEP),
    Row(_GOSSIP, _DRAWN, TRIGGERS, _WHOLE,
        {"--compress": "partners that are drawn keep no copies of each other, so that only whole models can be sent"},
        shared_memory=None),
    Row(_GOSSIP, ("exponential",), ("period",), COMPRESSORS,
        {"--trigger": "who sends to one and receives from another cannot agree with both on an exchange"},
        shared_memory=None),
    Row(_GOSSIP, _PAIRED, TRIGGERS, COMPRESSORS, shared_memory=None),
    Row(_GOSSIP, tuple(GRAPHS), TRIGGERS, _WHOLE,
        {"--compress": "a model that is pushed goes whole, since nobody keeps a copy of it"},
        asynchronous=True, shared_memory=None),
    Row(("local-sgd",), ("ring",), TRIGGERS, COMPRESSORS),
    Row(("local-sgd",), ("hierarchical",), TRIGGERS, ("none",),
        {"--compress": "sums in and between zones would have to be compressed again at each of their steps"}),
    Row(("ps",), ("shards",), ("period",), ("none",), balance=_IN_STEP),
    Row(("ps",), ("shards",), ("period",), ("none",), asynchronous=True),
)

#: option -> why a strategy does not have a choice, where no row knows better
_REASONS = {"--traffic": "who sends what to whom belongs to the strategy",
            "--trigger": "all gradients are used in every step",
            "--compress": "gradients are sent as they are",
            "--async": "all ranks exchange together",
            "--shared-memory": "only gossip mixes models in the memory of a node",
            "--library": "only allreduce is a single call of a library",
            "--balance": "each step takes all workers, so that none can make more of them"}


def check(method: Method) -> None:
    """Refuse a method that cannot be.

    Parameters
    ----------
    method : with its strategy and traffic set.

    Raises
    ------
    BadOptions : names the option, what is valid in its place, and the reason.
    """
    for given, asked, fit, valid in (
            (method.global_every, "--global-every", method.strategy in _GOSSIP and not method.asynchronous,
             "gossip, adaptive-gossip without --async"),
            (method.quasi_global, "--quasi-global", method.strategy in _GOSSIP, "gossip, adaptive-gossip"),
            (method.staleness, "--staleness", method.strategy == "ps", "strategy ps"),
            (method.period, "--period", method.when == "period" and method.strategy not in ("allreduce", "ps"),
             "gossip, adaptive-gossip, local-sgd and trigger period"),
            (method.threshold is not None, "--threshold", method.when == "drift", "trigger drift"),
            (method.comm_budget is not None, "--comm-budget", method.when == "drift", "trigger drift"),
            (method.warm_up is not None, "--warm-up", method.when == "drift", "trigger drift"),
            (method.silence is not None, "--silence", method.when == "drift", "trigger drift")):
        if given and not fit:
            raise BadOptions(f"{asked}: not valid with strategy {method.strategy}, trigger {method.when}"
                          f"{', --async' * method.asynchronous}; valid with {valid}")
    if method.balance == "steps" and method.strategy in _GOSSIP and not method.asynchronous:
        # others may end a round with any number of steps, but pairs that meet after each step need as many
        if method.shared_memory:
            raise BadOptions("--balance steps: with --shared-memory the ranks of a node meet after every step; "
                             "valid: --balance batch, or --async")
        if method.when == "period" and method.every == 1:
            raise BadOptions("--balance steps: with an exchange after every step there are none to shift between "
                             "two; valid: --period 2 or more, as many as the quickest is times as quick as the "
                             "slowest; --balance batch; or --async")
    rows = [row for row in ROWS if method.strategy in row.strategies]
    least = min(len(row.misfits(method)) for row in rows)
    if least:
        raise BadOptions(_refusal(method, [row for row in rows if len(row.misfits(method)) == least]))


def _refusal(method: Method, nearest: Sequence[Row]) -> str:
    """What does not go with what, why, and what is valid instead: one line."""
    # a reason of a row's own says more than that of the strategy
    known = [row for row in nearest if row.because.keys() & row.misfits(method)] or nearest
    misfits = known[0].misfits(method)
    option = next((its for its in misfits if its in known[0].because), next(iter(misfits)))
    choices = {"--traffic": method.traffic, "--trigger": method.when, "--compress": method.compress,
               "--balance": method.balance}
    switches = {"--async": method.asynchronous, "--shared-memory": method.shared_memory, "--library": method.library}
    shown = {**{its: f"{its} {choice}" for its, choice in choices.items()
                if choice != "off"},
             **{its: its for its, given in switches.items() if given}}
    rest = " ".join([str(method.strategy), *(text for its, text in shown.items() if its != option)])
    valid = "; or ".join(dict.fromkeys(", ".join(row.misfits(method).values()) for row in [known[0], *nearest]))
    return f"{shown.get(option, f'no {option}')}: {known[0].because.get(option, _REASONS[option])}; asked for with " \
           f"{rest}; valid: {valid}"


def table() -> str:
    """ROWS in Markdown, as docs/train.md has them."""
    def words(names: tuple[str, ...]) -> str:
        return ", ".join(f"`{name}`" for name in names)
    lines = ["| strategy | `--traffic` | `--trigger` | `--compress` | `--balance` | and |",
             "| --- | --- | --- | --- | --- | --- |"]
    for row in ROWS:
        switches = {"--async": row.asynchronous, "--shared-memory": row.shared_memory, "--library": row.library}
        further = [f"`{option}`{'' if its else ' or not'}" for option, its in switches.items() if its is not False]
        lines.append(f"| {words(row.strategies)} | {words(row.traffic)} | {words(row.triggers)} | "
                     f"{words(row.compressors)} | {words(row.balance)} | {', '.join(further)} |")
    return "\n".join(lines)
