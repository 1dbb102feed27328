"""Bits per byte of assistants' messages, in the rendering of the student's template.

Tokens that cover a message count, as in `heldout_bits_per_byte`; a turn's end doesn't.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch
from lm_eval.api.model import LM

from pipeline.batches import AlignedBatch, SourceDocument
from pipeline.chats.chat_alignment import ChatSide, align_chats
from pipeline.chats.messages import ChatError, read_chat
from pipeline.chats.rendering import LearnRule
from pipeline.chats.templates import ChatTemplate
from pipeline.chats.turns import settle_speaker
from pipeline.evaluation.answer_log import AnswerLog
from pipeline.evaluation.context_room import Room
from pipeline.evaluation.sets import Item
from pipeline.models.generation_defaults import read_generation_defaults
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
    left_out += [why for _, why in (*batch.refused, *batch.failures)]
    by_place = dict(items)
    samples = []
    for place, ids, learned, num_bytes in _learned(batch):
        if not num_bytes:
            left_out.append("nothing of it is said by an assistant")
            continue
        if len(ids) > model.max_length:
            left_out.append(f"{len(ids)} tokens, and the context has {model.max_length}")
            continue
        document = {"place": place, "question": by_place[place].question}
        nats = _nats(model, log, ids, learned)
        value = {"metrics": ["bits_per_byte"], "bits_per_byte": (nats, num_bytes)}
        samples.append({"doc": document} | value)
    note = f"{len(left_out)} of {len(items)} conversations are left out, such as: {left_out[:1]}"
    fitting = tuple(range(len(samples)))
    return samples, Room(fitting, len(left_out), note=note if left_out else "")


def _side_of(student: str) -> ChatSide:
    tokenizer = load_tokenizer(student, special_strings="honoured")
    defaults = read_generation_defaults(student)
    text = defaults.templates.get("default")
    if text is None:
        raise ValueError(f"student {student} has no chat template: tasks=chats can't be asked")
    controls = control_tokens(orjson.loads(tokenizer.file_bytes))
    template = ChatTemplate(text, dict(sorted(defaults.names.items())))
    return ChatSide(tokenizer, settle_speaker(template, [*controls], side="student"))


def _documents(items: Sequence[tuple[int, Item]]) -> tuple[list[SourceDocument], list[str]]:
    documents, invalid = [], []
    for place, item in items:
        row = json.loads(item.chat)
        try:
            chat = read_chat(row["messages"], row.get("tools"))
            documents.append(SourceDocument(str(place), chat.encode()))
        except ChatError as error:
            invalid.append(str(error))
    return documents, invalid


def _learned(batch: AlignedBatch) -> Iterator[tuple[int, list[int], list[int], int]]:
    """Yield each chat's place, tokens, learned positions and number of learned bytes."""
    assert batch.chats is not None
    # The student is on both sides, and a teacher's learned tokens are those that cover a text.
    cu_tokens, covering = batch.student.cu_tokens, batch.chats.teacher.learned
    for d, document in enumerate(batch.documents):
        ids = batch.student.input_ids[cu_tokens[d] : cu_tokens[d + 1]].tolist()
        runs = covering.values[covering.cu[d] : covering.cu[d + 1]].tolist()
        places = [place for start, stop in runs for place in range(start, stop) if place]
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
