"""Masks and ids against the templates that TRL marks by hand, token by token.

TRL marks as learned what an assistant's turn holds. Three things that it marks are not learned
here: what the template's own generation prompt gives (a model that is asked need not say it), empty
thoughts, and white space where it leaves it out. Learned here alone is what stops a call of
Gemma's, `<|tool_response>`.
"""

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from pipeline.chats.habits import habits_of, settle_speaker
from pipeline.chats.messages import ChatError, read_chat
from pipeline.chats.rendering import LearnRule, render_chat
from pipeline.chats.templates import ChatTemplate
from tests.support.chats import SYSTEM, THINKING, TOOLS, TWO_TURNS, WEATHER, said, user
from tests.support.tokenizer_zoo import PACKAGED

_FOLDER = Path(os.environ.get("TRL_CHAT_TEMPLATES", "/nowhere"))
if not _FOLDER.is_dir():
    try:
        import trl

        _FOLDER = Path(trl.__file__).parent / "chat_templates"
    except ImportError:
        pytest.skip("TRL isn't installed: pip install --no-deps trl", allow_module_level=True)

_MARKED = sorted(_FOLDER.glob("*_training.jinja"))
_NAMES = {"bos_token": "<BOS>", "eos_token": "<EOS>", "unk_token": "<UNK>", "pad_token": "<PAD>"}
_CONTROLS = (
    *("<|im_end|>", "<|im_start|>", "<EOS>", "<BOS>", "</s>", "<|eot_id|>", "<|end|>", "<|eot|>"),
    *("<|endoftext|>", "<end_of_turn>", "<|user|>", "<|observation|>", "<|END_OF_TURN_TOKEN|>"),
    *("<｜end▁of▁sentence｜>", "<end_of_utterance>", "<|return|>", "<|call|>", "<|END_RESPONSE|>"),
)
_CHATS: dict[str, list[dict[str, Any]]] = {
    "two turns": TWO_TURNS,
    "system": SYSTEM,
    "white space": [user("hi"), said("  hi\n\n"), user("hi"), said("hi")],
    "tools": TOOLS,
    "thinking": THINKING,
}
_OPTIONS = {"today": "2026-01-31"}


def test_there_are_templates() -> None:
    assert len(_MARKED) >= 31


@pytest.mark.parametrize("path", _MARKED, ids=lambda path: path.stem)
def test_ids_and_masks_are_those_of_trl(path: Path) -> None:
    text = path.read_text()
    options = _OPTIONS if "strftime_now" in text else {}
    speaker = settle_speaker(ChatTemplate(text, _NAMES, options), _CONTROLS, side="student")
    compared, refused = 0, list[str]()
    for kind, messages in _CHATS.items():
        chat = read_chat(messages, [WEATHER] if kind == "tools" else None)
        try:
            own = render_chat(chat, (speaker, speaker), LearnRule()).sides[0]
        except ChatError as error:
            refused.append(str(error))
            continue
        given = [speaker.template._given(message) for message in chat.messages]
        (expected,), (marks,) = render_jinja_template(
            [given],
            tools=list(chat.tools) or None,
            chat_template=text,
            return_assistant_tokens_mask=True,
            **_NAMES,
        )
        if "strftime_now" not in text:
            assert own.text.decode() == expected
        rendered = own.text.decode()
        if rendered != expected:  # another day
            continue
        compared += 1
        ours = _mask(rendered, [(_char(own.text, a), _char(own.text, b)) for a, b in own.said])
        theirs = _mask(rendered, marks)
        _compare(rendered, ours, theirs, habits_of(speaker), kind)
    assert compared or "strftime_now" in text
    assert all("refuses it" in each or "the chat template drops the" in each for each in refused)


def _char(text: bytes, place: int) -> int:
    return len(text[:place].decode())


@cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(PACKAGED["deepseek"]))


def _mask(text: str, ranges: Any) -> list[bool]:
    """Return which tokens of a text overlap some ranges of characters; empty ones overlap none."""
    offsets = _tokenizer().encode(text, add_special_tokens=False).offsets
    return [any(max(a, start) < min(b, stop) for a, b in ranges) for start, stop in offsets]


def _compare(rendered: str, ours: list[bool], theirs: list[bool], habits: Any, kind: str) -> None:
    offsets = _tokenizer().encode(rendered, add_special_tokens=False).offsets
    differing = [n for n, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b]
    runs: list[list[int]] = []
    for n in differing:
        if runs and runs[-1][-1] == n - 1 and ours[n] == ours[runs[-1][-1]]:
            runs[-1].append(n)
        else:
            runs.append([n])
    prompt = habits.header + habits.prompt
    for run in runs:
        part = rendered[offsets[run[0]][0] : offsets[run[-1]][1]]
        bare = "".join(part.split())
        if ours[run[0]]:  # what stops the turn, which TRL leaves to the next one
            assert not bare or bare.endswith("|tool_response>"), (kind, part)
        else:
            given = "".join(prompt.split()) + habits.no_reasoning
            assert not bare or bare in given or bare in _OTHERS, (kind, part)


_OTHERS = ("<think></think>", "<｜tool▁outputs▁end｜>", "<|start|>assistant")
