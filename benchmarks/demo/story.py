"""The four acts: what the cluster looks like, what runs on it, and what the screen says about it."""

from __future__ import annotations

import os
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from benchmarks import cloud_nodes, results
from benchmarks.demo import jobs
from benchmarks.demo.cluster import DemoCluster, open_log
from benchmarks.demo.jobs import CONTROL, LEAF, PLACED, PLAIN, Job, Outcome, Outcomes
from benchmarks.demo.page import format_page
from benchmarks.demo.picture import draw_demo
from benchmarks.demo.report import describe_probe, format_closing, format_run, format_table, make_rows
from benchmarks.suite import run_repeated
from slurmdl.sandbox import lifecycle
from slurmdl.sandbox.spec import SandboxSpec, round_robin_topology

NODES, ZONES, WIDTH = 12, 3, 98
#: nodes of other users in the acts of a mesh and a bad link: one of zoneA, one of zoneC
FRAGMENTED = ("n01", "n03")
#: and in the acts in two zones: all of zoneC, one each of zoneA and zoneB
TWO_ZONES = ("n02", "n03", "n06", "n09", "n10", "n12")
#: bit/s of the bad link, as of a network adapter that falls back to a lower speed
BAD_RATE = 1e8
PROBE_BUDGET = "5s"
#: output files, ignored by git
OUTPUT = Path(__file__).resolve().parents[2] / "build"


class Story:
    """Runs the acts on a cluster; prints text and a line for each run in the first repeat."""

    def __init__(self, cluster: DemoCluster, with_controls: bool) -> None:
        self.cluster, self.with_controls = cluster, with_controls
        self.outcomes: Outcomes = {}
        self.is_verbose = True

    def run(self, repeats: int) -> Outcomes:
        for repeat in range(repeats):
            self.is_verbose = not repeat
            for act in (self.act_mesh, self.act_bad_link, self.act_servers, self.act_islands):
                act()
        return self.outcomes

    def act_mesh(self) -> None:
        self.cluster.occupy(FRAGMENTED)
        self._say("1 of 4: a mesh on a fragmented cluster", f"""
            {jobs.MESH.ranks} ranks as a mesh {jobs.MESH.options.mesh}; most bytes are between the two ranks of a tp
            group. Other users hold {' and '.join(FRAGMENTED)}, so that the job needs three zones. Plain Slurm does
            not know the groups and splits some over slow uplinks. slurmdl takes an even number of nodes in each zone,
            so that every tp group stays inside one.""")
        self._run(jobs.MESH)

    def act_bad_link(self) -> None:
        job, cluster = jobs.BAD_LINK, self.cluster
        cluster.occupy(FRAGMENTED)
        bad = cluster.nodes_of_plain_slurm(job.ranks)[-1]
        self._say("2 of 4: a node with a bad link", f"""
            The link of {bad} falls back to {BAD_RATE / 1e6:g} Mbit/s. The node stays up, so plain Slurm uses it, and
            every rank of an all-reduce waits for it. slurmdl measures the idle nodes with a short job (`slurmdl links
            probe --all`) and leaves the slow one out.""")
        if self.with_controls:  # the same nodes before the link is bad
            self._run(job, (CONTROL,))
        try:
            cluster.sandbox.shape_link(bad, rate=BAD_RATE)
            cluster.call(["slurmdl", "links", "probe", "--all", "--budget", PROBE_BUDGET])
            found = cluster.call(["slurmdl", "links", "show"])
            if self.is_verbose:
                print(f"  probe             {describe_probe(found, bad)}", flush=True)
            self._run(job)
        finally:
            cluster.sandbox.shape_link(bad, rate=cluster.sandbox.spec.node_rate)
            cluster.call(["sh", "-c", "rm -f $HOME/.local/state/slurmdl/probe-*.jsonl"])

    def act_servers(self) -> None:
        self.cluster.occupy(TWO_ZONES)
        self._say("3 of 4: parameter servers", f"""
            {jobs.PS.options.ps} parameter servers and {jobs.PS.ranks - jobs.PS.options.ps} workers. Only
            {jobs.PS.ranks} nodes in two zones are free, so every way gets the same nodes; the question is which ranks
            serve. In the order of names and of leaf switches both servers are in one zone. slurmdl puts one server
            into each zone, so that both uplinks carry the parameters.""")
        self._run(jobs.PS)

    def act_islands(self) -> None:
        self.cluster.occupy(TWO_ZONES)
        self._say("4 of 4: training across two slow zones", f"""
            An allreduce of gradients crosses the uplinks in every step. Leaf order is already its best order, so
            slurmdl's placement cannot gain over it. Islands (`--dl-islands=zone`) average gradients inside a zone,
            and exchange models between zones every {jobs.PERIOD} steps as int4. This is another training method:
            compare the accuracy as well.""")
        self._run(jobs.ALLREDUCE)
        self._run(jobs.ISLANDS)

    def _say(self, title: str, text: str) -> None:
        if self.is_verbose:
            print(f"\nAct {title}\n" + textwrap.fill(" ".join(text.split()), WIDTH, initial_indent="  ",
                                                    subsequent_indent="  "), flush=True)

    def _run(self, job: Job, variants: Sequence[str] = ()) -> None:
        control = (CONTROL,) if self.with_controls and job.control else ()
        for variant in variants or (*job.variants, *control):
            outcome = self.outcomes.setdefault((job.key, variant), Outcome())
            self.cluster.run(job, variant, outcome)
            if self.is_verbose:
                print(format_run(job, variant, outcome, self.cluster), flush=True)


def run(repeats: int = 1, results_file: str | None = None, name: str = "demo") -> None:
    """Run the acts on a sandbox of its own; print the story, the table and where the details are."""
    start = time.monotonic()
    log_file, picture_file, page_file = (OUTPUT / f"demo.{suffix}" for suffix in ("log", "svg", "html"))
    with open_log(log_file) as log:
        outcomes, version = _run_on_sandbox(name, repeats, results_file is not None, log)
    _give_to_user(OUTPUT, log_file)
    print("\n" + format_table(outcomes))
    picture, page, log_name = (os.path.relpath(file) for file in (picture_file, page_file, log_file))
    closing = format_closing(f"{picture}, {page}", log_name, time.monotonic() - start)
    picture_file.write_text(draw_demo(outcomes), encoding="utf-8")
    page_file.write_text(format_page(outcomes, f"Measured on {version}, {NODES} nodes in {ZONES} zones of a sandbox.",
                                     closing), encoding="utf-8")
    _give_to_user(picture_file, page_file)
    print("\n" + closing)
    if results_file:
        results.write(results_file, make_rows(outcomes), seed=jobs.SEED, versions={"slurm": version},
                      command=f"python -m benchmarks.demo --repeats {repeats} --results {results_file}")


def _run_on_sandbox(name: str, repeats: int, with_controls: bool, log: IO[str]) -> tuple[Outcomes, str]:
    sandbox = lifecycle.sandbox_up(SandboxSpec(name, round_robin_topology(NODES, ZONES),
                                               slurm_conf_lines=cloud_nodes.SLURM_CONF_LINES[:1]))
    try:
        cluster = DemoCluster(sandbox, log)
        version = cluster.version()
        spec = sandbox.spec
        print(f"A real Slurm ({version}) on this machine: {NODES} nodes, alternately in {ZONES} zones\n"
              f"(leaf switches), {spec.node_rate / 1e9:g} Gbit/s inside a zone, {spec.zone_rate / 1e6:g} Mbit/s "
              f"between zones. Three ways to submit each job:\n"
              f"  {PLAIN:11} sbatch and srun: ranks in the order of node names\n"
              f"  {LEAF:11} the same nodes, ranks ordered by leaf switch\n"
              f"  {PLACED:11} slurmdl sbatch and slurmdl srun", flush=True)
        cluster.call(["slurmdl", "topology", "show"])
        return Story(cluster, with_controls).run(repeats), version
    finally:
        lifecycle.sandbox_down(name)


def _give_to_user(*paths: Path) -> None:
    """Under sudo, make the files those of the calling user."""
    uid, gid = (int(os.environ.get(name) or -1) for name in ("SUDO_UID", "SUDO_GID"))
    for path in paths if uid >= 0 else ():
        os.chown(path, uid, gid)


def main(argv: list[str]) -> None:
    run_repeated("demo", "Five training jobs in four acts on a sandbox of 12 nodes, each submitted three ways (needs "
                 "root).", run, 1, argv)
