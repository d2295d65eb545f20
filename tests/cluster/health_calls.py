"""A user's calls on a cluster with a list of bad nodes of their own."""

from __future__ import annotations

import re

from conftest import Cluster


class Health:
    """A user's calls, with a list of exclusions of their own."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.state = cluster, cluster.directory("state")
        self.env = {"XDG_STATE_HOME": str(self.state)}

    def run(self, *argv: str):
        return self.cluster.run(["slurmdl", *argv], env=self.env)

    def submit(self, script: str, *options: str, name: str = "sbatch") -> int:
        argv = ["slurmdl", "sbatch"] if name == "slurmdl" else ["sbatch"]
        path = self.cluster.script(script)
        return self.cluster.submit([*argv, *options, str(path)], env=self.env, directory=path.parent)

    def history(self) -> str:
        return self.run("preflight", "--history").stdout


def started_on(text: str, restart: int) -> set[str]:
    match = re.search(rf"start {restart} on \S+ with (.*)", text)
    assert match, text
    return set(match[1].split())
