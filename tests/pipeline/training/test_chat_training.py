"""Chats: a teacher's losses from nothing, what is stored of them, and training on both."""

import json
import math
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from beam_jobs.score.command import main as score
from beam_jobs.score.summary import estimate_disk, learned_share
from pipeline.dataset.chosen_documents import ChosenDocuments, select_documents
from pipeline.dataset.files import open_dataset
from pipeline.dataset.score_files import list_scores
from pipeline.distributions.cells import count_pairs
from pipeline.distributions.pair import look_at_pair
from pipeline.distributions.sample import sample_documents
from pipeline.losses.distillation import truncated_turns
from pipeline.methods.method import Method
from pipeline.models.hf_models import load_language_model
from pipeline.models.probe import UntrainedTeacherError
from pipeline.scoring.comparison import compare_scores
from pipeline.scoring.teaching import Teaching
from pipeline.streaming import AlignedRows, Reading, StreamConfig
from pipeline.streaming.vocabularies import vocabulary_map
from pipeline.training.config import TrainConfig
from pipeline.training.held_out import bits_per_byte, open_heldout
from pipeline.training.hf_trainer import GuidedTrainer
from pipeline.training.loop import train
from pipeline.training.ranks import Ranks
from pipeline.training.run_opening import open_training
from pipeline.validate.dataset_checks import validate_dataset
from schemas.sidecar import decode_score_manifest, decode_sidecar
from tests.support.chats import FOLDER, NAMES, align_chats_job, chat_tokenizer, said, user
from tests.support.completions_server import MODEL, serve
from tests.support.datasets import read_documents
from tests.support.guided_trainers import arguments, logged
from tests.support.hf_folders import write_model
from tests.support.runs import read_log
from tests.support.scored_data import THREADS, online_losses

_CHATS = [
    [
        m
        for k in range(turns)
        for m in (user(f"What is {n}+{k}?"), said(f"It is {n + k}, naïve 😀."))
    ]
    for n, turns in enumerate((1, 2, 3, 1, 2, 4))
]
_LENGTH = 256


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Chats, a tiny student and a tiny teacher of another tokenizer and template, their scores."""
    root = tmp_path_factory.mktemp("world")
    align_chats_job(root, _CHATS, sides=("chatml", "llama2"))
    for side, size in (("student", 320), ("teacher", 512)):
        kept = {path.name: path.read_bytes() for path in (root / side).iterdir()}
        write_model(root / side, chat_tokenizer(size), seed=size)
        for name, data in kept.items():
            (root / side / name).write_bytes(data)
    _score(root)
    return root


def _score(root: Path, *more: str) -> None:
    given = ["--seq-length", str(_LENGTH), "--dtype", "float32", "--allow-untrained-teacher"]
    given += ["--threads", str(THREADS), "--top-k", "4", *more]
    assert score([str(root / "aligned"), "--teacher", str(root / "teacher"), *given]) == 0


def test_chats_of_which_nothing_is_learned_are_refused_by_name(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chats = [[user("Why?"), said("So.", weight=0)], [user("Nobody answers.")]]
    aligned, _ = align_chats_job(tmp_path, chats)
    why = "--learn assistant takes assistants' messages, and these are missing, empty or have \"w"
    assert f"0 student tokens, 0 B of text; can't be trained on: {why}" in capsys.readouterr().out
    given = ["--teacher", str(world / "teacher"), "--allow-untrained-teacher"]
    assert score([str(aligned), *given, "--seq-length", str(_LENGTH)]) == 2
    assert f"no teacher tokens, as {why}" in capsys.readouterr().err
    with pytest.raises(ValueError, match="no student tokens, as --learn assistant takes"):
        open_training(str(aligned), str(world / "student"), Method("full"))
    rows = AlignedRows(StreamConfig(str(world / "aligned")))
    with pytest.raises(ValueError, match="no bytes, as --learn assistant takes"):
        open_heldout({"held": str(aligned)}, rows)


def _from_nothing(root: Path, number: int) -> tuple[list[int], torch.Tensor]:
    """Return a chat's teacher tokens and their losses, by nothing of vocag."""
    (text,), _ = render_jinja_template(
        [_CHATS[number]], chat_template=(FOLDER / "llama2.jinja").read_text(), **NAMES
    )
    tokenizer = Tokenizer.from_file(str(root / "teacher/tokenizer.json"))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    model = AutoModelForCausalLM.from_pretrained(root / "teacher")
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0]
    losses = -logits.log_softmax(-1)[:-1].gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
    return ids, losses


def test_a_teacher_s_losses_are_those_of_its_own_rendering(world: Path) -> None:
    rows = AlignedRows(StreamConfig(str(world / "aligned"), seq_length=_LENGTH))
    batch = rows.__getitems__(range(len(rows)))
    online = online_losses(world / "teacher", batch)
    expected = {tuple(ids): losses for ids, losses in (_from_nothing(world, n) for n in range(6))}
    found = 0
    for row, bounds in enumerate(batch["teacher_cu_seqlens"].tolist()):
        for start, stop in pairwise(bounds):
            ids = tuple(batch["teacher_input_ids"][row, start:stop].tolist())
            if ids in expected:
                torch.testing.assert_close(
                    online[row, start + 1 : stop], expected[ids], atol=1e-6, rtol=1e-6
                )
                found += 1
    assert found == len(_CHATS)


def test_a_teacher_is_tried_on_a_row_that_is_learned(world: Path) -> None:
    """Of a long prompt's row its mean loss is of nothing, and a good teacher was refused."""
    data = StreamConfig(
        str(world / "aligned"), seq_length=24, teaching=Teaching(teacher=str(world / "teacher"))
    )
    seeds = (replace(data, seed=seed) for seed in range(100))
    of_prompt = next(each for each in seeds if not AlignedRows(each)[0]["loss_mask"].any())
    with pytest.raises(UntrainedTeacherError, match=r"first learned row of the data is \d"):
        open_training(of_prompt, str(world / "student"), Method("teacher"))


def test_only_what_is_said_of_learned_tokens_is_stored(world: Path) -> None:
    (file,) = (world / "aligned").glob("*.teacher-*.safetensors")
    stored = decode_sidecar(file.read_bytes(), at=file.name)
    assert stored.learned is not None
    assert stored.entries is not None
    index = open_dataset(str(world / "aligned")).read_index(0, with_names=True)
    documents = read_documents(world / "aligned")
    for place, name in enumerate(index.document_id):
        own = slice(*stored.starts[place : place + 2].tolist())
        document = documents[name]
        learned = document.chat.teacher.is_learned(len(document.teacher))
        np.testing.assert_array_equal(stored.learned[own], learned)
        losses = _from_nothing(world, int(name.removeprefix("chat-")))[1].numpy()
        given = np.where(learned[1:], losses, np.nan).astype(np.float16)
        np.testing.assert_allclose(stored.losses[own][1:], given, rtol=2e-3)
        positions = slice(*stored.entries.position_starts[place : place + 2].tolist())
        has_entries = stored.entries.counts[positions] > 0
        np.testing.assert_array_equal(has_entries, np.append(learned, False))
    assert validate_dataset(str(world / "aligned")).findings == ()


def test_all_losses_and_those_of_learned_tokens_compare_as_equal(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each kept its share of its own tokens; and the disk was that of all tokens."""
    root = shutil.copytree(world, tmp_path / "world")
    capsys.readouterr()
    _score(root, "--dry-run", "--top-k", "8")
    told = capsys.readouterr().out
    before = {path.name for path in (root / "aligned").iterdir()}
    _score(root, "--top-k", "8")
    written = [path for path in (root / "aligned").iterdir() if path.name not in before]
    (scores,) = [path for path in written if path.suffix == ".json"]
    of_learned = decode_score_manifest(scores.read_bytes(), at="")
    records = of_learned.sidecars
    mean = sum(r.loss_sum for r in records) / sum(r.num_losses for r in records)
    assert f"mean loss {mean:.3f} nats" in told
    dataset = open_dataset(str(root / "aligned"))
    num_bytes = sum(path.stat().st_size for path in written)
    (root / "gone").mkdir()
    shards, rule = dataset.manifest.shards, of_learned.rule
    learned = learned_share(select_documents(dataset), rule)
    room = estimate_disk(str(root / "gone"), shards, rule, learned=learned)
    assert room == pytest.approx(num_bytes, rel=0.15), "bounds of what is learned aren't counted"
    assert learned < 0.4
    _score(root, "--top-k", "8", "--no-learned-only")
    rules = [each.manifest.rule for each in list_scores(str(root / "aligned"))]
    (all_of_them,) = (each.fingerprint for each in rules if not each.learned_only)
    pair = (of_learned.rule.fingerprint, all_of_them)
    found = [compare_scores(str(root / "aligned"), *names) for names in (pair, pair[::-1])]
    assert [each.num_changed for each in found] == [0, 0]
    assert found[0].num_kept == found[1].num_kept > 0


def test_the_pair_s_cells_are_counted_as_in_training(world: Path) -> None:
    rows = AlignedRows(StreamConfig(str(world / "aligned"), seq_length=_LENGTH, with_cells=True))
    dataset = open_dataset(str(world / "aligned"))
    documents = sample_documents([ChosenDocuments(dataset)])
    expected = int(count_pairs(documents, vocabulary_map(rows)).counts.sum())
    assert look_at_pair(dataset).num_labels == expected > 50


def test_scores_of_a_document_are_by_its_learned_bytes(world: Path) -> None:
    dataset = open_dataset(str(world / "aligned"))
    from pipeline.dataset.document_scores import open_scored_documents

    bits = open_scored_documents("teacher", dataset).read(0, ["bits_per_byte"])["bits_per_byte"]
    index = dataset.read_index(0, with_names=True)
    documents = read_documents(world / "aligned")
    for place, name in enumerate(index.document_id):
        document = documents[name]
        learned = document.chat.teacher.is_learned(len(document.teacher))[1:]
        nats = _from_nothing(world, int(name.removeprefix("chat-")))[1].numpy()[learned].sum()
        num_bytes = sum(b - a for a, b in document.chat.learned.tolist())
        assert bits[place] == pytest.approx(nats / math.log(2) / num_bytes, rel=2e-3)


def test_every_token_of_a_text_has_the_teacher_s_distribution(tmp_path: Path) -> None:
    """One tokenizer and two templates: what is mapped is what the teacher said, at every label."""
    options = {"chat_template": (f"student={FOLDER / 'llama3.jinja'}",)}
    one = {"sides": ("llama3", "chatml"), "student": str(tmp_path / "teacher")}
    align_chats_job(tmp_path, _CHATS, chat_options=options, **one)
    kept = {path.name: path.read_bytes() for path in (tmp_path / "teacher").iterdir()}
    write_model(tmp_path / "teacher", chat_tokenizer(512), seed=512)
    for name, data in kept.items():
        (tmp_path / "teacher" / name).write_bytes(data)
    _score(tmp_path, "--draws", "0")
    teaching = Teaching(stored_losses=("teacher",))
    rows = AlignedRows(
        StreamConfig(
            str(tmp_path / "aligned"),
            seq_length=_LENGTH,
            teaching=teaching,
            with_distributions=True,
        )
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "teacher")
    compared = 0
    for row in (rows[number] for number in range(len(rows))):
        for start, stop in pairwise(row["teacher_cu_seqlens"].tolist()):
            ids = row["teacher_input_ids"][start:stop].long()
            if not len(ids) or not row["loss_mask"].any():
                continue
            with torch.inference_mode():
                probs = model(ids[None]).logits[0].softmax(-1)
            spans = row["teacher_spans"]
            for place in (row["loss_mask"] > 0).nonzero()[:, 0].tolist():
                first, last = spans[place].tolist()
                if first == last or not start < first < stop:
                    continue
                found = row["next_token_ids"][place]
                likeliest = probs[first - start - 1].topk(4)
                assert {*found[found >= 0].tolist()} <= {
                    *likeliest.indices.tolist(),
                    int(row["labels"][place]),
                }
                assert (found >= 0).any()
                compared += 1
    assert compared > 100


def _config(root: Path, output: Path, method: Method, **changes: Any) -> TrainConfig:
    values: dict[str, Any] = {
        "data": Reading(str(root / "aligned")),
        "student": str(root / "student"),
        "output": output,
        "method": method,
        "teaching": Teaching(stored_losses=("teacher",)),
        "seq_length": _LENGTH,
        "global_batch_size": 2,
        "micro_batch_size": 2,
        "num_steps": 2,
        "num_epochs": 20,
        "warmup_steps": 0,
        "learning_rate": 1e-3,
    }
    return TrainConfig(**(values | changes))


@pytest.mark.parametrize("name", ["teacher", "full", "alm", "distill", "chunks", "student_loss"])
def test_methods_train_on_stored_scores(world: Path, tmp_path: Path, name: str) -> None:
    served = {} if name in ("teacher", "alm", "distill", "chunks") else {"teaching": Teaching()}
    values = train(_config(world, tmp_path, Method(name), **served))
    assert math.isfinite(values["loss"])


def test_uld_pairs_the_tokens_of_a_turn(world: Path, tmp_path: Path) -> None:
    """The student's t-th token of each answer with the teacher's, by the renderings alone."""
    rows = AlignedRows(StreamConfig(str(world / "aligned"), seq_length=_LENGTH))
    batch = rows.__getitems__(range(len(rows)))
    mask, spans = batch["loss_mask"], batch["teacher_spans"]
    places, taught = truncated_turns(mask, spans, batch.teacher_has_loss)
    labels = batch["labels"].flatten()[places].tolist()
    following = batch["teacher_input_ids"].flatten()[taught + 1].tolist()
    pairs, expected = [*zip(labels, following, strict=True)], list[tuple[int, int]]()
    for document in read_documents(world / "aligned").values():
        for start, stop in document.chat.learned.tolist():
            ours, theirs = (
                side.input_ids[(side.byte_offsets[:, 1] > start) & (side.byte_offsets[:, 0] < stop)]
                for side in (document.student, document.teacher)
            )
            expected += zip(ours.tolist(), theirs.tolist(), strict=False)
    assert sorted(pairs) == sorted(expected)
    teaching = Teaching(teacher=str(world / "teacher"))
    changes = {"teaching": teaching, "allow_untrained_teacher": True}
    values = train(_config(world, tmp_path, Method("uld"), **changes))
    assert values["divergence"] > 0


def test_the_hugging_face_trainer_trains_as_vocag_train_does(world: Path, tmp_path: Path) -> None:
    heldout = str(world / "aligned")
    alike = {"num_steps": 4, "schedule": "constant", "weight_decay": 0.0, "heldout": (heldout,)}
    config = _config(world, tmp_path / "own", Method("teacher"), **alike)
    last = train(config)
    own = read_log(tmp_path / "own")
    more = {"eval_strategy": "steps", "eval_steps": 4, "save_strategy": "no", "adam_beta2": 0.95}
    args = arguments(tmp_path / "trainer", **more)
    stored = Teaching(stored_losses=("teacher",))
    data = StreamConfig(str(world / "aligned"), seq_length=_LENGTH, teaching=stored)
    student = AutoModelForCausalLM.from_pretrained(world / "student")
    trainer = GuidedTrainer(student, args, data=data, method=Method("teacher"), heldout=heldout)
    trainer.train()
    assert logged(trainer) == pytest.approx([entry["loss"] for entry in own], rel=1e-5)
    measured = logged(trainer, "eval_bits_per_byte")
    assert measured == pytest.approx([last["heldout_bits_per_byte"]], rel=1e-5)


def test_a_served_teacher_reads_the_tokens_of_its_own_rendering(
    world: Path, tmp_path: Path
) -> None:
    dataset = Path(shutil.copytree(world / "aligned", tmp_path / "aligned"))
    with serve(world / "teacher") as server:
        asked = ["--engine", "openai", "--endpoint", server.url, "--model", MODEL]
        given = ["--dtype", "float32", "--quantization", "none", "--allow-untrained-teacher"]
        assert score([str(dataset), *asked, *given, "--seq-length", str(_LENGTH)]) == 0
        assert all(isinstance(body["prompt"], list) for body in server.bodies), "ids, not text"
    found = {}
    for scores in list_scores(str(dataset)):
        (record,) = scores.manifest.sidecars
        stored = decode_sidecar((dataset / record.file).read_bytes(), at=record.file)
        found[scores.manifest.rule.engine is not None] = stored
    np.testing.assert_array_equal(found[True].learned, found[False].learned)
    np.testing.assert_allclose(found[True].losses, found[False].losses, rtol=2e-3, atol=1e-4)


def test_a_teacher_that_runs_teaches_what_would_be_stored(world: Path) -> None:
    config = StreamConfig(str(world / "aligned"), seq_length=_LENGTH)
    running = AlignedRows(config)
    stored = AlignedRows(replace(config, teaching=Teaching(stored_losses=("teacher",))))
    for number in range(len(running)):
        torch.testing.assert_close(
            running[number].teacher_has_loss, stored[number].teacher_has_loss
        )
        assert running[number].teacher_has_loss.any()


def test_a_method_of_one_vocabulary_needs_one_template(world: Path, tmp_path: Path) -> None:
    same, options = {"student": str(world / "teacher")}, [f"student={FOLDER / 'chatml.jinja'}"]
    align_chats_job(tmp_path, _CHATS, chat_options={"chat_template": (*options,)}, **same)
    running = Teaching(teacher=str(world / "teacher"))
    config = _config(tmp_path, tmp_path / "run", Method("kld"), teaching=running, **same)
    with pytest.raises(ValueError, match="has two chat templates"):
        train(config)


def test_held_out_bits_are_those_of_learned_bytes(world: Path, tmp_path: Path) -> None:
    heldout_set = (str(world / "aligned"),)
    config = _config(world, tmp_path, Method("full"), teaching=Teaching(), heldout=heldout_set)
    rows = AlignedRows(StreamConfig(str(world / "aligned"), seq_length=_LENGTH))
    (heldout,) = open_heldout(config.heldout_sets, rows).values()
    student = load_language_model(str(world / "student"))
    found = bits_per_byte(config, student, heldout, Ranks(torch.device("cpu")))
    nats, num_bytes = 0.0, 0
    for document in read_documents(world / "aligned").values():
        ids = torch.tensor([document.student.input_ids.tolist()])
        with torch.inference_mode():
            logits = student(ids).logits[0]
        losses = -logits.log_softmax(-1)[:-1].gather(-1, ids[0, 1:, None])[:, 0]
        for a, b in document.chat.learned.tolist():
            offsets = document.student.byte_offsets
            over = (offsets[:, 0] < b) & (offsets[:, 1] > a) & (offsets[:, 1] > offsets[:, 0])
            nats += float(losses[torch.from_numpy(over[1:])].sum())
            num_bytes += b - a
    assert found == pytest.approx(nats / math.log(2) / num_bytes, rel=1e-5)


def test_a_trained_model_keeps_template_and_ids(world: Path, tmp_path: Path) -> None:
    train(_config(world, tmp_path, Method("full"), teaching=Teaching()))
    loaded = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert loaded.chat_template is not None
    text = loaded.apply_chat_template(_CHATS[1], tokenize=False)
    assert text == loaded.apply_chat_template(
        _CHATS[1], tokenize=False, chat_template=(FOLDER / "chatml.jinja").read_text()
    )
    ids = loaded(text, add_special_tokens=False)["input_ids"]
    assert ids == read_documents(world / "aligned")["chat-1"].student.input_ids.tolist()


def test_a_base_model_is_exported_with_its_template(world: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    write_model(base, chat_tokenizer(320), seed=320)
    changes = {"student": str(base), "teaching": Teaching()}
    train(_config(world, tmp_path / "run", Method("full"), **changes))
    loaded = AutoTokenizer.from_pretrained(tmp_path / "run/model")
    text = loaded.apply_chat_template(_CHATS[0], tokenize=False)
    assert text.startswith("<|im_start|>user\nWhat is 0+0?<|im_end|>\n")
    config = json.loads((tmp_path / "run/model/generation_config.json").read_bytes())
    ends = config["eos_token_id"]
    assert loaded.convert_tokens_to_ids("<|im_end|>") in (
        ends if isinstance(ends, list) else [ends]
    )


@pytest.mark.long
@pytest.mark.slow
def test_an_instruct_model_still_answers_in_its_template(smollm2: Path, tmp_path: Path) -> None:
    """After 50 steps on its own template it begins and ends a turn as before."""
    sums = [
        [user(f"What is {a}+{b}?"), said(f"It is {a + b}.")] for a in range(8) for b in range(8)
    ]
    lines = (json.dumps({"messages": chat}) for chat in sums)
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    from beam_jobs.align.command import align
    from beam_jobs.align.options import AlignOptions, ChatOptions

    model = str(smollm2)
    align(
        AlignOptions(
            (str(tmp_path / "chats.jsonl"),),
            str(tmp_path / "aligned"),
            model,
            model,
            chats=ChatOptions("messages"),
        )
    )
    changes = {"student": model, "teaching": Teaching(), "seq_length": 64, "num_steps": 50}
    sizes = {"global_batch_size": 1, "micro_batch_size": 1, "learning_rate": 1e-5}
    train(_config(tmp_path, tmp_path / "run", Method("full"), **changes, **sizes))
    trained = tmp_path / "run/model"
    tokenizer = AutoTokenizer.from_pretrained(trained)
    student = AutoModelForCausalLM.from_pretrained(trained)
    asked = tokenizer.apply_chat_template(
        [user("What is 3+4?")], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    written = student.generate(**asked, max_new_tokens=24, do_sample=False)[0]
    answer = written[asked["input_ids"].shape[1] :].tolist()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert answer[-1] == end
    assert "7" in tokenizer.decode(answer[:-1])
    assert not set(answer[:-1]) & {*tokenizer.all_special_ids}
