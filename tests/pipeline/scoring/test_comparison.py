"""Two scores are compared token by token, by a slow twin's arithmetic."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from beam_jobs.score.compare_command import main
from pipeline.command_line.failures import hints_of
from pipeline.dataset.files import open_dataset
from pipeline.dataset.score_files import find_scores, list_scores
from pipeline.guidance.top_fraction import keep_top_fraction
from pipeline.scoring.comparison import KEPT, compare_scores, kept_tokens
from schemas.document import decode_document
from schemas.errors import DatasetError, ForeignLossesError
from schemas.sidecar import decode_sidecar
from tests.support.datasets import byte_level, remove_documents
from tests.support.hf_folders import write_model
from tests.support.scored_data import run_score


@pytest.fixture(scope="module")
def compared(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A world that another teacher has scored, too."""
    own = shutil.copytree(world, tmp_path_factory.mktemp("compared") / "world")
    write_model(own / "other", byte_level(480), seed=5)
    run_score(own, "--teacher", str(own / "other"))
    return own


def test_a_comparison_is_that_of_a_loop_over_tokens(
    compared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = compare_scores(str(compared / "data"), "teacher", "other")
    dataset = open_dataset(str(compared / "data"))
    by_name = {s.manifest.source.rsplit("/")[-1]: s for s in list_scores(str(compared / "data"))}
    differences: list[float] = []
    num_kept = num_changed = 0
    for number in range(len(dataset.manifest.shards)):
        index = dataset.read_index(number, with_names=True)
        sides = []
        for name in ("teacher", "other"):
            record = by_name[name].manifest.sidecars[number]
            sides.append(decode_sidecar((compared / "data" / record.file).read_bytes(), at=""))
        differences += (sides[1].losses.astype(float) - sides[0].losses.astype(float)).tolist()
        ranked: list[list[tuple[float, int]]] = [[], []]
        place = 0
        for document, (_, sample) in enumerate(dataset.samples(number, index)):
            for start, stop in decode_document(sample).teacher_spans.tolist():
                for side, ranking in zip(sides, ranked, strict=True):
                    first = side.starts[document]
                    own = side.losses[first + start : first + stop]
                    if len(own):
                        ranking.append((float(own.max()), place))
                place += 1
        kept = [{n for _, n in sorted(ranking)[: 2 * len(ranking) // 5]} for ranking in ranked]
        num_kept += len(kept[0])
        num_changed += len(kept[0] - kept[1])
    sizes = np.abs(differences)
    assert found.num_tokens == len(differences) > 2000
    assert found.mean == pytest.approx(np.mean(differences))
    assert (found.mean_absolute, found.largest) == pytest.approx((sizes.mean(), sizes.max()))
    assert (found.num_kept, found.num_changed) == (num_kept, num_changed)
    assert num_changed > 100
    assert main([str(compared / "data"), "teacher", "other"]) == 0
    shown = capsys.readouterr().out
    assert f"mean {found.mean:+.4f} nats" in shown
    assert f"{100 * num_changed / num_kept:.1f} % of " in shown


@pytest.mark.parametrize("num_mapped", [1, 4, 9, 100])
def test_as_many_are_kept_as_in_training(num_mapped: int) -> None:
    guidance = np.append(np.random.default_rng(0).integers(0, 9, num_mapped) / 4, np.nan)
    candidates = torch.tensor([~np.isnan(guidance)])
    ranking = -torch.tensor([np.nan_to_num(guidance)], dtype=torch.float32)
    trained, _ = keep_top_fraction(ranking, candidates, KEPT, num_candidates=candidates.sum(-1))
    assert kept_tokens(guidance).tolist() == trained[0].tolist()


def test_removed_documents_count_in_no_comparison(
    tmp_path: Path, compared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(compared / "data", tmp_path / "data")
    data = str(tmp_path / "data")
    whole = compare_scores(data, "teacher", "other")
    remove_documents(tmp_path / "data", "doc-0-3", "doc-0-11")
    rest, gone = compare_scores(data, "teacher", "other"), 0
    dataset = open_dataset(data)
    for number in range(len(dataset.manifest.shards)):
        index = dataset.read_index(number)
        gone += int(index.num_teacher_tokens[dataset.removed_of(number)].sum())
    assert gone > 0
    assert rest.num_tokens == whole.num_tokens - gone
    assert rest.num_kept < whole.num_kept
    assert rest.mean != whole.mean
    shards = range(len(dataset.manifest.shards))
    ids = [name for n in shards for name in dataset.read_ids(n).to_pylist()]
    remove_documents(tmp_path / "data", *ids)
    assert main([data, "teacher", "other"]) == 2
    assert "all documents that they scored are removed" in capsys.readouterr().err


def test_scores_that_can_t_be_compared_are_refused(
    compared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = str(compared / "data")
    with pytest.raises(ForeignLossesError, match="is named twice"):
        compare_scores(data, "teacher", "teacher")
    run_score(compared, "--dtype", "bfloat16", seq_length=128)
    (other,) = [s for s in list_scores(data) if s.manifest.rule.dtype == "bfloat16"]
    with pytest.raises(ForeignLossesError, match="were scored in different contexts"):
        compare_scores(data, "other", other.path)
    with pytest.raises(DatasetError, match="2 teachers are named") as error:
        compare_scores(data, "teacher", "other")
    [hint] = hints_of(error.value)
    chosen, *comment = hint.removeprefix("hint: ").split()
    assert comment == ["#", "in", "place", "of", "teacher"]
    assert find_scores(chosen, data)
    Path(other.path).unlink()
    assert main([data, "teacher", "teacher"]) == 2
    assert "is named twice" in capsys.readouterr().err
