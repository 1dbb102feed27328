"""GuidedTrainer inside the real Trainer: rows, loss, evaluation, resuming, what is refused."""

import copy
import inspect
import json
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    TrainerCallback,
)

from pipeline.command_line.failures import hints_of
from pipeline.dataset.files import open_dataset
from pipeline.methods.method import Method
from pipeline.models.hf_models import load_language_model
from pipeline.models.probe import UntrainedTeacherError
from pipeline.packing.state import StreamMismatchError
from pipeline.streaming import AlignedRows, Reading, StreamConfig
from pipeline.training.guided import GuidedStudent
from pipeline.training.hf_trainer import GuidedTrainer
from pipeline.training.loop import train
from pipeline.training.run_opening import open_training
from schemas.document import decode_document
from tests.support.datasets import remove_documents, seen_ids
from tests.support.guided_trainers import arguments, data_of, logged, trainer_of
from tests.support.mixtures import write_mixture
from tests.support.runs import read_log
from tests.support.scored_data import SEQ_LENGTH, train_config


def seen_rows(trainer: Any) -> list[torch.Tensor]:
    """Note every micro-batch that the loss is made of."""
    seen: list[torch.Tensor] = []
    own = trainer.compute_loss

    def note(model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        seen.append(inputs["rows"].clone())
        return own(model, inputs, *args, **options)

    trainer.compute_loss = note
    return seen


def test_it_trains_as_vocag_train_does(world: Path, tmp_path: Path) -> None:
    """Every other default of the Trainer's stays: unused columns removed, random sampling."""
    heldout = str(world / "data")
    trainer = trainer_of(
        world,
        tmp_path / "trainer",
        settings={"eval_strategy": "steps", "eval_steps": 4, "adam_beta2": 0.95},
        heldout=heldout,
    )
    assert trainer.args.remove_unused_columns
    assert trainer.args.train_sampling_strategy == "random"
    trainer.train()
    last = train(train_config(world, tmp_path / "own", stored_losses=("",), heldout=(heldout,)))
    own = read_log(tmp_path / "own")
    assert logged(trainer) == pytest.approx([entry["loss"] for entry in own], rel=1e-5)
    for name in ("kept_fraction", "teacher_loss"):
        assert logged(trainer, name) == pytest.approx([entry[name] for entry in own], rel=1e-6)
    measured = logged(trainer, "eval_bits_per_byte")
    assert measured == pytest.approx([last["heldout_bits_per_byte"]], rel=1e-5)
    # The held-out loss, by the slow way: token by token, each counted alike.
    rows = trainer.eval_dataset
    batch = rows.__getitems__(range(len(rows)))
    with torch.no_grad():
        result = GuidedStudent(trainer.model, Method("full"))(batch)
    expected = float(result.loss_sum) / float(result.num_tokens)
    assert logged(trainer, "eval_loss") == pytest.approx([expected], rel=1e-5)


def test_it_saves_the_tokenizer_of_its_data(world: Path, tmp_path: Path) -> None:
    """In checkpoints, too; but for one that the user brings."""
    trainer = trainer_of(world, tmp_path, settings={"max_steps": 2})
    trainer.train()
    trainer.save_model()
    dataset = open_dataset(str(world / "data"))
    _, sample = next(dataset.samples(0, dataset.read_index(0, with_names=True)))
    document = decode_document(sample)
    for folder in (tmp_path, tmp_path / "checkpoint-2"):
        loaded = AutoTokenizer.from_pretrained(folder)
        ids = loaded(document.text.decode(), add_special_tokens=False)["input_ids"]
        assert ids == document.student.input_ids.tolist()
        config = AutoConfig.from_pretrained(folder)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            assert getattr(config, name) == getattr(loaded, name)
    loaded.add_tokens(["<mine>"])
    own = trainer_of(world, tmp_path / "own", settings={}, processing_class=loaded)
    own.save_model()
    assert "<mine>" in AutoTokenizer.from_pretrained(tmp_path / "own").get_vocab()


def test_epochs_and_micro_batches_read_the_runs_rows_in_order(world: Path, tmp_path: Path) -> None:
    settings = {"max_steps": -1, "num_train_epochs": 2.0, "save_strategy": "no"}
    settings |= {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 3}
    plain = data_of(world, stored_losses=None)
    trainer = trainer_of(world, tmp_path, settings=settings, method=Method("full"), data=plain)
    seen = seen_rows(trainer)
    trainer.train()
    rows = AlignedRows(replace(plain, global_batch_size=6, num_epochs=2))
    assert len(rows) == 2 * rows.samples_per_epoch > 12
    expected = rows.__getitems__(range(len(rows))).buffer
    assert torch.equal(torch.cat(seen), expected)
    assert trainer.state.global_step == len(rows) // 6
    assert trainer.num_examples(trainer.get_train_dataloader()) == len(rows) // 2  # was 2**62


def test_an_epoch_that_a_callback_ends_gives_its_other_rows_to_the_next(
    world: Path, tmp_path: Path
) -> None:
    """The next one read the same rows again. A resumed run goes on where that one stood."""

    class Stop(TrainerCallback):
        def on_step_end(self, *given: Any, **_: Any) -> None:
            given[2].should_epoch_stop = given[1].global_step == 3

    data = data_of(world, stored_losses=None)
    settings = {"max_steps": -1, "num_train_epochs": 2, "save_steps": 5}
    settings |= {"per_device_train_batch_size": 16}
    given = {"settings": settings, "method": Method("full"), "data": data}
    trainer = trainer_of(world, tmp_path, callbacks=[Stop()], **given)
    seen = seen_rows(trainer)
    trainer.train()
    steps = 3 + trainer.rows.samples_per_epoch // 16
    expected = trainer.rows.__getitems__(range(16 * steps)).buffer
    assert torch.equal(torch.cat(seen), expected)
    again = trainer_of(world, tmp_path, **given)
    rest = seen_rows(again)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert torch.equal(torch.cat(rest)[: 16 * (steps - 5)], expected[16 * 5 :])


def test_a_mixture_is_read_to_its_last_row(world: Path, tmp_path: Path) -> None:
    """Whose last epoch is not a whole one."""
    data = str(world / "data")
    file = write_mixture(
        tmp_path / "mixture.toml",
        a={"path": data, "where": "num_student_tokens > 60"},
        b={"path": data, "where": "num_student_tokens <= 60", "max_epochs": 3},
    )
    mixture = StreamConfig(Reading(str(file)), seq_length=SEQ_LENGTH)
    num_rows = len(AlignedRows(mixture))
    assert num_rows % AlignedRows(mixture).samples_per_epoch
    size = next(size for size in (4, 3, 2, 1) if num_rows % size == 0)
    settings = {"max_steps": num_rows // size, "per_device_train_batch_size": size}
    trainer = trainer_of(world, tmp_path, settings=settings, method=Method("full"), data=mixture)
    seen = seen_rows(trainer)
    trainer.train()
    assert torch.equal(torch.cat(seen), trainer.rows.__getitems__(range(num_rows)).buffer)


def test_a_run_goes_on_with_the_rows_that_follow(world: Path, tmp_path: Path) -> None:
    """From the middle of the second epoch: same rows, same random choices, same weights."""
    steps = len(AlignedRows(data_of(world, global_batch_size=4))) // 4
    settings = {"max_steps": steps + 4, "save_steps": steps + 2}
    settings |= {"gradient_accumulation_steps": 2}
    given = {"settings": settings, "method": Method("random")}
    given |= {"data": data_of(world, stored_losses=None)}
    whole = trainer_of(world, tmp_path / "run", **given)
    seen = seen_rows(whole)
    whole.train()
    again = trainer_of(world, tmp_path / "run", **given)
    rest = seen_rows(again)
    again.train(resume_from_checkpoint=str(tmp_path / f"run/checkpoint-{steps + 2}"))
    assert len(rest) == 4
    assert all(map(torch.equal, rest, seen[-4:]))
    assert logged(again)[-2:] == logged(whole)[-2:]
    weights = dict(whole.model.named_parameters())
    assert all(torch.equal(weights[name], p) for name, p in again.model.named_parameters())
    other = trainer_of(world, tmp_path / "run", settings=settings, data=data_of(world, seed=5))
    with pytest.raises(StreamMismatchError):
        other.train(resume_from_checkpoint=True)
    settings["gradient_accumulation_steps"] = 1
    smaller = trainer_of(world, tmp_path / "run", **given)
    with pytest.raises(StreamMismatchError, match="global_batch_size 4, this run has 2"):
        smaller.train(resume_from_checkpoint=True)
    (tmp_path / "foreign").mkdir()
    for cut in (False, True):  # a file of a killed run
        if cut:
            (tmp_path / "foreign/vocag_rows.json").write_text('{"consumed')
        with pytest.raises(ValueError, match=r"no whole vocag_rows\.json.* from an earlier one"):
            other.train(resume_from_checkpoint=str(tmp_path / "foreign"))


def test_a_run_goes_on_with_its_data_as_they_were(world: Path, tmp_path: Path) -> None:
    """Of a mixture, whose generations can't be named; a document was removed meanwhile."""
    folder = tmp_path / "data"
    shutil.copytree(world / "data", folder)
    file = write_mixture(tmp_path / "mixture.toml", a={"path": str(folder), "max_epochs": 2})
    given = {"method": Method("full"), "settings": {"max_steps": 4, "save_on_each_node": True}}
    given |= {"data": StreamConfig(Reading(str(file)), seq_length=SEQ_LENGTH)}
    whole = trainer_of(world, tmp_path / "run", **given)
    seen = seen_rows(whole)
    whole.train()
    remove_documents(folder, min(seen_ids(folder)))
    checkpoint = str(tmp_path / "run/checkpoint-2")
    with pytest.raises(StreamMismatchError, match=r"TrainingArguments\.resume_from_checkpoint"):
        trainer_of(world, tmp_path / "run", **given).train(resume_from_checkpoint=checkpoint)
    given["settings"] |= {"resume_from_checkpoint": checkpoint}
    again = trainer_of(world, tmp_path / "run", **given)
    rest = seen_rows(again)
    again.train(resume_from_checkpoint=checkpoint)
    assert len(rest) == 2
    assert all(map(torch.equal, rest, seen[2:]))


def test_a_model_belongs_to_none_of_its_trainers(world: Path, tmp_path: Path) -> None:
    """The last trainer's method was every trainer's, and copies computed with the model's weights.

    Neither could such a model be pickled.
    """
    student = AutoModelForCausalLM.from_pretrained(world / "student")
    once = {"data": data_of(world), "method": Method("teacher")}
    first = GuidedTrainer(student, arguments(tmp_path / "a", max_steps=1), **once)
    plain = {"data": data_of(world, stored_losses=None), "method": Method("full")}
    GuidedTrainer(student, arguments(tmp_path / "b"), **plain)
    alone = trainer_of(world, tmp_path / "c", settings={"max_steps": 1})
    copied, pickled = copy.deepcopy(student), pickle.loads(pickle.dumps(student))
    first.train()
    alone.train()
    assert logged(first) == logged(alone)
    ids = torch.tensor([[1, 2, 3]])
    untrained = AutoModelForCausalLM.from_pretrained(world / "student")(ids).logits
    for model in (copied, pickled):
        torch.testing.assert_close(model(ids).logits, untrained, rtol=0, atol=0)
    assert not torch.equal(student(ids).logits, untrained)


def test_a_bf16_model_stays_what_it_was_to_others(world: Path, tmp_path: Path) -> None:
    """Copies computed with its weights, and `generate` didn't know what its forward pass takes."""
    settings = {"max_steps": 1, "bf16": True, "save_strategy": "no"}
    plain = {"data": data_of(world, stored_losses=None), "method": Method("full")}
    trainer = trainer_of(world, tmp_path, settings=settings, **plain)
    student = trainer.model
    trainer.train()
    GuidedTrainer(student, arguments(tmp_path, **settings), **plain).train()
    ids = torch.tensor([[1, 2, 3]])
    copies = copy.deepcopy(student), pickle.loads(pickle.dumps(student))
    trained = [model(ids).logits for model in copies]
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.zero_()
    for model, logits in zip(copies, trained, strict=True):
        assert torch.equal(model(ids).logits, logits)
    own = inspect.signature(student.forward).parameters
    assert ["self", *own] == list(inspect.signature(type(student).forward).parameters)
    unwrapped = trainer.accelerator.unwrap_model(student, keep_fp32_wrapper=False)
    assert not unwrapped(ids).logits.any()


def test_a_finished_run_makes_no_further_step(world: Path, tmp_path: Path) -> None:
    """It made one, and saved it."""
    settings = {"max_steps": 2}
    trainer_of(world, tmp_path, settings=settings).train()
    again = trainer_of(world, tmp_path, settings=settings)
    with pytest.raises(ValueError, match=r"checkpoint-2 is of step 2, the last one: load its"):
        again.train(resume_from_checkpoint=True)
    saved = tmp_path / "checkpoint-2/vocag_rows.json"
    known = json.loads(saved.read_text("utf-8"))
    for other in (known | {"newer": 1}, {}, []):
        saved.write_text(json.dumps(other), "utf-8")
        with pytest.raises(ValueError, match=r"no whole vocag_rows\.json.* another version"):
            again.train(resume_from_checkpoint=True)


def test_a_kill_while_the_checkpoint_before_is_removed_costs_no_run(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of which half is gone: the new one is the only one."""
    settings = {"max_steps": 3, "save_steps": 1, "save_total_limit": 1}

    def end(path: object, *_: object, **__: object) -> None:
        Path(str(path), "trainer_state.json").unlink()
        raise KeyboardInterrupt

    whole = trainer_of(world, tmp_path, settings=settings)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", end)
        with pytest.raises(KeyboardInterrupt):
            whole.train()
    again = trainer_of(world, tmp_path, settings=settings)
    again.train(resume_from_checkpoint=True)
    assert [entry["step"] for entry in again.state.log_history if "loss" in entry] == [1, 2, 3]


def test_a_model_alone_is_no_checkpoint(world: Path, tmp_path: Path) -> None:
    """The run went on with a new optimizer and schedule, without a word."""
    settings = {"save_only_model": True}
    trainer_of(world, tmp_path, settings=settings).train()
    again = trainer_of(world, tmp_path, settings=settings)
    with pytest.raises(ValueError, match=r"checkpoint-2 holds no scheduler\.pt.*save_only_model"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_a_first_run_has_no_checkpoint(world: Path, tmp_path: Path) -> None:
    settings = {"resume_from_checkpoint": True}
    with pytest.raises(ValueError, match=r"run holds no checkpoint: leave out resume_from_"):
        trainer_of(world, tmp_path / "run", settings=settings)


def test_every_node_that_saves_keeps_its_rows(world: Path, tmp_path: Path) -> None:
    trainer = trainer_of(world, tmp_path, settings={"save_on_each_node": True})
    trainer.state.is_world_process_zero = False
    trainer.save_model(str(tmp_path / "checkpoint-2"), _internal_call=True)
    assert (tmp_path / "checkpoint-2/vocag_rows.json").is_file()


def test_a_step_may_be_longer_than_a_mixtures_epoch(world: Path, tmp_path: Path) -> None:
    data = str(world / "data")
    file = write_mixture(tmp_path / "mixture.toml", a={"path": data, "max_epochs": 4})
    mixture = StreamConfig(Reading(str(file)), seq_length=SEQ_LENGTH)
    num_rows = AlignedRows(mixture).samples_per_epoch
    settings = {"max_steps": 2, "per_device_train_batch_size": num_rows + 1}
    trainer = trainer_of(world, tmp_path, settings=settings, method=Method("full"), data=mixture)
    seen = seen_rows(trainer)
    trainer.train()
    expected = trainer.rows.__getitems__(range(2 * (num_rows + 1))).buffer
    assert torch.equal(torch.cat(seen), expected)


@pytest.mark.parametrize(
    ("settings", "more"),
    [
        ({"label_smoothing_factor": 0.1}, {}),
        ({"auto_find_batch_size": True}, {}),
        ({"ignore_data_skip": True}, {}),
        ({"train_sampling_strategy": "group_by_length"}, {}),
        ({"accelerator_config": {"split_batches": True}}, {}),
        ({"batch_eval_metrics": True}, {}),
        ({"include_num_input_tokens_seen": True}, {}),  # 0 was logged
        ({"include_for_metrics": ["inputs"]}, {}),
        ({"use_liger_kernel": True}, {}),
        ({"optim": "lomo"}, {}),
        ({"optim": "galore_adamw_layerwise"}, {}),
        ({"eval_strategy": "steps", "eval_steps": 1}, {}),
        ({"eval_on_start": True}, {}),
        ({}, {"compute_metrics": len}),
        ({}, {"data_collator": list}),
        ({}, {"train_dataset": [0]}),
        ({}, {"eval_dataset": [0]}),
        ({}, {"model_init": dict}),
        ({}, {"data": {"global_batch_size": 3}}),
        ({}, {"data": {"num_epochs": 3}}),
        ({}, {"data": {"stored_losses": None}}),
        # Longer than the model's.
        ({}, {"data": {"seq_length": 1024, "stored_losses": None}, "method": Method("full")}),
        ({}, {"method": Method("alms")}),
    ],
    ids=str,
)
def test_what_would_change_rows_or_loss_is_refused(
    world: Path, tmp_path: Path, settings: dict[str, Any], more: dict[str, Any]
) -> None:
    if "data" in more:
        more = {"data": data_of(world, **more["data"])}
    with pytest.raises(ValueError, match=r"leave|needs|lower|choose|give|make a"):
        trainer_of(world, tmp_path, settings=settings, **more)


def test_a_path_is_data_and_what_lacks_is_named(world: Path, tmp_path: Path) -> None:
    path = str(world / "data")
    plain = trainer_of(world, tmp_path, settings={}, data=path, method=Method("full"))
    assert plain.rows.config == StreamConfig(path, global_batch_size=2, num_epochs=None)
    with pytest.raises(ValueError, match="needs a teacher, or stored_losses of one") as error:
        trainer_of(world, tmp_path, settings={}, data=path)
    teaching = 'teaching=Teaching(stored_losses="")'
    assert hints_of(error.value) == [f'hint: StreamConfig("{path}", seq_length=512, {teaching})']


def test_what_is_no_model_or_method_is_named(world: Path, tmp_path: Path) -> None:
    data = str(world / "data")
    for student in (str(world / "student"), None):
        with pytest.raises(ValueError, match=r"isn't a model: give load_language_model"):
            GuidedTrainer(student, arguments(tmp_path), data=data, method=Method("full"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"method 'full' isn't a Method: give Method\('full'\)"):
        trainer_of(world, tmp_path, settings={}, data=data, method="full")
    with pytest.raises(ValueError, match=r"give Method\('alm'\)"):
        GuidedStudent(load_language_model(str(world / "student")), "alm")  # type: ignore[arg-type]


def test_only_held_out_sets_are_measured(world: Path, tmp_path: Path) -> None:
    """Other rows hold the ends of texts, too: their bits per byte were larger, without a word."""
    data = data_of(world, stored_losses=None)
    plain = {"data": data, "method": Method("full")}
    trainer = trainer_of(world, tmp_path, settings={}, heldout=world / "data", **plain)
    measured = trainer.evaluate()
    assert trainer.evaluate("heldout")["eval_loss"] == measured["eval_loss"]
    trainer.args.eval_do_concat_batches = False  # was an AttributeError
    assert trainer.evaluate()["eval_loss"] == measured["eval_loss"]
    without = trainer_of(world, tmp_path, settings={}, **plain)
    for asked, given in ((trainer, AlignedRows(data)), (trainer, "data"), (without, None)):
        with pytest.raises(ValueError, match=r"isn't a held-out set: give GuidedTrainer heldout="):
            asked.evaluate(given)


def test_nothing_of_an_earlier_call_is_logged(world: Path, tmp_path: Path) -> None:
    """The last steps of one that ends between two lines of the log are in no line."""
    settings = {"max_steps": 3, "logging_steps": 2, "save_strategy": "no"}
    trainer = trainer_of(world, tmp_path, settings=settings)
    trainer.train()
    first = logged(trainer, "mapped_fraction")  # of the data alone
    trainer.train()
    assert logged(trainer, "mapped_fraction") == first


def test_rows_without_what_the_method_needs_are_refused(world: Path) -> None:
    rows = AlignedRows(data_of(world))
    with pytest.raises(ValueError, match="opened without with_distributions, which the method"):
        open_training(rows, str(world / "student"), Method("distill"))


def test_parts_may_be_paths_and_a_teacher_is_a_model(world: Path) -> None:
    """Each was an AttributeError."""
    plain = data_of(world, stored_losses=None)
    student, heldout = world / "student", world / "data"
    opened = open_training(plain, student, Method("full"), heldout=heldout)
    assert list(opened.heldout) == ["heldout"]
    with pytest.raises(ValueError, match=r"teacher 'a' isn't a model: give load_language_model"):
        open_training(plain, student, Method("alm"), teacher="a")  # type: ignore[arg-type]


def test_a_teacher_that_the_data_name_is_loaded(world: Path) -> None:
    paper = Method("teacher")
    named = data_of(world, stored_losses=None, teacher=str(world / "teacher"))
    with pytest.raises(UntrainedTeacherError, match="; check the files"):
        open_training(named, str(world / "student"), paper)
    opened = open_training(named, str(world / "student"), paper, allow_untrained_teacher=True)
    loss = opened.guided(opened.rows.__getitems__([0]), teacher=opened.teacher)
    stored = open_training(data_of(world), opened.student, paper)
    expected = stored.guided(stored.rows.__getitems__([0]))
    assert float(loss.loss_sum.detach()) == pytest.approx(float(expected.loss_sum.detach()), 1e-3)


def test_a_teacher_that_the_method_does_not_ask_is_said(
    world: Path, caplog: pytest.LogCaptureFixture
) -> None:
    named = data_of(world, stored_losses=None, teacher="nowhere/at/all")
    assert open_training(named, str(world / "student"), Method("random")).teacher is None
    assert "method=random asks no teacher: nowhere/at/all isn't read" in caplog.text


def test_predictions_are_refused(world: Path, tmp_path: Path) -> None:
    """They ended in a TypeError of the Trainer's loop."""
    trainer = trainer_of(world, tmp_path, settings={}, heldout=str(world / "data"))
    with pytest.raises(ValueError, match=r"no predictions, .*: call evaluate\(\)"):
        trainer.predict(trainer.eval_dataset)


def test_deepspeed_is_refused(world: Path, tmp_path: Path) -> None:
    """Its engine makes the step in the backward pass; here as if it were installed."""
    args = arguments(tmp_path)
    args.deepspeed_plugin = object()
    student = AutoModelForCausalLM.from_pretrained(world / "student")
    with pytest.raises(ValueError, match="deepspeed doesn't work here: it makes a step before"):
        GuidedTrainer(student, args, data=data_of(world), method=Method("teacher"))


def test_a_model_of_another_tokenizer_is_refused(world: Path, tmp_path: Path) -> None:
    teacher = AutoModelForCausalLM.from_pretrained(world / "teacher")
    with pytest.raises(ValueError, match="tokenizer"):
        GuidedTrainer(teacher, arguments(tmp_path), data=data_of(world), method=Method("teacher"))


@pytest.mark.parametrize(
    ("method", "folder"),
    [
        ("kld", "teacher"),  # two vocabularies
        ("teacher", "teacher"),  # random weights
        ("teacher", "student"),  # another tokenizer
        ("teacher", "small"),  # rows for fewer tokens
    ],
)
def test_a_teacher_that_vocag_train_refuses_is_refused(
    world: Path, tmp_path: Path, method: str, folder: str
) -> None:
    ignored = shutil.ignore_patterns("tokenizer*")
    source = world / folder
    if folder == "small":
        source = shutil.copytree(world / "student", tmp_path / "small", ignore=ignored)
    plain = data_of(world, stored_losses=None)
    teacher = load_language_model(str(source))
    with pytest.raises(
        ValueError, match=r"aligned with|chance|is not the dataset's|holds teacher"
    ) as own:
        trainer_of(
            *(world, tmp_path), settings={}, data=plain, method=Method(method), teacher=teacher
        )
    with pytest.raises(type(own.value)) as theirs:
        train(train_config(world, tmp_path / "own", teacher=str(source), method=Method(method)))
    # The command's remedy is an option, which a loaded model has passed by.
    told, expected = (str(each.value).rpartition("; ")[0] for each in (own, theirs))
    assert (told or str(own.value)) == (expected or str(theirs.value))


def test_a_running_teacher_gives_the_stored_losses(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.models.running_teacher.require_trained", lambda *_, **__: None)
    first = {}
    for name, stored in {"stored": "", "running": None}.items():
        settings = {"max_steps": 1, "save_strategy": "no"}
        teacher = None if stored == "" else load_language_model(str(world / "teacher"))
        data = data_of(world, stored_losses=stored)
        trainer = trainer_of(world, tmp_path, settings=settings, data=data, teacher=teacher)
        trainer.train()
        first[name] = logged(trainer)[0]
        assert trainer.model(input_ids=torch.ones(1, 3, dtype=torch.long)).logits.shape[1] == 3
    assert first["running"] == pytest.approx(first["stored"], rel=1e-3)
