"""Launchers in the command of a step: their options, changes that keep the rank map, and steps that do not fit."""

from __future__ import annotations

import ipaddress
import os
import re
import shlex
import socket
import subprocess
from pathlib import Path

import pytest
from placing import cluster, node, two_level

from slurmdl import dl_options
from slurmdl.errors import PlacementError
from slurmdl.launch import launchers, step_inputs, submission
from slurmdl.launch.launchers import LauncherCommand
from slurmdl.links.link_scores import LinkScores
from slurmdl.placement.place import place_job
from slurmdl.placement.rank_orders import best_rank_map
from slurmdl.traffic import Traffic

ENVIRON = {"SLURM_NNODES": "6"}


def find(command: str, environ: dict[str, str] | None = None) -> LauncherCommand | None:
    return launchers.find_launcher(shlex.split(command), ENVIRON | (environ or {}))


#: command -> launcher, fewest and most nodes, ranks per node of 8 GPUs, and whether the nodes form one world
@pytest.mark.parametrize(("command", "name", "nodes", "ranks", "is_multi_node"), [
    ("torchrun --nnodes=6 --nproc-per-node=2 train.py", "torchrun", (6, 6), 2, True),
    ("/opt/venv/bin/torchrun --nnodes 6 --nproc_per_node 2 train.py", "torchrun", (6, 6), 2, True),
    ("torchrun --nnodes=2:6 --nproc=4 -m train", "torchrun", (2, 6), 4, True),
    ("torchrun --nnodes=6 train.py --nproc-per-node=3", "torchrun", (6, 6), 1, True),
    ("torchrun --nnodes=6 --nproc-per-node=gpu train.py", "torchrun", (6, 6), 8, True),
    ("torchrun --nnodes=6 --nproc-per-node=cpu train.py", "torchrun", (6, 6), 0, True),
    ("torchrun --nproc-per-node=4 train.py", "torchrun", None, 4, False),
    ("torchrun --standalone --nnodes=6 train.py", "torchrun", (6, 6), 1, False),
    ("torchrun --nnodes=1:1 train.py", "torchrun", (1, 1), 1, False),
    ("python3 -u -m torch.distributed.run --nnodes=6 train.py", "torchrun", (6, 6), 1, True),
    ("ft_launcher --ignore-missing-fault-tol-cfg --nnodes=6 --ft-cfg-path c.yaml t.py", "torchrun", (6, 6), 1, True),
    ("numactl --localalloc env A=1 torchrun --nnodes=6 train.py", "torchrun", (6, 6), 1, True),
    ("bash -lc 'cd /x && A=1 torchrun --nnodes=${SLURM_NNODES} --nproc_per_node \"2\" train.py; echo done'",
     "torchrun", (6, 6), 2, True),
    ("bash -c 'torchrun --nnodes=$UNKNOWN train.py'", "torchrun", None, 1, True),
    ("env N=6 G=3 bash -c 'torchrun --nnodes=$N --nproc-per-node=$G train.py'", "torchrun", (6, 6), 3, True),
    ("numactl --localalloc /bin/bash -c 'torchrun --nnodes=6 train.py'", "torchrun", (6, 6), 1, True),
    ("apptainer exec --nv img.sif bash -c 'torchrun --nnodes=6 train.py'", "torchrun", (6, 6), 1, True),
    ("torchrun --nnodes=6 --no-python bash -c 'torchrun --nnodes=3 train.py'", "torchrun", (6, 6), 1, True),
    ("bash -c 'torchrun --nproc-per-node=$((2*4)) --nnodes=6 train.py'", "torchrun", (6, 6), 0, True),
    ("bash -c 'torchrun --nproc-per-node=${G:-8} --nnodes=6 train.py'", "torchrun", (6, 6), 0, True),
    ("accelerate launch --num_processes 12 --num-machines=6 t.py --num_machines 3", "accelerate", (6, 6), 2, True),
    ("accelerate launch --num_processes 4 train.py", "accelerate", None, 4, False),
    ("accelerate launch --config_file c.yaml train.py", "accelerate", None, 0, False),
    ("deepspeed --no_ssh --num_nodes 6 --num_gpus 4 train.py", "deepspeed", (6, 6), 4, True),
    ("deepspeed --num_nodes=6 train.py", "deepspeed", (6, 6), 0, True),
    ("torchrun --nnodes=6 --nproc-per-node", "torchrun", (6, 6), 1, True),
    ("ray symmetric-run --address n1:6379 -- python train.py", "ray", None, 0, True),
    *((command, None, None, 0, False) for command in (
        "python train.py", "python train.py torchrun", "bash run.sh", "bash -c 'echo $(torchrun --nnodes=6 x.py)'",
        "accelerate config", "bash -c", "python train.py bash -c 'torchrun --nnodes=6 x.py'", ""))])
def test_launcher_is_read_from_the_command(command, name, nodes, ranks, is_multi_node):
    launcher = find(command)
    assert (launcher and (launcher.name, launcher.node_count(), launcher.ranks_per_node("8"),
                          launcher.is_multi_node)) == (name and (name, nodes, ranks, is_multi_node))


#: command -> the same with the planned order, "" if it keeps that; variables, and a part of the change for each
@pytest.mark.parametrize(("command", "changed", "variables", "changes"), [
    ("torchrun --nnodes=6 --nproc-per-node=2 t.py 'a b'", "", {}, []),
    ("torchrun --nnodes 6 --rdzv_backend c10d --rdzv_endpoint n1:29500 train.py --rdzv_backend c10d", "", {},
     ["PET_LOCAL_ADDR"]),
    ("torchrun --nnodes=2:6 --max-restarts=3 --rdzv-backend=c10d --rdzv-endpoint=n3:1 t.py",
     "torchrun --nnodes=2:6 --max-restarts=3 --rdzv-backend=c10d --rdzv-endpoint=n1:1 t.py", {},
     ["PET_LOCAL_ADDR", "--rdzv-endpoint n3:1 -> n1:1"]),
    ("torchrun --nnodes=6 --rdzv-b=c10d --rdzv-endpoint=n3:29500 -m train",
     "torchrun --nnodes=6 --rdzv-b=c10d --rdzv-endpoint=n1:29500 -m train", {}, ["PET_LOCAL_ADDR", "n3:29500"]),
    ("bash -c 'torchrun --nnodes=6 --rdzv-backend=\"c10d\" --rdzv-endpoint=\"$head:1\" t.py'", "", {},
     ["PET_LOCAL_ADDR"]),
    ("torchrun --nnodes=6 --node-rank=3 --master-addr n4 --master-port 1 train.py",
     "torchrun --nnodes=6 --node-rank=3 --master-addr n1 --master-port 1 train.py", {}, ["--master-addr n4 -> n1"]),
    ("bash -c 'torchrun --nnodes=$SLURM_NNODES --rdzv_backend \"c10d\" --rdzv_endpoint=$(hostname):1 t.py $X'", "",
     {}, ["PET_LOCAL_ADDR"]),
    ("env PET_NNODES=6 torchrun train.py", "", {"PET_RDZV_ENDPOINT": "n1:29400"},
     ["PET_LOCAL_ADDR", "--rdzv-endpoint n2:29400 -> n1:29400"]),
    ("accelerate launch --num_processes 12 --num_machines 6 --rdzv_backend c10d --main_process_ip n2 t.py",
     "/bin/sh -c 'exec accelerate launch --machine_rank=\"$SLURM_PROCID\" --num_processes 12 --num_machines 6 "
     "--rdzv_backend c10d --main_process_ip n1 t.py'", {},
     ["PET_LOCAL_ADDR", "--main-process-ip n2 -> n1", "--machine_rank=$SLURM_PROCID added"]),
    ("bash -c 'accelerate launch --num_machines 6 --machine_rank $SLURM_NODEID t.py'", "", {}, []),
    ("deepspeed --num_nodes 6 --node_rank=2 --master_addr n3 t.py",
     "deepspeed --num_nodes 6 --node_rank=2 --master_addr n1 t.py", {}, ["--master-addr n3 -> n1"])])
def test_command_is_changed_where_it_would_lose_the_order(command, changed, variables, changes):
    environ = {"PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "n2:29400"} if "PET_" in command else {}
    launcher = find(command, environ)
    adapted = launchers.keep_map(launcher, "n1", lambda host: "$" in host or host == "n1")
    assert list(adapted.program) == shlex.split(changed or command)
    assert adapted.environ == {"SLURMDL_LAUNCHER": launcher.name, **variables}
    assert not adapted.reason_map_not_kept
    assert len(adapted.changes) == len(changes) and all(map(str.__contains__, adapted.changes, changes))


@pytest.mark.parametrize(("command", "reason"), [
    ("torchrun --nnodes=6 --rdzv-backend=c10d --local-addr=n7 t.py", "--local-addr=n7: .*; expected no --local-addr"),
    ("torchrun --nnodes=6 --rdzv-backend=etcd --rdzv-endpoint=n3:1 t.py", "--rdzv-backend=etcd: .*; expected c10d"),
    ("ray start --head", "ray numbers its workers itself")])
def test_launch_that_numbers_nodes_itself_is_left_unchanged_with_the_reason(command, reason):
    adapted = launchers.keep_map(find(command), "n1", lambda host: False)
    assert (list(adapted.program), adapted.environ, adapted.changes) == (shlex.split(command), {}, ())
    assert re.match(reason, adapted.reason_map_not_kept)


@pytest.mark.parametrize(("command", "tasks_per_node", "message"), [
    ("torchrun --nnodes=4 t.py", [1] * 6, "--nnodes: .* 4 nodes .* has 6; expected --nnodes=6"),
    ("torchrun --nnodes=7:9 t.py", [1] * 6, "--nnodes: .* 7 nodes .* --nnodes=6"),
    ("accelerate launch --num_machines 2 t.py", [1] * 6, "--num_machines=6"),
    ("torchrun --nnodes=6 t.py", [2] * 6, "2 tasks on a node.*--ntasks-per-node=1")])
def test_launcher_that_does_not_fit_the_step_is_rejected(command, tasks_per_node, message):
    with pytest.raises(PlacementError, match=message):
        launchers.check_launcher(find(command), tasks_per_node)


def test_addresses_sort_as_the_ranks_of_their_nodes():
    """The task shell writes the address of each node, by which any other node reaches it."""
    hosts = ("10.0.0.255", "100.64.1.2", "172.16.9.9", "30.0.0.1")
    assert step_inputs.node_addresses(hosts) == hosts
    count = step_inputs.MAX_SORTABLE_NODES
    addresses = [f"10.{i % 7}.{i // 250}.{i % 250}" for i in range(count)]
    shell = (Path(step_inputs.__file__).parent / "task.sh").read_text()
    start = shell.index("_dl_sortable_address()")
    function = shell[start:shell.index("\n}\n", start) + 3]
    # an index far behind the list's end would be slow to shift in a loop
    loop = "for SLURM_PROCID in $RANKS; do set --; _dl_sortable_address $TEXTS; echo $_dl_text; done"
    ranks = [*range(70), 255, 256, 257, 1000, count - 2, count - 1]
    output = subprocess.run(["sh", "-euc", f"{function}\n{loop}"], capture_output=True, text=True, check=True,
                            env={**os.environ, "RANKS": " ".join(map(str, ranks)), "TEXTS": " ".join(addresses)})
    texts = output.stdout.split()
    assert texts == sorted(texts) and texts[0] == addresses[0]
    assert [ipaddress.IPv6Address(text).ipv4_mapped for text in texts[1:]] == \
        [ipaddress.IPv4Address(addresses[rank]) for rank in ranks[1:]]
    assert socket.getaddrinfo(texts[-1], 80)[0][4][0] == f"::ffff:{addresses[-1]}"


@pytest.mark.parametrize("hosts", [
    *(("10.0.0.1", host) for host in ("localhost", "127.0.0.1", "no-such-host.invalid", "x" * 300)),
    ("10.0.0.1",) * (step_inputs.MAX_SORTABLE_NODES + 1)])
def test_nodes_without_addresses_for_others_or_too_many_to_sort(hosts):
    assert step_inputs.node_addresses(hosts[:-1]) == hosts[:-1]
    assert step_inputs.node_addresses(hosts) == ()


@pytest.mark.parametrize("traffic", [Traffic("allreduce"), Traffic("allreduce", pattern="hierarchical"),
                                     Traffic("gossip", pattern="base-2"), Traffic("gossip", pattern="zone-aware")])
@pytest.mark.parametrize("rank0", ["first", "any"])
def test_ranks_of_a_node_are_consecutive(traffic, rank0):
    nodes = ("n1", "n2", "n3", "n4", "n5", "n10")
    topology = two_level(nodes[::2], nodes[1::2])
    rank_map = best_rank_map([(node, 3) for node in nodes], topology, LinkScores(), traffic, rank0, node_by_node=True)
    assert all(len(set(rank_map.nodes[i:i + 3])) == 1 for i in range(0, 18, 3))
    assert set(rank_map.nodes) == set(nodes)
    assert rank0 == "any" or rank_map.nodes[0] == nodes[0]


@pytest.mark.parametrize(("script", "ranks"), [
    ("slurmdl srun torchrun --nnodes=$SLURM_NNODES --nproc-per-node=4 train.py", 4),
    ("export A=1; slurmdl srun -N6 --dl-explain \\\n  torchrun --nnodes 6 \\\n  --nproc_per_node 4 train.py", 4),
    ("dlsrun bash -c 'cd x && torchrun --nnodes=6 --nproc-per-node=gpu train.py' # 8 GPUs", 8),
    ("slurmdl srun accelerate launch --num_machines 2 --num_processes 16 train.py", 8),
    ("slurmdl srun torchrun --nnodes=6 train.py", 1),
    ("slurmdl srun torchrun --standalone --nproc-per-node=4 train.py", 0),
    ("srun torchrun --nnodes=6 --nproc-per-node=4 train.py", 0),
    ("# slurmdl srun torchrun --nnodes=6 --nproc-per-node=4 train.py", 0),
    ("slurmdl srun --no-such-dl torchrun --nnodes=6 --nproc-per-node=$N train.py", 0),
    ("slurmdl srun --dl-wrong=1 torchrun --nnodes=6 --nproc-per-node=4 train.py", 0),
    ("slurmdl srun torchrun --nnodes=6 --nproc-per-node=4 a.py\nslurmdl srun torchrun --nnodes=6 b.py", 0),
    ("slurmdl srun python train.py", 0)])
def test_ranks_per_node_of_a_script(script: str, ranks: int) -> None:
    assert launchers.script_ranks_per_node(script, "8") == ranks


def test_placement_counts_the_ranks_of_the_script(tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/sh\n#SBATCH -N2 --gpus-per-node=8\n"
                      "slurmdl srun torchrun --nnodes=2 --nproc-per-node=gpu t.py\n")
    nodes = cluster(*(node(name, gres={"gpu": 8}) for name in ("a", "b")))
    for options, ranks in ((), 16), (("-n4",), 4), (("--dl-launcher=none",), 2), (("--dl-launcher=auto:3",), 6):
        request = submission.parse_submission(submission.SbatchCall.from_argv([*options, str(script)]), {}).request
        placement = place_job(request, nodes, two_level(["a", "b"]), LinkScores())
        assert placement.rank_map is not None
        assert len(placement.rank_map.nodes) == ranks, options


def test_launchers_of_the_option_are_known():
    assert ("auto", "none", *launchers.LAUNCHERS) == dl_options.LAUNCHERS
