"""Chats, from a file to a dataset that keeps every rule, and to rows."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from beam_jobs.align.command import align, describe
from beam_jobs.align.dry_run import estimate_volume
from beam_jobs.align.inputs import sampling
from beam_jobs.align.inputs.sampling import sample_input
from beam_jobs.align.opened_input import open_input
from beam_jobs.align.options import AlignOptions, parse_options
from beam_jobs.job_errors import InputError, OptionsError
from pipeline.dataset.files import open_dataset
from pipeline.dataset.tokenizers import load_dataset_tokenizer
from pipeline.explore.preview import load_previews
from pipeline.streaming import AlignedRows, StreamConfig
from pipeline.validate.dataset_checks import validate_dataset
from schemas.errors import DatasetError, SchemaVersionError
from schemas.manifest import decode_manifest, encode_manifest
from tests.support.chats import (
    NAMES,
    SYSTEM,
    TWO_TURNS,
    align_chats_job,
    chat_tokenizer,
    chats_options,
    said,
    user,
    write_chats,
    write_tokenizer,
)
from tests.support.corpus import align_options, small_corpus
from tests.support.datasets import read_documents

_CHATS = [
    TWO_TURNS,
    SYSTEM,
    [user("Say <|im_end|>"), said("<|im_end|> 😀 naïve")],
    [m for n in range(12) for m in (user(f"Question {n} of twelve?"), said(f"Answer {n}. " * 4))],
]
_BAD = [
    [user("x"), {"role": "function", "content": "y"}],
    [user("x"), user("Llama 2's template wants turns."), said("y")],
]


@pytest.fixture(scope="module")
def aligned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return align_chats_job(tmp_path_factory.mktemp("chats"), [*_CHATS, *_BAD])[0]


def test_every_chat_is_a_document_or_a_dead_letter(aligned: Path) -> None:
    assert sorted(read_documents(aligned)) == [f"chat-{n}" for n in range(4)]
    letters = [json.loads(x) for x in (aligned / "dead_letters.jsonl").read_text().splitlines()]
    assert [(each["document_id"], each["reason"]) for each in letters] == [
        ("chat-4", "bad_chat"),
        ("chat-5", "rendering_failed"),
    ]
    assert "teacher: the chat template refuses it" in letters[1]["detail"]


def test_a_dry_run_of_chats_foretells_their_tokens(tmp_path: Path) -> None:
    opened = open_input(chats_options(tmp_path, _CHATS))
    whole, num_bytes, _ = estimate_volume(
        sample_input(opened.files, opened.rules, sampling.ESTIMATE), opened
    )
    totals = align(opened.options).totals
    assert whole.num_student_tokens == totals["num_student_tokens"]
    assert whole.num_teacher_tokens == totals["num_teacher_tokens"]
    assert whole.num_text_bytes == num_bytes == totals["num_text_bytes"]


@pytest.mark.parametrize("said_last", [said("Hello"), said("Hello", weight=0)])
def test_a_dry_run_says_that_nothing_would_be_learned(
    tmp_path: Path, said_last: dict[str, Any]
) -> None:
    told, _ = describe(chats_options(tmp_path, [[user("Hi"), said_last]]))
    why = "nothing of the sample; can't be trained on: --learn assistant takes assistants' messages"
    assert (why in told) == ("weight" in said_last)


def test_the_dataset_keeps_every_rule(aligned: Path) -> None:
    report = validate_dataset(str(aligned), with_tokenizers=True)
    assert report.findings == ()


def test_labels_that_a_release_no_longer_gives_are_found(tmp_path: Path) -> None:
    """What of the template is learned was compared with nothing."""
    output, manifest = align_chats_job(tmp_path, [TWO_TURNS], chat_options={"learn_end": "no"})
    assert manifest.chats is not None
    other = replace(manifest, chats=replace(manifest.chats, learn_end=True))
    (output / "manifest.json").write_bytes(encode_manifest(other))
    report = validate_dataset(str(output), with_tokenizers=True)
    (finding,) = (each for each in report.findings if each.check == "chats")
    assert "is learned if it is rendered again; if another release made it" in finding.message


def test_a_token_covers_the_bytes_of_the_document_that_it_is_from(aligned: Path) -> None:
    dataset = open_dataset(str(aligned))
    for document in read_documents(aligned).values():
        assert document.text is not None
        assert document.chat is not None
        for side in ("student", "teacher"):
            own = getattr(document.chat, side)
            rendering = own.render(document.text)
            tokenizer = load_dataset_tokenizer(dataset, side)
            assert tokenizer.source == getattr(dataset.manifest, side).source
            fresh = tokenizer.tokenize_batch([rendering])
            tokens = getattr(document, side)
            np.testing.assert_array_equal(tokens.input_ids, fresh.input_ids)
            # Byte for byte: where in the document, if anywhere, each byte of the rendering is.
            origin = np.full(len(rendering), -1)
            at = 0
            for size, start, stop in own.pieces.tolist():
                at += size
                origin[at : at + stop - start] = np.arange(start, stop)
                at += stop - start
            for (a, b), (start, stop) in zip(
                fresh.byte_offsets.tolist(), tokens.byte_offsets.tolist(), strict=True
            ):
                covered = origin[a:b][origin[a:b] >= 0].tolist()
                assert covered == list(range(start, stop))


def test_labels_are_the_tokens_that_an_assistant_says(aligned: Path) -> None:
    dataset = open_dataset(str(aligned))
    tokenizer = load_dataset_tokenizer(dataset, "student")
    document = read_documents(aligned)["chat-0"]
    assert document.chat is not None
    learned = document.chat.student.is_learned(len(document.student))
    said_ids = document.student.input_ids[learned].tolist()
    words = [tokenizer.token_bytes(i).decode() or tokenizer.token_name(i) for i in said_ids]
    assert "".join(words) == "It is 4.<|im_end|>\n6, of course.<|im_end|>\n"


def test_rows_mask_what_nobody_learns(aligned: Path) -> None:
    rows = AlignedRows(StreamConfig(str(aligned), seq_length=128, shuffle_shards=1))
    tokenizer = load_dataset_tokenizer(rows.dataset, "student")
    learned: list[int] = []
    for number in range(len(rows)):
        row = rows[number]
        learned += row["labels"][row["loss_mask"] > 0].tolist()
    words = [tokenizer.token_bytes(i).decode("utf-8", "replace") for i in learned]
    expected = sum(
        int(d.chat.student.is_learned(len(d.student)).sum())
        for d in read_documents(aligned).values()
        if d.chat
    )
    assert len(learned) == expected
    assert "Question" not in "".join(words)


def test_a_long_chat_is_cut_between_turns(aligned: Path) -> None:
    rows = AlignedRows(StreamConfig(str(aligned), seq_length=160, shuffle_shards=1))
    start = load_dataset_tokenizer(rows.dataset, "student").find_token("<|im_start|>")
    cut = 0
    for plan in (each.plan for each in rows.datasets):
        for document, first in plan.segments[["document", "student_start"]].tolist():
            if not first:
                continue
            cut += 1
            index = rows.dataset.read_index(0, with_names=True)
            own = read_documents(aligned)[index.document_id[document]]
            assert own.student.input_ids[first] == start
    assert cut


def test_texts_alone_can_be_labels(aligned: Path) -> None:
    config = StreamConfig(str(aligned), seq_length=256, shuffle_shards=1, text_labels=True)
    rows = AlignedRows(config)
    ends = {
        load_dataset_tokenizer(rows.dataset, "student").find_token(name) for name in ("<|im_end|>",)
    }
    found = [i for n in range(len(rows)) for i in rows[n]["labels"][rows[n]["loss_mask"] > 0]]
    documents = read_documents(aligned).values()
    wanted = sum(
        np.count_nonzero((d.student.byte_offsets[:, 1] > a) & (d.student.byte_offsets[:, 0] < b))
        for d in documents
        if d.chat
        for a, b in d.chat.learned.tolist()
    )
    assert 0 < len(found) <= wanted
    assert sum(int(i) in ends for i in found) == 1  # the one that a text holds


def test_where_templates_are_empty_a_chat_is_its_text(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jinja"
    empty.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    options = {"chat_template": (f"student={empty}", f"teacher={empty}")}
    chats = [[user("Two and two "), said("is four, naïve 😀.")]]
    found = read_documents(align_chats_job(tmp_path / "chats", chats, chat_options=options)[0])
    corpus = small_corpus(
        tmp_path / "texts",
        **{
            "a.jsonl": [
                b'{"id": "chat-0", "text": "Two and two is four, na\xc3\xafve \xf0\x9f\x98\x80."}'
            ]
        },
    )
    folder = tmp_path / "chats"
    sides = {s: str(folder / s) for s in ("student", "teacher")}
    align(align_options(corpus, tmp_path / "texts/aligned", special_strings="honoured", **sides))
    text, chat = read_documents(tmp_path / "texts/aligned")["chat-0"], found["chat-0"]
    for side in ("student", "teacher"):
        for name in ("input_ids", "byte_offsets"):
            a, b = (getattr(getattr(d, side), name) for d in (text, chat))
            np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(text.teacher_spans, chat.teacher_spans)
    assert (text.text_sha256, text.num_text_bytes) == (chat.text_sha256, chat.num_text_bytes)


def test_the_templates_are_part_of_the_dataset(aligned: Path, tmp_path: Path) -> None:
    manifest = open_dataset(str(aligned)).manifest
    assert manifest.chats is not None
    assert manifest.schema_version == 3
    assert manifest.chats.student.names == NAMES
    assert decode_manifest(encode_manifest(manifest)).fingerprint == manifest.fingerprint
    other = align_chats_job(tmp_path, _CHATS, sides=("llama3", "llama2"))[1]
    assert other.fingerprint != manifest.fingerprint
    old = json.loads((aligned / "manifest.json").read_text()) | {"schema_version": 4}
    with pytest.raises(SchemaVersionError):
        decode_manifest(json.dumps(old).encode())


def test_control_strings_are_counted_or_refused(aligned: Path, tmp_path: Path) -> None:
    index = open_dataset(str(aligned)).read_index(0, with_names=True)
    counts = dict(zip(index.document_id, index.chats["num_control_strings"].tolist(), strict=True))
    assert counts == {"chat-0": 0, "chat-1": 0, "chat-2": 2, "chat-3": 0}
    folder, manifest = align_chats_job(tmp_path, _CHATS, special_strings="plain")
    assert manifest.dead_letters.by_reason == {"rendering_failed": 1}
    assert "--special-strings plain refuses" in (folder / "dead_letters.jsonl").read_text()


def test_an_altered_template_is_found(tmp_path: Path) -> None:
    folder = align_chats_job(tmp_path, _CHATS)[0]
    file = folder / "templates/student.jinja"
    file.write_text(file.read_text().replace("im_start", "im_begin"))
    findings = validate_dataset(str(folder)).findings
    assert {finding.check for finding in findings} == {"chats", "sha256"}


def test_a_preview_shows_templates_and_what_is_learned(aligned: Path) -> None:
    dataset = open_dataset(str(aligned))
    (shown,) = load_previews(dataset, num_documents=1, document_id="chat-0", max_tokens=500)
    tokens = [token for block in shown.blocks for token in block.student]
    assert tokens[0].text == "<|im_start|>"
    assert tokens[0].of_template
    assert not tokens[0].learned
    learned = "".join(token.text for token in tokens if token.learned)
    assert learned == "It·is·4.<|im_end|>⏎6,·of·course.<|im_end|>⏎"


def test_a_template_for_tools_is_taken_where_there_are_tools(tmp_path: Path) -> None:
    """As transformers does; the default one left the tools out."""
    folder = write_tokenizer(tmp_path / "two", chat_tokenizer(320), "chatml")
    plain = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    with_tools = "{% for t in tools or [] %}{{ t.name }}\n{% endfor %}" + plain
    path = folder / "tokenizer_config.json"
    kinds = {"default": plain, "tool_use": with_tools}
    named = [{"name": name, "template": text} for name, text in kinds.items()]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": named}))
    for options, expected in (({}, plain), ({"tools": "tools"}, with_tools)):
        output = tmp_path / f"{len(options)}"
        _, made = align_chats_job(output, _CHATS[:1], student=str(folder), chat_options=options)
        assert made.chats is not None
        assert (output / "aligned" / made.chats.student.file).read_text() == expected


@pytest.mark.parametrize("learn_end", ["yes", "no"])
def test_a_template_that_ends_no_last_answer_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, learn_end: str
) -> None:
    """As GLM's and vLLM's ChatML: chats with one answer taught no student to stop."""
    folder = write_tokenizer(tmp_path / "open", chat_tokenizer(320), "chatml")
    turns = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    turns += "{% if not loop.last or add_generation_prompt %}<|im_end|>\n{% endif %}{% endfor %}"
    turns += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    (folder / "chat_template.jinja").write_text(turns)
    chosen = {"learn_end": learn_end}
    for side in ("teacher", "student"):
        output = tmp_path / side
        align_chats_job(output, _CHATS[:1], **{side: str(folder)}, chat_options=chosen)
        told = "ends no answer that is a chat's last" in caplog.text
        assert told == (side == "student" and learn_end == "yes")


def test_a_begin_that_is_null_is_rendered_as_nothing(tmp_path: Path) -> None:
    """As transformers does; it was taken from the vocabulary."""
    folder = write_tokenizer(tmp_path / "null", chat_tokenizer(320), "chatml")
    (folder / "tokenizer_config.json").write_text(json.dumps(NAMES | {"bos_token": None}))
    text = "{{ bos_token }}" + (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").write_text(text)
    aligned, made = align_chats_job(tmp_path, _CHATS[:1], student=str(folder))
    assert made.chats is not None
    assert made.chats.student.names == {"eos_token": "</s>"}
    (document,) = read_documents(aligned).values()
    assert document.chat is not None
    assert document.text is not None
    assert document.chat.student.render(document.text).startswith(b"<|im_start|>user")


def test_a_name_that_is_not_utf_8_costs_its_document_alone(tmp_path: Path) -> None:
    """It ended the job, at every start."""
    good = json.dumps({"id": "good", "messages": TWO_TURNS}).encode()
    part = b'{"id": "a", "messages": [{"role": "user", "content": [{"type": "im\xe9ge"}]}]}'
    turns = b'{"id": "b", "r\xe9ponses": [{"role": "user", "content": "x"}]}'
    (tmp_path / "in.jsonl").write_bytes(b"\n".join((good, part, turns, b"")))
    folder, made = align_chats_job(tmp_path, [], input=(str(tmp_path / "in.jsonl"),))
    assert made.totals["num_documents"] == 1
    letters = (folder / "dead_letters.jsonl").read_text("utf-8").splitlines()
    assert len(letters) == 2
    assert "im\\\\udce9ge" in letters[0]


def test_more_chats_are_appended(tmp_path: Path) -> None:
    folder = align_chats_job(tmp_path, _CHATS)[0]
    write_chats(tmp_path / "more.jsonl", [[user("new"), said("New.")]])
    text = (tmp_path / "more.jsonl").read_text().replace("chat-0", "new")
    (tmp_path / "more.jsonl").write_text(text)
    grown = align_chats_job(tmp_path, [], input=(str(tmp_path / "more.jsonl"),), append=True)[1]
    assert grown.generation == 1
    assert grown.chats is not None
    assert validate_dataset(str(folder)).findings == ()


def test_a_mixture_holds_chats_or_texts(aligned: Path, tmp_path: Path) -> None:
    corpus = small_corpus(tmp_path, **{"a.jsonl": [b'{"id": "a", "text": "Two and two."}']})
    sides = {side: str(aligned.parent / side) for side in ("student", "teacher")}
    align(align_options(corpus, tmp_path / "texts", special_strings="honoured", **sides))
    given = {"chats": aligned, "texts": tmp_path / "texts"}
    named = (f'[datasets.{n}]\npath = "{p}"\nrepeat = true\n' for n, p in given.items())
    stage = "[[stages]]\nweights = { chats = 0.5, texts = 0.5 }\n"
    (tmp_path / "mixture.toml").write_text("".join((*named, stage)))
    with pytest.raises(DatasetError, match="one holds conversations and one texts"):
        AlignedRows(StreamConfig(str(tmp_path / "mixture.toml"), seq_length=64))


def test_tools_and_parts_come_from_tables(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"messages": [TWO_TURNS], "id": ["a"]}), tmp_path / "chats.parquet")
    align_chats_job(tmp_path, [], input=(str(tmp_path / "chats.parquet"),))
    assert [*read_documents(tmp_path / "aligned")] == ["a"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--learn", "all"], "--learn is about chats: name the field"),
        (["--messages", "m", "--text-field", "t"], "--text-field is about texts"),
        (["--messages", "m", "--student-bos", "none"], "--student-bos is about texts"),
        (["--messages", "m", "--no-keep-text"], "--no-keep-text: a chat is kept"),
    ],
)
def test_options_of_texts_and_chats_are_not_mixed(arguments: list[str], words: str) -> None:
    with pytest.raises(OptionsError, match=words):
        parse_options(["--input", "a.jsonl", "--output", "b", *arguments])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--chat-template", "tutor=x"], "tutor: write SIDE=FILE, SIDE being student"),
        (["--chat-template", "teacher="], "teacher: write SIDE=FILE"),
        (["--chat-template", "student=/nowhere.jinja"], r"student: /nowhere\.jinja is not there"),
        (["--template-options", "enable_thinking"], "write NAME=VALUE"),
    ],
)
def test_what_names_no_template_is_refused_with_the_options(
    arguments: list[str], words: str
) -> None:
    with pytest.raises(OptionsError, match=words):
        parse_options(["--input", "a.jsonl", "--output", "b", "--messages", "m", *arguments])


def test_a_template_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latin.jinja").write_bytes(b"\xe9")
    options = {"chat_template": (f"student={tmp_path}/latin.jinja",)}
    with pytest.raises(OptionsError, match=r"latin\.jinja can't be read: 'utf-8' codec"):
        align_chats_job(tmp_path, _CHATS, chat_options=options)


def test_a_side_without_a_template_is_refused_with_what_to_give(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "bare", chat_tokenizer(320), "chatml")
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(OptionsError, match=r"has no chat template.*--chat-template teacher=FILE"):
        align_chats_job(tmp_path, _CHATS, teacher=str(folder))


@pytest.mark.parametrize(
    ("line", "field", "words"),
    [
        ({"messages": TWO_TURNS}, "", '"messages" is a conversation: --messages messages'),
        ({"turns": TWO_TURNS}, "messages", '"turns" is a conversation: --messages turns'),
        ({"c": [{"from": "human", "value": "x"}]}, "c", 'rename them to "role" and "content"'),
        ({"m": [{"role": "robot", "content": "x"}]}, "m", "message 0 has role 'robot', not one of"),
        ({"m": [user("x"), {"role": "assistant"}]}, "m", "message 1 .* has neither content nor"),
    ],
)
def test_a_file_that_is_wholly_wrong_is_refused_with_what_to_do(
    tmp_path: Path, line: dict[str, Any], field: str, words: str
) -> None:
    (tmp_path / "wrong.jsonl").write_text(json.dumps(line) + "\n")
    given = {"input": (str(tmp_path / "wrong.jsonl"),)}
    with pytest.raises(InputError, match=words):
        align_chats_job(tmp_path, [], chat_options={"messages": field}, **given)


def test_a_template_next_to_a_bare_tokenizer_is_found(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "bare", chat_tokenizer(320), "chatml")
    (folder / "tokenizer_config.json").unlink()
    for number, source in enumerate((folder, folder / "tokenizer.json")):
        output = tmp_path / f"{number}"
        manifest = align_chats_job(output, _CHATS[:1], teacher=str(source))[1]
        assert manifest.chats is not None
        text = (output / "aligned" / manifest.chats.teacher.file).read_text()
        assert text == (folder / "chat_template.jinja").read_text()


def test_an_input_of_which_no_chat_can_be_used_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="none of the first 1 chats can be used; the first is"):
        align_chats_job(tmp_path, _BAD[1:])
    with pytest.raises(InputError, match="name it with --messages"):
        align_chats_job(tmp_path / "b", _CHATS, chat_options={"messages": "turns"})
    folder = align_chats_job(tmp_path / "c", _CHATS)[0]
    with pytest.raises(InputError, match="a dataset of chats"):
        align(AlignOptions((str(folder),), str(tmp_path / "d"), str(tmp_path / "c/student")))
