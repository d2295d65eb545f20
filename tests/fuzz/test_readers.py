"""Fuzz each reader for SLURMDL_FUZZ_SECONDS seconds: 1 by default, more with `make fuzz`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("atheris", reason="atheris has no wheel for this Python")

SECONDS = int(os.environ.get("SLURMDL_FUZZ_SECONDS", "1"))
ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "unit" / "data"
SEEDS = {
    "conf": [*(ROOT / "topology").glob("*.conf"), *DATA.glob("*.conf")],
    "check": [*(ROOT / "topology").glob("*.conf"), *DATA.glob("*.conf")],
    "yaml": [*DATA.glob("topology*.yaml")],
    "scontrol": [*DATA.glob("scontrol-*.txt")],
    "saved": [*DATA.glob("scontrol-*.txt")],
    "saved-cluster": [*DATA.glob("scontrol-*.txt")],
    "sacct": [*DATA.glob("sacct-*")],
}
WORDS = ["SwitchName=", "Switches=", "Nodes=", "LinkSpeed=", "BlockName=", "BlockSizes=", "RingName=", "Include ",
         "topology: ", "tree:", "switches:", "- switch: ", "nodes: ", "children: ", "block_sizes:", "blocks:",
         "flat: true", "torus3d:", "toruses:", "regions:", "cluster_default: ", "n[1-4]", "[0-65535]",
         "AggregatedBlock=", "&a", "*a", '"zones":', '"parent":', '"level":', '"uplink_bandwidth":', '"leaf":',
         '"topologies":', '"default":', "Level=0 ", "BlockIndex=0 ", "NodeName=", "State=IDLE*", "Gres=gpu:a:2",
         "NODELIST STATE", "HOSTNAMES|STATECOMPLETE|CPUS(A/I/O/T)", "n[1-2] mix"]
SCORE_WORDS = ['"nodes":', '"zones":', '"inter_leaf":', '"throughput":', '"rtt":', '"rtt_p99":', '"loss":', '"age":',
               '"samples":', '"rdma":', '"source":', '"time":', '"kind":', '"name":', '"half_life":', '"tolerance":',
               "1e8", '"status":"success"', '"data":', '"resultType":"vector"', '"result":', '"metric":',
               '"instance":', '"value":', "NaN", "Infinity", "kind,name,throughput,rtt,loss,age,samples",
               "inter_leaf,a|b,"]
SCORES = {
    "json": 'j{"nodes": {"n1": {"throughput": 1e8, "rtt": 0.0001, "loss": 0.1}}, "inter_leaf": {"a|b": {}}, '
            '"time": 1.7e9}',
    "csv": "ckind,name,throughput,rtt,loss,age,samples\nnode,n1,1e8,0.0001,0.01,5,3\ninter_leaf,a|b,,,,,\n",
    "lines": 'j{"kind":"node","name":"n1","time":1.8e9,"source":"probe","throughput":1e8,"loss":0.1}\n',
    "line": '{"kind":"inter_leaf","name":"a|b","time":1799999990,"source":"job","rtt":1,"rtt_p99":2,"rdma":true}\n',
    "answer": '{"status":"success","data":{"resultType":"vector","result":[{"metric":{"instance":"n1:9100"},'
              '"value":[1.8e9,"0.5"]}]}}'}


@pytest.mark.parametrize("reader", ["conf", "yaml", "json", "scontrol", "hostlist", "scores", *(
    pytest.param(reader, marks=pytest.mark.nightly)
    for reader in ("saved", "saved-cluster", "check", "samples", "prometheus", "train", "sacct"))])
def test_reader(reader: str, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for seed in SEEDS.get(reader, ()):
        if seed.stat().st_size < 20_000:
            shutil.copy(seed, corpus)
    (corpus / "word").write_text("n[1-3],m2")
    (corpus / "json").write_text('{"kind": "tree", "zones": ["s"], "parent": [-1], "level": [0], '
                                 '"uplink_bandwidth": [null], '
                                 '"nodes": ["n1"], "leaf": [0]}')
    (corpus / "train").write_text("lr: 0.1\nasync: true\nvirtual-ranks: 4\nvirtual-zones: [A:2, B:2x1]\n"
                                  "virtual-links: inter-zone=1G:0.1\nemulate-compute: 1\nstraggler: 1=2\n"
                                  "fold: 1/5\nstrategy: gossip\n")
    reads_links = reader in ("scores", "samples", "prometheus")
    for name, text in SCORES.items() if reads_links else ():
        (corpus / name).write_text(text)
    dictionary, words = tmp_path / "words", SCORE_WORDS if reads_links else WORDS
    dictionary.write_text("".join('"{}"\n'.format(word.replace('"', '\\"')) for word in words))
    done = subprocess.run(
        # libFuzzer limits the peak RSS reported by the kernel, which exec(2) does not reset: start it from a small
        # shell, because a pytest worker may already exceed the limit
        ["sh", "-c", '"$@"; exit $?', "sh", sys.executable, str(Path(__file__).with_name("readers.py")), reader,
         # only a hang exceeds this limit, also on a busy machine
         f"-max_total_time={SECONDS}", "-timeout=30", "-rss_limit_mb=1024", "-max_len=4096", f"-dict={dictionary}",
         f"-artifact_prefix={tmp_path}/", "-print_final_stats=1", str(corpus)],
        capture_output=True, text=True, errors="replace", timeout=SECONDS + 60, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    executed = re.search(r"number_of_executed_units: (\d+)", done.stderr)
    assert executed, done.stderr[-1000:]
    print(f"{reader}: {executed[1]} executions in {SECONDS} s")
    assert int(executed[1]) > 10  # more in a second on an idle machine; a busy one needs longer for each
