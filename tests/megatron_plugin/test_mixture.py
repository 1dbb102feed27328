"""The Megatron plugin on a mixture: the rows and steps of its datasets, or refused at the start."""

import pytest

pytest.importorskip("megatron.core")

from tests.megatron_plugin.reference_step import reference_gradients
from tests.megatron_plugin.training_job import SEED, require_equal, train

pytestmark = pytest.mark.slow


def write_mixture(inputs, folder, weights, limit="repeat = true"):
    path = folder / "mixture.toml"
    lines = [f"seed = {SEED}"]
    for dataset in weights:
        lines += [f"[datasets.{dataset}]", f'path = "{getattr(inputs, dataset)}"', limit]
    shares = ", ".join(f"{dataset} = {weight}" for dataset, weight in weights.items())
    path.write_text("\n".join([*lines, "[[stages]]", f"weights = {{ {shares} }}"]))
    return path


def test_a_mixture_of_one_dataset_gives_its_gradients(inputs, tmp_path):
    mixture = write_mixture(inputs, tmp_path, {"data": 1.0})
    train(inputs, 1, tmp_path / "dump", vocag_data=mixture)
    require_equal(tmp_path / "dump", inputs, reference_gradients(inputs))


def test_two_datasets_train_and_validate_in_two_worlds(inputs, tmp_path):
    mixture = write_mixture(inputs, tmp_path, {"data": 0.75, "validation": 0.25})
    validation = {"vocag_validation_data": mixture, "eval_iters": 1, "eval_interval": 1}
    done = train(
        inputs, 2, vocag_data=mixture, vocag_teacher_world_size=1, train_iters=2, **validation
    )
    assert "guided loss value" in done.stdout


def test_a_mixture_that_ends_before_the_run_is_refused_at_the_start(inputs, tmp_path):
    mixture = write_mixture(inputs, tmp_path, {"data": 1.0}, "max_epochs = 1")
    done = train(inputs, 1, vocag_data=mixture, train_iters=900, check=False)
    assert done.returncode != 0
    assert "--train-iters 900 need 7200 rows" in done.stderr
    assert "raise max_epochs there" in done.stderr
