"""The `vocag` command: what its commands need, and how one runs and ends."""

import os
import sys
from importlib import import_module

from pipeline.command_line import failures
from pipeline.command_line.failures import hinted, left_behind, report
from pipeline.command_line.installed import install, installed_version
from pipeline.command_line.streams import outlive_readers
from pipeline.command_line.termination import Terminated, terminate_by_exception

TYPE_CHECKING = False  # typing's own, whose import takes as long as the rest of `vocag --help`
if TYPE_CHECKING:
    from typing import NoReturn

# Named, not imported: each command runs only with the extra that it needs installed.
GROUPS = {
    "make": {
        "align": ("beam_jobs.align.__main__", "beam", "turn documents into aligned shards"),
        "score": ("beam_jobs.score.command", "beam,hf", "store a teacher's losses with the shards"),
    },
    "train": {
        "train": ("pipeline.training.command", "hf", "train a student on a dataset"),
        "transfer": ("pipeline.transfer.command", "hf", "give a model another tokenizer"),
        "acceptance": (
            "pipeline.transfer.acceptance_command",
            "hf",
            "measure how well one model drafts for another",
        ),
        "export": ("megatron_plugin.export_command", "megatron", "convert a Megatron checkpoint"),
        "evaluate": ("pipeline.evaluation.command", "evaluate", "measure a student on nine sets"),
        "figures": ("pipeline.figures.command", "hf", "draw the paper's figures"),
    },
    "maintain": {
        "explore": ("pipeline.explore.command", "", "show totals, documents and rows of a dataset"),
        "validate": ("pipeline.validate.command", "", "check a dataset byte by byte"),
        "remove": ("beam_jobs.remove.command", "beam", "remove documents by their ids"),
        "overlap": ("pipeline.evaluation.overlap_command", "", "find test questions in a dataset"),
        "doctor": ("pipeline.doctor.command", "", "show what works here, and what is missing"),
        "compare-scores": ("beam_jobs.score.compare_command", "", "compare two teachers' losses"),
    },
}
"""Commands by purpose: each one's module, extras and help."""

COMMANDS = {name: entry for group in GROUPS.values() for name, entry in group.items()}

_OWN_PACKAGES = ("schemas", "pipeline", "beam_jobs", "megatron_plugin")
_OWN_EXTRA = {"httpx2": "served", "tenacity": "served", "gguf": "packaged-teacher"}
"""Extras of packages that only some uses of a command need."""


def main(argv: list[str] | None = None) -> "NoReturn":
    """Run `vocag COMMAND …` and end the process with its status."""
    given = sys.argv[1:] if argv is None else argv
    outlive_readers()
    arguments = [argument for argument in given if argument != "--debug"]
    failures.with_traceback = arguments != list(given)
    if arguments[:1] == ["--version"]:
        print(f"vocag {installed_version()}")
        leave(0)
    name = " ".join(["vocag", *arguments[:1]])
    try:
        if arguments and not arguments[0].startswith("-"):
            # Before a command is imported, for then Beam logs; `vocag --help` does without.
            from pipeline.command_line.logs import set_up_logging

            set_up_logging(name)
        with terminate_by_exception():
            status = run_command(arguments)
        leave(status)
    except MemoryError:
        leave(1, f"{name}: error: memory ran out while libraries were loaded; see ulimit -v")
    except KeyboardInterrupt:
        leave(130, f"{name}: interrupted")
    except Terminated as end:
        leave(end.status, f"{name}: {end.how}")
    except Exception as error:  # commands explain the errors that they expect
        from shlex import join  # only for an error

        again = join(["vocag", "--debug", *arguments])
        hinted(error, f"{again}  # and report it with what vocag doctor --json prints")
        report(name, error, f"unexpected {type(error).__name__}: {error}")
        leave(1)


def run_command(arguments: list[str]) -> int:
    """Run a command's module; return its exit code."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        report("vocag", hinted(ValueError(f'unknown command "{name}"'), _closest(name)))
        return 2
    if unreadable := next((word for word in rest if not _is_unicode(word)), None):
        # It can't be written to a manifest, a log or a page.
        message = f'"{unreadable}" isn\'t UTF-8: rename what it names'
        report(
            f"vocag {name}", hinted(ValueError(message), "locale  # UTF-8 names need UTF-8 here")
        )
        return 2
    module_name, extra, _ = COMMANDS[name]
    try:
        return int(import_module(module_name).main(rest) or 0)
    except ModuleNotFoundError as error:  # at once, or when a command needs it: help needs less
        if not extra or (error.name or "").partition(".")[0] in _OWN_PACKAGES:
            raise
        message = f"it needs a package that is missing ({error.name})"
        own = _OWN_EXTRA.get(error.name or "", extra)
        report(f"vocag {name}", hinted(error, install(own)), message)
        return 2


def leave(status: int, message: str = "") -> "NoReturn":
    """End this process without waiting for an abandoned job's threads."""
    if message:
        print(message, file=sys.stderr)
    try:
        sys.stdout.flush()  # Python would lose what a full disk refuses, without a word
    except OSError as error:
        report("vocag", error)
        status = status or 1
    if any(thread.is_alive() for thread in left_behind):
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def _is_unicode(word: str) -> bool:
    try:
        word.encode()
    except UnicodeEncodeError:
        return False
    return True


def _closest(name: str) -> str:
    from difflib import get_close_matches

    return " ".join(["vocag", *get_close_matches(name, COMMANDS, n=1), "--help"])


def _usage() -> str:
    lines = ["usage: vocag COMMAND …"]
    for group, commands in GROUPS.items():
        lines += ["", f"{group}:"]
        lines += [f"  {name:<15} {help_text}" for name, (_, _, help_text) in commands.items()]
    last = "vocag COMMAND --help shows a command's options; --debug shows where an error arose."
    return "\n".join([*lines, "", last])
