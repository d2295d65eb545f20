"""Records: what is written is read back, and errors name file and key."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Annotated, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurmdl import records
from slurmdl.bench.spec import Spec
from slurmdl.cluster.snapshot import _Contents as Contents
from slurmdl.errors import InputError
from slurmdl.health.exclusions import Exclusion
from slurmdl.launch.srun import Outcome
from slurmdl.launch.submission_record import SubmissionRecord
from slurmdl.links.link_scores import LinkScore, LinkScores
from slurmdl.links.probe.pair_probe import PairMeasurement, ProbeConfig
from slurmdl.links.probe.tcp_task import LeaderMessage, ProbeSchedule


@dataclass(frozen=True)
class Port:
    speed: float
    up: bool = True


@dataclass(frozen=True)
class Host:
    name: records.Line
    ports: Mapping[str, Port] = field(default_factory=dict)
    lanes: Annotated[int, records.Valid(lambda number: number > 0, "an integer above 0")] | None = None
    ends: Sequence[tuple[int, int]] = ()
    main: Port | None = None
    backup: str | Port = ""


HOST = Host("n1", {"a": Port(1.5, False)}, 4, ((1, 2), (3, 4)), Port(2.0), Port(3.0))


def test_round_trip() -> None:
    for host in (HOST, Host("n2"), Host("n3", backup="b")):
        assert records.from_json(Host, json.loads(json.dumps(records.to_json(host)))) == host
        assert records.from_json(Host, records.to_json(host, 3), version=3) == host
    assert records.from_json(Host, {"name": "n1", "main": {"speed": 2}}).main == Port(2.0)


@pytest.mark.parametrize(("change", "message"), [
    ({"name": None}, "hosts.json: name None: expected a string of one line"),
    ({"name": "a\nb"}, "hosts.json: name 'a\\nb': expected a string of one line"),
    ({"nmae": 1}, "hosts.json: unknown key 'nmae'; expected name, ports, lanes, ends, main, backup"),
    ({"ports": []}, "hosts.json: ports: expected an object"),
    ({"ports": {"b": {}}}, "hosts.json: ports: b: speed is missing"),
    ({"ports": {"b": {"speed": True}}}, "hosts.json: ports: b: speed True: expected a number"),
    ({"ports": {"b": {"speed": float("nan")}}}, "hosts.json: ports: b: speed nan: expected a number"),
    ({"ports": {"b": {"speed": 1, "up": 1}}}, "hosts.json: ports: b: up 1: expected true or false"),
    ({"lanes": 0}, "hosts.json: lanes 0: expected an integer above 0"),
    ({"lanes": 1.0}, "hosts.json: lanes 1.0: expected an integer above 0"),
    ({"ends": 1}, "hosts.json: ends 1: expected a list"),
    ({"ends": [[1, 2], [1]]}, "hosts.json: ends[1] [...]: expected a list of 2"),
    ({"ends": [[1, "2"]]}, "hosts.json: ends[0][1] '2': expected an integer"),
    ({"main": 5}, "hosts.json: main: expected an object"),
    ({"backup": None}, "hosts.json: backup None: expected a string"),
    ({"backup": {"speed": "1"}}, "hosts.json: backup: speed '1': expected a number"),
    ({"version": 2}, "hosts.json: version 2; expected 3"),
])
def test_error_names_file_and_key(change: dict[str, object], message: str) -> None:
    with pytest.raises(InputError) as error:
        records.from_json(Host, {**records.to_json(HOST, 3), **change}, "hosts.json", version=3)
    assert str(error.value) == message


def test_data_that_is_no_object() -> None:
    with pytest.raises(InputError, match=r"^expected an object$"):
        records.from_json(Host, [], version=3)


def values(annotation: Any) -> st.SearchStrategy[Any]:
    """Valid values of an annotation."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    scalars = {str: st.text(max_size=3), bool: st.booleans(), int: st.integers(0, 9), float: st.floats(0.125, 8)}
    if annotation is type(None):
        return st.none()
    if annotation in scalars:
        return scalars[annotation]
    if is_dataclass(annotation):
        hints = typing.get_type_hints(annotation, include_extras=True)
        return st.builds(annotation, **{each.name: values(hints[each.name]) for each in fields(annotation)})
    if origin is Annotated:
        return values(arguments[0]).filter(arguments[1].is_valid)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*map(values, arguments))
    if origin in (tuple, Sequence):
        fixed = origin is tuple and arguments[-1] is not ...
        return st.tuples(*map(values, arguments)) if fixed else st.lists(values(arguments[0]), max_size=2).map(tuple)
    return st.dictionaries(st.text(max_size=2), values(arguments[1]), max_size=2)


@pytest.mark.parametrize("record_type", [
    Contents, LeaderMessage, LinkScore, LinkScores, Outcome, PairMeasurement, Exclusion, ProbeConfig, ProbeSchedule,
    Spec, SubmissionRecord], ids=lambda record_type: record_type.__name__)
@settings(max_examples=10, derandomize=True)
@given(st.data())
def test_every_record_is_read_back(record_type: type, data: st.DataObject) -> None:
    """Except Plan, whose fields depend on each other."""
    record = data.draw(values(record_type))
    written = json.loads(json.dumps(records.to_json(record)))
    assert records.to_json(records.from_json(record_type, written)) == records.to_json(record)
    with pytest.raises(InputError, match=r"^file: unknown key 'no such'; expected "):
        records.from_json(record_type, {**written, "no such": 1}, "file")
    required = [each.name for each in fields(record_type) if each.default is each.default_factory is MISSING]
    for name in required[:1]:
        with pytest.raises(InputError, match=rf"^file: {name} is missing$"):
            records.from_json(record_type, {key: value for key, value in written.items() if key != name}, "file")
