"""What `explore scores` counts, and which spots it marks, held against plain Python."""

import math
import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.explore.command import main
from pipeline.explore.scores import QUANTILES, bin_edges, count_bins, find_thresholds
from pipeline.explore.scores_page import SPOT_TOKENS, find_spots
from schemas.sidecar import ScoreManifest
from tests.pipeline.dataset.test_chosen_documents import METADATA, values
from tests.pipeline.dataset.test_document_scores import losses_of
from tests.support.datasets import build_dataset, make_texts, remove_documents
from tests.support.stored_scores import document_scores, write_scores

GONE = "doc-0-5"


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[ScoreManifest]]:
    """Documents of two teachers, one of them removed; the first teacher finds a spot costly."""
    folder = tmp_path_factory.mktemp("explored")
    build_dataset(folder, metadata=METADATA, values=values)
    plain = losses_of(1)

    def with_spot(name: str, count: int) -> np.ndarray:
        losses = plain(name, count)
        losses[100:140] = 60
        return losses

    made = [write_scores(folder, "a/one", with_spot), write_scores(folder, "two", losses_of(2))]
    remove_documents(folder, GONE)
    return folder, made


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert main(["scores", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def quantile(ordered: list[float], share: float) -> float:
    """The least value that so many are at most as large as."""
    return next(v for n, v in enumerate(ordered, 1) if n >= share * len(ordered) - 1e-9)


@given(
    st.lists(st.tuples(st.sampled_from([0.5, 1.0, 1.5, 2.25, math.nan]), st.integers(0, 9))),
    st.lists(st.sampled_from([0, 0.05, 0.5, 0.9, 1]), max_size=3),
)
def test_thresholds_keep_what_they_say(
    documents: list[tuple[float, int]], quantiles: list[float]
) -> None:
    numbers, sizes = np.array([v for v, _ in documents], float), np.array([s for _, s in documents])
    found = find_thresholds(numbers, sizes.astype(int), quantiles)
    ordered = sorted(v for v, _ in documents if not math.isnan(v))
    assert len(found) == (len(quantiles) if ordered else 0)
    for each, share in zip(found, quantiles, strict=False):
        assert each.value == quantile(ordered, share)
        kept = [size for value, size in documents if value <= each.value]
        assert (each.num_documents, each.num_bytes) == (len(kept), sum(kept))
    counts = count_bins(numbers, bin_edges(numbers))
    assert counts.sum() == len(ordered)


def test_a_column_that_no_document_has_is_shown_empty(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build_dataset(tmp_path, [("a", "too short for a later part"), ("b", "as is this")])
    write_scores(tmp_path, "one", losses_of(1))
    assert main(["info", str(tmp_path)]) == 0
    (line,) = [x for x in capsys.readouterr().out.splitlines() if "bits_per_byte_later" in x]
    assert line.split()[-1] == "bits_per_byte_later"


def test_lines_are_counted_from_the_losses(
    scored: tuple[Path, list[ScoreManifest]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, made = scored
    lines = shown(capsys, str(folder), "--by", "source", "--at", "0.5", "--teacher", "two")
    found = document_scores(folder, made[1])
    del found[GONE]
    texts = {name: len(text.encode()) for name, text in make_texts(24)}
    bits = {name: own["bits_per_byte"] or 0.0 for name, own in found.items()}
    middle = quantile(sorted(bits.values()), 0.5)
    kept = [texts[name] for name, value in bits.items() if value <= middle]
    assert lines[0] == "two: bits_per_byte of 23 documents; 0 more have none"
    cells = lines[2].split()
    share, of_bytes = len(kept) / 23, sum(kept) / sum(texts[name] for name in found)
    assert cells[:3] == ["0.5", f"{middle:.4g}", str(len(kept))]
    assert [float(cells[3]), float(cells[-2])] == pytest.approx(
        [100 * share, 100 * of_bytes], abs=0.06
    )
    for source, part in (("web", 0), ("math", 1), ("(none)", 2)):
        own = sorted(value for name, value in bits.items() if int(name[6:]) % 3 == part)
        (line,) = [line for line in lines if line.startswith(source)]
        expected = [len(own), *(quantile(own, share) for share in (0.05, 0.5, 0.95))]
        numbers = [float(cell) for cell in line.removeprefix(source).split()[:4]]
        assert numbers == pytest.approx(expected, rel=1e-3)


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)), max_size=120), st.integers(0, 90))
def test_spots_are_windows_far_above_the_document(
    tokens: list[tuple[int, int]], place: int
) -> None:
    losses = np.array([0.5 + loss + 9 * (place <= n < place + 40)
                       for n, (loss, _) in enumerate(tokens)])  # fmt: skip
    ends = np.cumsum([size for _, size in tokens]).astype(int)
    offsets = np.stack([ends - [size for _, size in tokens], ends], 1) if tokens else ends
    spots, marked = find_spots(losses, offsets), set[int]()

    def bits(first: int, stop: int) -> float:
        size = int(offsets[stop - 1][1] - offsets[first][0])
        return math.fsum(losses[first:stop]) / math.log(2) / max(1, size)

    for first in range(len(tokens) - SPOT_TOKENS + 1 if len(tokens) > SPOT_TOKENS else 0):
        ratio = bits(first, first + SPOT_TOKENS) / bits(0, len(tokens))
        if ratio > 2 + 1e-9:
            marked |= set(range(first, first + SPOT_TOKENS))
        elif ratio > 2 - 1e-9:
            return  # rounding decides
    starts = sorted(n for n in marked if n - 1 not in marked)
    stops = sorted(n + 1 for n in marked if n + 1 not in marked)
    assert [(s.start, s.stop) for s in spots] == [
        (offsets[a][0], offsets[b - 1][1]) for a, b in zip(starts, stops, strict=True)
    ]
    for spot, a, b in zip(spots, starts, stops, strict=True):
        assert spot.bits_per_byte == pytest.approx(bits(a, b))


def test_a_chat_s_answers_are_no_spots_where_only_they_have_losses() -> None:
    losses = np.full(400, np.nan)
    losses[100:164] = losses[300:364] = 2.0
    ends = np.arange(1, 401) * 3
    assert find_spots(losses, np.stack([ends - 3, ends], 1)) == []
    losses[320:360] = 9.0
    (spot,) = find_spots(losses, np.stack([ends - 3, ends], 1))
    assert 300 * 3 <= spot.start < 320 * 3 < spot.stop


def test_the_page_shows_texts_side_by_side(
    scored: tuple[Path, list[ScoreManifest]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, made = scored
    page = tmp_path / "scores.html"
    one, two = (own.rule.fingerprint[:9] for own in made)
    names = ["--teacher", one, "--teacher", two]
    lines = shown(capsys, str(folder), *names, "--at", "0", "1", "--documents", "2", "--html",
                  str(page))  # fmt: skip
    assert lines[-1] == f"wrote {page}"
    root = ElementTree.fromstring(
        re.sub("<(meta)([^>]*)>", r"<\1\2/>", page.read_text("utf-8")[16:])
    )
    texts, found = dict(make_texts(24)), document_scores(folder, made[0])
    del found[GONE]
    order = sorted(found, key=lambda name: found[name]["bits_per_byte"] or 0)
    cards = [card for card in root.iter("div") if card.get("class") == "card"]
    expected = [name for name in (*order[:2], *order[-2:]) for _ in range(2)]
    assert [card.findtext("h3") for card in cards] == expected
    for card, name in zip(cards, expected, strict=True):
        (pre,) = card.iter("pre")
        assert "".join(pre.itertext()) == texts[name]
    told = ["".join(card.find("p").itertext()) for card in cards]
    assert all(text.startswith(("one: bits", "two: bits")[n % 2]) for n, text in enumerate(told))
    assert f"one: bits_per_byte {found[expected[0]]['bits_per_byte']:.4g}," in told[0]
    assert sum("".join(mark.itertext()) != "" for mark in root.iter("mark")) > 0


def test_info_shows_quantiles_of_every_column(
    scored: tuple[Path, list[ScoreManifest]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, made = scored
    assert main(["info", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, manifest in zip(("one", "two"), made, strict=True):
        found = document_scores(folder, manifest)
        del found[GONE]
        start = f"{name} ({manifest.rule.fingerprint[:8]})"
        own = [line for line in lines if line.startswith(start)]
        assert len(own) == 4
        for line in own:
            column, *numbers = line.removeprefix(start).split()
            ordered = sorted(n for each in found.values() if (n := each[column]) is not None)
            right = [quantile(ordered, share) for share in QUANTILES]
            assert list(map(float, numbers)) == pytest.approx(right, rel=1e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--teacher", "three"], r'no scores by teacher "three".*name one of'),
        (["--by", "colour"], r'the dataset has no metadata "colour": it has source'),
        (["--column", "loss"], r"--column loss: choose one of bits_per_byte, "),
        (["--at", "2"], r"--at 2: a quantile is from 0 to 1"),
        (["--documents", "0"], r"--documents 0: it must be at least 1"),
    ],
)
def test_errors_are_one_line_and_a_hint_at_most(
    scored: tuple[Path, list[ScoreManifest]],
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["scores", str(scored[0]), *arguments]) == 2
    told = capsys.readouterr().err
    assert re.search(message, told)
    said, *hints = told.splitlines()
    assert said.startswith("vocag explore: ")
    assert len(hints) <= 1
    assert all(line.startswith("hint: vocag ") for line in hints)


def test_one_of_several_scores_of_a_name_is_asked_for(
    scored: tuple[Path, list[ScoreManifest]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(scored[0], tmp_path / "data")
    write_scores(folder, "b/two", losses_of(3))
    assert main(["scores", str(folder), "--teacher", "two"]) == 2
    *_, hint = capsys.readouterr().err.splitlines()
    assert main(["scores", str(folder), *hint.removeprefix("hint: ").split()]) == 0


def test_a_dataset_without_scores_says_so(
    scored: tuple[Path, list[ScoreManifest]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ignored = shutil.ignore_patterns("*teacher-*")
    folder = shutil.copytree(scored[0], tmp_path / "data", ignore=ignored)
    assert main(["scores", str(folder)]) == 2
    message, hint = capsys.readouterr().err.splitlines()
    assert "no teacher has scored" in message
    assert hint.startswith(f"hint: vocag score {folder} --teacher MODEL --seq-length 2048")
