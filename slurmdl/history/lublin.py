"""Generator of rigid parallel jobs after the model of Lublin and Feitelson, with its published parameters.

Reference: Lublin and Feitelson, The workload on parallel supercomputers: modeling the characteristics of rigid
jobs, Journal of Parallel and Distributed Computing 63(11), 2003. The parameters are those of its combined model of
batch and interactive jobs.

Size: serial with a fixed probability; otherwise 2^u with u two-stage uniform, rounded to a power of two with a fixed
probability. Run time: e^g with g hyper-gamma, whose probability of the first gamma falls linearly with the size.
Arrivals: gaps of e^g with g gamma, in a time that passes faster in busy half hours of the day; the numbers of
arrivals per half hour follow a gamma density.

Not in the model, and stated in the notes of the trace: time limits (the run time times a uniform factor, rounded up
to minutes) and users (a few of them submit most jobs).
"""

from __future__ import annotations

import math

import numpy as np

from slurmdl.errors import UsageError
from slurmdl.history.traces import JobTrace
from slurmdl.placement.arrays import FloatArray, IntArray

SERIAL_PROBABILITY, POWER_OF_TWO_PROBABILITY = 0.244, 0.576
#: two-stage uniform of log2 of the size: lowest value, middle below the highest, probability of the lower stage
LOW, MIDDLE_BELOW_HIGH, LOWER_PROBABILITY = 0.8, 2.5, 0.86
#: shape and scale of the two gammas of ln(run time in s); probability of the first one: slope per node, intercept
RUN_GAMMA_1, RUN_GAMMA_2 = (4.2, 0.94), (312.0, 0.03)
FIRST_SLOPE, FIRST_INTERCEPT = -0.0054, 0.78
MAX_LN_RUN = 12.0
#: shape and scale of the gammas of ln(gap in s) and of the half hour of an arrival, counted from CYCLE_BEGIN
GAP_GAMMA, CYCLE_GAMMA = (10.2303, 0.4871), (8.1737, 3.9631)
MAX_LN_GAP = 13.0
HALF_HOURS, CYCLE_BEGIN = 48, 11
#: time limits are the run time times a uniform factor from 1 to this
MAX_LIMIT_FACTOR = 4.0
USERS = 40


def generate_lublin_trace(jobs: int, nodes: int, load: float, seed: int) -> JobTrace:
    """Generate a trace whose load (JobTrace.load) on `nodes` nodes is `load`, with the daily cycle unscaled."""
    if jobs < 2:
        raise UsageError(f"--jobs {jobs}: expected a number from 2")
    if nodes < 2:
        raise UsageError(f"a cluster of {nodes}: the generator of jobs expects at least 2 nodes")
    generator = np.random.default_rng(seed)
    sizes = draw_sizes(generator, jobs, nodes)
    run_s = draw_run_times(generator, sizes)
    span_s = float((run_s * sizes).sum()) / (nodes * load)
    submit_s = _draw_arrivals(generator, jobs, span_s)
    limit_s = np.ceil(run_s * generator.uniform(1, MAX_LIMIT_FACTOR, jobs) / 60) * 60
    weight = 1 / np.arange(1, USERS + 1)
    user = generator.choice(USERS, jobs, p=weight / weight.sum())
    return JobTrace(submit_s, run_s, limit_s, sizes, user.astype(np.int64), f"Lublin-Feitelson, seed {seed}",
                    (f"generated: {jobs:,} jobs, load {load:g}, limits of 1 to {MAX_LIMIT_FACTOR:g} run times, "
                     f"{USERS} users",))


def draw_sizes(generator: np.random.Generator, jobs: int, nodes: int) -> IntArray:
    """Numbers of nodes, shape (jobs,)."""
    high = math.log2(nodes)
    middle = max(high - MIDDLE_BELOW_HIGH, LOW)
    is_lower = generator.random(jobs) < LOWER_PROBABILITY
    low = np.where(is_lower, min(LOW, high), middle)
    exponent = generator.uniform(low, np.where(is_lower, middle, high))
    exponent = np.where(generator.random(jobs) < POWER_OF_TWO_PROBABILITY, np.round(exponent), exponent)
    size = np.clip(np.round(2.0 ** exponent), 2, nodes)
    return np.where(generator.random(jobs) < SERIAL_PROBABILITY, 1, size).astype(np.int64)


def draw_run_times(generator: np.random.Generator, sizes: IntArray) -> FloatArray:
    """Run times in whole seconds from 1, shape (jobs,); values above e^12 s are drawn again."""
    first = np.clip(FIRST_SLOPE * sizes + FIRST_INTERCEPT, 0, 1)
    logarithm = np.full(len(sizes), np.inf)
    while (again := logarithm > MAX_LN_RUN).any():
        is_first = generator.random(len(sizes)) < first
        drawn = np.where(is_first, generator.gamma(*RUN_GAMMA_1, len(sizes)),
                         generator.gamma(*RUN_GAMMA_2, len(sizes)))
        logarithm = np.where(again, drawn, logarithm)
    return np.asarray(np.maximum(1.0, np.round(np.exp(logarithm))))


def daily_weights() -> FloatArray:
    """Share of the arrivals in each half hour of the day, from midnight; shape (48,)."""
    shape, scale = CYCLE_GAMMA
    x = np.arange(HALF_HOURS) + 0.5
    density = np.exp((shape - 1) * np.log(x) - x / scale - math.lgamma(shape) - shape * math.log(scale))
    return np.asarray(np.roll(density / density.sum(), CYCLE_BEGIN))


def _draw_arrivals(generator: np.random.Generator, jobs: int, span_s: float) -> FloatArray:
    """Times of submission from 0 to `span_s`, shape (jobs,), the day beginning at midnight."""
    logarithm = np.minimum(generator.gamma(*GAP_GAMMA, jobs - 1), MAX_LN_GAP)
    busy = np.concatenate([[0.0], np.cumsum(np.exp(logarithm))])
    days = int(span_s // 86400) + 1
    border_s = np.arange(days * HALF_HOURS + 1) * (86400 / HALF_HOURS)
    # share of busy time that has passed at each border of a half hour
    passed = np.concatenate([[0.0], np.cumsum(np.tile(daily_weights(), days))])
    end = np.interp(span_s, border_s, passed)
    return np.asarray(np.interp(busy / busy[-1] * end, passed, border_s))
