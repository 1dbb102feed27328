"""What a student makes of text that it has not seen, by the byte."""

import math
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from pipeline.dataset.files import Dataset
from pipeline.dataset.selection import Kept, select_documents
from pipeline.guidance.cross_entropy import linear_cross_entropy
from pipeline.models.hf_models import hidden_states
from pipeline.models.output_layer import output_layer
from pipeline.streaming import AlignedRows, Convention, Rows
from pipeline.training.config import TrainConfig
from pipeline.training.ranks import Ranks
from schemas.index import ShardIndex

BITS_PER_BYTE = "heldout_bits_per_byte"
_ROWS_AT_ONCE = 8


def evaluate(
    config: TrainConfig,
    student: PreTrainedModel,
    ranks: Ranks,
    convention: Convention,
) -> dict[str, float]:
    """Return the bits per byte of every held-out set: with one, its name is left out.

    Args:
        config: names the sets.
        student: what is measured.
        ranks: this process among those that share the work.
        convention: the tokens around the student's training text; what stands before a text stands
            before held-out text, too, whatever its dataset recorded.

    Example:
        >>> evaluate(config, student, ranks, rows.rules.student)
        {'heldout_bits_per_byte/math': 2.58, 'heldout_bits_per_byte/code': 1.93}
    """
    sets = config.heldout_sets
    return {
        BITS_PER_BYTE if len(sets) == 1 else f"{BITS_PER_BYTE}/{name}": bits_per_byte(
            config, student, path, ranks, convention
        )
        for name, path in sets.items()
    }


@torch.inference_mode()
def bits_per_byte(
    config: TrainConfig,
    student: PreTrainedModel,
    path: str,
    ranks: Ranks,
    convention: Convention,
) -> float:
    """Return the student's mean code length of a dataset's text.

    Comparable between any tokenizers: the sum over the text's tokens, by its bytes. What stands
    before a text is context and costs nothing, and a document's end isn't asked for, as in
    `vocag evaluate --measures text`. Removed documents count on neither side.

    Raises:
        ValueError: the first token of a text has no loss.
    """
    # The held-out set may have another teacher.
    # Neither a teacher nor a condition on the training data's fields concerns it.
    stream = replace(config.stream(path), teacher_seq_length=None, teacher_context=None, where="")
    endless = replace(convention, end_token_id=None)
    rows = AlignedRows(replace(stream, student=endless, student_bos=None, student_eos=None))
    if convention.first_token_id is None:
        raise ValueError(f"{path}: without a context token the first token has no loss")
    student.train(False)
    total = torch.zeros(1, dtype=torch.float64, device=ranks.device)
    starts = range(ranks.number * _ROWS_AT_ONCE, len(rows), ranks.count * _ROWS_AT_ONCE)
    for start in starts:
        numbers = range(start, min(start + _ROWS_AT_ONCE, len(rows)))
        total += _loss_sum(config, student, rows.__getitems__(numbers).to(ranks.device))
    return float(ranks.add_up(total)) / math.log(2) / _num_text_bytes(rows.dataset)


def _num_text_bytes(dataset: Dataset) -> int:
    """Return the bytes of the documents that are read."""
    if dataset.is_whole:
        return dataset.manifest.totals["num_text_bytes"]
    sizes = select_documents(dataset).each(_num_bytes_read)
    return sum(sizes)


def _num_bytes_read(index: ShardIndex, kept: Kept) -> int:
    sizes = index.num_text_bytes if kept is None else index.num_text_bytes[kept]
    return int(sizes.sum())


def _loss_sum(config: TrainConfig, student: PreTrainedModel, batch: Rows) -> torch.Tensor:
    with torch.autocast(student.device.type, dtype=torch.bfloat16, enabled=config.bf16):
        hidden = hidden_states(
            student,
            batch["input_ids"],
            position_ids=batch["position_ids"],
        )
        scores = linear_cross_entropy(
            hidden, output_layer(student), batch["labels"].long(), loss_mask=batch["loss_mask"]
        )
    return scores.losses.double().sum()
