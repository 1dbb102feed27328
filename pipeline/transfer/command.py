"""`vocag transfer`: a new tokenizer for a model."""

from collections.abc import Iterator
from pathlib import Path

from pipeline.command_line.folder_lock import hold_folder
from pipeline.command_line.option_parsing import parse_options
from pipeline.drawing.printing import prints
from pipeline.transfer.options import TransferOptions

_EPILOG = """\
examples:
  vocag transfer models/smollm2 --tokenizer models/llama2 --text corpus.jsonl --output student
      SmolLM2 with Llama 2's vocabulary.
  vocag transfer models/smollm2 --tokenizer models/llama2 --text aligned --layers 0 1 2 15 28 29 \\
      --output draft
      A draft of six layers, by the texts of an aligned dataset.
  vocag transfer models/small --tokenizer models/large --rows-of models/large --text corpus.jsonl \\
      --output draft
      A draft that vLLM takes for models/large.

Where each new token's embedding and output row come from, the first rule that applies:
  special    a control token: the old one of the same name, else of the same role
  copied     an old token spells the same bytes
  seen       it occurs in the text: the old tokens that cover its bytes there, by how often
  segmented  the old tokenizer's own tokens of its bytes, in equal parts
  mean       all old tokens

A transplanted model has lost part of what it knew. To recover it, train it with the old model as
the teacher:
  vocag align --input corpus.jsonl --student student --teacher models/smollm2 --output aligned
  vocag score aligned --teacher models/smollm2 --seq-length 1024 --top-k 8
  vocag train --data aligned --stored-losses smollm2 --student student --method distill \\
      --weight 0.5 --seq-length 1024 --output healed"""


@prints("vocag transfer")
def main(argv: list[str] | None = None) -> Iterator[str]:
    """Return the command's output."""
    options = parse_options(TransferOptions, argv, prog="vocag transfer", epilog=_EPILOG)
    from pipeline.transfer.transferring import transfer_model  # help does without

    output = Path(options.output).absolute()
    # Two at once would write one model of both.
    with hold_folder(str(output.with_name(f".{output.name}.lock")), options.output):
        yield from transfer_model(options)
