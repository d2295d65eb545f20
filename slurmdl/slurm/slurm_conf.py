"""Slurm's configuration: its files, the plugin's line in plugstack.conf, and the answer to `scontrol show config`.

Further, the process management interface (PMI) of the MPI in PATH, and srun's --mpi option for it.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slurmdl.errors import InputError, SlurmdlError
from slurmdl.slurm import process

if TYPE_CHECKING:
    from slurmdl.slurm.getopt import CommandLine

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
#: name of mpirun's file -> PMI
_PMI_BY_MPIRUN = {**dict.fromkeys(("orterun", "prterun", "mpirun.openmpi", "prte"), "pmix"),
                  **dict.fromkeys(("mpiexec.hydra", "mpirun.mpich", "mpiexec.mpich"), "pmi2")}


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


def detect_pmi(environ: Mapping[str, str]) -> str:
    """Return the PMI of the MPI in PATH: "pmix", "pmi2", or "" if there is no known MPI."""
    import shutil  # slow

    mpirun = shutil.which("mpirun", path=environ.get("PATH"))
    return _PMI_BY_MPIRUN.get(os.path.basename(os.path.realpath(mpirun)), "") if mpirun else ""


def mpi_type_option(line: CommandLine, get_slurm_config: Callable[[], SlurmConfig],
                    environ: Mapping[str, str]) -> list[str]:
    """Return srun's --mpi option for the MPI in PATH; with a wrong type every task is an MPI world of its own.

    The list is empty if the user chooses (--mpi, SLURM_MPI_TYPE) or the cluster's default is right.
    """
    pmi = "" if line.has_option("mpi") or "SLURM_MPI_TYPE" in environ else detect_pmi(environ)
    if not pmi:
        return []
    try:
        slurm_config = get_slurm_config()
        is_needed = slurm_config.has_pmi_plugin(pmi) and not slurm_config.mpi_default.startswith(pmi)
    except SlurmdlError:
        # srun lists its plugins without the controller
        result = process.run_command(["srun", "--mpi=list"], env=environ)
        is_needed = pmi in re.findall(r"\w+", result.stdout + result.stderr)
    return [f"--mpi={pmi}"] if is_needed else []


def pmix_hangs_across_components(get_slurm_config: Callable[[], SlurmConfig]) -> bool:
    """Whether `srun --mpi=pmix` can hang at the end of a step over several components of a heterogeneous job.

    Its threads, one per component, overwrite each other's PMIx agent (SchedMD ticket 16817, fixed in Slurm 24.11).
    """
    try:
        return get_slurm_config().version < (24, 11)
    except SlurmdlError:
        return True


def mpirun_has_ulfm(environ: Mapping[str, str]) -> bool:
    """Whether the mpirun in PATH is Open MPI 5.0 or newer, whose ranks can continue after the loss of a rank."""
    version = re.match(r"mpi\w+ \(Open MPI\) (\d+)", process.run_command(["mpirun", "--version"], env=environ).stdout)
    return version is not None and int(version[1]) >= 5


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
