"""What each file of results answers: the question, the row that answers it first, and how the rows were obtained.

A new file of results needs an entry here; docs/results.md is made of them. Of rows that answer alike, the headline is
the least favorable or the middle one, not the best.
"""

from __future__ import annotations

from dataclasses import dataclass

# {cores}: of the machine, filled in from the file
_MEASURED = "measured on {cores} cores"
_SANDBOX = "measured on a sandbox with {cores} cores"
_EMULATED = "measured on a sandbox with {cores} cores, with emulated computation"
_VIRTUAL = "trained on virtual ranks, with simulated time and network"
_PREDICTED = "predicted by the cost model, not measured"
_SIMULATED = "simulated, not measured"


@dataclass(frozen=True)
class Headline:
    """What one file of results answers.

    Attributes:
        file: results/FILE.json.
        metric: of the row that answers the question; `*` stands for any text.
        method: how the rows were obtained: measured on which machine, emulated, simulated or predicted.
    """

    file: str
    question: str
    metric: str
    method: str


#: module in `benchmarks` -> the target of the Makefile that runs it, and its files
BENCHMARKS: dict[str, tuple[str, tuple[Headline, ...]]] = {
    "demo": ("bench-demo", (
        Headline("demo", "Are the steps of a parameter-server job shorter on the chosen ranks?",
                 "ps: seconds per step, slurmdl", _SANDBOX),)),
    "placement": ("bench-placement", (
        Headline("placement", "How far are the chosen nodes and ranks from the optimum?",
                 "exact: 99th percentile of the ratio",
                 f"{_PREDICTED}; placing, submitting and waiting are {_MEASURED}, with a real slurmctld"),)),
    "cost_model": ("bench-model", (
        Headline("model", "Does the cost model order placements as measurements do?",
                 "gossip: rank correlation of predicted with measured seconds", _SANDBOX),)),
    "mesh": ("bench-mesh", (
        Headline("mesh-optimality", "How far are placed meshes from the optimum?",
                 "predicted seconds / optimum, 99th percentile", _PREDICTED),
        Headline("mesh-groups", "How far are placed groups of nodes from the optimum?",
                 "predicted seconds / optimum, 99th percentile", _PREDICTED),
        Headline("mesh", "Does a placed mesh communicate faster than one on whole segments, the best of other rules?",
                 "70B (*): predicted communication of segments / slurmdl",
                 f"{_PREDICTED}; seconds of place_job are {_MEASURED}"),
        Headline("mesh-slurmctld", "How much longer does a mesh communicate on the nodes of a real slurmctld?",
                 "900 nodes, MoE, 32 experts: predicted communication of slurmctld's nodes in leaf order / slurmdl",
                 f"{_PREDICTED}; nodes by a real slurmctld"),
        Headline("mesh-step-time", "Does the cost model order the steps of a real device mesh correctly?",
                 "dp=4,tp=2: rank correlation of predicted and measured seconds, * random maps", _SANDBOX))),
    "launchers": ("bench-launchers", (
        Headline("launchers", "Does an all-reduce under torchrun become faster in the planned order?",
                 "torchrun, c10d: all-reduce", _SANDBOX),)),
    "binding": ("bench-binding", (
        Headline("binding", "Does Slurm give a bound job nodes as good as slurmdl promised?",
                 "all kinds: bound jobs whose nodes are as good as promised",
                 "nodes given by a real Slurm on a sandbox with {cores} cores, times by the cost model"),)),
    "gpu_requests": ("bench-gpu-requests", (
        Headline("gpu-requests", "Does slurmdl count nodes, tasks and GPUs as Slurm does?",
                 "answers that differ from Slurm's*", "counted with a real Slurm, whose GPUs are only numbers"),)),
    "spank_overhead": ("bench-spank", (
        Headline("spank", "How long do the plugin's callbacks take for a task?",
                 "callbacks in srun and slurmstepd for a task, median of *, with --dl-rank-map", _SANDBOX),)),
    "topology_io": ("bench-topology", (
        Headline("topology", "How long does it take to read the topology of 100,000 nodes?",
                 "read conf, 100000 nodes", _MEASURED),)),
    "audit": ("bench-audit", (
        Headline("audit", "How long does the audit of a million jobs take?",
                 "audit of 1,000,000 records", f"{_MEASURED}; records of a simulated cluster"),)),
    "replay": ("bench-replay", (
        Headline("replay-policies", "How do run times change if all jobs are placed?",
                 "256 nodes, all to all, 2:1 uplinks, load 0.85: run time of jobs bound by communication, all placed "
                 "/ plain Slurm", _SIMULATED),
        Headline("replay-calibration", "Does the replay wait as long as a real slurmctld?",
                 "block, Slurm *: mean wait of the simulation (baseline: slurmctld), error *",
                 "simulated; the baseline is measured with a real slurmctld and virtual nodes on {cores} cores"),
        Headline("replay-speed", "How long does the replay of 15,000 jobs take?",
                 "15,000 jobs on 640 nodes, policy slurmdl, *", _MEASURED))),
    "link_scores": ("bench-scores", (
        Headline("scores", "Are steps shorter if link scores name two bad links?",
                 "median seconds per step, zone + link scores *",
                 f"{_SANDBOX}; rows with 10000 nodes are simulated"),)),
    "preflight": ("bench-preflight", (
        Headline("preflight", "Does the preflight find a faulty node, and call no other node bad?",
                 "2 % loss, 10 ms delay: other nodes called bad",
                 f"{_SANDBOX}; the 1000 nodes are simulated"),
        Headline("preflight-slow-node", "Are steps as short as before after a job has left a slow node?",
                 "exclude: mean step of the last quarter, of the clean run's", _SANDBOX))),
    "simulator": ("bench-simulate", (
        Headline("simulate-validation", "Do simulated step times agree with measured ones?",
                 "gossip: error of the simulation, per case",
                 f"simulated, compared with steps {_SANDBOX}"),
        Headline("simulate-scaling", "What does placement change for an allreduce on 10,000 nodes?",
                 "allreduce, 10000 nodes: seconds per step, placed (baseline: leaf order)", _SIMULATED))),
    "strategies": ("bench-strategies", (
        Headline("strategies", "Is the hierarchical allreduce faster than DistributedDataParallel?",
                 "8 ranks, 25M parameters, 1 Gbit/s: steps/s of hierarchical allreduce", _EMULATED),
        Headline("strategies-simulated", "What accuracy do 97 % fewer bytes cost?",
                 "skewed data, SGD: sign, comm-budget 2.8%: accuracy vs. gossip at every step", _VIRTUAL),
        Headline("strategies-asynchronous", "What accuracy do few exchanges cost beside a slow rank?",
                 "*: fp32, every 32 steps: accuracy vs. gossip at every step", _VIRTUAL))),
    "training": ("bench-training", (
        Headline("training-equality", "Do synchronous strategies end with the model of one process?",
                 "local-sgd, mean of every step, virtual: distance from the model of one process", _MEASURED),
        Headline("training-overhead", "How much longer is a step with the library than with plain PyTorch?",
                 "1.1 million parameters: time per step, library to plain PyTorch", _MEASURED),
        Headline("training-intra-node", "How much faster are ranks of one node than with DistributedDataParallel?",
                 "1.1 million parameters, 4 ranks on one node: rate, slurmdl to DistributedDataParallel", _MEASURED),
        Headline("training-gloo", "Is allreduce over gloo as fast as DistributedDataParallel?",
                 "8 ranks, 1M parameters, 100 Mbit/s*: rate, slurmdl over gloo, hierarchical, to *", _EMULATED))),
    "islands": ("bench-islands", (
        Headline("islands", "How much sooner do islands reach the loss of DistributedDataParallel?",
                 "100 Mbit/s: islands, local-sgd every 16 steps, int4: time to the loss",
                 f"steps on virtual ranks; their seconds are {_EMULATED}"),
        Headline("islands-when", "How much shorter are steps of islands than of hierarchical allreduce?",
                 "simulated, 10 Gbit/s between zones, 100 M parameters: islands (baseline: hierarchical allreduce)",
                 _SIMULATED),
        Headline("islands-prediction", "Do predicted step times of islands agree with measured ones?",
                 "20 Mbit/s: islands, local-sgd every 16 steps, int4: predicted seconds of a step, of those measured",
                 f"simulated, compared with steps {_EMULATED}"),
        Headline("islands-disturbances", "Do islands stay ahead of allreduce with skewed data or a slow zone?",
                 "zone B at half speed: islands, gossip every 16 steps, int4: emulated time to the loss",
                 _VIRTUAL),
        Headline("islands-trigger", "Is the drift trigger between islands better than a fixed period?",
                 "islands, adaptive gossip with a budget of 0.85%, int4: test loss after 240 steps", _VIRTUAL),
        Headline("islands-lost-island", "Does training continue without a lost island?",
                 "islands, gossip every 16 steps, int4, zone B is lost *: test loss after *",
                 f"{_MEASURED}, with real ranks"))),
    "heterogeneous": ("bench-heterogeneous", (
        Headline("heterogeneous-throughput", "Do fast ranks keep their speed beside a slow one?",
                 "one rank of 8 at a quarter of the speed: balanced allreduce, as a share of communication off",
                 f"{_EMULATED}, except in rows with real computation"),
        Headline("heterogeneous-accuracy", "Does a slow rank cost accuracy?",
                 "asynchronous gossip: accuracy, one rank of 8 at a quarter of the speed vs. equal speeds",
                 _VIRTUAL),
        Headline("heterogeneous-placement-savings", "Does placement save all bytes that can be saved?",
                 "PS: bytes across zones saved relative to Slurm's nodes, leaf order, *, per job",
                 f"{_PREDICTED}; rows with `run` are {_SANDBOX}"),
        Headline("heterogeneous-no-bottleneck-control", "Does placement change nothing on unshaped links?",
                 "PS: seconds per step, placed, over those of Slurm's default, unshaped links*", _SANDBOX),
        Headline("heterogeneous-rank-failure", "How long do the other ranks wait if a rank is killed?",
                 "gossip in shared memory: longest time between good steps after a rank is killed",
                 f"{_MEASURED}, with real ranks and emulated computation"))),
    "papers": ("bench-paper", (
        Headline("paper-dltap", "How many bytes does placement save parameter servers?",
                 "ResNet-50, *: bytes between nodes saved relative to Slurm's default", _PREDICTED),
        Headline("paper-zones", "Do zones and link scores shorten steps beside two bad links?",
                 "median seconds per step, zone + link scores *",
                 f"{_SANDBOX}; rows of predicted seconds are not measured"),
        Headline("paper-adaptive-gossip", "How much time does adaptive gossip save?",
                 "skewed data, 100 Mbit/s: adaptive, sign, comm-budget 2.8%, time saved vs. gossip at every step",
                 _VIRTUAL),
        Headline("paper-heterogeneous", "Does balanced gossip keep the speed of ranks at 1 x, 2 x and 4 x?",
                 "ranks at 1 x, 2 x and 4 x: gossip, messages, balanced, synchronous",
                 f"{_EMULATED}; accuracy on virtual ranks"),
        Headline("paper-frameworks", "Does slurmdl process as many images as DistributedDataParallel?",
                 "strong scaling, emulated computation: slurmdl allreduce, 2 nodes: images/s", _EMULATED))),
}
