"""Nodes, partitions and reservations as `scontrol show` prints them, of the running cluster or in saved text.

Saved text may also have tables of sinfo, whose states replace those of `scontrol show nodes`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from slurmdl.cluster.snapshot import (
    MAX_NUMBER,
    NULL_VALUES,
    ClusterSnapshot,
    IntArray,
    Node,
    NodeProfile,
    Partition,
    Reservation,
    parse_gres,
)
from slurmdl.errors import InputError, OnError, raise_error
from slurmdl.slurm import hostlist
from slurmdl.slurm.output import NODE_COLUMNS, STATE_COLUMNS, SinfoTable, SlurmOutput, split_output
from slurmdl.text import pluralize

#: KEY=VALUE at the beginning of the line or after a blank. Values with blanks (OS, Reason, Comment, Extra) are not
#: used, and free text comes after all used keys.
_KEY_VALUE = re.compile(r"(?:^| )(\w+)=([^ ]*)")
_STATE_SUFFIXES = "*~#!%$@+^-"
#: a field of the last line of a record: a record without it is cut off if others have it
_LAST_FIELDS = {"NodeName": " CfgTRES=", "PartitionName": " MaxMemPer", "ReservationName": " State="}

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
_MIN_CUT_CHARS = 6  # narrowest column of states in sinfo's own formats
_CUT_MEMORY_DIGITS = 6  # the width of MEMORY in `sinfo -N -l`, which cuts off the other digits
_MAX_LISTED_NAMES = 4 * hostlist.MAX_NAMES  # in all rows: a node may be in several partitions and tables
_EMPTY_CELLS = ("", "none", *NULL_VALUES)
_FEATURE_COLUMNS = ("ACTIVE_FEATURES", "AVAIL_FEATURES", "FEATURES")


def parse_snapshot(text: str) -> ClusterSnapshot:
    """Parse the output of the running cluster; see `read_cluster`."""
    return read_cluster(split_output(text))


def read_cluster(output: SlurmOutput, on_error: OnError = raise_error,
                 on_warning: Callable[[str], None] | None = None) -> ClusterSnapshot:
    """Return the snapshot in the output of `scontrol -d show nodes`, `show partitions` and so on, and of sinfo.

    Records have one line each (-o) or several; the first of duplicate node records counts. `show config` provides the
    cluster's name and the default memory of jobs. The states of tables of sinfo replace those of scontrol.

    Args:
        on_error: gets each record without State or its last fields (cut off, or other text), and each malformed
            hostlist; the record is skipped if it returns.
        on_warning: gets the assumptions for what saved text may lack; None for the output of the running cluster.
    """
    nodes, partitions, records = (_complete_records(output, key, on_error) for key in _LAST_FIELDS)
    reservations = []
    for index, line in records:
        fields = _parse_fields(line)
        try:
            reservations.append(Reservation(fields["ReservationName"],
                                            tuple(hostlist.expand_hostlist(fields.get("Nodes", ""))),
                                            fields.get("State") == "ACTIVE"))
        except InputError as error:
            on_error(output.error(index, line, str(error)))
    lines = [line for _, line in nodes]
    snapshot = _build_snapshot(_with_gres_used(lines, output.file, on_warning) if on_warning else lines,
                               [_parse_partition(line, output.config) for _, line in partitions], reservations,
                               output.config.get("ClusterName", ""))
    if not output.tables or not on_warning:
        return snapshot
    return _read_sinfo_tables(output, on_error, on_warning).merge_over(snapshot)


def read_comments(output: SlurmOutput) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield name, and Comment and Extra, of each node; these two may have blanks and are the last fields."""
    for _, record in output.records["NodeName"]:
        comment, extra = (value if found else "" for _, found, value in map(
            record.rpartition, (" Comment=", " Extra=")))
        name = record.partition(" ")[0].removeprefix("NodeName=")
        yield name, (comment.partition(" Extra=")[0].strip(), extra.strip())


def _complete_records(output: SlurmOutput, key: str, on_error: OnError) -> list[tuple[int, str]]:
    """Return the records of a key that have a State, without a last one of saved text that is cut off."""
    records, last_field = output.records[key], _LAST_FIELDS[key]
    if output.file and len(records) > 1 and last_field in records[0][1] and last_field not in records[-1][1]:
        on_error(output.error(*records[-1], "the record is cut off"))
        records = records[:-1]
    complete = []
    for index, line in records:
        if " State=" in line:
            complete.append((index, line))
        else:
            on_error(output.error(index, line, "the record has no State; expected the unchanged output of `scontrol "
                                               "-d show nodes`, `show partitions` or `show reservations`"))
    return complete


def _build_snapshot(lines: Sequence[str], partitions: Sequence[Partition],
                    reservations: Sequence[Reservation], name: str) -> ClusterSnapshot:
    """Return the snapshot of node records of one line each; the first of duplicate nodes counts.

    The arrays are built column by column; each distinct text is parsed once.
    """
    line_of_name: dict[str, str] = {}
    for line in lines:
        line_of_name.setdefault(line.partition(" ")[0].removeprefix("NodeName="), line)
    lines = list(line_of_name.values())
    profiles: dict[tuple[str, ...], int] = {}
    profile_index = [profiles.setdefault(texts, len(profiles)) for texts in zip(
        *(_record_column(lines, key) for key in ("State", "ActiveFeatures", "Gres", "GresUsed", "Partitions")),
        strict=True)]

    def numbers(key: str) -> IntArray:
        texts = _record_column(lines, key)
        parsed = {text: _parse_number(text) for text in set(texts)}
        return np.fromiter(map(parsed.__getitem__, texts), np.int64, len(texts))

    cpus = numbers("CPUEfctv")
    if not cpus.all():
        cpus = np.where(cpus > 0, cpus, numbers("CPUTot"))
    memory = np.maximum(0, numbers("RealMemory") - numbers("MemSpecLimit"))
    return ClusterSnapshot(
        tuple(line_of_name), np.array(profile_index, np.int32),
        tuple(NodeProfile(*_parse_state(state), _split_list(features), _split_list(partitions), _gres_items(gres),
                          _gres_items(gres_used))
              for state, features, gres, gres_used, partitions in profiles), cpus,
        np.maximum(0, cpus - numbers("CPUAlloc")), memory, np.maximum(0, memory - numbers("AllocMem")),
        numbers("Weight"), tuple(partitions), tuple(reservations), name)


def _record_column(lines: Sequence[str], key: str) -> list[str]:
    """Return the value of one key in each record of one line, "" if absent; the first key of a record is none."""
    prefix = f" {key}="
    return [line.partition(prefix)[2].partition(" ")[0] for line in lines]


def _with_gres_used(lines: list[str], file: str, on_warning: Callable[[str], None]) -> list[str]:
    """Return node records with GresUsed, which `scontrol show nodes` has with -d only.

    It follows from AllocTRES if the cluster counts the resource (AccountingStorageTRES). Otherwise a node in use has
    no free resources of this kind.
    """
    result, from_tres, assumed = list(lines), 0, 0
    # GresUsed is before State; after it, a reason may hold the same words
    for i in [i for i, line in enumerate(lines) if line.find(" GresUsed=", 0, line.find(" State=")) < 0]:
        line, _, rest = lines[i].partition(" State=")
        gres, state, configured, allocated = (_record_column([lines[i]], key)[0]
                                              for key in ("Gres", "State", "CfgTRES", "AllocTRES"))
        if gres in ("", "(null)"):
            continue
        used, is_assumed = _gres_used(gres, state, configured, allocated)
        from_tres, assumed = from_tres + (not is_assumed), assumed + is_assumed
        result[i] = f"{line} GresUsed={used} State={rest}"
    if from_tres:
        on_warning(f"{file}: {pluralize(from_tres, 'node')} without GresUsed (scontrol without -d); used generic "
                   "resources are those of AllocTRES")
    if assumed:
        on_warning(f"{file}: {pluralize(assumed, 'node')} without GresUsed (scontrol without -d), or the same in "
                   "CfgTRES; nodes in use count as without free generic resources")
    return result


def _gres_used(gres: str, state: str, configured: str, allocated: str) -> tuple[str, bool]:
    """Return the value of GresUsed, and whether it is an assumption."""
    counted = dict(part.partition("=")[::2] for part in allocated.split(",") if part.startswith("gres/"))
    total = parse_gres(gres)
    is_in_use = any(flag.startswith(("ALLOC", "MIX", "COMPLETING")) for flag in state.split("+"))
    used: list[str] = []
    is_assumed = False
    for kind in dict.fromkeys(name.partition(":")[0] for name in total):
        names = [name for name in total if name.partition(":")[0] == kind]
        of_kind = counted.get(f"gres/{kind}", "0")
        if all(f"gres/{name}=" in configured for name in names):
            used += [f"{name}:{counted.get(f'gres/{name}', '0')}" for name in names]
        elif f"gres/{kind}=" in configured and (len(names) == 1 or of_kind == "0"):
            used += [f"{name}:{of_kind}" for name in names]
        else:
            is_assumed = True
            used += [f"{name}:{total[name] if is_in_use else 0}" for name in names]
    return ",".join(used), is_assumed


def _parse_fields(line: str) -> dict[str, str]:
    """Return values by key. The first of duplicate keys counts: `Reason=broken State=IDLE` has no state."""
    fields: dict[str, str] = {}
    for key, value in _KEY_VALUE.findall(line):
        fields.setdefault(key, "" if value in NULL_VALUES else value)
    return fields


# many profiles have the same texts
@functools.cache
def _parse_state(text: str) -> tuple[tuple[str, ...], bool]:
    parts = tuple(part.rstrip(_STATE_SUFFIXES) for part in text.split("+") if part) or ("UNKNOWN",)
    return parts, "*" not in text and "NOT_RESPONDING" not in parts


@functools.cache
def _gres_items(text: str) -> tuple[tuple[str, int], ...]:
    return tuple(parse_gres(text).items())


def _parse_partition(line: str, config: dict[str, str]) -> Partition:
    """Parse a record of one line; `config` has the cluster's DefMemPerCPU and DefMemPerNode."""
    fields = _parse_fields(line)
    # UNLIMITED: the cluster's default applies
    limits = {key: value for key, value in fields.items() if key.startswith("DefMemPer") and value.isdigit()}
    default = limits or config
    # Slurm 26.05 has Exclusive=NODE next to OverSubscribe=NO
    oversubscribe = "EXCLUSIVE" if fields.get("Exclusive") == "NODE" else fields.get("OverSubscribe", "NO")
    return Partition(fields["PartitionName"], fields.get("Default") == "YES", fields.get("State", "UP"),
                     oversubscribe, _parse_number(default.get("DefMemPerCPU", "")) or None,
                     _parse_number(default.get("DefMemPerNode", "")) or None, fields.get("Topology", ""),
                     _parse_number(fields.get("PriorityTier", "1")))


@functools.cache
def _split_list(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word and word not in NULL_VALUES)


def _parse_number(text: str) -> int:
    match = re.match(r"[0-9]{1,15}", text)
    return min(MAX_NUMBER, int(match[0])) if match else 0


@dataclass
class _SinfoNodes:
    """Nodes and partitions of all tables of a text, by name; the first row of a node gives all but partitions."""

    nodes: dict[str, Node] = field(default_factory=dict)
    partitions: dict[str, Partition] = field(default_factory=dict)
    names_left: int = _MAX_LISTED_NAMES

    def merge_over(self, snapshot: ClusterSnapshot) -> ClusterSnapshot:
        """Return the snapshot with the states of these nodes, and with the nodes that it lacks.

        Unallocated resources are kept if they agree with the new state; else the node counts as a whole.
        """
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


def _read_sinfo_tables(output: SlurmOutput, on_error: OnError, on_warning: Callable[[str], None]) -> _SinfoNodes:
    """Return the nodes of all tables; `on_error` and `on_warning` as of `read_cluster`."""
    result = _SinfoNodes()
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

    def __init__(self, table: SinfoTable, result: _SinfoNodes) -> None:
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
        if state_text == "n/a" or node_list in _EMPTY_CELLS:
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
        allocated = cells.get("ALLOCMEM", "") if count == 1 else ""
        used_memory = _parse_number(allocated) if allocated[:1].isdigit() else \
            0 if free_cpus or memory == MAX_NUMBER else memory
        gres = parse_gres(cells.get("GRES", ""))
        gres_used = parse_gres(cells["GRES_USED"]) if "GRES_USED" in cells else {} if is_free else gres
        features = cells.get(self.features, "")
        partition = cells.get("PARTITION", "").rstrip("*")
        return Node("", state, responding, cpus, free_cpus, memory, max(0, memory - used_memory),
                    tuple(word for word in features.split(",") if word not in _EMPTY_CELLS),
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


def _with_state(node: Node, observed: Node) -> Node:
    """Return the node with the state of another record; see `_SinfoNodes.merge_over`."""
    base = observed.state[:1]
    flags = dict.fromkeys([*observed.state[1:], *(flag for flag in node.state[1:] if flag in _KEPT_FLAGS)])
    node = replace(node, state=(*base, *flags), responding=observed.responding)
    is_partly_used = 0 < node.cpus_unallocated < node.cpus
    if base == ("IDLE",) and node.cpus_unallocated != node.cpus:
        return replace(node, cpus_unallocated=node.cpus, memory_unallocated=node.memory, gres_used={})
    if (base == ("MIXED",) and not is_partly_used) or (base == ("ALLOCATED",) and node.cpus_unallocated):
        return replace(node, cpus_unallocated=0, memory_unallocated=0, gres_used=node.gres)
    return node
