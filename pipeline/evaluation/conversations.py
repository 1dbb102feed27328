"""Bits per byte of assistants' messages, in the rendering of the student's template.

Tokens that cover a message count, as in `heldout_bits_per_byte`; a turn's end doesn't.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch
from lm_eval.api.model import LM

from pipeline.batches import AlignedBatch, SourceDocument
from pipeline.chats.chat_alignment import ChatSide, align_chats
from pipeline.chats.habits import settle_speaker
from pipeline.chats.messages import CONTENT, Chat, ChatError
from pipeline.chats.rendering import LearnRule
from pipeline.chats.templates import ChatTemplate
from pipeline.evaluation.answer_log import AnswerLog
from pipeline.evaluation.context_room import Room
from pipeline.evaluation.sets import Item, chat_of
from pipeline.models.generation_defaults import (
    TEMPLATE_FILE,
    TOKENIZER_FILE,
    read_generation_defaults,
)
from pipeline.tokenization import load_tokenizer
from pipeline.tokenization.definition import control_tokens


def score_chats(
    items: Sequence[tuple[int, Item]], model: LM, log: AnswerLog, student: Path
) -> tuple[list[dict[str, Any]], Room]:
    """Return a sample per conversation, in lm-eval's form, and the omissions.

    ValueError if the student, a folder or a .gguf file, has no usable chat template.
    """
    side = _side_of(str(student))
    documents, left_out = _documents(items)
    batch = align_chats(documents, (side, side), LearnRule())
    left_out += [(int(each.document_id), why) for each, why in (*batch.refused, *batch.failures)]
    by_place = dict(items)
    samples = []
    for place, ids, learned, num_bytes in _learned(batch, model.prefix_token_id):
        if not num_bytes:
            left_out.append((place, "nothing of it is said by an assistant"))
            continue
        if len(ids) > model.max_length:
            why = f"{len(ids)} tokens, and the context has {model.max_length}"
            left_out.append((place, why))
            continue
        document = {"place": place, "question": _question(chat_of(by_place[place]))}
        nats = _nats(model, log, ids, learned)
        value = {"metrics": ["bits_per_byte"], "bits_per_byte": (nats, num_bytes)}
        samples.append({"doc": document} | value)
    fitting = tuple(range(len(samples)))
    return samples, Room(fitting, len(left_out), note=_note(left_out, len(items)))


def _note(left_out: Sequence[tuple[int, str]], num_items: int) -> str:
    if not left_out:
        return ""
    place, why = min(left_out)
    num = f"{len(left_out)} of {num_items}"
    return f"{num} conversations are left out, such as item {place + 1}: {why}"


def _question(chat: Chat) -> str:
    """Return what a chat begins with, but for a system's message."""
    return next((each.get(CONTENT, "") for each in chat.messages if each["role"] != "system"), "")


def _side_of(student: str) -> ChatSide:
    tokenizer = load_tokenizer(student, special_strings="honoured")
    defaults = read_generation_defaults(student)
    text = defaults.templates.get("default")
    if text is None:
        raise ValueError(
            f"student {student} has no chat template: give it a {TEMPLATE_FILE}, or leave out "
            "tasks=chats"
        )
    controls = control_tokens(orjson.loads(tokenizer.file_bytes))
    template = ChatTemplate(text, dict(sorted(defaults.names.items())))
    remedy = f"change {_template_place(Path(student))}"
    speaker = settle_speaker(template, [*controls], side="student", remedy=remedy)
    return ChatSide(tokenizer, speaker)


def _template_place(student: Path) -> str:
    own = student / TEMPLATE_FILE
    if own.is_file():
        return str(own)
    return f"chat_template in {student / TOKENIZER_FILE if student.is_dir() else student}"


def _documents(
    items: Sequence[tuple[int, Item]],
) -> tuple[list[SourceDocument], list[tuple[int, str]]]:
    documents, invalid = [], []
    for place, item in items:
        try:
            documents.append(SourceDocument(str(place), chat_of(item).encode()))
        except ChatError as error:
            invalid.append((place, str(error)))
    return documents, invalid


def _learned(batch: AlignedBatch, context: int) -> Iterator[tuple[int, list[int], list[int], int]]:
    """Yield each chat's place, tokens, learned positions and number of learned bytes.

    `context` comes before a chat whose first token is learned, as before a text; in rows of a
    held-out set, which have no room for it, that token has no loss.
    """
    assert batch.chats is not None
    # The student is on both sides, and a teacher's learned tokens are those that cover a text.
    cu_tokens, covering = batch.student.cu_tokens, batch.chats.teacher.learned
    for d, document in enumerate(batch.documents):
        ids = batch.student.input_ids[cu_tokens[d] : cu_tokens[d + 1]].tolist()
        runs = covering.values[covering.cu[d] : covering.cu[d + 1]].tolist()
        places = [place for start, stop in runs for place in range(start, stop)]
        if places[:1] == [0]:
            ids, places = [context, *ids], [place + 1 for place in places]
        ranges = batch.chats.learned.values[slice(*batch.chats.learned.cu[d : d + 2])]
        num_bytes = int(np.diff(ranges).sum())
        yield int(document.document_id), ids, places, num_bytes


@torch.inference_mode()
def _nats(model: LM, log: AnswerLog, ids: list[int], learned: list[int]) -> float:
    def ask() -> float:
        given = torch.tensor([ids], device=model.device)
        logits = model.model(given).logits[0, [place - 1 for place in learned]]
        scores = logits.float().log_softmax(-1)
        wanted = given[0, learned]
        return float(scores[torch.arange(len(learned)), wanted].double().sum())

    return float(log.once("chat", (ids, learned), ask))
