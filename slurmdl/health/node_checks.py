"""Checks of one node, and the task of a preflight that runs them: `python -m slurmdl.health.node_checks [CHECK...]`.

The task prints one line per check: a JSON object with `node`, `check`, and either `values` or `error`. A check
reports what it measured; `faults` judges it against the other nodes. A check may hang (a dead file system, a GPU off
the bus), so the task runs each one in a process that it can kill (`--only CHECK`), which prints the values.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from slurmdl.errors import SlurmdlError
from slurmdl.slurm import process

#: seconds of the CPU check, and iterations between two looks at the clock (about 1 ms)
_CPU_SECONDS, _CPU_BATCH = 1.0, 20_000
#: bytes of one copy of the memory check, larger than the caches of a core; seconds that it copies
_COPY_BYTES, _COPY_SECONDS = 64 * 2**20, 0.3
#: bytes that the disk check writes
_WRITE_BYTES = 1 << 20
#: rows of a matrix, whose product takes a few ms on a current GPU; seconds of products
_GPU_MATRIX_SIZE, _PRODUCT_SECONDS = 8192, 0.3
_GPU_TOOL_TIMEOUT_S = 20.0
#: fields of `nvidia-smi --query-gpu`
_NVIDIA_FIELDS = ("uuid", "memory.total", "memory.free", "ecc.errors.uncorrected.volatile.total",
                  "clocks_throttle_reasons.hw_slowdown", "clocks_throttle_reasons.hw_thermal_slowdown")


def check_cpu() -> dict[str, float]:
    """Iterations per second on all CPUs of this process at once.

    Returns `cpus`, `rate` (iterations per second of wall time, all CPUs together: low beside other programs),
    `speed` (iterations per second of CPU time of the slowest CPU: low with a throttled clock) and `withheld` (share
    of the CPU time that a quota of a control group withheld from these processes; waiting for other programs does not
    count).
    """
    cpus = sorted(os.sched_getaffinity(0))
    withheld_before = _withheld_seconds()
    pipes = []
    for cpu in cpus:
        reader, writer = os.pipe()
        if os.fork() == 0:
            status = 1
            with suppress(OSError):
                os.sched_setaffinity(0, {cpu})
                os.write(writer, json.dumps(_count_iterations()).encode())
                status = 0
            os._exit(status)
        os.close(writer)
        pipes.append(reader)
    results = []
    for reader in pipes:
        with os.fdopen(reader, "rb") as file:
            results.append(json.loads(file.read()))
    withheld = max((after - withheld_before.get(directory, 0.0) for directory, after in _withheld_seconds().items()),
                   default=0.0)
    return {"cpus": len(cpus), "rate": sum(count / wall for count, wall, _ in results),
            "speed": min(count / cpu_time for count, _, cpu_time in results),
            "withheld": withheld / (withheld + sum(cpu_time for _, _, cpu_time in results))}


def _count_iterations() -> tuple[int, float, float]:
    """Iterations, seconds of wall time and of CPU time of about one second of integer arithmetic."""
    count, start, start_cpu = 0, time.monotonic(), time.process_time()
    while (wall := time.monotonic() - start) < _CPU_SECONDS:
        for _ in range(_CPU_BATCH):
            pass
        count += _CPU_BATCH
    return count, wall, max(1e-3, time.process_time() - start_cpu)


def check_memory() -> dict[str, float]:
    """`bandwidth`, `available` and `total` bytes.

    The bandwidth is that of the fastest copy by one CPU, bytes read and written per second of CPU time: waiting for
    memory counts, waiting for other programs does not.
    """
    values = {}
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            name, _, value = line.partition(":")
            values[name] = float(value.split()[0]) * 1024
    available, total = values["MemAvailable"], values["MemTotal"]
    limit = _cgroup_memory_left()
    if limit is not None:
        available = min(available, limit)
    result = {"available": available, "total": total}
    if available > 4 * _COPY_BYTES:
        result["bandwidth"] = _copy_bandwidth()
    return result


def _copy_bandwidth() -> float:
    source, target = bytearray(_COPY_BYTES), memoryview(bytearray(_COPY_BYTES))
    fastest, end = float("inf"), time.monotonic() + _COPY_SECONDS
    while time.monotonic() < end:
        start = time.thread_time()
        target[:] = source
        fastest = min(fastest, time.thread_time() - start)
    return 2 * _COPY_BYTES / fastest


def _cgroup_directories(controller: str) -> list[str]:
    """The control groups of this process and their parents, of cgroup v1 or v2 (cgroups(7))."""
    directories = []
    with open("/proc/self/cgroup", encoding="utf-8") as file:
        for line in file:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            mount, parts = f"/sys/fs/cgroup/{controllers}".rstrip("/"), path.strip("/").split("/")
            directories += ["/".join([mount, *parts[:length]]) for length in range(len(parts), 0, -1)]
    return directories


def _withheld_seconds() -> dict[str, float]:
    """Control group -> CPU seconds that its quota has withheld from processes so far."""
    seconds = {}
    for directory in _cgroup_directories("cpu"):
        with suppress(OSError, ValueError), open(f"{directory}/cpu.stat", encoding="ascii") as file:
            statistics = dict(line.split() for line in file)
            if "throttled_usec" in statistics:
                seconds[directory] = float(statistics["throttled_usec"]) / 1e6
            elif "throttled_time" in statistics:
                seconds[directory] = float(statistics["throttled_time"]) / 1e9
    return seconds


def _cgroup_memory_left() -> float | None:
    """Bytes that the control groups of this process may still use; None without a limit."""
    left = []
    for directory in _cgroup_directories("memory"):
        for limit, usage in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            with suppress(OSError, ValueError), open(f"{directory}/{limit}") as first, \
                    open(f"{directory}/{usage}") as second:
                left.append(float(first.read()) - float(second.read()))
    return min(left, default=None)


def check_disk() -> dict[str, Any]:
    """Free bytes in the directory for temporary files, and the seconds to write and sync a small file there."""
    directory = tempfile.gettempdir()
    free = shutil.disk_usage(directory).free
    start = time.monotonic()
    with tempfile.TemporaryFile(dir=directory) as file:
        file.write(b"\0" * _WRITE_BYTES)
        file.flush()
        os.fsync(file.fileno())
    return {"directory": directory, "free": free, "write_seconds": time.monotonic() - start}


def check_clock() -> dict[str, float]:
    """`time`, seconds since the epoch; the reader compares it with its own clock."""
    return {"time": time.time()}


def check_gpu() -> dict[str, Any]:
    """GPUs that the driver reports, GPUs that Slurm allocated, `errors` of single GPUs, and `products`.

    `products` has the name and the rate of matrix products (FLOP/s) of each GPU; it is empty without PyTorch. All is
    empty if Slurm allocated no GPU on this node. References: nvidia-smi(1), rocm-smi.
    """
    allocated = os.environ.get("SLURM_GPUS_ON_NODE", "0")
    if not allocated.isdigit() or not int(allocated):
        return {}
    if shutil.which("nvidia-smi"):
        gpus, errors = parse_nvidia_smi(process.check_output(
            ["nvidia-smi", f"--query-gpu={','.join(_NVIDIA_FIELDS)}", "--format=csv,noheader,nounits"],
            timeout=_GPU_TOOL_TIMEOUT_S))
    elif shutil.which("rocm-smi"):
        text = process.check_output(["rocm-smi", "--showuniqueid", "--json"], timeout=_GPU_TOOL_TIMEOUT_S)
        gpus, errors = len(json.loads(text)), []
    else:
        return {"allocated": int(allocated), "gpus": 0, "errors": ["neither nvidia-smi nor rocm-smi is in PATH"]}
    products, product_errors = _measure_matrix_products()
    return {"allocated": int(allocated), "gpus": gpus, "errors": [*errors, *product_errors], "products": products}


def _measure_matrix_products() -> tuple[list[dict[str, Any]], list[str]]:
    """Name and FLOP/s of each GPU that PyTorch sees, and what failed on some of them."""
    if importlib.util.find_spec("torch") is None:
        return [], []
    import torch

    products, errors = [], []
    for number in range(torch.cuda.device_count()):
        try:
            products.append({"name": torch.cuda.get_device_name(number),
                             "rate": matrix_product_rate(f"cuda:{number}", _GPU_MATRIX_SIZE)})
        except torch.cuda.OutOfMemoryError:
            continue  # another program of the job uses it
        except RuntimeError as error:
            errors.append(f"GPU {number}: a matrix product fails: {str(error).splitlines()[0][:120]}")
    return products, errors


def matrix_product_rate(device: str, size: int) -> float:
    """FLOP/s of products of two bfloat16 matrices of this size on a device of PyTorch, after a first one."""
    import torch

    matrix = torch.ones(size, size, dtype=torch.bfloat16, device=device)

    def product_s() -> float:
        start = time.perf_counter()
        float((matrix @ matrix)[0, 0])  # waits for the device
        return time.perf_counter() - start

    product_s()
    end, fastest = time.monotonic() + _PRODUCT_SECONDS, float("inf")
    while time.monotonic() < end:
        fastest = min(fastest, product_s())
    return float(2 * size**3 / fastest)


def parse_nvidia_smi(text: str) -> tuple[int, list[str]]:
    """The number of GPUs in the output of `nvidia-smi --query-gpu`, and what is wrong with some of them."""
    errors = []
    lines = [line for line in text.splitlines() if line.strip()]
    for number, line in enumerate(lines):
        values = [value.strip() for value in line.split(",")]
        if len(values) != len(_NVIDIA_FIELDS):
            errors.append(f"GPU {number}: {line.strip()[:80]}")
            continue
        _, _, _, ecc, slowdown, thermal = values
        if ecc.isdigit() and int(ecc):
            errors.append(f"GPU {number}: {ecc} uncorrected ECC errors")
        if "Active" in (slowdown, thermal):
            errors.append(f"GPU {number}: clock throttled by the hardware{' (heat)' * (thermal == 'Active')}")
    return len(lines), errors


#: name -> function, and its time limit in seconds
CHECKS: dict[str, tuple[Callable[[], dict[str, Any]], float]] = {
    "clock": (check_clock, 5.0),
    "disk": (check_disk, 5.0),
    "memory": (check_memory, 5.0),
    "gpu": (check_gpu, 25.0),
    "cpu": (check_cpu, 8.0),
}


def run_check(name: str) -> dict[str, object]:
    """The result of one check, in a process of its own: `values`, or `error` if it fails or does not end in time."""
    try:
        text = process.run_command(process.module_argv("slurmdl.health.node_checks", "--only", name),
                                   timeout=CHECKS[name][1], name=f"check {name}").checked_stdout()
        return {"values": json.loads(text)}
    except (SlurmdlError, ValueError) as error:
        return {"error": str(error)}


def main() -> None:
    if sys.argv[1:2] == ["--only"]:
        print(json.dumps(CHECKS[sys.argv[2]][0]()))
        return
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    for name in sys.argv[1:] or CHECKS:
        print(json.dumps({"node": node, "check": name, **run_check(name)}), flush=True)


if __name__ == "__main__":
    main()
