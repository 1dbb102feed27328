"""The chat templates in a dataset of chats."""

from functools import lru_cache
from hashlib import sha256

import orjson

from pipeline.chats.habits import Speaker, settle_speaker
from pipeline.chats.rendering import LearnRule
from pipeline.chats.templates import ChatTemplate
from pipeline.dataset.dataset_reading import read_whole
from pipeline.dataset.files import Dataset
from pipeline.tokenization.definition import control_tokens
from schemas.errors import DatasetError
from schemas.manifest import ChatsRecord, TemplateRecord, TokenizerRecord


def load_speakers(dataset: Dataset) -> tuple[tuple[Speaker, Speaker], LearnRule]:
    """Load both templates and the learn rule of a dataset of chats.

    DatasetError for an altered copy; ChatError if it isn't a template.
    """
    manifest = dataset.manifest
    chats = manifest.chats
    assert chats is not None
    student = _load(dataset.location, "student", _key(chats.student), manifest.student)
    teacher = _load(dataset.location, "teacher", _key(chats.teacher), manifest.teacher)
    return (student, teacher), rule_of(chats)


def rule_of(chats: ChatsRecord) -> LearnRule:
    """Return which parts of a chat are learned."""
    return LearnRule(chats.learn, chats.learn_end)


def _key(record: TemplateRecord) -> tuple[str, str, bytes]:
    return record.file, record.sha256, orjson.dumps([record.names, record.options])


@lru_cache(maxsize=4)
def _load(
    folder: str, side: str, key: tuple[str, str, bytes], tokenizer: TokenizerRecord
) -> Speaker:
    file, expected, values = key
    names, options = orjson.loads(values)
    text = read_whole(f"{folder}/{file}")
    found = sha256(text).hexdigest()
    if found != expected:
        raise DatasetError(
            f"{folder}/{file} has SHA-256 {found[:16]}…, the manifest says {expected[:16]}…: "
            "restore the template"
        )
    controls = control_tokens(orjson.loads(read_whole(f"{folder}/{tokenizer.file}")))
    return settle_speaker(ChatTemplate(text.decode(), names, options), [*controls], side=side)
