"""The parts of a build that pyproject.toml cannot state: the commit in `slurmdl/COMMIT`, the license, the readme."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import setuptools
from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT))

from slurmdl.commit import COMMIT_FILE, find_commit  # noqa: E402

REPOSITORY = "https://github.com/slurmdl/slurmdl"


def write_commit(package: Path) -> None:
    if commit := find_commit():
        (package / COMMIT_FILE).unlink(missing_ok=True)  # may be a hard link to the source
        (package / COMMIT_FILE).write_text(f"{commit}\n")


class BuildWithCommit(build_py):
    def run(self) -> None:
        if not self.editable_mode:
            # without modules of an earlier build that no longer exist
            shutil.rmtree(Path(self.build_lib) / "slurmdl", ignore_errors=True)
        super().run()
        if not self.editable_mode:
            write_commit(Path(self.build_lib) / "slurmdl")


class SdistWithCommit(sdist):
    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        write_commit(Path(base_dir) / "slurmdl")


def link_to_repository(readme: str) -> str:
    """The README for a page elsewhere: relative links name the repository."""
    readme = re.sub(r"(!\[[^]]*\]\()(?!https?:|#)", rf"\1{REPOSITORY}/raw/main/", readme)
    return re.sub(r"((?<!!)\[[^]]*\]\()(?!https?:|#)", rf"\1{REPOSITORY}/blob/main/", readme)


# License-Expression (PEP 639) needs setuptools 77; Debian 12, for whose packages 66 is enough, has the older field
is_spdx = int(setuptools.__version__.partition(".")[0]) >= 77
setup(cmdclass={"build_py": BuildWithCommit, "sdist": SdistWithCommit},
      **{"license_expression" if is_spdx else "license": "Apache-2.0"},
      long_description=link_to_repository((ROOT / "README.md").read_text(encoding="utf-8")),
      long_description_content_type="text/markdown")
