"""Chats, templates of well-known models, and the job that aligns chats with them."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from beam_jobs.align.command import align
from beam_jobs.align.options import AlignOptions, ChatOptions
from pipeline.chats.habits import Speaker, settle_speaker
from pipeline.chats.messages import read_chat
from pipeline.chats.rendering import LearnRule, RenderedChat, render_chat
from pipeline.chats.templates import ChatTemplate
from pipeline.tokenization import Tokenizer
from schemas.manifest import Manifest
from tests.support.datasets import byte_level, with_control_tokens

FOLDER = Path(__file__).parents[1] / "data" / "chats"
STOCK = tuple(sorted(path.stem for path in FOLDER.glob("*.jinja")))
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
CONTROLS = (
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|end|>", "<|endoftext|>"),
    *("<end_of_turn>", "<start_of_turn>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|user|>", "<|assistant|>", "<|system|>"),
)
"""Of the stock templates; not all models have all of them."""

WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {}}}},
}


def user(text: str) -> dict[str, Any]:
    """Return a user's message."""
    return {"role": "user", "content": text}


def said(text: str, **more: Any) -> dict[str, Any]:
    """Return an assistant's message."""
    return {"role": "assistant", "content": text, **more}


TWO_TURNS = [user("What is 2+2?"), said("It is 4."), user("And 3+3?"), said("6, of course.")]
SYSTEM = [{"role": "system", "content": "Be brief."}, *TWO_TURNS]
THINKING = [user("17*3?"), said("51.", reasoning_content="17*3 is 51.")]
TOOLS = [
    user("Weather in Bonn?"),
    said(
        "",
        tool_calls=[
            {
                "type": "function",
                "id": "call00001",
                "function": {"name": "weather", "arguments": {"city": "Bonn", "days": 2}},
            }
        ],
    ),
    {"role": "tool", "tool_call_id": "call00001", "name": "weather", "content": "18 C"},
    said("18 degrees."),
]
CALLS = {"tool_calls": TOOLS[1]["tool_calls"]}


def template(name: str, **options: Any) -> ChatTemplate:
    """Return a well-known model's template."""
    return ChatTemplate((FOLDER / f"{name}.jinja").read_text(), NAMES, options)


def speaker(name: str, **options: Any) -> Speaker:
    """Return a side that speaks by a well-known model's template."""
    return settle_speaker(template(name, **options), CONTROLS, side="student")


def render_in(messages: Any, *sides: str, tools: Any = None, **rule: Any) -> RenderedChat:
    student, teacher = (speaker(side) for side in (sides * 2)[:2])
    return render_chat(read_chat(messages, tools), (student, teacher), LearnRule(**rule))


def said_in(chat: RenderedChat, side: int = 0) -> list[str]:
    text = chat.sides[side].text
    merged: list[list[int]] = []
    for start, stop in chat.sides[side].said:
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(stop, merged[-1][1])
        else:
            merged.append([start, stop])
    return [text[start:stop].decode() for start, stop in merged]


def put_together(chat: RenderedChat, side: int) -> bytes:
    own, at, parts = chat.sides[side], 0, list[bytes]()
    for size, start, stop in own.pieces:
        parts += own.own_text[at : at + size], chat.text[start:stop]
        at += size
    return b"".join(parts)


def chat_tokenizer(vocab_size: int) -> Tokenizer:
    """Return a small byte-level tokenizer that reads the stock templates' control tokens."""
    return with_control_tokens(byte_level(vocab_size), *CONTROLS)


def write_tokenizer(folder: Path, tokenizer: Tokenizer, name: str) -> Path:
    """Write what a chat model's folder has of its tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_bytes(tokenizer.file_bytes)
    (folder / "tokenizer_config.json").write_text(json.dumps(NAMES))
    (folder / "chat_template.jinja").write_bytes((FOLDER / f"{name}.jinja").read_bytes())
    return folder


def write_chats(file: Path, chats: Iterable[Sequence[Mapping[str, Any]]], **fields: Any) -> Path:
    """Write chats as JSON lines, each with the same further fields."""
    lines = (
        json.dumps({"id": f"chat-{n}", "messages": chat, **fields}, ensure_ascii=False)
        for n, chat in enumerate(chats)
    )
    file.write_text("".join(f"{line}\n" for line in lines))
    return file


def align_chats_job(
    folder: Path,
    chats: Iterable[Sequence[Mapping[str, Any]]],
    *,
    sides: tuple[str, str] = ("chatml", "llama2"),
    chat_options: Mapping[str, Any] | None = None,
    **changes: Any,
) -> tuple[Path, Manifest]:
    """Align chats by the job, with two small tokenizers; return the dataset and its manifest."""
    options = chats_options(folder, chats, sides=sides, chat_options=chat_options, **changes)
    return folder / "aligned", align(options)


def chats_options(
    folder: Path,
    chats: Iterable[Sequence[Mapping[str, Any]]],
    *,
    sides: tuple[str, str] = ("chatml", "llama2"),
    chat_options: Mapping[str, Any] | None = None,
    **changes: Any,
) -> AlignOptions:
    """Write chats and two small tokenizers; return the job's options."""
    folder.mkdir(parents=True, exist_ok=True)
    student = write_tokenizer(folder / "student", chat_tokenizer(320), sides[0])
    teacher = write_tokenizer(folder / "teacher", chat_tokenizer(512), sides[1])
    values: dict[str, Any] = {
        "input": (str(write_chats(folder / "chats.jsonl", chats)),),
        "output": str(folder / "aligned"),
        "student": str(student),
        "teacher": str(teacher),
        "chats": ChatOptions(**({"messages": "messages"} | dict(chat_options or {}))),
        "max_dead_letters": 1.0,
        "no_fast_path": True,
    }
    return AlignOptions(**(values | changes))
