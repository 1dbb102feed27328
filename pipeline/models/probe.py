"""Check that a teacher is trained, by one text and one threshold, without torch."""

import logging
import math

from pipeline.command_line.failures import hinted
from pipeline.dataset.files import Dataset
from pipeline.dataset.tokenizers import load_dataset_tokenizer

PROBE_TEXT = (
    "The sum of two even numbers is even, because each of them can be written as twice an integer. "
    "In the same way, the product of an even number and any other whole number is even."
)

# A model whose weights did not load has a loss of ln(vocabulary) or more. One that knows only token
# frequencies loses about 0.7 of that, a language model far less. 0.85 is halfway.
_CHANCE_SHARE = 0.85

logger = logging.getLogger(__name__)


class UntrainedTeacherError(ValueError):
    """The teacher predicts no better than chance: its weights did not load."""


def probe_tokens(dataset: Dataset) -> list[int]:
    """Tokenize `PROBE_TEXT` as a dataset's teacher does."""
    teacher = load_dataset_tokenizer(dataset, "teacher")
    ids: list[int] = teacher.tokenize_batch([PROBE_TEXT.encode()]).input_ids.tolist()
    return ids


def require_trained(
    mean_loss: float, vocab_size: int, *, text: str = "a plain English text"
) -> None:
    """Raise UntrainedTeacherError unless a teacher's mean loss, in nats, beats chance.

    NaN counts as chance. `vocab_size` are rows of the output layer.
    """
    chance = math.log(vocab_size)
    logger.info("the teacher's mean loss on %s is %.2f, chance %.2f", text, mean_loss, chance)
    if mean_loss < _CHANCE_SHARE * chance:
        return
    error = UntrainedTeacherError(
        f"the teacher's mean loss on {text} is {mean_loss:.2f} nats per token, chance is "
        f"{chance:.2f}: its weights did not load, or they belong to another tokenizer; check the "
        "files"
    )
    raise hinted(error, "allow_untrained_teacher=True  # only to test or to measure speed")
