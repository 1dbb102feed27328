"""Megatron's parts of the GPU benchmark, as far as they can be checked without a GPU."""

from argparse import ArgumentParser

import pytest

pytest.importorskip("megatron.core")

import gpu_megatron
from gpu_world import SMALL
from megatron_prediction import Plan, describe

from megatron_plugin.arguments import add_arguments, read_options
from pipeline.command_line.option_parsing import parse_options
from tests.megatron_plugin.models import save_model
from tests.support.datasets import build_dataset


@pytest.fixture
def work(tmp_path):
    build_dataset(tmp_path / "aligned")
    for name in ("student", "seven", "tiny"):
        save_model(tmp_path / name, "llama")
    return tmp_path


@pytest.mark.parametrize("compiler", ["/usr/bin/cc", None])
def test_every_run_has_arguments_that_work(work, monkeypatch, compiler):
    from megatron.training.arguments import add_megatron_arguments

    monkeypatch.setattr("shutil.which", lambda _: compiler)
    found = []
    for name in gpu_megatron.RUNS:
        ranks, argv = gpu_megatron.megatron_arguments(work, SMALL, name)
        parser = add_arguments(add_megatron_arguments(ArgumentParser(allow_abbrev=False)))
        known, unknown = parser.parse_known_args(argv)
        assert unknown == []
        assert known.train_iters == SMALL.steps
        assert known.bias_swiglu_fusion == known.bias_dropout_fusion == bool(compiler)
        options = read_options(argv)
        found.append((ranks, bool(options.teaching.teacher), options.teacher.world_size))
    assert found == [(1, False, 0), (1, True, 0), (2, True, 1)]


def test_a_run_is_predicted_before_it_is_measured(work):
    plain, colocated, _ = (
        gpu_megatron.predict_step(work, SMALL, name) for name in gpu_megatron.RUNS
    )
    assert 0 < plain[0] < colocated[0]
    assert plain[1] < colocated[1]


def test_a_log_gives_the_median_of_warm_steps_and_the_peak():
    """Of an even number, too: the slower half was told."""
    times = [9000, 9000, 2000, 8000, 4000, 1000]
    log = "".join(f" elapsed time per iteration (ms): {time:.1f} |\n" for time in times)
    assert gpu_megatron.read_log(f"{log} max allocated: 2048.00 | max allocated: 1.0") == (3.0, 2.0)
    with pytest.raises(SystemExit, match="tells of 0 steps"):
        gpu_megatron.read_log("no step of a known form")


def test_a_prediction_is_printed(work):
    argv = ["--student", str(work / "student"), "--teacher", str(work / "seven"), "--gpus", "8"]
    told = describe(parse_options(Plan, argv, prog="megatron_prediction.py"))
    assert "8 × h100, teacher colocated; 1024 rows of 2048" in told
    assert "GiB of 80 on a student's rank" in told
    assert "communication not counted" in told
