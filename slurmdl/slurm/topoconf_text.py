"""The YAML of `scontrol show topoconf` in text that holds other output, too."""

from __future__ import annotations

import re
from collections.abc import Sequence

#: a shell prompt, with or without a command
PROMPT_PATTERN = (r"(?:\[[^\]]*\]|[^\s=]*)[$#%>]"
                  r"(?:\s*$| *(?:\S*/)?(?:scontrol|sinfo|squeue|sudo|ssh|cat|date|echo)(?:\s|$))")
TOPOCONF_BEGIN = re.compile(r"""(-\s+)?["']?topology["']?\s*:""")
#: the YAML ends before the next output or prompt
_END = re.compile(rf"scontrol:|\w+\s*=|\.\.\.|[a-zA-Z ]+\.?$|{PROMPT_PATTERN}")


def find_topoconf(lines: Sequence[str]) -> tuple[int, int]:
    """Return the range of lines with the YAML of `show topoconf`; an empty one if there is none."""
    begin = next((i for i, line in enumerate(lines) if TOPOCONF_BEGIN.match(line)), len(lines))
    return begin, next((i for i in range(begin, len(lines)) if _END.match(lines[i])), len(lines))
