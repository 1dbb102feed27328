"""The `vocag` command: one name for every `python -m …` command of the project.

Commands are named here, not imported: each runs only with the extra that it needs installed.
"""

import sys
from importlib import import_module

COMMANDS = {
    "align": ("beam_jobs.align.command", "beam", "documents in, verified aligned shards out"),
    "remove": ("beam_jobs.edit.remove", "beam", "documents of a dataset, by their ids"),
    "compact": ("beam_jobs.edit.compact", "beam", "a dataset anew, without what was removed"),
    "add-teacher": ("beam_jobs.views.add_teacher", "beam", "another teacher's view of a dataset"),
    "add-student": ("beam_jobs.views.add_student", "beam", "another student's view of a dataset"),
    "score": ("beam_jobs.score.command", "beam,hf", "a teacher's losses, once, beside the shards"),
    "train": ("pipeline.training.command", "hf", "a student on aligned rows, under a teacher"),
    "evaluate": ("pipeline.evaluation.command", "evaluate", "a student on the paper's nine sets"),
    "validate": ("pipeline.validate.command", "", "check a dataset byte by byte"),
    "explore": ("pipeline.explore.command", "", "what is in a dataset: totals, previews, rows"),
    "export": ("megatron_plugin.export_hf", "megatron", "a trained student to Hugging Face"),
    "figures": (
        "pipeline.figures.command",
        "",
        "the paper's figures: vocabularies, tokens, alignment",
    ),
}


def main(argv: list[str] | None = None) -> int:
    """Run `vocag COMMAND …` as `python -m MODULE …`; return its exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        print(f'vocag: unknown command "{name}"\n\n{_usage()}', file=sys.stderr)
        return 2
    module_name, extra, _ = COMMANDS[name]
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if not extra:
            raise
        print(
            f"vocag {name} needs a package that is missing ({error.name}): "
            f"pip install 'vocag[{extra}]'",
            file=sys.stderr,
        )
        return 2
    return int(module.main(rest) or 0)


def _usage() -> str:
    lines = [f"  {name:<12} {help_text}" for name, (_, _, help_text) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: vocag COMMAND …",
            "",
            *lines,
            "",
            "vocag COMMAND --help tells the rest; vocag --version.",
        ]
    )
