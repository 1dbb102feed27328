"""What a student makes of text that it has not seen, by the byte."""

import math
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from pipeline.guidance.cross_entropy import linear_cross_entropy
from pipeline.scoring.hf_models import hidden_states, output_weight
from pipeline.streaming import AlignedRows, Convention, Rows
from pipeline.training.config import TrainConfig
from pipeline.training.ranks import Ranks

BITS_PER_BYTE = "heldout_bits_per_byte"
_ROWS_AT_ONCE = 8


def evaluate(
    config: TrainConfig, student: PreTrainedModel, ranks: Ranks, convention: Convention
) -> dict[str, float]:
    """Return the bits per byte of every held-out set: with one, its name is left out.

    Args:
        config: names the sets.
        student: what is measured.
        ranks: this process among those that share the work.
        convention: the tokens around the student's training text; they stand around held-out text
            too, whatever its dataset recorded.

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
    """Return the student's mean code length of a dataset's text and its documents' ends.

    Comparable between any tokenizers: the sum over all tokens, by the bytes of the text.

    Raises:
        ValueError: the first token of a text has no loss.
    """
    # The held-out set may have another teacher.
    # Neither a teacher, a condition on the training data's fields nor a view of it concerns it.
    stream = replace(
        config.stream(path), teacher_seq_length=None, teacher_context=None, where="", view=""
    )
    rows = AlignedRows(replace(stream, student=convention, student_bos=None, student_eos=None))
    if convention.first_token_id is None:
        raise ValueError(f"{path}: without a context token the first token has no loss")
    student.train(False)
    total = torch.zeros(1, dtype=torch.float64, device=ranks.device)
    starts = range(ranks.number * _ROWS_AT_ONCE, len(rows), ranks.count * _ROWS_AT_ONCE)
    for start in starts:
        numbers = range(start, min(start + _ROWS_AT_ONCE, len(rows)))
        total += _loss_sum(config, student, rows.__getitems__(numbers).to(ranks.device))
    num_bytes = rows.manifest.totals["num_text_bytes"]
    return float(ranks.add_up(total)) / math.log(2) / num_bytes


def _loss_sum(config: TrainConfig, student: PreTrainedModel, batch: Rows) -> torch.Tensor:
    with torch.autocast(student.device.type, dtype=torch.bfloat16, enabled=config.bf16):
        hidden = hidden_states(
            student,
            batch["input_ids"],
            position_ids=batch["position_ids"],
        )
        scores = linear_cross_entropy(
            hidden, output_weight(student), batch["labels"].long(), loss_mask=batch["loss_mask"]
        )
    return scores.losses.double().sum()
