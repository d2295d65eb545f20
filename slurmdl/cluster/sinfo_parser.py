"""Nodes and partitions in tables of sinfo; states of a table replace those of `scontrol show nodes`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from slurmdl.cluster.snapshot import MAX_NUMBER, ClusterSnapshot, Node, Partition, parse_gres
from slurmdl.errors import InputError, OnError
from slurmdl.slurm import hostlist
from slurmdl.slurm.output import NODE_COLUMNS, STATE_COLUMNS, SinfoTable, SlurmOutput
from slurmdl.text import pluralize

#: sinfo's short and long names of states -> Slurm's base state and flags, as `scontrol show nodes` gives them. Where
#: a name hides whether the node runs jobs, a node that may run some counts as allocated.
_STATES: dict[str, tuple[str, ...]] = {
    "ALLOC": ("ALLOCATED",), "MIX": ("MIXED",), "UNK": ("UNKNOWN",), "FUTR": ("FUTURE",),
    "COMP": ("ALLOCATED", "COMPLETING"), "COMPLETING": ("ALLOCATED", "COMPLETING"),
    "DRAIN": ("IDLE", "DRAIN"), "DRAINED": ("IDLE", "DRAIN"), "DRNG": ("ALLOCATED", "DRAIN"),
    "DRAINING": ("ALLOCATED", "DRAIN"), "FAIL": ("IDLE", "FAIL"), "FAILG": ("ALLOCATED", "FAIL"),
    "FAILING": ("ALLOCATED", "FAIL"), "MAINT": ("IDLE", "MAINTENANCE"), "RESV": ("IDLE", "RESERVED"),
    "RESERVED": ("IDLE", "RESERVED"), "PLND": ("IDLE", "PLANNED"), "PLANNED": ("IDLE", "PLANNED"),
    "BLOCK": ("IDLE", "BLOCKED"), "BLOCKED": ("IDLE", "BLOCKED"), "BOOT": ("DOWN", "REBOOT_ISSUED"),
    "REBOOT": ("DOWN", "REBOOT_ISSUED"), "INVAL": ("IDLE", "INVALID_REG"),
    "POW_DN": ("IDLE", "POWERING_DOWN"), "POW_UP": ("IDLE", "POWERING_UP")}
_BASE_STATES = ("IDLE", "MIXED", "ALLOCATED", "DOWN", "UNKNOWN", "FUTURE", "ERROR")
_FLAGS = ("CLOUD", "COMPLETING", "DRAIN", "DYNAMIC_FUTURE", "DYNAMIC_NORM", "EXTERNAL", "INVALID_REG", "FAIL",
          "MAINTENANCE", "POWER_DOWN", "POWER_UP", "POWERED_DOWN", "REBOOT_REQUESTED", "REBOOT_ISSUED", "RESERVED",
          "RESUME", "NOT_RESPONDING", "PLANNED", "BLOCKED", "POWERING_UP", "POWERING_DOWN", "UNDRAIN")
#: mark at the end of a state -> flag (sinfo(1)); `*`: the node does not respond
_MARKS = {"~": "POWERED_DOWN", "#": "POWERING_UP", "%": "POWERING_DOWN", "!": "POWER_DOWN", "$": "MAINTENANCE",
          "@": "REBOOT_REQUESTED", "^": "REBOOT_ISSUED", "-": "PLANNED", "+": "COMPLETING", "*": "NOT_RESPONDING"}
_PARTITION_STATES = {"down": "DOWN", "drain": "DRAIN", "inact": "INACTIVE"}
_KEPT_FLAGS = ("CLOUD", "DYNAMIC_NORM")  # of `scontrol show nodes`: sinfo does not print them
_CPU_COUNTS = re.compile(r"(\d{1,9})/(\d{1,9})/(\d{1,9})/(\d{1,9})")
_NUMBER = re.compile(r"\d{1,12}")
_MIN_CUT_CHARS = 6  # narrowest column of states in sinfo's own formats
_CUT_MEMORY_DIGITS = 6  # the width of MEMORY in `sinfo -N -l`, which cuts off the other digits
_MAX_LISTED_NAMES = 4 * hostlist.MAX_NAMES  # in all rows: a node may be in several partitions and tables
_NULL_VALUES = ("", "(null)", "N/A", "n/a", "none")
_FEATURE_COLUMNS = ("ACTIVE_FEATURES", "AVAIL_FEATURES", "FEATURES")


@dataclass
class SinfoNodes:
    """Nodes and partitions of all tables of a text, by name; the first row of a node gives all but partitions."""

    nodes: dict[str, Node] = field(default_factory=dict)
    partitions: dict[str, Partition] = field(default_factory=dict)
    names_left: int = _MAX_LISTED_NAMES

    def merge_over(self, snapshot: ClusterSnapshot) -> ClusterSnapshot:
        """Return the snapshot with the states of these nodes, and with the nodes that it lacks.

        Unallocated resources are kept if they agree with the new state; else the node counts as a whole.
        """
        if not snapshot.names:
            return ClusterSnapshot.from_nodes(self.nodes.values(), snapshot.partitions or [*self.partitions.values()],
                                              snapshot.reservations, snapshot.name)
        merged = {node.name: node for node in snapshot.nodes}
        for name, node in self.nodes.items():
            merged[name] = _with_state(merged[name], node) if name in merged else node
        return ClusterSnapshot.from_nodes(merged.values(), snapshot.partitions or [*self.partitions.values()],
                                          snapshot.reservations, snapshot.name)


def parse_sinfo_state(text: str) -> tuple[tuple[str, ...], bool] | None:
    """Return base state and flags, and whether the node responds, of e.g. `idle~`, `DRAIN+IDLE`; None if unknown."""
    text = text.upper()
    words = text.rstrip("".join(_MARKS))
    marks = [_MARKS[mark] for mark in text[len(words):]]
    states: list[str] = []
    for word in words.split("+"):
        bare = word.rstrip("".join(_MARKS))
        marks += [_MARKS[mark] for mark in word[len(bare):]]
        bare = _complete_name(bare)
        if bare in _STATES and not (bare in _FLAGS and "+" in words):
            states += _STATES[bare]
        elif bare in _BASE_STATES or bare in _FLAGS:
            states.append(bare)
        else:
            return None
    flags = [state for state in dict.fromkeys([*states, *marks]) if state not in _BASE_STATES]
    base = [state for state in states if state in _BASE_STATES]
    responding = "NOT_RESPONDING" not in flags
    # without a base state, the node counts as not usable
    return ((base or ["UNKNOWN"])[0], *(flag for flag in flags if flag != "NOT_RESPONDING")), responding


def _complete_name(name: str) -> str:
    """Complete the name of a state that sinfo cut to the width of its column, e.g. POWERED_DOW."""
    names = {*_STATES, *_BASE_STATES, *_FLAGS}
    matches = [known for known in names if known.startswith(name)]
    return matches[0] if name not in names and len(matches) == 1 and len(name) >= _MIN_CUT_CHARS else name


def read_sinfo_tables(output: SlurmOutput, on_error: OnError, on_warning: Callable[[str], None]) -> SinfoNodes:
    """Return the nodes of all tables; `on_error` gets rows that are malformed.

    `on_warning` gets what a table leaves open, and what is assumed instead.
    """
    result = SinfoNodes()
    for table in output.tables:
        reader = _TableReader(table, result)
        for line, text in table.rows:
            try:
                reader.read_row(text)
            except InputError as error:
                on_error(InputError(str(error), output.file, line, text))
        if assumed := reader.assumptions():
            on_warning(f"{output.file}:{table.line}: table of sinfo: {'; '.join(assumed)}")
    return result


class _TableReader:
    """Reader of one table; adds its nodes to `result`."""

    def __init__(self, table: SinfoTable, result: SinfoNodes) -> None:
        self.table, self.result = table, result
        self.assumed_busy = 0  # nodes in use whose free CPUs are not known
        self.has_cut_memory = False
        self.features = next((column for column in _FEATURE_COLUMNS
                              if column in table.columns and column not in table.cut_columns), "")

    def read_row(self, text: str) -> None:
        """Add the nodes of one row; InputError if it is malformed."""
        cells = self.table.row_cells(text)
        if cells is None:
            if "n/a" in text.split():  # a partition without nodes
                return
            raise InputError(f"cannot be assigned to the columns {' '.join(self.table.columns)}")
        state_text = next(cells[column] for column in STATE_COLUMNS if column in cells)
        node_list = next(cells[column] for column in NODE_COLUMNS if column in cells)
        if state_text == "n/a" or node_list in _NULL_VALUES:
            return
        state = parse_sinfo_state(state_text)
        if state is None:
            raise InputError(f"state {state_text!r} is not known; expected for example idle, mixed, drained*")
        names = hostlist.expand_hostlist(node_list, min(self.result.names_left, hostlist.MAX_NAMES))
        self.result.names_left -= len(names)
        partition = cells.get("PARTITION", "")
        name = partition.rstrip("*")
        if name:
            state_of_partition = _PARTITION_STATES.get(cells.get("AVAIL", ""), "UP")
            self.result.partitions.setdefault(name, Partition(name, partition.endswith("*"), state_of_partition))
        model = None
        for node_name in names:
            known = self.result.nodes.get(node_name)
            if known is None:
                model = model or self._node(cells, *state, len(names))
                self.result.nodes[node_name] = replace(model, name=node_name)
            elif name and name not in known.partitions:
                self.result.nodes[node_name] = replace(known, partitions=(*known.partitions, name))

    def _node(self, cells: Mapping[str, str], state: tuple[str, ...], responding: bool, count: int) -> Node:
        """Return the node of a row with `count` nodes of the same state, without its name."""
        is_free = state[:1] not in (("ALLOCATED",), ("MIXED",))
        cpus, free_cpus = _parse_cpus(cells, is_free, count)
        if free_cpus is None:
            self.assumed_busy += count
            free_cpus = 0
        memory = _parse_number(cells.get("MEMORY", "")) or MAX_NUMBER
        self.has_cut_memory |= "TMP_DISK" in cells and len(cells.get("MEMORY", "")) == _CUT_MEMORY_DIGITS
        used_memory = _parse_number(cells.get("ALLOCMEM", "")) if count == 1 else None
        if used_memory is None:
            used_memory = 0 if free_cpus or memory == MAX_NUMBER else memory
        gres = parse_gres(cells.get("GRES", ""))
        gres_used = parse_gres(cells["GRES_USED"]) if "GRES_USED" in cells else {} if is_free else gres
        features = cells.get(self.features, "")
        partition = cells.get("PARTITION", "").rstrip("*")
        return Node("", state, responding, cpus, free_cpus, memory, max(0, memory - used_memory),
                    tuple(word for word in features.split(",") if word not in _NULL_VALUES),
                    (partition,) if partition else (), gres, gres_used, _parse_number(cells.get("WEIGHT", "")) or 1)

    def assumptions(self) -> list[str]:
        """Describe what the table leaves open, and what is assumed instead."""
        columns = self.table.columns
        assumed = []
        if not {"CPUS", "CPUS(A/I/O/T)"} & {*columns}:
            assumed.append("no column CPUS, each node counts as 1 CPU")
        if self.assumed_busy:
            assumed.append(f"free CPUs of {pluralize(self.assumed_busy, 'mixed node')} not known, none is assumed")
        if "MEMORY" not in columns:
            assumed.append("no column MEMORY, any memory is assumed to fit")
        if self.has_cut_memory:
            assumed.append(f"MEMORY with {_CUT_MEMORY_DIGITS} digits is used as printed, but may lack digits")
        if "PARTITION" not in columns:
            assumed.append("no column PARTITION, partitions are not known")
        if self.table.rows and not self.features and {*_FEATURE_COLUMNS} & self.table.cut_columns:
            assumed.append("features are cut off and not used")
        if "GRES" in columns and "GRES_USED" not in columns:
            assumed.append("no column GRES_USED, nodes in use count as without free generic resources")
        return assumed


def _parse_cpus(cells: Mapping[str, str], is_free: bool, count: int) -> tuple[int, int | None]:
    """Return CPUs per node and the unallocated ones; None if a mixed node leaves them open."""
    match = _CPU_COUNTS.fullmatch(cells.get("CPUS(A/I/O/T)", ""))
    is_mixed = "mix" in next(cells[column] for column in STATE_COLUMNS if column in cells).lower()
    if match:  # sums over the nodes of the row
        allocated, total = int(match[1]), int(match[4])
        cpus = total // count
        if count == 1 or allocated in (0, total):
            return cpus, max(0, total - allocated) // count
        return cpus, None if is_mixed else cpus if is_free else 0
    cpus = _parse_number(cells.get("CPUS", "")) or 1  # `32+` is the smallest number of several nodes
    return cpus, cpus if is_free else None if is_mixed else 0


def _parse_number(text: str) -> int | None:
    match = _NUMBER.match(text)
    return min(MAX_NUMBER, int(match[0])) if match else None


def _with_state(node: Node, observed: Node) -> Node:
    """Return the node with the state of another record; see `SinfoNodes.merge_over`."""
    base = observed.state[:1]
    flags = dict.fromkeys([*observed.state[1:], *(flag for flag in node.state[1:] if flag in _KEPT_FLAGS)])
    node = replace(node, state=(*base, *flags), responding=observed.responding)
    is_partly_used = 0 < node.cpus_unallocated < node.cpus
    if base == ("IDLE",) and node.cpus_unallocated != node.cpus:
        return replace(node, cpus_unallocated=node.cpus, memory_unallocated=node.memory, gres_used={})
    if (base == ("MIXED",) and not is_partly_used) or (base == ("ALLOCATED",) and node.cpus_unallocated):
        return replace(node, cpus_unallocated=0, memory_unallocated=0, gres_used=node.gres)
    return node
