"""Find what fits a student's context; lm-eval would silently cut prompts from the left."""

from collections.abc import Sequence
from dataclasses import dataclass

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.task import ConfigurableTask

MIN_ANSWER_TOKENS = 64
"""With fewer, most worked answers are cut off."""


@dataclass(frozen=True)
class Room:
    """The part of a task that fits: documents' places, in order; without any, the task is left out.

    `answer_tokens` is 0 if no answer is generated.
    """

    documents: tuple[int, ...]
    num_left_out: int = 0
    answer_tokens: int = 0
    note: str = ""


def find_room(task: ConfigurableTask, model: LM, max_answer_tokens: int) -> Room:
    """Build a task's requests, and return the part that fits.

    Answers are asked of all items or none, for accuracies on parts don't compare; the longest
    prompt sets their limit. Likelihoods are measured on items that fit.
    """
    task.build_all_requests()
    instances: Sequence[Instance] = task.instances
    documents = tuple(dict.fromkeys(instance.doc_id for instance in instances))
    if task.OUTPUT_TYPE == "generate_until":
        longest = max(len(model.tok_encode(instance.args[0])) for instance in instances)
        left = model.max_length - longest
        why = f"the longest prompt has {longest} tokens, the context {model.max_length}"
        if left >= max_answer_tokens:
            return Room(documents, answer_tokens=max_answer_tokens)
        if left >= MIN_ANSWER_TOKENS:
            note = f"answers of at most {left} tokens, not {max_answer_tokens}: {why}"
            return Room(documents, answer_tokens=left, note=note)
        note = f"not asked: {why}: that leaves {max(left, 0)} for an answer, "
        return Room((), len(documents), note=f"{note}{MIN_ANSWER_TOKENS} are the least")
    # One more, if a model puts a token before an empty context.
    too_long = {
        instance.doc_id
        for instance in instances
        if len(model.tok_encode("".join(instance.args))) + 1 > model.max_length
    }
    note = f"{len(too_long)} of {len(documents)} items are longer than its context"
    note += f" of {model.max_length} tokens and left out"
    fitting = tuple(document for document in documents if document not in too_long)
    return Room(fitting, len(too_long), note=note if too_long else "")
