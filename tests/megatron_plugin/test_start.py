"""Options reach what they are for, and inputs that don't belong together are refused."""

from argparse import ArgumentParser, Namespace
from dataclasses import fields
from typing import get_args, get_type_hints

import pytest

pytest.importorskip("megatron.core")

from megatron_plugin.arguments import ArgumentError, add_arguments, read_options
from megatron_plugin.checks import require_service, require_student
from megatron_plugin.models.arguments import model_arguments
from megatron_plugin.models.shape import read_shape
from megatron_plugin.student.run import StudentRun
from megatron_plugin.worlds import World
from pipeline.guidance import Aggregation, Expectation, SelectionRule
from schemas.errors import ForeignTokenizerError
from tests.megatron_plugin.accepted_arguments import WORKING
from tests.megatron_plugin.models import save_model
from tests.support.datasets import build_dataset, byte_level

OF_THE_RULE = {"selector": "--vocag-method"}


def options(*extra):
    return read_options(["--vocag-data", "data", *extra])


def values_of(kind):
    """Return values of a field's type, other than the defaults as far as there are any."""
    return get_args(kind) or {float: (0.25,), int: (7,)}[kind]


def guidance_options():
    """Return (field, option, value) of everything that `pipeline.guidance` can be told."""
    hints = get_type_hints(SelectionRule)
    for field in fields(SelectionRule):
        option = OF_THE_RULE.get(field.name, "--vocag-" + field.name.replace("_", "-"))
        yield from ((field.name, option, value) for value in values_of(hints[field.name]))
    for name, kind in (("aggregation", Aggregation), ("expectation", Expectation)):
        yield from ((name, f"--vocag-{name}", value) for value in values_of(kind))


@pytest.mark.parametrize(("name", "option", "value"), list(guidance_options()))
def test_every_guidance_option_is_an_argument(name, option, value):
    read = options("--vocag-teacher", "model", option, str(value))
    assert getattr(read if hasattr(read, name) else read.rule, name) == value


def test_every_argument_states_its_default():
    parser = add_arguments(ArgumentParser())
    own = [action for action in parser._actions if action.dest.startswith("vocag_")]
    assert len(own) > 20
    for action in own:
        assert "default" in action.help or "(required)" in action.help, action.option_strings


def test_a_students_tokenizer_must_be_the_datasets(tmp_path):
    manifest = build_dataset(tmp_path / "data")
    save_model(tmp_path / "student", "llama", vocab_size=400)
    of_data = options("--vocag-data", str(tmp_path / "data"))
    run = StudentRun(of_data, World("student", 0, 1, 1), manifest)
    args = megatron_args(model_arguments(read_shape(tmp_path / "student")))
    run._open_student(args, str(tmp_path / "student"))
    (tmp_path / "student" / "tokenizer.json").write_text("{}")
    with pytest.raises(ForeignTokenizerError, match=r"student tokenizer .* is not the dataset's"):
        run._open_student(args, str(tmp_path / "student"))


@pytest.mark.parametrize("side", ["student", "teacher"])
def test_validation_data_must_have_the_same_tokenizers(tmp_path, side):
    manifest = build_dataset(tmp_path / "data")
    build_dataset(tmp_path / "same")
    build_dataset(tmp_path / "other", **{side: byte_level(420)})
    args = Namespace(**WORKING)
    require_student(args, options("--vocag-validation-data", str(tmp_path / "same")), manifest)
    with pytest.raises(
        ForeignTokenizerError, match=rf"other was made with {side} tokenizer .*: align both"
    ):
        require_student(args, options("--vocag-validation-data", str(tmp_path / "other")), manifest)


def test_a_colocated_teacher_has_no_virtual_stages():
    args = Namespace(
        global_batch_size=8,
        micro_batch_size=2,
        data_parallel_size=1,
        eval_global_batch_size=8,
        eval_micro_batch_size=2,
        eval_iters=0,
        virtual_pipeline_model_parallel_size=2,
        distributed_timeout_minutes=10,
    )
    require_service(
        args, options("--vocag-teacher", "m", "--vocag-teacher-world-size", "1").teacher
    )
    with pytest.raises(ArgumentError, match="no virtual pipeline stages: give it ranks of its own"):
        require_service(args, options("--vocag-teacher", "m").teacher)


@pytest.mark.parametrize("minutes", ["inf", "10071"])
def test_both_timeouts_together_are_within_a_teachers_patience(minutes):
    args = Namespace(
        global_batch_size=8,
        micro_batch_size=2,
        data_parallel_size=1,
        eval_global_batch_size=8,
        eval_micro_batch_size=2,
        eval_iters=0,
        distributed_timeout_minutes=10,
    )

    def teacher(minutes):
        world = ("--vocag-teacher", "m", "--vocag-teacher-world-size", "1")
        return options(*world, "--vocag-teacher-timeout-minutes", minutes).teacher

    require_service(args, teacher("10070"))
    told = rf"--vocag-teacher-timeout-minutes {minutes} and --distributed-timeout-minutes 10: .*"
    with pytest.raises(ArgumentError, match=told + "gives its student up after 10080: lower them"):
        require_service(args, teacher(minutes))


def megatron_args(argv):
    """Return Megatron's arguments for a model, not validated."""
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(ArgumentParser(allow_abbrev=False))
    return parser.parse_args([*argv, "--seq-length", "64"])
