"""Chats as input. What renders them is imported only if needed."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from os.path import expanduser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from beam_jobs.align.options import SIDES, ChatOptions
from beam_jobs.job_errors import InputError, OptionsError
from pipeline.alignment import align_batch
from pipeline.batches import AlignedBatch, SourceDocument
from pipeline.chats.messages import ChatError, decode_chat
from pipeline.tokenization.definition import control_tokens
from schemas.manifest import ChatsRecord, TemplateRecord

if TYPE_CHECKING:
    from beam_jobs.align.inputs.documents import PlacedDocument
    from pipeline.chats.habits import Speaker
    from pipeline.chats.rendering import LearnRule
    from pipeline.chats.templates import ChatTemplate
    from pipeline.models.generation_defaults import GenerationDefaults
    from pipeline.tokenization import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class JobChats:
    """What determines a dataset of chats besides texts and tokenizers; plain values.

    Pairs are (student's, teacher's). `refuse_controls` leaves out chats with control strings.
    """

    templates: tuple[ChatTemplate, ChatTemplate]
    controls: tuple[tuple[str, ...], tuple[str, ...]]
    rule: LearnRule
    refuse_controls: bool

    @cached_property
    def speakers(self) -> tuple[Speaker, Speaker]:
        """Templates with their tokenizers' control tokens."""
        from pipeline.chats.habits import Speaker

        student, teacher = map(Speaker, self.templates, self.controls)
        return student, teacher

    @property
    def record(self) -> ChatsRecord:
        """The manifest's entry."""
        student, teacher = (
            TemplateRecord(
                f"templates/{side}.jinja", each.sha256, dict(each.names), dict(each.options)
            )
            for side, each in zip(SIDES, self.templates, strict=True)
        )
        return ChatsRecord(self.rule.learn, self.rule.end, student, teacher)

    @property
    def identity(self) -> dict[str, Any]:
        """Chats' part of the configuration."""
        record = self.record
        sides = {side: vars(getattr(record, side)) for side in SIDES}
        plain = {"refuse_controls": True} if self.refuse_controls else {}
        return {"chats": {"learn": record.learn, "learn_end": record.learn_end, **sides, **plain}}


def open_chats(
    options: ChatOptions,
    sources: Sequence[str],
    tokenizers: tuple[Tokenizer, Tokenizer],
    *,
    refuse_controls: bool,
) -> JobChats:
    """Read both sides' templates; OptionsError if one isn't usable."""
    from pipeline.chats.habits import settle_speaker
    from pipeline.chats.rendering import LearnRule
    from pipeline.chats.templates import ChatTemplate
    from pipeline.chats.turns import ends_answers

    files, chosen = options.template_files, options.template_values
    templates, controls = [], []
    for side, source, tokenizer in zip(SIDES, sources, tokenizers, strict=True):
        defaults = _defaults_of(source)
        text = _read_template(side, source, files.get(side), defaults, tools=options.tools)
        known = {**_names_of(tokenizer), **defaults.names}
        names = {role: name for role, name in known.items() if name}
        own = tuple(control_tokens(orjson.loads(tokenizer.file_bytes)))
        template = ChatTemplate(text, dict(sorted(names.items())), chosen[side])
        try:
            speaker = settle_speaker(template, own, side=side)
        except ChatError as error:
            raise OptionsError(str(error)) from error
        if side == "student" and options.learn_end == "yes" and not ends_answers(speaker):
            logger.warning(
                "the student's chat template ends no answer that is a chat's last, so chats with "
                "one answer don't teach the student to stop: --chat-template student=FILE gives "
                "another"
            )
        templates.append(speaker.template)
        controls.append(own)
    return JobChats(
        (templates[0], templates[1]),
        (controls[0], controls[1]),
        LearnRule(options.learn, options.learn_end == "yes"),
        refuse_controls,
    )


def align_documents(
    documents: Sequence[SourceDocument],
    tokenizers: tuple[Tokenizer, Tokenizer],
    chats: JobChats | None,
) -> AlignedBatch:
    """Align texts, or chats as JSON."""
    if chats is None:
        return align_batch(documents, *tokenizers)
    from pipeline.chats.chat_alignment import ChatSide, align_chats

    student, teacher = map(ChatSide, tokenizers, chats.speakers)
    return align_chats(
        documents, (student, teacher), chats.rule, refuse_controls=chats.refuse_controls
    )


def render_first(documents: Iterable[PlacedDocument], chats: JobChats) -> list[bytes]:
    """Render an input's first chats; InputError if none can be."""
    from pipeline.chats.rendering import render_chat

    renderings, refused = list[bytes](), list[str]()
    for document in documents:
        try:
            chat = render_chat(decode_chat(document.text), chats.speakers, chats.rule)
            renderings += [side.text for side in chat.sides]
        except ChatError as error:
            refused.append(f"{document.source}#{document.position}: {error}")
    if refused and not renderings:
        raise InputError(
            f"none of the first {len(refused)} chats can be used; the first is {refused[0]}"
        )
    return renderings


def _defaults_of(source: str) -> GenerationDefaults:
    from pipeline.models.generation_defaults import GenerationDefaults, read_generation_defaults

    if source == "bytes":  # no model's tokenizer
        return GenerationDefaults()
    path = Path(expanduser(source))
    if path.is_file() and path.suffix != ".gguf":
        source = str(path.parent)
    return read_generation_defaults(source)


def _read_template(
    side: str, source: str, file: str | None, defaults: GenerationDefaults, *, tools: str
) -> str:
    if file is not None:
        try:
            return Path(file).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise OptionsError(f"--chat-template {side}={file} can't be read: {error}") from error
    if tools and "tool_use" in defaults.templates:
        logger.warning("%s renders all chats by its template for tools, tool_use", source)
        return defaults.templates["tool_use"]
    found = defaults.templates.get("default")
    if found is None:
        named = f" (it has {', '.join(defaults.templates)})" if defaults.templates else ""
        raise OptionsError(
            f"{source} has no chat template{named}, so how the {side} sees a chat is not known: "
            f"give --chat-template {side}=FILE, such as the chat_template.jinja of an instruct "
            f"model of its family, or name as --{side} a folder with one"
        )
    return found


def _names_of(tokenizer: Tokenizer) -> Mapping[str, str]:
    ids = {"bos_token": tokenizer.bos_token_id, "eos_token": tokenizer.eos_token_id}
    return {role: tokenizer.token_name(i) for role, i in ids.items() if i is not None}
