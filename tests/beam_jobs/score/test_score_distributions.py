"""`vocag score --top-k`: the same job, with entries; and who finds what it has written."""

import re
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from beam_jobs.score.command import main
from beam_jobs.score.summary import estimate_disk
from pipeline.dataset.chosen_documents import select_documents
from pipeline.dataset.files import open_dataset
from pipeline.dataset.score_files import find_scores, list_scores
from pipeline.packing.plan import plan_rows
from pipeline.packing.rules import PackingRules
from pipeline.scoring.engines.engine_settings import TopSettings
from pipeline.scoring.stored_losses import open_stored_losses
from pipeline.validate.dataset_checks import validate_dataset
from schemas.distribution_rule import DistributionRule
from schemas.errors import DatasetError, ForeignLossesError
from schemas.sidecar import ScoreManifest, ShardLosses, decode_sidecar
from schemas.stored_distributions import largest_error, stored_values
from tests.support.completions_server import CompletionsServer
from tests.support.datasets import build_dataset, byte_level, make_texts
from tests.support.killing import run_killed
from tests.support.scored_data import (
    SEQ_LENGTH,
    read_sidecars,
    run_score,
    score_arguments,
    served_arguments,
    sidecars,
)

TOP = ("--top-k", "6", "--top-mass", "0.1")
ALONE = ("--batch-tokens", "1")


@pytest.fixture(scope="module")
def top(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The world, where the teacher's distributions are stored, too."""
    root = tmp_path_factory.mktemp("top") / "world"
    shutil.copytree(world, root, ignore=shutil.ignore_patterns("plans"))
    run_score(root, *TOP)
    return root


def scores_with(folder: Path) -> ScoreManifest:
    (found,) = [s.manifest for s in list_scores(str(folder)) if s.manifest.rule.distributions]
    return found


def stored(root: Path) -> Iterator[ShardLosses]:
    return read_sidecars(root, scores_with(root / "data"))


def test_losses_stay_and_entries_come_with_them(top: Path, world: Path) -> None:
    before, after = sidecars(world), sidecars(top)
    assert before.items() < {k: v.replace(str(top).encode(), str(world).encode())
                             for k, v in after.items()}.items()  # fmt: skip
    rule = scores_with(top / "data").rule.distributions
    assert rule == DistributionRule(6, 0.1, 480, "uint8")
    plain = [decode_sidecar(data, at="") for name, data in before.items() if "safetensors" in name]
    for losses, old in zip(stored(top), plain, strict=True):
        np.testing.assert_allclose(losses.losses, old.losses, rtol=2**-10, atol=1e-4)
    assert validate_dataset(str(top / "data"), teacher=str(top / "teacher")).findings == ()


def test_summary_and_dry_run_say_what_is_stored(
    top: Path, unscored: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_score(unscored, *TOP)
    shown = capsys.readouterr().out
    counts, masses, num_bytes, num_tokens = [], 0.0, 0, 0
    for record, losses in zip(
        scores_with(unscored / "data").sidecars, stored(unscored), strict=True
    ):
        assert losses.entries is not None
        own = losses.entries.counts
        counts += own[own > 0].tolist()
        codes = losses.entries.log_probs.astype(float)
        masses += float(np.exp(-20 * (codes / 255) ** 2).sum())
        num_bytes += record.num_bytes
        num_tokens += record.num_tokens
    mean, mass = f"{np.mean(counts):.2f}", f"{masses / len(counts):.4f}"
    assert f"{mean} a position on average, which hold {mass} of the mass\n" in shown
    assert f"{num_bytes / num_tokens:.3f} bytes a teacher token" in shown
    run_score(top, *TOP, "--top-log-probs", "float16", "--dry-run")
    told = capsys.readouterr().out
    (found,) = re.findall(r"mass in float16: ([\d.]+) a position, ([\d.]+) bytes a teacher", told)
    assert float(found[0]) == pytest.approx(float(mean), abs=0.005)
    bytes_each = 3 + np.mean(counts) * (9 / 8 + 2)
    assert float(found[1]) == pytest.approx(bytes_each, abs=0.06)
    shards = open_dataset(unscored / "data").manifest.shards
    rule = scores_with(unscored / "data").rule
    (unscored / "gone").mkdir()
    estimate = estimate_disk(str(unscored / "gone"), shards, rule, float(mean) * (9 / 8 + 1))
    written = sum(len(data) for data in sidecars(unscored).values())
    assert estimate == pytest.approx(written, rel=0.02)
    assert estimate_disk(str(unscored / "gone"), shards, rule) > estimate, "before any is known"


@pytest.mark.slow
def test_a_killed_run_goes_on_and_gives_the_same_bytes(unscored: Path, top: Path) -> None:
    of_top = scores_with(top / "data").rule.fingerprint[:16]

    def written(root: Path) -> dict[str, bytes]:
        found = sidecars(root).items()
        return {k: v.replace(str(root).encode(), b"") for k, v in found if of_top in k}

    write = ["beam_jobs.score.steps._write"]
    run_killed("beam_jobs.score.command", score_arguments(unscored, *TOP), write, call=3)
    (left,) = (unscored / "data").glob("*teacher-*.safetensors")
    # altered entries whose sizes are right: scored again
    data = bytearray(left.read_bytes())
    data[-1] = 0  # as likely as can be: more than those before it
    left.write_bytes(data)
    run_score(unscored, *TOP)
    assert written(unscored) == written(top)


def test_more_than_the_vocabulary_is_refused() -> None:
    """Entries, draws and the text's own token: what is drawn from is never empty."""
    with pytest.raises(ValueError, match=r"top_k=201 is more than .* vocabulary of 200 tokens"):
        TopSettings(201).rule(200)
    assert TopSettings(200).rule(200) == DistributionRule(200, 1.0, 200, "uint8")
    with pytest.raises(ValueError, match=r"draws=4 and the text's own .* vocabulary of 12 tok"):
        TopSettings(8, draws=4).rule(12)
    assert TopSettings(8, draws=4).rule(13) is not None


@pytest.mark.parametrize(
    ("given", "num_draws"),
    [
        (TopSettings(8), 4),
        (TopSettings(8, draws=0), 0),
        (TopSettings(8, draws=2), 2),
        (TopSettings(8, 0.9), 0),
        (TopSettings(195), 4),
        (TopSettings(196), 0),
    ],
)
def test_four_are_drawn_if_nothing_is_said_and_there_is_room(
    given: TopSettings, num_draws: int
) -> None:
    rule = given.rule(200)
    assert rule is not None
    assert rule.draws == num_draws


def test_names_find_scores_with_or_without(top: Path, tmp_path: Path) -> None:
    folder = str(top / "data")
    with_top, without = (
        find_scores("teacher", folder, with_distributions=each) for each in (True, False)
    )
    assert with_top.manifest.rule.distributions is not None
    assert without.manifest.rule.distributions is None
    with pytest.raises(ForeignLossesError, match=r"no distributions: run .* with --top-k"):
        find_scores(without.path, folder, with_distributions=True)
    copied = tmp_path / "world"
    shutil.copytree(top, copied)
    Path(copied, "data", Path(without.path).name).unlink()
    run_score(copied, "--top-k", "2", "--draws", "0")
    found = find_scores("teacher", str(copied / "data")).manifest.rule.distributions
    assert found is not None
    assert found.top_k == 2, "losses are the same: those with least next to them"
    with pytest.raises(DatasetError, match=r"2 teachers are named .* with distributions") as told:
        find_scores("teacher", str(copied / "data"), with_distributions=True)
    for rule in (
        "likeliest 6 tokens up to 0.1 of the mass in uint8",
        "likeliest 2 tokens in uint8",
    ):
        assert rule in str(told.value)
    for path in (copied / "data").glob("teacher-*.json"):
        path.unlink()
    run_score(copied)
    with pytest.raises(
        DatasetError, match=r"no scores .* with distributions \(vocag score --top-k"
    ):
        find_scores("teacher", str(copied / "data"), with_distributions=True)


def test_entries_are_read_by_document(top: Path) -> None:
    dataset = open_dataset(top / "data")
    rules = PackingRules.of_dataset(dataset.manifest, seq_length=SEQ_LENGTH)
    plan = plan_rows(select_documents(dataset).each, rules)
    losses = open_stored_losses("teacher", dataset, plan, with_distributions=True)
    expected = [entries for shard in stored(top) for entries in documents_of(shard)]
    assert len(expected) == 40
    for document, (counts, codes) in enumerate(expected):
        ids, log_probs = np.empty((len(counts), 6), np.int32), np.empty((len(counts), 6), "f4")
        losses.read_entries(document, 0, ids=ids, log_probs=log_probs)
        assert ((ids >= 0).sum(axis=1) == counts).all()
        np.testing.assert_allclose(
            log_probs[ids >= 0], -20 * (codes.astype(float) / 255) ** 2, atol=1e-5
        )
        part = ids[2:5].copy(), log_probs[2:5].copy()
        losses.read_entries(document, 2, ids=ids[:3], log_probs=log_probs[:3])
        assert (ids[:3] == part[0]).all()
        assert (log_probs[:3] == part[1]).all()
        with pytest.raises(ForeignLossesError, match=rf"has {len(counts)} positions of document"):
            losses.read_entries(document, 1, ids=ids, log_probs=log_probs)
    plain = open_stored_losses("teacher", dataset, plan)
    with pytest.raises(ForeignLossesError, match="holds losses and no distributions"):
        plain.read_entries(0, 0, ids=ids, log_probs=log_probs)


def documents_of(shard: ShardLosses) -> Iterator[tuple[Any, Any]]:
    """Return every document's counts and stored log-probabilities."""
    entries = shard.entries
    assert entries is not None
    for own, these in zip(pairwise(entries.position_starts), pairwise(entries.starts), strict=True):
        yield entries.counts[slice(*own)], entries.log_probs[slice(*these)]


def test_entries_are_reused_by_the_same_rule_and_losses_from_any(
    top: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "world"
    shutil.copytree(top, root, ignore=shutil.ignore_patterns("*teacher-*"))
    run_score(root, *TOP, *ALONE)
    texts = [*make_texts(40), *make_texts(3, seed=9)]
    for name in ("fresh", "new"):
        build_dataset(root / name, texts, num_shards=2, student=byte_level(300), name="other")
    arguments = score_arguments(root, *ALONE)[1:]
    assert main([str(root / "fresh"), *arguments, *TOP]) == 0
    reuse = [str(root / "new"), *arguments, "--reuse", str(root / "data")]

    def told(*more: str) -> tuple[int, str]:
        capsys.readouterr()
        assert main([*reuse, *more]) == 0
        shown = capsys.readouterr().out
        return int(re.findall(r"reused +(\d+) document", shown)[0]), shown

    reused, _ = told(*TOP)
    assert 0 < reused < 43
    names = [record.file for record in scores_with(root / "fresh").sidecars]
    for name in names:
        assert (root / "new" / name).read_bytes() == (root / "fresh" / name).read_bytes()
    num_reused, shown = told("--top-k", "6", "--draws", "0")
    assert num_reused == 0
    assert re.search(r"distributions is \{.*'top_mass': 0.1.*\} there and \{.* 1.0", shown)
    assert told()[0] == reused, "losses alone"


def test_a_server_that_changes_what_follows_is_refused(
    unscored: Path, server: CompletionsServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wrong at documents' ends only: losses and all other places are raw."""
    server.sampling, server.is_stubborn = {"temperature": 0.7, "top_k": 4}, True
    assert main([*served_arguments(unscored, server), "--top-k", "6"]) == 2
    assert re.search(r"puts 0\.\d\d of the mass elsewhere after a prompt", capsys.readouterr().err)
    assert main(served_arguments(unscored, server)) == 0, "losses don't depend on it"


def test_a_server_fills_the_same_files(
    unscored: Path, server: CompletionsServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its model's own sampling, meant for chats, doesn't count."""
    server.sampling = {"temperature": 0.7, "top_k": 4}
    served = served_arguments(unscored, server)
    assert main([*served, "--top-k", "21"]) == 2
    assert "as many (vLLM: --max-logprobs 21), or lower --top-k" in capsys.readouterr().err
    assert main([*served, "--top-k", "6"]) == 0
    theirs = list(stored(unscored))
    for path in (unscored / "data").glob("*teacher-*"):  # the manifest, and what it names
        path.unlink()
    run_score(unscored, "--top-k", "6", "--draws", "0")
    values = stored_values("uint8")[0]
    num_compared = 0
    for a, b in zip(theirs, stored(unscored), strict=True):
        assert a.entries is not None
        assert b.entries is not None
        assert (a.entries.counts == b.entries.counts).all()
        ours, others = (values[each.entries.log_probs] for each in (a, b) if each.entries)
        assert (np.abs(ours - others) <= 2 * largest_error(ours, "uint8") + 1e-4).all()
        num_compared += len(ours)
    assert num_compared > 1000
    assert validate_dataset(str(unscored / "data"), teacher=None).findings == ()
