"""Both commands on tiny models: a draft for a target whose rows are padded, and what is said."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.alignment import align_batch
from pipeline.batches import AlignedBatch, SourceDocument
from pipeline.command_line.folder_lock import hold_folder
from pipeline.drawing import progress
from pipeline.models.exported_tokenizer import ExportedTokenizer, convert_tokenizer, save_model
from pipeline.tokenization import Tokenizer
from pipeline.transfer import transferring
from pipeline.transfer.acceptance_command import main as measure
from pipeline.transfer.command import main as transfer
from pipeline.transfer.options import TransferOptions
from schemas.manifest import TokenizerRecord
from tests.support.datasets import byte_level, make_texts, with_control_tokens
from tests.support.hf_folders import make_instruct, write_model

TURNS = [{"role": "user", "content": "Two and two?"}]


def write_texts(folder: Path) -> Path:
    path = folder / "texts.txt"
    path.write_text("\n".join(text for _, text in make_texts(9)), "utf-8")
    return path


def test_a_missing_text_is_told_before_anything_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(tmp_path / "old"), "--tokenizer", str(tmp_path / "new")]
    given += ["--text", str(tmp_path / "missing.txt"), "--output", str(tmp_path / "draft")]
    assert transfer(given) == 2
    said = capsys.readouterr()
    assert "missing.txt" in said.err
    assert not said.out


def test_an_instruct_model_drafts_for_a_target_with_padded_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = write_texts(tmp_path)
    chat = with_control_tokens(byte_level(400), "<|im_start|>", "<|im_end|>")
    old = make_instruct(write_model(tmp_path / "old", chat), chat)
    own = with_control_tokens(byte_level(480), "<|x|>", "<|im_end|>", "<|im_start|>")
    target = write_model(tmp_path / "target", own, num_rows=544)
    given = [str(old), "--tokenizer", str(target), "--text", str(texts)]
    assert transfer([*given, "--rows-of", str(target), "--output", str(tmp_path / "draft")]) == 0
    assert "483 tokens, 544 rows" in (told := capsys.readouterr().out)
    assert "left out" not in told
    draft = AutoModelForCausalLM.from_pretrained(tmp_path / "draft")
    assert draft.get_input_embeddings().weight.shape[0] == draft.config.vocab_size == 544
    before, after = (AutoTokenizer.from_pretrained(f) for f in (old, tmp_path / "draft"))
    chats = [one.apply_chat_template(TURNS, tokenize=False) for one in (before, after)]
    assert chats[0] == chats[1]
    ends = [own.eos_token_id, own.find_token("<|im_end|>")]
    assert draft.config.eos_token_id == draft.generation_config.eos_token_id == ends
    assert (after.eos_token_id, draft.generation_config.top_p) == (ends[0], 0.9)
    few = ["--text", str(texts), "--prompts", "2", "--tokens", "4", "--prompt-bytes", "40"]
    assert measure([str(target), str(tmp_path / "draft"), *few]) == 0
    told = capsys.readouterr().out
    assert "vLLM takes the draft\nllama.cpp takes the draft\n" in told
    assert "  sampled  rate" in told
    assert measure([str(target), str(old), *few]) == 0
    told = capsys.readouterr().out
    assert "vLLM refuses the draft: the target has 544 rows, the draft 402" in told
    assert "  matched  rate" in told
    assert "sampled" not in told


def test_what_a_vocabulary_lacks_is_left_out_with_a_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = write_texts(tmp_path)
    chat = with_control_tokens(byte_level(400), "<|im_start|>", "<|im_end|>")
    old = make_instruct(write_model(tmp_path / "old", chat), chat)
    given = [str(old), "--tokenizer", "bytes", "--text", str(texts)]
    other = ["--rows-of", str(write_model(tmp_path / "small", byte_level(350), num_rows=200))]
    assert transfer([*given, *other, "--output", str(tmp_path / "new")]) == 2
    assert "it has 200 rows, bytes has 258 tokens: name the target" in capsys.readouterr().err
    assert transfer([*given, "--output", str(tmp_path / "new")]) == 0
    lacking = "the default chat template (no token <|im_start|>, <|im_end|>), the end <|im_end|>"
    assert f"nothing for it: {lacking}\n" in capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    assert model.config.eos_token_id == model.generation_config.eos_token_id == 256
    assert model.generation_config.temperature == 0.6
    assert AutoTokenizer.from_pretrained(tmp_path / "new").chat_template is None


def test_what_comes_to_the_output_meanwhile_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, output = write_model(tmp_path / "old", byte_level(400)), tmp_path / "new"

    def save_beside_another(*arguments: Any) -> None:
        save_model(*arguments)
        output.mkdir()
        (output / "notes.txt").write_text("another program's")

    monkeypatch.setattr(transferring, "save_model", save_beside_another)
    texts = str(write_texts(tmp_path))
    given = [str(model), "--tokenizer", "bytes", "--text", texts, "--output", str(output)]
    assert transfer(given) == 2
    assert f"--output {output} is not empty: name a new folder" in capsys.readouterr().err
    assert [path.name for path in output.iterdir()] == ["notes.txt"]
    assert not list(tmp_path.glob(".new*"))


def test_the_lock_of_one_killed_at_its_very_end_goes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, lock = tmp_path / "new", tmp_path / ".new.lock"
    output.mkdir()
    (output / "config.json").write_text("{}")
    lock.write_text("{}")
    given = ["old", "--tokenizer", "bytes", "--text", "texts.jsonl", "--output", str(output)]
    assert transfer(given) == 2
    assert f"--output {output} is not empty: name a new folder" in capsys.readouterr().err
    assert not lock.exists()


def test_control_tokens_beyond_a_target_s_rows_are_as_missing_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = write_texts(tmp_path)
    chat = with_control_tokens(byte_level(400), "<|im_start|>", "<|im_end|>", "<|pad|>")
    old = make_instruct(write_model(tmp_path / "old", chat), chat)
    target = write_model(tmp_path / "target", chat, num_rows=400)
    given = [str(old), "--tokenizer", str(target), "--rows-of", str(target), "--text", str(texts)]
    assert transfer([*given, "--output", str(tmp_path / "new")]) == 0
    told = capsys.readouterr().out
    assert "403 tokens, 400 rows\n  special            2    0.5 %\n" in told
    assert "the default chat template (no token <|im_start|>, <|im_end|>), the end" in told
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    end = chat.eos_token_id
    assert (model.config.eos_token_id, model.config.pad_token_id) == (end, end)


def test_of_a_long_text_the_beginning_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole file's tokens would take transformers 160 times its memory."""
    lengths, compare = [], convert_tokenizer

    def watch(new: Tokenizer, record: TokenizerRecord, known, **more) -> ExportedTokenizer:
        texts = list(known)
        lengths.extend(len(one.text) for one in texts)
        return compare(new, record, texts, **more)

    monkeypatch.setattr(transferring, "convert_tokenizer", watch)
    texts, old = write_texts(tmp_path), write_model(tmp_path / "old", byte_level(400))
    texts.write_text(texts.read_text("utf-8") * 20, "utf-8")
    given = [str(old), "--tokenizer", "bytes", "--text", str(texts)]
    assert transfer([*given, "--output", str(tmp_path / "new")]) == 0
    assert 30_000 < sum(lengths) <= 40_000 < texts.stat().st_size


def test_defaults_that_transformers_refuses_to_save_come_along(tmp_path: Path) -> None:
    """Release 5.9 refuses a temperature without do_sample, which many models have."""
    texts, old = write_texts(tmp_path), write_model(tmp_path / "old", byte_level(400))
    defaults = {"temperature": 0.6, "top_p": 0.9}
    (old / "generation_config.json").write_text(json.dumps(defaults))
    given = [str(old), "--tokenizer", "bytes", "--text", str(texts)]
    assert transfer([*given, "--output", str(tmp_path / "new")]) == 0
    written = json.loads((tmp_path / "new" / "generation_config.json").read_text())
    assert written == {**defaults, "eos_token_id": 256, "pad_token_id": 257}


def test_a_model_with_fewer_rows_than_its_texts_have_tokens_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts, few = write_texts(tmp_path), write_model(tmp_path / "few", byte_level(400), num_rows=270)
    given = [str(few), "--tokenizer", "bytes", "--text", str(texts)]
    assert transfer([*given, "--output", str(tmp_path / "new")]) == 2
    told = capsys.readouterr()
    assert "exceeds the old vocabulary's 270 rows: the text must be aligned with" in told.err
    assert "measuring" not in told.out


def test_a_model_that_reads_both_ways_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its bits per byte would be of tokens that it has seen."""
    texts, old = write_texts(tmp_path), write_model(tmp_path / "old", byte_level(400))
    shape = json.loads((old / "config.json").read_text())
    (old / "config.json").write_text(json.dumps(shape | {"is_causal": False}))
    given = [str(old), "--tokenizer", "bytes", "--text", str(texts)]
    assert transfer([*given, "--output", str(tmp_path / "new")]) == 2
    assert "(llama) reads texts in both directions" in capsys.readouterr().err


def test_a_tokenizer_that_names_no_end_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts, old = write_texts(tmp_path), write_model(tmp_path / "old", byte_level(400))
    bare = json.loads(byte_level(480).file_bytes) | {"added_tokens": [], "post_processor": None}
    (tmp_path / "bare.json").write_text(json.dumps(bare))
    given = [str(old), "--tokenizer", str(tmp_path / "bare.json"), "--text", str(texts)]
    assert transfer([*given, "--output", str(tmp_path / "new")]) == 2
    told = capsys.readouterr()
    assert "would have no loss: give it a special token such as <|endoftext|>" in told.err
    assert "trying" not in told.out


def test_missing_layers_are_named_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts, old = write_texts(tmp_path), write_model(tmp_path / "old", byte_level(400))
    given = [str(old), "--tokenizer", "bytes", "--text", str(texts), "--layers", "0", "7"]
    assert transfer([*given, "--output", str(tmp_path / "new")]) == 2
    told = capsys.readouterr()
    assert "--layers 0 7 must be some of 0 … 1, the model's\n" in told.err
    assert told.out.count("\n") == 1


def test_texts_that_cannot_be_aligned_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    texts, old = write_texts(tmp_path), write_model(tmp_path / "old", byte_level(400))
    odd = tmp_path / "odd.txt"
    odd.write_text("odd")

    def fail(documents: list[SourceDocument], *tokenizers: Tokenizer) -> AlignedBatch:
        good = [each for each in documents if each.text != b"odd"]
        failures = [(each, "student: why") for each in documents if each not in good]
        return replace(align_batch(good, *tokenizers), failures=failures)

    monkeypatch.setattr(transferring, "align_batch", fail)
    given = [str(old), "--tokenizer", "bytes", "--text", str(texts), str(odd), str(texts)]
    assert transfer([*given, "--output", str(tmp_path / "new")]) == 0
    assert f"1 of 2 documents can't be aligned and are left out, first {odd} (st" in caplog.text


def test_a_transfer_that_was_ended_leaves_nothing_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    texts, output = write_texts(tmp_path), tmp_path / "new"
    old = write_model(tmp_path / "old", byte_level(400))
    given = [str(old), "--tokenizer", "bytes", "--text", str(texts), "--output", str(output)]

    def ended(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ExportedTokenizer, "write", ended)
        with pytest.raises(KeyboardInterrupt):
            transfer(given)
    left = tmp_path / ".new.tmp"
    assert not output.exists()
    assert not left.exists()
    left.mkdir()  # as after a kill
    (left / "junk").write_text("")
    capsys.readouterr()
    assert transfer(given) == 0
    assert not left.exists()
    assert not (output / "junk").exists()
    AutoModelForCausalLM.from_pretrained(output)
    told = capsys.readouterr().out.splitlines()
    assert told[0] == f"reading {old} and the tokenizer bytes"
    steps = ["reading", "trying", "aligning 1 document (", "measuring", "making 258", "measuring"]
    assert [line[: len(step)] for line, step in zip(told, steps, strict=False)] == steps


def test_a_model_that_another_process_makes_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts, output = write_texts(tmp_path), tmp_path / "new"
    given = [str(tmp_path), "--tokenizer", "bytes", "--text", str(texts), "--output", str(output)]
    with hold_folder(str(tmp_path / ".new.lock"), str(output)):
        assert transfer(given) == 2
    assert f"writes to {output}; wait until it has ended" in capsys.readouterr().err


def test_no_model_is_made_where_it_can_t_be_renamed_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "is_mount", lambda _: True)
    with pytest.raises(ValueError, match="is where a disk is mounted: name a folder in it"):
        TransferOptions("old", "bytes", ("texts",), str(tmp_path))


def test_how_far_a_long_step_is_shows_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0)
    assert list(progress.watched("abc", "aligning", "documents", each=1000)) == ["a", "b", "c"]
    told = capsys.readouterr().err.splitlines()
    assert told == [f"aligning: {done} of 3,000 documents" for done in ("0", "1,000", "2,000")]
