"""A checkpoint of which a file is cut, damaged or gone is refused, by the file's name."""

import shutil
from argparse import Namespace

import pytest

pytest.importorskip("megatron.core")

from megatron_plugin.export_hf import export_student
from megatron_plugin.models import weight_sources
from megatron_plugin.models.weight_sources import TRACKER_FILE, WeightsError
from megatron_plugin.student.run_identity import read_checkpoint
from pipeline.command_line.failures import hints_of
from pipeline.models.weights import UnfittingWeightsError
from tests.megatron_plugin.training_job import train

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def saved(inputs, tmp_path_factory):
    """A run's checkpoints of its first and its second step."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoint"
    train(
        inputs,
        1,
        vocag_teacher=None,
        vocag_method="full",
        train_iters=2,
        save=folder,
        save_interval=1,
    )
    return folder


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path):
    data = bytearray(path.read_bytes())
    data[:] = bytes(len(data))
    path.write_bytes(data)


def names_of(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != "metadata.json")


def test_every_file_of_a_checkpoint_is_missed(saved, tmp_path):
    newest = saved / "iter_0000002"
    names = names_of(newest)
    assert {".metadata", "__0_0.distcp"} <= set(names)
    for name in names:
        for number, harm in enumerate((cut, lambda path: path.unlink())):
            folder = tmp_path / f"{name}-{number}"
            shutil.copytree(saved, folder)
            harm(folder / newest.name / name)
            for read in (resume, lambda folder: export_student(folder, tmp_path / "student")):
                with pytest.raises(WeightsError) as refused:
                    read(folder)
                said = str(refused.value)
                assert name in said
                assert f"write the number of another iteration into {folder / TRACKER_FILE}" in said
                assert "(there are 1)" in said
            # What the message says to do.
            (folder / TRACKER_FILE).write_text("1")
            assert resume(folder) is not None


def test_a_checkpoint_without_one_parameter_is_not_exported(saved, tmp_path, monkeypatch):
    """Whoever wrote it: `torch.distributed.checkpoint` reads what there is."""
    whole = weight_sources._whole_parameters
    lost = "self_attention.linear_proj.weight"

    def without(folder):
        return {name: tensor for name, tensor in whole(folder).items() if not name.endswith(lost)}

    monkeypatch.setattr(weight_sources, "_whole_parameters", without)
    with pytest.raises(UnfittingWeightsError, match=r"missing \(model.layers.0.self_attn.o_proj"):
        export_student(saved, tmp_path / "student")


def resume(folder):
    return read_checkpoint(Namespace(load=str(folder), finetune=False))


@pytest.mark.parametrize(
    ("name", "what"),
    [(".metadata", ".metadata can't be read"), ("__0_0.distcp", "was started with can't be read")],
)
def test_what_is_damaged_in_the_middle(saved, tmp_path, name, what):
    shutil.copytree(saved, tmp_path / "checkpoint")
    flip(tmp_path / "checkpoint" / "iter_0000002" / name)
    with pytest.raises(WeightsError, match=rf"iter_0000002 is damaged: .*{what} \("):
        resume(tmp_path / "checkpoint")


def test_the_only_iteration(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "checkpoint")
    shutil.rmtree(tmp_path / "checkpoint" / "iter_0000001")
    (tmp_path / "checkpoint" / "iter_0000002" / ".metadata").unlink()
    with pytest.raises(WeightsError, match="there is no other iteration to go back to"):
        resume(tmp_path / "checkpoint")


def test_a_converters_checkpoint_is_no_run(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / TRACKER_FILE).write_text("release")
    with pytest.raises(WeightsError, match="says 'release', not an iteration") as refused:
        resume(tmp_path / "checkpoint")
    assert hints_of(refused.value) == ["hint: --finetune"]


def test_a_tracker_ahead_of_its_checkpoints(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / TRACKER_FILE).write_text("9")
    with pytest.raises(
        WeightsError, match=r"iter_0000009, which .* names, isn't .*\(there are 1, 2\)"
    ):
        resume(tmp_path / "checkpoint")
