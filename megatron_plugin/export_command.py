"""`vocag export`: the command. Help needs no torch."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pipeline.command_line import commands
from pipeline.command_line.failures import report
from pipeline.command_line.folder_lock import hold_folder
from pipeline.command_line.option_parsing import Option, parse_options


@dataclass(frozen=True)
class ExportOptions:
    """Export a trained student as a Hugging Face folder.

    Attributes:
        checkpoint: --save folder, or one iteration's folder.
        output: folder to make.
        dtype: data type of the exported weights (default: as in the checkpoint).
        no_tokenizer: leave the dataset's tokenizer out.
    """

    checkpoint: Annotated[Path, Option("CHECKPOINT", form="positional")]
    output: Annotated[Path, Option("FOLDER", form="positional")]
    dtype: Literal["float32", "bfloat16"] | None = None
    no_tokenizer: bool = False


def main(argv: Sequence[str] | None = None) -> int:
    """Export one checkpoint; return the exit code."""
    options = parse_options(ExportOptions, argv, prog="vocag export")
    import torch
    from safetensors import SafetensorError

    from megatron_plugin.export_hf import export_student

    output = options.output.absolute()
    try:
        # Two at once would write one model of both.
        with hold_folder(str(output.with_name(f".{output.name}.lock")), str(options.output)):
            shape = export_student(
                options.checkpoint,
                options.output,
                dtype=None if options.dtype is None else getattr(torch, options.dtype),
                with_tokenizer=not options.no_tokenizer,
            )
    except (ValueError, OSError, SafetensorError) as error:
        report("vocag export", error)
        return 2
    print(f"{options.output}: a student of the family {shape.family}")
    return 0


if __name__ == "__main__":
    commands.main(["export", *sys.argv[1:]])
