"""Options reach what they are for; what can't work is refused at once, with the remedy."""

import re
import shlex
from argparse import ArgumentParser, Namespace
from contextlib import nullcontext
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest

pytest.importorskip("megatron.core")

from megatron_plugin import checks, pretrain_gpt
from megatron_plugin.arguments import NO_TEACHER, ArgumentError, read_options
from megatron_plugin.bridge import Pairing
from megatron_plugin.checks import (
    require_layout,
    require_micro_batch,
    require_rows,
    require_same_tokenizers,
    require_schedule,
    require_service,
    require_student,
)
from megatron_plugin.models import megatron_arguments
from megatron_plugin.models.megatron_arguments import (
    config_of_arguments,
    model_arguments,
    require_model,
)
from megatron_plugin.models.shape import read_shape, shape_of_config
from megatron_plugin.student.student_run import StudentRun
from megatron_plugin.teacher.setup import require_fit
from megatron_plugin.upstream import add_megatron_arguments
from megatron_plugin.worlds import World, enter_world
from pipeline.command_line.failures import hints_of
from pipeline.guidance import PAPER_RULE
from pipeline.methods import METHODS, kind_of
from pipeline.methods.method import WHICH_METHOD, Method
from pipeline.packing.opening import open_run
from pipeline.packing.reading import Reading
from schemas.errors import ForeignTokenizerError
from tests.megatron_plugin.forked_ranks import ROOT
from tests.megatron_plugin.models import make_model, save_model
from tests.support.datasets import build_dataset, byte_level, with_control_tokens

TEACHER = ("--vocag-teacher", "m")
STORED_DISTILL = ("--vocag-stored-losses", "", "--vocag-method", "distill")
OWN_WORLD = (*TEACHER, "--vocag-teacher-world-size")
# Megatron's arguments that every check accepts.
WORKING = vars(add_megatron_arguments(ArgumentParser(allow_abbrev=False)).parse_args([])) | {
    "attention_dropout": 0,
    "dataloader_type": "external",
    "transformer_impl": "local",
    "calculate_per_token_loss": True,
    "eval_iters": 0,
}
SIZES = {
    "global_batch_size": 8,
    "micro_batch_size": 2,
    "data_parallel_size": 1,
    "eval_global_batch_size": 8,
    "eval_micro_batch_size": 2,
    "eval_iters": 0,
    "virtual_pipeline_model_parallel_size": None,
}


def options(*extra):
    """Read options; the paper's method, or plain training without a teacher, unless one is named.

    The last one holds.
    """
    taught = {"--vocag-teacher", "--vocag-stored-losses"} & set(extra)
    method = ("--vocag-method", "teacher" if taught else "full")
    return read_options(["--vocag-data", "data", "--num-layers", "2", *method, *extra])


def parsed_arguments(*argv):
    return add_megatron_arguments(ArgumentParser(allow_abbrev=False)).parse_args(argv)


def test_a_selections_defaults_are_the_papers():
    read = options(*TEACHER)
    assert read.kind.rule(read.method) == PAPER_RULE
    assert (read.method, read.teacher.world_size) == (Method("teacher"), 0)


def test_a_method_is_asked_for(capsys):
    with pytest.raises(SystemExit):
        read_options(["--vocag-data", "data", *TEACHER])
    message, *choices, _ = capsys.readouterr().err.splitlines()
    assert message.endswith("the following arguments are required: --vocag-method")
    assert choices == [f"  {line}" for line in WHICH_METHOD.splitlines()]


@pytest.mark.parametrize("name", ["", "teachers/large"])
def test_stored_losses_take_a_teachers_place(name):
    read = options("--vocag-stored-losses", name, "--vocag-teacher-seq-length", "9")
    assert (read.teaching.names, read.teacher, read.teacher_seq_length) == ((name,), NO_TEACHER, 9)
    assert read.kind is METHODS["teacher"]


def test_weights_of_teachers_are_refused_at_once():
    message = "--vocag-teacher-weights 1.0 must be one .* each of the 2 --vocag-stored-losses"
    with pytest.raises(ValueError, match=message):
        options("--vocag-stored-losses", "a", "b", "--vocag-teacher-weights", "1")


def test_what_is_read_is_named_as_elsewhere():
    read = options("--vocag-generation", "3", "--vocag-where", "a > 1", "--vocag-student-bos", "7")
    assert read.data == Reading("data", where="a > 1", generation=3, student_bos="7")


def test_guidance_is_chosen_as_in_the_trainer():
    chosen = {"keep_fraction": 0.25, "unmapped": "mean", "scope": "group", "seed": 7}
    chosen |= {"aggregation": "sum", "expectation": "all"}
    given = [f"--vocag-{name.replace('_', '-')}={value}" for name, value in chosen.items()]
    assert options(*TEACHER, *given).method == Method("teacher", **chosen)


def test_the_guide_names_the_methods_that_are_refused():
    lines = (ROOT / "docs/guides/megatron.md").read_text().splitlines()
    (row,) = (line for line in lines if line.startswith("| `--vocag-method` |"))
    named = row.partition(" but ")[2].partition(", whose")[0]
    assert {*re.findall(r"`(\w+)`", named)} == {
        k.name for k in METHODS.values() if k.needs == "model"
    }


@pytest.mark.parametrize("method", METHODS)
def test_methods_are_those_of_the_trainer(method):
    given = () if METHODS[method].needs == "nothing" else TEACHER
    if METHODS[method].needs == "model":
        with pytest.raises(ArgumentError, match=f"{method} runs a model of the student's vocab"):
            options(*given, "--vocag-method", method)
    else:
        assert options(*given, "--vocag-method", method).kind is METHODS[method]


def test_a_teacher_that_nobody_asks_is_refused():
    with pytest.raises(ArgumentError, match="random needs no teacher, and its ranks") as refused:
        options(*OWN_WORLD, "4", "--vocag-method", "random")
    assert hints_of(refused.value) == ["hint: leave out --vocag-teacher"]


def test_a_checkpoint_of_before_goes_on():
    """What a run's checkpoint notes of its guidance has not changed."""
    plain = {"aggregation": "max", "expectation": "kept"} | asdict(PAPER_RULE)
    assert options(*TEACHER).guidance == plain
    learned = {"distill_tokens": "all", "temperature": 1.0, "reverse_kl": False, "top_k": 16}
    learned |= {"distill_map": "cells"}  # before there were cells, distill taught otherwise
    learned |= {"name": "distill", "weight": 0.8}
    distill = (*TEACHER, "--vocag-method", "distill")
    assert options(*distill, "--vocag-draws", "0").guidance == plain | learned
    assert options(*distill).guidance == plain | learned | {"draws": 4}


def test_help_lists_both_megatrons_arguments_and_ours(capsys):
    assert read_options(["--help"]) is None
    pretrain_gpt.print_help()
    text = capsys.readouterr().out
    assert text.index("--tensor-model-parallel-size") < text.index("vocag: data and student:")
    assert text.index("vocag: data and student:") < text.index("vocag: guidance:")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (("--vocag-method", "teacher_loss"), "teacher_loss needs a teacher, or --vocag-stor"),
        (("--vocag-teacher-world-size", "4"), "world-size 4 needs --vocag-teacher, which is miss"),
        (("--vocag-allow-untrained-teacher",), "untrained-teacher True needs --vocag-teacher"),
        (("--vocag-stored-losses", "", "--vocag-teacher-world-size", "1"), "1 needs --vocag-teach"),
        ((*TEACHER, "--vocag-stored-losses", ""), "choose one of them"),
        ((*OWN_WORLD, "3", "--vocag-teacher-pipeline-model-parallel-size", "2"), "3 isn't a mult"),
        ((*OWN_WORLD, "-2"), "world-size -2: give the teacher's ranks, or leave it out"),
        ((*TEACHER, "--vocag-teacher-tensor-model-parallel-size", "2"), "parallelism: leave out"),
        ((*TEACHER, "--vocag-teacher-micro-batch-size", "0"), "micro-batch size 0 and"),
        ((*TEACHER, "--vocag-temperature", "2"), "--vocag-temperature 2.0 is for --vocag-method d"),
        ((*TEACHER, "--vocag-temperature", "0"), "^--vocag-temperature 0.0 must be above 0"),
        (
            (*TEACHER, "--vocag-keep-fraction", "7"),
            "^--vocag-keep-fraction must lie in 0..1, got 7",
        ),
        (
            (*TEACHER, "--vocag-teacher-weights", "1"),
            "^--vocag-teacher-weights and --vocag-teacher-c",
        ),
        ((*TEACHER, "--vocag-weight", "0.5"), "--vocag-weight 0.5 is for --vocag-method alm and"),
        ((*STORED_DISTILL, "--vocag-top-k", "4"), "--vocag-top-k 4 is for a running teacher"),
        (("--vocag-method", "distill"), "distill needs a teacher, or --vocag-stored-losses"),
        (
            (*TEACHER, "--vocag-method", "distill", "--vocag-draws", "4", "--vocag-reverse-kl"),
            "^--vocag-reverse-kl needs a teacher without draws",
        ),
        ((*STORED_DISTILL, "--vocag-draws", "4"), "^--vocag-draws 4 is for a running teacher"),
    ],
)
def test_impossible_options(extra, message):
    with pytest.raises(ValueError, match=message):
        options(*extra)


@pytest.mark.parametrize(
    ("extra", "hint"),
    [
        (("--vocag-method", "distill"), '--vocag-stored-losses ""'),
        (("--vocag-teacher-world-size", "4"), "leave out --vocag-teacher-world-size"),
        ((*TEACHER, "--vocag-stored-losses", ""), "leave out --vocag-teacher"),
        (
            (*OWN_WORLD, "3", "--vocag-teacher-pipeline-model-parallel-size", "2"),
            "--vocag-teacher-world-size 4",
        ),
        (
            (*TEACHER, "--vocag-teacher-tensor-model-parallel-size", "2"),
            "--vocag-teacher-world-size 2",
        ),
        ((*STORED_DISTILL, "--vocag-top-k", "4"), "leave out --vocag-top-k"),
        ((*TEACHER, "--vocag-draws", "4"), "leave out --vocag-draws"),
    ],
)
def test_the_hint_of_impossible_options_makes_them_possible(extra, hint):
    with pytest.raises(ValueError) as refused:  # noqa: PT011 -- the hint says which
        options(*extra)
    assert hints_of(refused.value) == [f"hint: {hint}"]
    remedied = shlex.split(hint)
    if remedied[0] == "leave":
        start = extra.index(remedied[-1])
        options(*extra[:start], *extra[start + 2 :])
    else:
        options(*extra, *remedied)  # the last one holds


def test_no_student_rank_left(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(
        ArgumentError, match="4 leaves 0 of the job's 4 ranks for the student"
    ) as refused:
        enter_world(4)
    assert hints_of(refused.value) == ["hint: torchrun --nproc-per-node 5"]


def test_without_torchrun(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("sys.argv", ["pretrain_gpt.py", "--vocag-data", "a b"])
    with pytest.raises(ArgumentError, match="RANK isn't set: start with torchrun") as refused:
        enter_world(0)
    again = "hint: torchrun --nproc-per-node 1 -m megatron_plugin.pretrain_gpt --vocag-data 'a b'"
    assert hints_of(refused.value) == [again]


@pytest.mark.parametrize(("students", "teachers"), [(1, 1), (4, 2), (2, 4), (6, 3), (1, 5), (8, 1)])
def test_pairing_is_even_and_mutual(students, teachers):
    pairing = Pairing(students, teachers)
    shares = [0.0] * teachers
    for student in range(students):
        served_by = pairing.teachers_of(student)
        for teacher in served_by:
            assert student in pairing.students_of(teacher)
            shares[teacher] += 1 / len(served_by)
    assert len(set(shares)) == 1
    assert sum(shares) == students


def test_uneven_pairing_is_refused():
    with pytest.raises(ValueError, match="3 student replicas can't be served evenly by 2 teacher"):
        Pairing(3, 2)


@pytest.mark.parametrize(
    ("teacher", "changes", "message", "hint"),
    [
        (
            (*OWN_WORLD, "2", "--vocag-teacher-micro-batch-size", "2"),
            {"global_batch_size": 6, "micro_batch_size": 3},
            r"6 rows per student replica, which 2 teacher.*of 2:",
            "--global-batch-size 12",
        ),
        (
            (*OWN_WORLD, "2"),
            {"eval_iters": 1, "eval_global_batch_size": 7, "eval_micro_batch_size": 1},
            "a validation step has 7 rows per student replica",
            "--eval-global-batch-size 6",
        ),
        (
            TEACHER,
            {"virtual_pipeline_model_parallel_size": 2},
            "no virtual pipeline stages",
            "--vocag-teacher-world-size 1",
        ),
    ],
)
def test_steps_that_a_teacher_cannot_serve(teacher, changes, message, hint):
    teacher = options(*teacher).teacher
    require_service(Namespace(**SIZES), teacher)
    with pytest.raises(ArgumentError, match=message) as refused:
        require_service(Namespace(**SIZES | changes), teacher)
    assert hints_of(refused.value) == [f"hint: {hint}"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"calculate_per_token_loss": False}, "--calculate-per-token-loss is missing"),
        ({"attention_dropout": 0.1}, "attention has no dropout"),
        ({"eval_iters": 100}, "--eval-iters 100 needs --vocag-validation-data"),
        ({"ckpt_format": "torch"}, r"--ckpt-format torch isn't supported \(runs are resumed"),
        ({"iterations_to_skip": [3]}, "every row is learned from"),
        ({"non_persistent_ckpt_type": "global"}, "continue from what --save-interval saves"),
        ({"non_persistent_save_interval": 5}, "-save-interval 5 .*from what --save-interval saves"),
        (
            {"result_rejected_tracker_filename": "rejected", "iterations_to_skip": [3]},
            "^--result-rejected-tracker-filename rejected isn't supported",
        ),
        ({"init_model_with_meta_device": True}, "-meta-device True .*weights would be lost"),
        ({"spec": ["module", "name"]}, "--spec .*layers are made for packed documents"),
        ({"experimental_attention_variant": "gated_delta_net"}, "attention doesn't keep to docu"),
        ({"qk_clip": True}, "--qk-clip True isn't supported"),
        ({"log_max_attention_logit": True}, "--log-max-attention-logit True isn't supported"),
        ({"fp8_output_proj": True}, "--fp8-output-proj True isn't supported"),
        ({"perform_rl_step": True}, "--perform-rl-step True isn't supported"),
        (
            {"tensor_model_parallel_size": 2, "tensor_parallel_num_weight_shards": 4},
            "--tensor-parallel-num-weight-shards 4 .*leave it at 2",
        ),
        ({"window_size": (128, 0)}, r"--window-size \(128, 0\) .*as a whole\): leave it out"),
        ({"softmax_type": "learnable"}, r"--softmax-type learnable isn't .*leave it at vanilla"),
        ({"layernorm_zero_centered_gamma": True}, "--apply-layernorm-1p True isn't supported"),
        ({"rotary_seq_len_interpolation_factor": 2}, "interpolation-factor 2 .*export would lose"),
        ({"cp_comm_type": ["a2a"]}, "--cp-comm-type .*gather their keys"),
        ({"check_for_spiky_loss": True}, "--check-for-spiky-loss True isn't supported"),
        ({"split": "90,5,5"}, r"--split 90,5,5 isn't supported \(--vocag-data is what is read"),
        ({"reset_position_ids": True}, "--reset-position-ids True .*: leave it out"),
        ({"train_data_path": ["a"]}, "--train-data-path .*--vocag-data is what"),
        ({"fp8": "e4m3"}, "--fp8-format e4m3 .*only Transformer Engine's layers"),
        (
            {"use_distributed_optimizer": True, "save": "folder"},
            "optimizer can't be used with --save here: .*18 bytes per parameter",
        ),
        ({"use_distributed_optimizer": True, "load": "folder"}, "can't be used with --load here"),
    ],
)
def test_what_megatron_could_do_but_not_with_documents(changes, message):
    # Megatron's own checks set the second.
    for accepted in (WORKING, WORKING | {"tensor_parallel_num_weight_shards": 1}):
        require_student(Namespace(**accepted), options())
    with pytest.raises(ArgumentError, match=message) as refused:
        require_student(Namespace(**WORKING | changes), options())
    [hint] = hints_of(refused.value)
    assert "--" in hint


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({"calculate_per_token_loss": False}, "--calculate-per-token-loss"),
        ({"eval_iters": 100}, "--eval-iters 0"),
        ({"softmax_type": "learnable"}, "leave out --softmax-type"),
    ],
)
def test_the_hint_of_what_megatron_could_do(changes, hint):
    with pytest.raises(ArgumentError) as refused:
        require_student(Namespace(**WORKING | changes), options())
    assert hints_of(refused.value) == [f"hint: {hint}"]


def test_a_smaller_padded_vocabulary_is_refused():
    """Such as of Qwen2.5's tokenizer, which has fewer tokens than the models have rows."""
    padded = WORKING | {"tokenizer_type": "HuggingFaceTokenizer", "padded_vocab_size": 151_680}
    sizes = {"vocab_size": 151_936, "tensor_model_parallel_size": 2}
    with pytest.raises(ArgumentError, match=r"151680, given or .*HuggingFace.* 151936") as refused:
        require_student(Namespace(**padded | sizes), options())
    (hint,) = hints_of(refused.value)
    remedied = vars(parsed_arguments(*hint.removeprefix("hint: ").split()))["padded_vocab_size"]
    require_student(Namespace(**padded | sizes | {"padded_vocab_size": remedied}), options())


@pytest.mark.parametrize("name", [None, "models/student"])
def test_a_student_needs_rows_for_what_the_data_holds(tmp_path, name):
    """And for no more: Gemma 3 1B's tokenizer names a token that the model has no row for."""
    named = with_control_tokens(byte_level(400), "<image>", special=False)
    for folder, text in (("without", "No picture."), ("with", "An <image> here.")):
        build_dataset(tmp_path / folder, [("one", text)], student=named, num_shards=1)
    without, held = (open_run(Reading(str(tmp_path / name))) for name in ("without", "with"))
    require_rows(name, without, vocab_size=400)
    with pytest.raises(
        ValueError, match=r'student token 400 in document "one" .* 0 … 399'
    ) as error:
        require_rows(name, held, vocab_size=400)
    assert hints_of(error.value) == ([] if name else ["hint: --vocab-size 401"])
    require_rows(name, held, vocab_size=401)


def test_a_students_positions_are_its_own(tmp_path):
    """As in vocag train: --max-position-embeddings gives no more, but passes Megatron's check."""
    build_dataset(tmp_path / "data")
    sizes = {"vocab_size": 480, "max_length": 128}
    opened = open_run(Reading(str(tmp_path / "data")))
    require_rows("models/student", opened, seq_length=128, **sizes)
    with pytest.raises(ValueError, match=r"129 student tokens, models/student was made for 128"):
        require_rows("models/student", opened, seq_length=129, **sizes)


def test_distributed_optimizers_that_work(monkeypatch):
    distributed = WORKING | {"use_distributed_optimizer": True}
    require_student(Namespace(**distributed), options())
    weights_only = {"load": "folder", "finetune": True}
    require_student(Namespace(**distributed | weights_only), options())
    monkeypatch.setattr(checks, "HAVE_APEX_OR_TE", True)
    require_student(Namespace(**distributed | {"save": "folder"}), options())


@pytest.mark.parametrize(
    ("saved", "changed", "refused"),
    [
        ({"use_distributed_optimizer": True}, {"tensor_model_parallel_size": 2}, True),
        ({"use_distributed_optimizer": True}, {"pipeline_model_parallel_size": 2}, True),
        ({"use_distributed_optimizer": True}, {"context_parallel_size": 2}, False),
        ({}, {"tensor_model_parallel_size": 2}, False),
        (
            {"use_distributed_optimizer": True, "dist_ckpt_optim_fully_reshardable": True},
            {"tensor_model_parallel_size": 2},
            False,
        ),
    ],
)
def test_what_a_distributed_optimizers_checkpoint_goes_on_in(saved, changed, refused):
    now, checkpoint = Namespace(**WORKING | changed), Namespace(**WORKING | saved)
    require_layout(now, None)
    message = r"2: its distributed .* --dist-ckpt-optim-fully-resh"
    with pytest.raises(ArgumentError, match=message) if refused else nullcontext():
        require_layout(now, checkpoint)


@pytest.mark.parametrize(
    ("method", "refused"),
    [
        (Method("student_entropy"), True),
        (Method("student_entropy", scope="row"), False),
        (Method("distill"), False),
        (Method("distill", distill_tokens="kept"), True),
        (Method("full"), False),
    ],
)
def test_a_run_whose_tokens_compete_in_micro_batches_keeps_them(method, refused):
    """It went on with another choice of tokens, without a word."""
    options = SimpleNamespace(method=method, kind=kind_of(method))
    saved, now = (Namespace(load="run", micro_batch_size=size) for size in (2, 1))
    require_micro_batch(now, options, None)
    require_micro_batch(saved, options, saved)
    message = "run was saved at --micro-batch-size 2, this run has 1"
    with pytest.raises(ArgumentError, match=message) if refused else nullcontext():
        require_micro_batch(now, options, saved)


def test_a_run_that_goes_on_longer_is_told_how():
    saved = Namespace(**WORKING | {"train_iters": 7500})
    longer = WORKING | {"train_iters": 9000, "load": "run"}
    require_schedule(Namespace(**longer), None)
    require_schedule(Namespace(**longer | {"train_iters": 7500}), saved)
    in_samples = {"train_iters": None, "train_samples": 60_007, "global_batch_size": 8}
    require_schedule(Namespace(**longer | in_samples | {"train_samples": 60_000}), saved)
    require_schedule(Namespace(**longer | in_samples), saved)
    message = r"run was saved at --train-iters 7500, this run has 9000: add --override-opt-param"
    with pytest.raises(ArgumentError, match=message) as refused:
        require_schedule(Namespace(**longer), saved)
    (hint,) = hints_of(refused.value)
    for option in (hint.removeprefix("hint: "), "--use-checkpoint-opt-param-scheduler"):
        assert option in str(refused.value)
        changed = add_megatron_arguments(ArgumentParser(allow_abbrev=False)).parse_args([option])
        args = Namespace(**vars(changed) | {"train_iters": 9000, "load": "run"})
        require_schedule(args, saved)


def test_a_teacher_must_fit_the_dataset(tmp_path):
    build_dataset(tmp_path / "data")
    opened = open_run(Reading(str(tmp_path / "data")))
    small, shape = (
        shape_of_config(make_model("llama", vocab_size=size).config.to_dict())
        for size in (300, 480)
    )
    with pytest.raises(ValueError, match=r"holds teacher token \d+ .* for 300 tokens, 0 … 299"):
        require_fit(small, tmp_path, opened, seq_length=64)
    with pytest.raises(ValueError, match=r"129 teacher tokens, .* was made for 128"):
        require_fit(shape, tmp_path, opened, seq_length=129)
    require_fit(shape, tmp_path, opened, seq_length=128)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ForeignTokenizerError, match=r"teacher tokenizer .* is not the dataset's"):
        require_fit(shape, tmp_path, opened, seq_length=128)


def test_a_students_tokenizer_must_be_the_datasets(tmp_path):
    build_dataset(tmp_path / "data")
    save_model(tmp_path / "student", "llama", vocab_size=400)
    of_data = options("--vocag-data", str(tmp_path / "data"))
    run = StudentRun(of_data, World("student", 0, 1, 1), open_run(of_data.data))
    shape = read_shape(tmp_path / "student")
    args = parsed_arguments(*model_arguments(shape), "--seq-length", "64")
    run._open_student(args, str(tmp_path / "student"))
    (tmp_path / "student" / "tokenizer.json").write_text("{}")
    with pytest.raises(ForeignTokenizerError, match=r"student tokenizer .* is not the dataset's"):
        run._open_student(args, str(tmp_path / "student"))


@pytest.mark.parametrize("side", ["student", "teacher"])
def test_validation_data_must_have_the_same_tokenizers(tmp_path, side):
    manifest = build_dataset(tmp_path / "data")
    require_same_tokenizers("same", build_dataset(tmp_path / "same"), manifest)
    other = build_dataset(tmp_path / "other", **{side: byte_level(420)})
    with pytest.raises(ForeignTokenizerError, match=f"validation-data other: {side} tokenizer .*"):
        require_same_tokenizers("other", other, manifest)


@pytest.mark.parametrize("with_apex", [False, True])
def test_without_apex_no_gradients_are_fused(monkeypatch, with_apex):
    """Among Transformer Engine's layers, too: the output layer is Megatron's own."""
    found = {"transformer_engine": True, "fused_weight_gradient_mlp_cuda": with_apex or None}
    monkeypatch.setattr(megatron_arguments, "find_spec", found.get)
    arguments = megatron_arguments.installed_arguments()
    assert "local" not in arguments
    assert ("--no-gradient-accumulation-fusion" in arguments) is not with_apex


def test_a_hint_to_leave_an_argument_out_names_one():
    shape = shape_of_config(make_model("llama").config.to_dict())
    parser = add_megatron_arguments(ArgumentParser("all", allow_abbrev=False))
    for name in megatron_arguments._attributes(shape):
        assert megatron_arguments._option_of(name) in parser._option_string_actions, name


def test_only_a_teacher_may_be_a_mixture_of_experts():
    sparse, dense = (
        shape_of_config(make_model(family).config.to_dict()) for family in ("qwen3_moe", "qwen3")
    )
    with pytest.raises(ValueError, match=r"student is a mixture of 4 experts .*only a teacher may"):
        model_arguments(sparse)
    sparse.require_parallel(tensor=2, expert=2)
    with pytest.raises(ValueError, match=r"4 experts can't be shared by 3 .*divides 4"):
        sparse.require_parallel(tensor=1, expert=3)
    dense.require_parallel(tensor=1, expert=1)
    with pytest.raises(ValueError, match=r"0 experts can't be shared by 2 .*leave the option out"):
        dense.require_parallel(tensor=1, expert=2)


@pytest.mark.parametrize("family", ["llama", "qwen2_tied", "qwen3"])
def test_a_models_arguments_describe_the_model(family):
    shape = shape_of_config(make_model(family).config.to_dict())
    args = parsed_arguments(*model_arguments(shape))
    again = shape_of_config(config_of_arguments(args, shape.vocab_size))
    assert replace(again, config={}) == replace(shape, config={})
    require_model(args, shape)
    args.rotary_base = 77
    with pytest.raises(ArgumentError, match=r"rotary_base 77, --vocag-student's config 10000:"):
        require_model(args, shape)
    args.rotary_base = 10_000
    args.rotary_percent = 0.5
    assert config_of_arguments(args, 400) is None
    with pytest.raises(ArgumentError, match=r"rotary_percent 0.5, --vocag-student's config 1.0"):
        require_model(args, shape)
    args.rotary_percent, args.swiglu = 1.0, False
    assert config_of_arguments(args, 400) is None
