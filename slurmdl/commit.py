"""The commit of this slurmdl: from git in a checkout, from the file that a build wrote in an installed package."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from slurmdl import __version__
from slurmdl.errors import UnavailableError
from slurmdl.slurm import process

#: written by setup.py (sdist, wheel) and tools/build-packages (deb, rpm); absent in a checkout
COMMIT_FILE = "COMMIT"


def find_commit(package: Path = Path(__file__).parent) -> str:
    """Abbreviated id of the commit of a package directory, "" if it is unknown.

    `, modified` follows the id if tracked files of the checkout have changed.
    """
    root = package.parent
    # only the checkout's own repository: an environment may lie in the checkout of another project
    if (root / ".git").exists():
        command = ["git", "--no-optional-locks", f"--git-dir={root / '.git'}", f"--work-tree={root}", "describe",
                   "--always", "--exclude=*", "--abbrev=10", "--dirty=, modified"]
        with suppress(UnavailableError):
            return process.check_output(command).strip()
    with suppress(OSError, UnicodeDecodeError):
        return (package / COMMIT_FILE).read_text(encoding="ascii").strip()
    return ""


def describe_version() -> str:
    """`VERSION (commit ID)`; `VERSION` if the commit is unknown."""
    commit = find_commit()
    return f"{__version__} (commit {commit})" if commit else __version__
