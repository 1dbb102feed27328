"""What can't work is refused at once, with the remedy."""

import subprocess
import sys
from argparse import Namespace

import pytest

pytest.importorskip("megatron.core")

from megatron_plugin.arguments import NO_TEACHER, ArgumentError, read_options
from megatron_plugin.bridge import Pairing
from megatron_plugin.checks import require_service, require_student, require_teacher
from megatron_plugin.models.arguments import (
    config_of_arguments,
    installed_arguments,
    model_arguments,
)
from megatron_plugin.models.shape import shape_of_config
from megatron_plugin.worlds import enter_world
from pipeline.guidance import PAPER_RULE
from pipeline.training.method import Method
from pipeline.training.methods import METHODS
from schemas.errors import ForeignTokenizerError
from tests.megatron_plugin.accepted_arguments import WORKING
from tests.megatron_plugin.launch import ROOT, job_environment
from tests.megatron_plugin.models import make_model
from tests.support.datasets import build_dataset


def options(*extra):
    return read_options(["--vocag-data", "data", "--num-layers", "2", *extra])


def test_defaults_are_the_papers():
    read = options("--vocag-teacher", "model")
    assert read.rule.selector == "teacher"
    assert read.rule.keep_fraction == 0.4
    assert read.rule.unmapped == "include"
    assert read.rule == PAPER_RULE == METHODS["teacher"].rule(Method()), (
        "the two trainers choose alike"
    )
    assert read.aggregation == "max"
    assert read.teacher.world_size == 0


def test_no_teacher_is_plain_pretraining():
    read = options()
    assert not read.teacher.name
    assert read.stored_losses is None
    assert read.rule.selector == "full"


@pytest.mark.parametrize("name", ["", "teachers/large"])
def test_stored_losses_take_a_teachers_place(name):
    read = options("--vocag-stored-losses", name, "--vocag-teacher-seq-length", "9")
    assert (read.stored_losses, read.teacher, read.teacher_seq_length) == (name, NO_TEACHER, 9)
    assert read.rule.selector == "teacher"


def test_help_is_left_to_megatron():
    assert read_options(["--help"]) is None


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (("--vocag-method", "teacher"), "needs --vocag-teacher"),
        (("--vocag-method", "teacher_loss"), "teacher_loss needs --vocag-teacher or --vocag-stor"),
        (("--vocag-teacher-world-size", "4"), "world-size 4 needs --vocag-teacher, which is miss"),
        (("--vocag-teacher-dtype", "float32"), "--vocag-teacher-dtype float32 needs --vocag-teach"),
        (("--vocag-allow-untrained-teacher",), "untrained-teacher True needs --vocag-teacher"),
        (("--vocag-stored-losses", "", "--vocag-teacher-world-size", "1"), "1 needs --vocag-teach"),
        (("--vocag-teacher", "m", "--vocag-stored-losses", ""), "choose one of them"),
        (
            (
                *("--vocag-teacher", "m", "--vocag-teacher-world-size", "3"),
                *("--vocag-teacher-pipeline-model-parallel-size", "2"),
            ),
            "3 isn't a multiple of 1 tensor-parallel by 2 pipeline-parallel by 1 expert-parallel",
        ),
        (
            ("--vocag-teacher", "m", "--vocag-teacher-tensor-model-parallel-size", "2"),
            "with the student's parallelism: leave out",
        ),
        (("--vocag-teacher", "m", "--vocag-teacher-micro-batch-size", "0"), "is 0, below 1"),
        (("--vocag-teacher", "m", "--vocag-teacher-timeout-minutes", "0"), "is not above 0"),
    ],
)
def test_impossible_options(extra, message):
    with pytest.raises(ArgumentError, match=message):
        options(*extra)


def test_a_keep_fraction_in_percent_is_refused():
    with pytest.raises(ValueError, match=r"40 % is written 0\.4"):
        options("--vocag-keep-fraction", "40")


def test_no_data_is_refused(capsys):
    with pytest.raises(SystemExit):
        read_options(["--num-layers", "2"])
    told = capsys.readouterr().err
    assert "the following arguments are required: --vocag-data" in told
    assert "usage" not in told, "half of the options, once for each rank"


def test_no_student_rank_left(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ArgumentError, match="4 leaves 0 of the job's 4 ranks for the student"):
        enter_world(4)


def test_without_torchrun(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ArgumentError, match="RANK isn't set: start with torchrun"):
        enter_world(0)


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


def test_rows_that_teachers_cannot_share():
    args = Namespace(
        global_batch_size=6,
        micro_batch_size=3,
        data_parallel_size=1,
        eval_global_batch_size=6,
        eval_micro_batch_size=3,
        eval_iters=0,
        virtual_pipeline_model_parallel_size=None,
        distributed_timeout_minutes=10,
    )
    teacher = options(
        *("--vocag-teacher", "m", "--vocag-teacher-world-size", "2"),
        *("--vocag-teacher-micro-batch-size", "2"),
    ).teacher
    with pytest.raises(ArgumentError, match=r"6 rows per student replica, which 2 teacher.*of 2:"):
        require_service(args, teacher)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"calculate_per_token_loss": False}, "--calculate-per-token-loss is missing"),
        ({"attention_dropout": 0.1}, "attention has no dropout"),
        ({"eval_iters": 100}, "--eval-iters 100 needs --vocag-validation-data"),
        ({"padded_vocab_size": 384}, "vocabulary of 384 is smaller .*: raise --vocab-size"),
        ({"ckpt_format": "torch"}, r"--ckpt-format torch isn't supported \(runs are resumed"),
        ({"rampup_batch_size": [8, 8, 64]}, "would break the exact resume"),
    ],
)
def test_what_megatron_could_do_but_not_with_documents(tmp_path, changes, message):
    manifest = build_dataset(tmp_path)
    require_student(Namespace(**WORKING), options(), manifest)
    with pytest.raises(ArgumentError, match=message):
        require_student(Namespace(**WORKING | changes), options(), manifest)


def test_a_teacher_must_fit_the_dataset(tmp_path):
    manifest = build_dataset(tmp_path / "data")
    small = shape_of_config(make_model("llama", vocab_size=300).config.to_dict())
    data = str(tmp_path / "data")
    with pytest.raises(ValueError, match=r"tokens up to 479 \(tokenizer tests/teacher\), .* 300:"):
        require_teacher(small, tmp_path, manifest, data=data, seq_length=64)
    shape = shape_of_config(make_model("llama", vocab_size=480).config.to_dict())
    with pytest.raises(ValueError, match=r"129 teacher tokens, .* was made for 128"):
        require_teacher(shape, tmp_path, manifest, data=data, seq_length=129)
    require_teacher(shape, tmp_path, manifest, data=data, seq_length=128)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ForeignTokenizerError, match=r"teacher tokenizer .* is not the dataset's"):
        require_teacher(shape, tmp_path, manifest, data=data, seq_length=128)


def test_local_layers_beside_transformer_engine_have_no_fused_gradients(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tests/megatron_plugin/stand_ins")
    fusion = "--no-gradient-accumulation-fusion"
    assert fusion not in installed_arguments()
    assert "local" not in installed_arguments()
    assert fusion in installed_arguments(["--lr", "1", "--transformer-impl", "local"])
    assert fusion in installed_arguments(["--transformer-impl=local"])


def test_only_a_teacher_may_be_a_mixture_of_experts():
    shape = shape_of_config(make_model("qwen3_moe").config.to_dict())
    with pytest.raises(ValueError, match=r"student is a mixture of 4 experts .*only a teacher may"):
        model_arguments(shape)
    shape.require_expert_parallel(2, what="teacher")
    with pytest.raises(ValueError, match=r"4 experts can't be shared by 3 .*divides 4"):
        shape.require_expert_parallel(3, what="teacher")
    dense = shape_of_config(make_model("qwen3").config.to_dict())
    dense.require_expert_parallel(1, what="teacher")
    with pytest.raises(ValueError, match=r"0 experts can't be shared by 2 .*leave the option out"):
        dense.require_expert_parallel(2, what="teacher")


def test_a_random_students_config_is_its_arguments():
    args = Namespace(
        normalization="RMSNorm",
        swiglu=True,
        add_bias_linear=False,
        position_embedding_type="rope",
        rotary_percent=1.0,
        use_rope_scaling=False,
        add_qkv_bias=False,
        qk_layernorm=True,
        group_query_attention=True,
        num_query_groups=2,
        num_attention_heads=4,
        hidden_size=32,
        ffn_hidden_size=48,
        num_layers=3,
        kv_channels=8,
        max_position_embeddings=64,
        layernorm_epsilon=1e-5,
        rotary_base=5000,
        untie_embeddings_and_output_weights=True,
    )
    shape = shape_of_config(config_of_arguments(args, 400))
    assert (shape.family, shape.num_layers, shape.num_query_groups) == ("qwen3", 3, 2)
    assert (shape.vocab_size, shape.rotary_base, shape.tied_embeddings) == (400, 5000.0, False)
    args.swiglu = False
    assert config_of_arguments(args, 400) is None


def test_help_lists_both_megatrons_arguments_and_ours():
    run = "from tests.megatron_plugin import cpu_shim"
    run += "; from megatron_plugin import pretrain_gpt as gpt; gpt.main()"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", run, "--help"],
        cwd=ROOT,
        env=job_environment(),
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    assert "--tensor-model-parallel-size" in done.stdout
    ours = done.stdout[done.stdout.index("vocag: data and student:") :]
    for option in ("--vocag-teacher-world-size", "--vocag-keep-fraction", "--vocag-student"):
        text = ours[ours.index(option) :]
        assert "default: " in text[:500], option
