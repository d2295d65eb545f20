"""Reader of a file of link scores."""

from __future__ import annotations

import json

from slurmdl.errors import InputError
from slurmdl.network.model import LinkScores


def from_file(path: str) -> LinkScores:
    """The scores in a JSON file as `LinkScores.to_json` writes it; every key may be absent.

    Raises
    ------
    InputError : with the file, where it cannot be read or does not hold scores.
    """
    try:
        with open(path, encoding="utf-8") as file:
            return LinkScores.from_json(json.load(file))
    except OSError as error:
        raise InputError(f"cannot be read ({error.strerror})", file=path) from error
    except ValueError as error:
        raise InputError(f"is not JSON ({error})", file=path) from error
    except InputError as error:
        raise InputError(str(error), file=path) from error
