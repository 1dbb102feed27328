"""Is a teacher trained? The rule alone; who runs a model is tested where it is run."""

import math
from pathlib import Path

import pytest

from pipeline.command_line.failures import hints_of
from pipeline.dataset.files import Dataset
from pipeline.models.probe import PROBE_TEXT, UntrainedTeacherError, probe_tokens, require_trained
from tests.support.datasets import build_dataset, byte_level


@pytest.mark.parametrize("vocab_size", [300, 32_000, 152_000])
def test_a_loss_near_chance_is_refused(vocab_size: int) -> None:
    chance = math.log(vocab_size)
    require_trained(0.84 * chance, vocab_size)
    for mean in (0.86 * chance, chance, 1.2 * chance, math.nan, math.inf):
        with pytest.raises(UntrainedTeacherError, match=rf"chance is {chance:.2f}: its weights"):
            require_trained(mean, vocab_size)


def test_the_remedy_is_an_option() -> None:
    with pytest.raises(UntrainedTeacherError, match=r"; check the files\nhint") as raised:
        require_trained(9.0, 300, text="row 0")
    assert "on row 0 is 9.00 nats" in str(raised.value)
    told = "hint: allow_untrained_teacher=True  # only to test or to measure speed"
    assert hints_of(raised.value) == [told]


def test_the_probe_is_in_the_dataset_s_teacher_tokens(tmp_path: Path) -> None:
    manifest = build_dataset(tmp_path / "data")
    expected = byte_level(480).tokenize_batch([PROBE_TEXT.encode()]).input_ids.tolist()
    assert probe_tokens(Dataset(str(tmp_path / "data"), manifest)) == expected
