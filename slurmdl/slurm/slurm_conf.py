"""Slurm's configuration: its files, the plugin's line in plugstack.conf, and the answer to `scontrol show config`."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from slurmdl.errors import InputError
from slurmdl.slurm import process

DEFAULT_SLURM_CONF = "/etc/slurm/slurm.conf"
_PLUGIN_FILE = "slurmdl.so"
#: slurm.conf of 100,000 nodes on separate lines is smaller
_MAX_CONF_CHARS = 32 * 2**20
#: what `read_cluster_defaults` reads; lines of partitions have values of their own
_DEFAULTS = {name.lower(): name for name in ("ClusterName", "DefMemPerCPU", "DefMemPerNode")}
_DEFAULTS_LINE = re.compile(rf"^(?!\s*PartitionName)[^#\n]*\b(?:{'|'.join(_DEFAULTS)})\s*=[^#\n]*", re.I | re.M)
_CONF_PAIR = re.compile(r"(\w+)\s*=\s*(\S+)")
_INCLUDE_LINE = re.compile(r"^\s*include\s", re.I | re.M)
#: bounds files that include each other
_MAX_INCLUDE_DEPTH = 8
#: a line as Slurm reads it, into 4096 bytes; a part of a longer line counts as a line
_LINE_PATTERN = re.compile(rb"[^\n]{0,4094}\n|[^\n]{1,4095}")
#: a carriage return and other blanks are part of a word
_WORD_PATTERN = re.compile(r"[^ \t\n]+")


def slurm_conf_path() -> str:
    """The slurm.conf of this process: $SLURM_CONF or the default (sbatch(1))."""
    return os.environ.get("SLURM_CONF") or DEFAULT_SLURM_CONF


def topology_file_path() -> str | None:
    """The topology file next to slurm.conf, or None. A topology.yaml hides topology.conf, as in Slurm (25.05)."""
    directory = os.path.dirname(slurm_conf_path())
    for name in ("topology.yaml", "topology.conf"):
        path = os.path.join(directory, name)
        if os.path.exists(path):
            return path
    return None


def read_cluster_defaults() -> dict[str, str] | None:
    """ClusterName, and DefMemPerCPU or DefMemPerNode if set, from the slurm.conf of this process.

    The controller reads the same file, so this saves a query. None if it cannot be read, includes other files, or has
    no ClusterName in lower case, to which Slurm converts it.
    """
    try:
        with open(slurm_conf_path(), encoding="utf-8", errors="replace") as file:
            text = file.read(_MAX_CONF_CHARS).replace("\\\n", " ")
    except OSError:
        return None
    defaults = {}
    for line in _DEFAULTS_LINE.findall(text):
        for key, value in _CONF_PAIR.findall(line):
            if name := _DEFAULTS.get(key.lower()):
                defaults[name] = value.strip('"')
    name = defaults.get("ClusterName", "")
    return defaults if name and name == name.lower() and not _INCLUDE_LINE.search(text) else None


def parse_key_values(text: str) -> dict[str, str]:
    """Parse lines `KEY = VALUE`, the format of `scontrol show config`."""
    return {key.strip(): value.strip() for key, equals, value in
            (line.partition("=") for line in text.splitlines()) if equals}


@dataclass(frozen=True)
class SlurmConfig:
    """The controller's settings that decide how srun behaves.

    Attributes:
        version: (major, minor), e.g. (22, 5).
        pack_nodes: tasks fill one node after the other (CR_Pack_Nodes).
        has_topology: TopologyPlugin has zones.
        cluster_name: ClusterName.
    """

    version: tuple[int, int]
    pack_nodes: bool
    mpi_default: str
    plugin_dirs: tuple[str, ...]
    has_topology: bool
    cluster_name: str = ""

    @classmethod
    def query(cls) -> SlurmConfig:
        """Query the controller. Raises UnavailableError, or InputError as `from_scontrol`."""
        return cls.from_scontrol(process.check_output(["scontrol", "show", "config"]))

    @classmethod
    def from_scontrol(cls, text: str) -> SlurmConfig:
        """Parse the output of `scontrol show config`; InputError if it has no version."""
        settings = parse_key_values(text)
        version = settings.get("SLURM_VERSION", "").split(".")
        if len(version) < 2 or not (version[0].isdigit() and version[1].isdigit()):
            raise InputError("scontrol show config: no SLURM_VERSION in the output")
        return cls((int(version[0]), int(version[1])),
                   "PACK_NODES" in settings.get("SelectTypeParameters", "").upper(),
                   settings.get("MpiDefault", ""), tuple(settings.get("PluginDir", "").split(":")),
                   settings.get("TopologyPlugin", "") not in ("topology/none", "topology/default", "topology/flat"),
                   settings.get("ClusterName", ""))

    def has_pmi_plugin(self, pmi: str) -> bool:
        """Whether a plugin directory on this node has the plugin of a PMI, for example mpi_pmix.so."""
        return any(os.path.exists(f"{directory}/mpi_{pmi}.so") for directory in self.plugin_dirs)

    def srun_cpus_per_task(self, environ: Mapping[str, str]) -> int | None:
        """The variable that srun reads: SRUN_CPUS_PER_TASK up to 23.02, SLURM_CPUS_PER_TASK from 23.11 on."""
        name = "SLURM_CPUS_PER_TASK" if self.version >= (23, 11) else "SRUN_CPUS_PER_TASK"
        value = environ.get(name, "")
        return int(value) if value.isdigit() and int(value) else None


def cluster_name(environ: Mapping[str, str]) -> str:
    """ClusterName of the cluster that Slurm's commands address. Raises UnavailableError if Slurm does not answer."""
    return environ.get("SLURM_CLUSTER_NAME") or (read_cluster_defaults() or {}).get("ClusterName") \
        or SlurmConfig.query().cluster_name


def start_config_query() -> Callable[[], SlurmConfig]:
    """Start to query the configuration; the returned function waits for it, and returns or raises the same each time.

    Meanwhile this process can import modules.
    """
    wait = process.start_command(["scontrol", "show", "config"])
    return functools.cache(lambda: SlurmConfig.from_scontrol(wait().checked_stdout()))


@dataclass(frozen=True)
class PlugstackLine:
    """A plugin line of plugstack.conf: location, whether jobs fail without the plugin, path of the plugin."""

    location: str
    required: bool
    path: str


def find_plugin_line(file: str, plugin_dirs: Sequence[str], depth: int = _MAX_INCLUDE_DEPTH) -> PlugstackLine | None:
    """The first line that names slurmdl's plugin, in plugstack.conf (spank(8)) or an included file, or None.

    Raises InputError if a file cannot be read. A plugin without a directory is searched in `plugin_dirs`, Slurm's
    PluginDir.
    """
    import glob

    if not os.path.lexists(file):
        return None
    try:
        with open(file, "rb") as opened:
            chunks = _LINE_PATTERN.findall(opened.read())
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror})", file) from error
    for number, chunk in enumerate(chunks, 1):
        words = _WORD_PATTERN.findall(os.fsdecode(re.split(b"[#\0]", chunk)[0]))
        if len(words) < 2 or words[0] not in ("required", "optional", "include"):
            continue
        if words[0] == "include" and depth:
            pattern = os.path.join(os.path.dirname(file), words[1])
            included = (find_plugin_line(path, plugin_dirs, depth - 1) for path in sorted(glob.glob(pattern)))
            if line := next(filter(None, included), None):
                return line
        elif words[0] != "include" and os.path.basename(words[1]).rstrip() == _PLUGIN_FILE:
            candidates = (os.path.join(directory, words[1]) for directory in plugin_dirs)
            path = words[1] if os.path.isabs(words[1]) else next(filter(os.path.exists, candidates), words[1])
            return PlugstackLine(f"{file}:{number}", words[0] == "required", path)
    return None
