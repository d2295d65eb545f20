"""The command line of `slurmdl srun`: srun's options, slurmdl's options and the program."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import dropwhile

from slurmdl import dl_options
from slurmdl.dl_options import DlOptions
from slurmdl.errors import UsageError, sort_by_similarity
from slurmdl.launch.rankmap_formats import FORMATS
from slurmdl.launch.submission_record import SubmissionRecord
from slurmdl.slurm import getopt, srun_options

STEP_STARTERS = ("srun", "mpirun")
_LONG_OPTIONS: dict[str, getopt.HasArg] = {**srun_options.LONG_OPTIONS, **dl_options.LONG_OPTIONS,
                                           **dict.fromkeys(srun_options.WRAPPER_OPTIONS, "required")}


@dataclass(frozen=True)
class SrunArgs:
    """A parsed command line.

    Attributes:
        srun_argv: the arguments without slurmdl's options.
        step_starter: one of STEP_STARTERS.
        map_format: one of rankmap_formats.FORMATS if only the rank map is printed, else "".
    """

    line: getopt.CommandLine
    srun_argv: tuple[str, ...]
    step_starter: str
    map_format: str
    settings: Mapping[str, str]

    @property
    def calls_plain_srun(self) -> bool:
        """Whether srun starts no step, or there is no program: srun handles both itself."""
        passthrough = any(self.line.has_option(name) for name in srun_options.PASSTHROUGH)
        return passthrough or self.line.last_value("mpi") == "list" or not (self.line.operands or self.map_format)

    @property
    def needs_map(self) -> bool:
        """Whether a plain srun cannot replace the mapped step."""
        return self.step_starter != "srun" or bool(self.map_format)

    @property
    def spans_components(self) -> bool:
        """Whether the step runs on several components of a heterogeneous job."""
        groups = self.line.last_value("het-group") or self.line.last_value("pack-group") or ""
        return ":" in self.line.operands or (not groups.isdigit() and bool(groups))

    def is_ordered_by_srun(self, environ: Mapping[str, str]) -> bool:
        """Whether the tasks are ranks in the order of the step's nodes if srun orders them, rank 0 on the first node.

        Not with options of other plugins: the image of a container may lack a shell.
        """
        distribution = self.line.last_value("distribution") or environ.get("SLURM_DISTRIBUTION", "")
        names = {option.name if option.is_known and option.is_complete else "" for option in self.line.options
                 if not option.name.startswith("dl-")}
        return (environ.keys() >= {"SLURM_JOB_ID", "SLURM_JOB_NODELIST"}
                and environ.keys().isdisjoint(srun_options.NOT_ORDERED_BY_SRUN_ENV)
                and names <= srun_options.ORDERED_BY_SRUN | srun_options.WRAPPER_OPTIONS
                and not distribution.lower().startswith("arbitrary") and ":" not in self.line.operands
                and "/" not in (self.line.last_value("nodelist") or ""))

    def merge_options(self, environ: Mapping[str, str], record: SubmissionRecord | None = None,
                      site_options: Mapping[str, str] | None = None) -> DlOptions:
        """Merge the --dl-* options: site < submission < environment < command line.

        Raises UsageError for an invalid variable or value.
        """
        changed = record.environ_without_inputs(environ) if record else environ
        return dl_options.merge_layers(site_options or {}, record.options.step_settings() if record else {},
                                       dl_options.dl_settings_from_environ(changed), self.settings)

    def kill_on_bad_exit_option(self, environ: Mapping[str, str]) -> list[str]:
        """--kill-on-bad-exit for the built-in trainer, whose ranks would wait forever for a killed rank.

        Other programs may continue without a task. The user's own option has precedence.
        """
        is_chosen = self.line.has_option("kill-on-bad-exit") or "SLURM_KILL_BAD_EXIT" in environ
        return ["--kill-on-bad-exit=1"] if is_trainer(self.line.operands) and not is_chosen else []


def parse_srun_argv(argv: Sequence[str],
                    plugin_options: Callable[[], Mapping[str, getopt.HasArg]] = dict) -> SrunArgs:
    """Parse the command line; `plugin_options` as for getopt.parse_command_line.

    UsageError for an unknown --dl-* option, step starter, format or value.
    """
    line = getopt.parse_command_line(argv, srun_options.SHORT_OPTIONS, _LONG_OPTIONS, plugin_options)
    settings = dl_options.collect_settings(line.options)
    starter = line.last_value("step-starter") or "srun"
    if starter not in STEP_STARTERS:
        raise UsageError(f"--step-starter: invalid value {starter!r}; expected one of {', '.join(STEP_STARTERS)}")
    map_format = line.last_value("print-rank-map") or ""
    if line.has_option("print-rank-map") and map_format not in FORMATS:
        valid = sort_by_similarity(map_format, list(FORMATS))
        raise UsageError(f"--print-rank-map: invalid value {map_format!r}; expected one of {', '.join(valid)}")
    removed = {option.index + i for option in line.options
               if option.name.startswith("dl-") or option.name in srun_options.WRAPPER_OPTIONS
               for i in range(len(option.args))}
    srun_argv = tuple(arg for i, arg in enumerate(argv) if i not in removed)
    return SrunArgs(line, srun_argv, starter, map_format, settings)


def is_trainer(args: Sequence[str]) -> bool:
    """Whether a command line is `slurmdl train` or `python -m slurmdl.train`, with any options of Python."""
    if not args:
        return False
    program, *operands = [os.path.basename(args[0]), *args[1:]]
    if program.startswith("python"):
        operands = list(dropwhile(lambda arg: arg.startswith("-") and arg != "-m", operands))
        return operands[:2] == ["-m", "slurmdl.train"] or operands[:3] == ["-m", "slurmdl", "train"]
    return program == "slurmdl" and operands[:1] == ["train"]
