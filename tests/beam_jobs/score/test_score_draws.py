"""`vocag score --draws`: the same draws whatever the batches; refused, reused, validated, named."""

import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from beam_jobs.score.command import main
from beam_jobs.score.summary import estimate_disk
from pipeline.dataset.files import open_dataset
from pipeline.losses.tail import draw_keys
from pipeline.scoring.entries import fill_entries
from pipeline.scoring.teaching import Teaching
from pipeline.streaming import AlignedRows, Reading, StreamConfig
from pipeline.validate.dataset_checks import validate_dataset
from schemas.distribution_rule import DistributionRule
from schemas.errors import DamagedShardError
from schemas.sidecar import decode_sidecar, encode_sidecar
from schemas.stored_distributions import least_entropies
from tests.support.datasets import build_dataset, byte_level, make_texts, read_documents
from tests.support.killing import run_killed
from tests.support.scored_data import (
    SEQ_LENGTH,
    read_sidecars,
    run_score,
    score_arguments,
    scores_of,
    sidecars,
)

DRAWN = ("--top-k", "4", "--draws", "3")
ID_BITS = 9  # of 480 tokens


@pytest.fixture(scope="module")
def drawn(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The world, where draws are stored, too."""
    root = tmp_path_factory.mktemp("drawn") / "world"
    shutil.copytree(world, root, ignore=shutil.ignore_patterns("plans", "*teacher-*"))
    run_score(root, *DRAWN)
    return root


def stored_draws(root: Path) -> Iterator[tuple[Any, Any]]:
    """Yield each document's (ids, draws), the draws unpacked bit by bit."""
    for record, losses in zip(scores_of(root).sidecars, read_sidecars(root), strict=True):
        packed = safetensors.numpy.load_file(root / "data" / record.file)["draw_ids"]
        entries = losses.entries
        assert entries is not None
        bits = np.unpackbits(packed, bitorder="little")[: len(entries.counts) * 3 * ID_BITS]
        every = (bits.reshape(-1, ID_BITS) @ (1 << np.arange(ID_BITS))).reshape(-1, 3)
        for document, (start, stop) in enumerate(pairwise(entries.position_starts.tolist())):
            shape = stop - start, 7
            ids, log_probs = np.empty(shape, np.int32), np.empty(shape, np.float32)
            fill_entries(entries, document, 0, ids=ids, log_probs=log_probs, at="")
            assert (ids[:, 4:] == every[start:stop]).all()
            yield ids[:, :4], ids[:, 4:]


def test_they_are_the_rest_and_cost_an_id(drawn: Path, tmp_path: Path) -> None:
    rule = scores_of(drawn).rule.distributions
    assert rule == DistributionRule(4, 1.0, 480, "uint8", draws=3)
    documents = read_documents(drawn / "data").values()
    tokens = [document.teacher.input_ids.astype(np.int64) for document in documents]
    num_drawn = 0
    for (ids, draws), own in zip(stored_draws(drawn), tokens, strict=True):
        assert (ids >= 0).all()
        assert not (draws[:, :, None] == ids[:, None, :]).any()
        assert not (draws[: len(own)] == own[:, None]).any(), "the text's own token"
        num_drawn += draws.size
    assert num_drawn > 10_000
    shards = open_dataset(drawn / "data").manifest.shards
    estimate = estimate_disk(
        str(tmp_path), shards, scores_of(drawn).rule, 4 * (9 / 8 + 1) + 3 * 9 / 8
    )
    written = sum(len(data) for name, data in sidecars(drawn).items())
    assert estimate == pytest.approx(written, rel=0.02)
    assert validate_dataset(str(drawn / "data"), teacher=str(drawn / "teacher")).findings == ()


def test_batches_change_no_draw_and_another_seed_does(drawn: Path, unscored: Path) -> None:
    run_score(unscored, *DRAWN, "--batch-tokens", "1")
    pairs = list(zip(stored_draws(drawn), stored_draws(unscored), strict=True))
    same = np.concatenate([(a == b).ravel() for (_, a), (_, b) in pairs])
    assert same.mean() > 0.9999  # where two are equally good to the last digit
    for path in (unscored / "data").glob("*teacher-*"):
        path.unlink()
    run_score(unscored, *DRAWN, "--draws-seed", "7")
    assert scores_of(unscored).rule.fingerprint != scores_of(drawn).rule.fingerprint
    pairs = list(zip(stored_draws(drawn), stored_draws(unscored), strict=True))
    same = np.concatenate([(a == b).ravel() for (_, a), (_, b) in pairs])
    assert same.mean() < 0.1
    data = str(unscored / "data")
    assert validate_dataset(data, teacher=str(unscored / "teacher")).findings == ()


def test_only_where_the_teacher_is_uncertain(
    drawn: Path, unscored: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """There as before, at the other positions nothing: no draws, and no label learns any."""
    full = [losses.entries for losses in read_sidecars(drawn)]
    bounds = np.concatenate([least_entropies(all_of(entries)[1]) for entries in full])
    middle = float(np.quantile(bounds, 0.7))
    run_score(unscored, *DRAWN, "--entropy-above", repr(middle))
    shown = capsys.readouterr().out
    assert f"in uint8, where their entropy is above {middle:g}: 4.00 a position" in shown
    found = [losses.entries for losses in read_sidecars(unscored)]
    has_some = np.concatenate([entries.counts > 0 for entries in found])
    assert f"of the mass, at {has_some.sum():,} positions" in shown
    rounded = np.abs(bounds - middle) < 0.1  # as 8 bits may
    assert (has_some == (bounds > middle))[~rounded].all()
    assert 0.2 < has_some.mean() < 0.4
    num_bytes = sum(len(entries.draw_ids) for entries in found)
    assert num_bytes == pytest.approx(has_some.sum() * 3 * ID_BITS / 8, abs=len(found))
    ids, again = (np.concatenate([all_of(e)[0] for e in each]) for each in (full, found))
    assert (ids == again)[has_some].all()
    assert (again[~has_some] == -1).all()
    data = str(unscored / "data")
    assert validate_dataset(data, teacher=str(unscored / "teacher")).findings == ()
    run_score(unscored, *DRAWN, "--entropy-above", repr(middle), "--dry-run")
    share = f"{has_some.mean():.1%}"
    each = 3 + has_some.mean() * (4 * (9 / 8 + 1) + 3 * 9 / 8)
    assert f"4.00 a position at {share} of them, {each:.1f} bytes" in capsys.readouterr().out
    rows = AlignedRows(
        StreamConfig(
            Reading(data),
            seq_length=SEQ_LENGTH,
            teaching=Teaching(stored_losses=("",)),
            with_distributions=True,
        )
    )
    batch = rows.__getitems__(range(len(rows)))
    known = (batch["next_token_ids"][..., 0] >= 0) & batch["loss_mask"].bool()
    share = known.sum() / batch["loss_mask"].sum()
    assert 0.15 < share < 0.45
    assert not batch["next_token_probs"][~known].any()


def test_positions_that_others_would_have_are_named(
    unscored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(
            "schemas.stored_distributions.least_entropies", lambda log_probs: log_probs[:, 0] + 100
        )
        run_score(unscored, "--top-k", "4", "--draws", "0", "--entropy-above", "6")
    (finding,) = validate_dataset(
        str(unscored / "data"), teacher=str(unscored / "teacher")
    ).findings
    assert "have entries only as stored or only when they are scored again" in str(finding)


def all_of(entries: Any) -> tuple[Any, Any]:
    """Return ids, draws included, and log-probabilities of a shard's entries."""
    parts = []
    for document, (start, stop) in enumerate(pairwise(entries.position_starts.tolist())):
        out = np.empty((stop - start, 7), np.int32), np.empty((stop - start, 7), np.float32)
        fill_entries(entries, document, 0, ids=out[0], log_probs=out[1], at="")
        parts.append(out)
    ids, log_probs = (np.concatenate(each) for each in zip(*parts, strict=True))
    return ids, log_probs[:, :4]


@pytest.mark.slow
def test_a_killed_run_goes_on_and_gives_the_same_bytes(drawn: Path, unscored: Path) -> None:
    write = ["beam_jobs.score.steps._write"]
    run_killed("beam_jobs.score.command", score_arguments(unscored, *DRAWN), write, call=3)
    assert len(sidecars(unscored)) < len(sidecars(drawn))
    run_score(unscored, *DRAWN)
    found, expected = (
        {name: data.replace(str(root).encode(), b"") for name, data in sidecars(root).items()}
        for root in (unscored, drawn)
    )
    assert found == expected


def test_foreign_draws_are_named(unscored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By another seed than the manifest's."""
    with monkeypatch.context() as patched:
        name = "pipeline.scoring.engines.transformers.draw_keys"
        patched.setattr(name, lambda ids, seed: draw_keys(ids, seed + 1))
        run_score(unscored, *DRAWN)
    data = str(unscored / "data")
    assert validate_dataset(data, teacher=None).findings == ()
    (finding,) = validate_dataset(data, teacher=str(unscored / "teacher")).findings
    assert re.search(
        r"draws of .* are others when they are drawn again: another seed", str(finding)
    )


def test_damaged_draws_are_named(drawn: Path) -> None:
    """An id beyond the vocabulary, and one of the entries."""
    ids, _ = next(stored_draws(drawn))
    entries = next(read_sidecars(drawn)).entries
    assert entries is not None
    for token, what in ((500, "a token id beyond the vocabulary of 480"), (0, "one of its ent")):
        bad, place = entries.draw_ids.copy(), 5 * 3
        wanted = token or int(ids[5, 2])
        bits = np.unpackbits(bad, bitorder="little")
        bits[place * ID_BITS : (place + 1) * ID_BITS] = (wanted >> np.arange(ID_BITS)) & 1
        bad = np.packbits(bits, bitorder="little")
        out = np.empty((len(ids), 7), np.int32), np.empty((len(ids), 7), np.float32)
        damaged = replace(entries, draw_ids=bad)
        with pytest.raises(DamagedShardError, match=rf"position 5 of document 0 has .*{what}"):
            fill_entries(damaged, 0, 0, ids=out[0], log_probs=out[1], at="")
    fewer = replace(entries, draw_ids=entries.draw_ids[:-1].copy())
    cut = encode_sidecar(replace(next(read_sidecars(drawn)), entries=fewer))
    with pytest.raises(DamagedShardError, match="bytes of draw_ids, 9 bits each"):
        decode_sidecar(cut, at="")


def test_draws_are_reused_by_the_same_rule(
    drawn: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever the documents' ids are: what is drawn depends on what the teacher sees."""
    root = shutil.copytree(drawn, tmp_path / "world", ignore=shutil.ignore_patterns("*teacher-*"))
    alone = ("--batch-tokens", "1")
    run_score(root, *DRAWN, *alone)
    texts = [(f"other-{name}", text) for name, text in [*make_texts(40), *make_texts(3, seed=9)]]
    for name in ("fresh", "new"):
        build_dataset(root / name, texts, num_shards=2, student=byte_level(300), name="other")
    arguments = [*score_arguments(root, *alone)[1:], *DRAWN]
    assert main([str(root / "fresh"), *arguments]) == 0
    capsys.readouterr()
    assert main([str(root / "new"), *arguments, "--reuse", str(root / "data")]) == 0
    assert "reused          0 " not in capsys.readouterr().out
    for path in (root / "fresh").glob("*teacher-*.safetensors"):
        assert (root / "new" / path.name).read_bytes() == path.read_bytes()
    seeded = [str(root / "new"), *arguments, "--draws-seed", "1"]
    assert main([*seeded, "--reuse", str(root / "data")]) == 0
    assert "nothing can be taken over" in capsys.readouterr().out
