"""The Megatron plugin on a mixture: the rows and steps of its datasets, or refused at the start."""

import pytest
import torch

pytest.importorskip("megatron.core")

from tests.megatron_plugin.training_job import make_inputs, merged, train_forked

pytestmark = pytest.mark.slow

SEED = 1234
"""Megatron's default."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return make_inputs(tmp_path_factory.mktemp("inputs"))


def write_mixture(inputs, name, weights, limit="repeat = true"):
    path = inputs.data.parent / name
    lines = [f"seed = {SEED}"]
    for dataset in weights:
        lines += [f"[datasets.{dataset}]", f'path = "{dataset}"', limit]
    shares = ", ".join(f"{dataset} = {weight}" for dataset, weight in weights.items())
    path.write_text("\n".join([*lines, "[[stages]]", f"weights = {{ {shares} }}"]))
    return path


def test_a_mixture_of_one_dataset_gives_its_gradients(inputs, tmp_path):
    mixture = write_mixture(inputs, "one.toml", {"data": 1.0})
    for name, data in (("mixture", mixture), ("dataset", inputs.data)):
        train_forked(inputs, 1, tmp_path / name, vocag_data=data)
    found, expected = (
        merged(tmp_path / name, "gradients", inputs.student) for name in ("mixture", "dataset")
    )
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_two_datasets_train_and_validate_in_two_worlds(inputs):
    mixture = write_mixture(inputs, "two.toml", {"data": 0.75, "validation": 0.25})
    done = train_forked(
        inputs,
        2,
        vocag_data=mixture,
        vocag_validation_data=mixture,
        vocag_teacher_world_size=1,
        train_iters=2,
        eval_iters=1,
        eval_interval=1,
    )
    assert "guided loss value" in done.stdout


def test_a_mixture_that_ends_before_the_run_is_refused_at_the_start(inputs):
    mixture = write_mixture(inputs, "short.toml", {"data": 1.0}, "max_epochs = 1")
    done = train_forked(inputs, 1, vocag_data=mixture, train_iters=900, check=False)
    assert done.returncode != 0
    assert "--train-iters 900 need 7200 rows" in done.stderr
    assert "raise max_epochs there" in done.stderr
