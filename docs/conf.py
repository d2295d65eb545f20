"""The documentation as a site: `make docs` writes build/docs. Sphinx with MyST renders the pages as GitHub does.

The pages are the Markdown files of the repository in their places. Links between them become links of the site; links
to other files, such as source code, become links to the repository.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from slurmdl import __version__  # noqa: E402

REPOSITORY = "https://github.com/slurmdl/slurmdl"
#: title of a group in the sidebar -> its pages
GROUPS = {
    "Use": ["placement", "launchers", "mesh", "binding", "health", "simulate", "reference", "glossary"],
    "Train": ["train", "library", "islands", "bench"],
    "Administer": ["admin", "topology", "links", "audit", "replay"],
    "Try": ["sandbox", "compose"],
    "Results": ["results", "benchmarks"],
}
PROJECT_PAGES = ["CONTRIBUTING", "CHANGELOG", "ROADMAP", "SECURITY", "spank/README"]

project = "slurmdl"
author = project_copyright = "the slurmdl developers"
version = release = __version__
extensions = ["myst_parser"]
root_doc = "README"
include_patterns = ["*.md", "docs/*.md", "spank/*.md"]
exclude_patterns = [".*", "build", "dist", "benchmarks", "slurmdl", "slurmdl.egg-info", "tests", "node_modules"]
myst_heading_anchors = 4
nitpicky = True
highlight_language = "text"

html_theme = "furo"
html_title = f"slurmdl {release}"
html_static_path = ["site/static"]
html_extra_path = ["site/index.html"]  # leads to README.html
html_css_files = ["slurmdl.css"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"source_repository": REPOSITORY, "source_branch": "main", "source_directory": ""}


def toctree(caption: str, pages: list[str]) -> str:
    return "\n".join(["", "```{toctree}", ":hidden:", f":caption: {caption}", "", *pages, "```", ""])


def link_to_repository(page: Path, text: str) -> str:
    """The text of a page, whose links to files that are no pages or pictures name the repository."""
    def replace(link: re.Match[str]) -> str:
        before, path, heading = link.groups()
        target = (page.parent / path).resolve()
        if target.suffix == ".md" or not target.exists():
            return link[0]  # Sphinx reports a missing page
        kind = "tree" if target.is_dir() else "blob"
        return f"{before}{REPOSITORY}/{kind}/main/{target.relative_to(ROOT)}{heading}"

    return re.sub(r"((?<!!)\[[^]]*\]\()(?!https?:|#)([^)#\s]+)([^)\s]*)", replace, text)


def prepare(app: object, name: str, content: list[str]) -> None:
    content[0] = link_to_repository(ROOT / f"{name}.md", content[0])
    if name == root_doc:
        content[0] += "".join(toctree(title, [f"docs/{page}" for page in pages]) for title, pages in GROUPS.items())
        content[0] += toctree("Project", PROJECT_PAGES)


def setup(app: object) -> None:
    app.connect("source-read", prepare)  # type: ignore[attr-defined]
