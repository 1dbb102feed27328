"""The options of `vocag transfer`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pipeline.command_line.option_parsing import (
    Folder,
    ModelSource,
    Option,
    TokenizerSource,
    require_least,
)


@dataclass(frozen=True)
class TransferOptions:
    """Give a pretrained model another tokenizer: new embeddings and output layer from the old.

    Attributes:
        model: folder or Hugging Face repository of a causal language model with its tokenizer.
        tokenizer: the new tokenizer: a tokenizer.json, a SentencePiece model, a folder that holds
            one, a Hugging Face repository, or bytes: the 256 byte values.
        text: texts in which tokens are seen and on which the model is measured: .jsonl and .txt
            files, or aligned datasets. A few megabytes of the training text are enough.
        output: folder for the new model.
        layers: keep these layers only, counted from 0 (default: all).
        text_field: field of each line that holds the text.
        text_megabytes: read no more text than this.
        multiple: pad the number of rows to a multiple, such as 128 for tensor cores.
        rows_of: model that this one drafts for: make as many rows as it has, as vLLM requires.
    """

    model: Annotated[ModelSource, Option("MODEL", form="positional")]
    tokenizer: TokenizerSource
    text: tuple[str, ...]
    output: Folder
    layers: tuple[int, ...] = ()
    text_field: Annotated[str, Option("NAME")] = "text"
    text_megabytes: int = 64
    multiple: int = 1
    rows_of: Annotated[ModelSource | None, Option("TARGET")] = None

    def __post_init__(self) -> None:
        require_least(self, "text_megabytes", "multiple")
        if self.rows_of is not None and self.multiple != 1:
            raise ValueError("--rows-of and --multiple both say how many rows: leave one out")
        if Path(self.output).is_mount():  # it is written next to it, and renamed
            raise ValueError(
                f"--output {self.output} is where a disk is mounted: name a folder in it"
            )

    def require_new_output(self) -> None:
        """Raise ValueError if there is something that the new model would replace."""
        output = Path(self.output)
        if output.exists() and (not output.is_dir() or any(output.iterdir())):
            raise ValueError(f"--output {output} is not empty: name a new folder")
