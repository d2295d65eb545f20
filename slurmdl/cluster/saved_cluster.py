"""Nodes, partitions and reservations in saved text of `scontrol show nodes`, `show partitions` and so on, and sinfo.

A line that is not understood is a warning here; output of the running cluster (`scontrol_parser.parse_snapshot`)
must be complete.
"""

from __future__ import annotations

from collections.abc import Callable

from slurmdl.cluster import scontrol_parser
from slurmdl.cluster.scontrol_parser import parse_gres, record_column
from slurmdl.cluster.sinfo_parser import read_sinfo_tables
from slurmdl.cluster.snapshot import ClusterSnapshot, Partition, Reservation
from slurmdl.errors import InputError
from slurmdl.slurm.saved_output import LineProblems, SavedOutput, split_saved_output
from slurmdl.text import pluralize

#: a field of the last line of a record: a record without it is cut off if others have it
_LAST_FIELDS = {"NodeName": "CfgTRES=", "PartitionName": "MaxMemPer", "ReservationName": "State="}


def parse_saved_cluster(text: str, file: str, on_warning: Callable[[str], None]) -> ClusterSnapshot:
    """Return the snapshot in a saved text; one without nodes if none is understood.

    The states of tables of sinfo replace those of `scontrol show nodes`. `on_warning` gets each line that is not
    understood (at most a few), and each assumption.
    """
    output = split_saved_output(text)
    problems = LineProblems(file)
    for index, line in output.unknown:
        problems.add(output.line_number(index), line, "not understood")
    for key in _LAST_FIELDS:
        _drop_incomplete_records(output, key, problems)
    config = {key.strip(): value.strip() for key, _, value in (line.partition("=") for line in output.config)
              if key.startswith(scontrol_parser.CONFIG_KEYS)}
    partitions: list[Partition] = [scontrol_parser.parse_partition(line, config)
                                   for line in output.records["PartitionName"]]
    reservations: list[Reservation] = []
    for index, line in zip(output.record_lines["ReservationName"], output.records["ReservationName"], strict=True):
        try:
            reservations.append(scontrol_parser.parse_reservation(line))
        except InputError as error:
            problems.add(output.line_number(index), line, str(error))
    snapshot = scontrol_parser.build_snapshot(_with_gres_used(output.records["NodeName"], file, on_warning),
                                              partitions, reservations, config.get("ClusterName", ""))
    if output.tables:
        snapshot = read_sinfo_tables(output.tables, problems, on_warning).merge_over(snapshot)
    if snapshot.names:
        problems.report(on_warning)
    return snapshot


def _drop_incomplete_records(output: SavedOutput, key: str, problems: LineProblems) -> None:
    """Remove records that have no State or were cut off."""
    records, indices = output.records[key], output.record_lines[key]
    cut = output.drop_incomplete_record(key, _LAST_FIELDS[key])
    if cut:
        problems.add(output.line_number(cut[0]), cut[1], "the record is cut off")
    if all(" State=" in line for line in records):
        return
    kept = [i for i, line in enumerate(records) if " State=" in line]
    for i in {*range(len(records))} - {*kept}:
        problems.add(output.line_number(indices[i]), records[i], "the record has no State")
    records[:], indices[:] = [records[i] for i in kept], [indices[i] for i in kept]


def _with_gres_used(lines: list[str], file: str, on_warning: Callable[[str], None]) -> list[str]:
    """Return node records with GresUsed, which `scontrol show nodes` has with -d only.

    It follows from AllocTRES if the cluster counts the resource (AccountingStorageTRES). Otherwise a node in use has
    no free resources of this kind.
    """
    result, from_tres, assumed = list(lines), 0, 0
    # GresUsed is before State; after it, a reason may hold the same words
    for i in [i for i, line in enumerate(lines) if line.find(" GresUsed=", 0, line.find(" State=")) < 0]:
        line, _, rest = lines[i].partition(" State=")
        gres, state, configured, allocated = (record_column([lines[i]], key)[0]
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
