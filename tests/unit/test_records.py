"""Records: what is written is read back, and errors name file and key."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import pytest

from slurmdl import records
from slurmdl.errors import InputError


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
