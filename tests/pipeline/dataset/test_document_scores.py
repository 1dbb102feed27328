"""Documents chosen by a teacher's stored losses, held against sums of losses one by one."""

import json
import math
import random
import shlex
import shutil
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from beam_jobs.align.command import align
from pipeline.command_line.failures import hints_of
from pipeline.dataset.chosen_documents import select_documents
from pipeline.dataset.conditions import WhereError
from pipeline.dataset.document_scores import SCORE_COLUMNS, open_scored_documents, summarise_losses
from pipeline.dataset.files import open_dataset
from pipeline.packing.state import StreamMismatchError
from pipeline.streaming import AlignedRows, Reading, StreamConfig
from pipeline.validate.dataset_checks import validate_dataset
from schemas.document_score_table import COLUMN_VERSIONS, document_scores_name
from schemas.errors import DamagedShardError
from schemas.sidecar import (
    ScoreManifest,
    ShardLosses,
    decode_sidecar,
    encode_score_manifest,
    encode_sidecar,
    score_manifest_name,
)
from tests.pipeline.dataset.test_chosen_documents import METADATA, chosen, values
from tests.support.datasets import build_dataset, make_texts, remove_documents, seen_ids
from tests.support.growing import QUIET, grow
from tests.support.mixtures import write_mixture
from tests.support.stored_scores import document_scores, summarise, write_scores

pytest.importorskip("duckdb")

NAMES = {"models/qwen": 1, "org/Small-2.5B": 2}


def losses_of(seed: int, *, dear: str = "") -> Any:
    """Return a teacher: losses are a function of seed and id, one document's much larger."""

    def give(name: str, count: int) -> np.ndarray:
        rng = random.Random(f"{seed} {name}")
        mean = 40.0 if name == dear else rng.uniform(0.5, 4)
        return np.array([rng.expovariate(1 / mean) for _ in range(count)])

    return give


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, ScoreManifest]]:
    """A dataset with metadata, and two teachers' scores of it."""
    folder = tmp_path_factory.mktemp("scored")
    build_dataset(folder, [*make_texts(24), ("doc-0-24", "x")], metadata=METADATA, values=values)
    made = {name: write_scores(folder, name, losses_of(seed)) for name, seed in NAMES.items()}
    return folder, made


@pytest.fixture
def copied_scores(
    scored: tuple[Path, dict[str, ScoreManifest]], tmp_path: Path
) -> tuple[Path, dict[str, ScoreManifest]]:
    folder, made = scored
    return shutil.copytree(folder, tmp_path / "data", ignore=shutil.ignore_patterns("plans")), made


@given(
    documents=st.lists(
        st.tuples(st.lists(st.floats(0, 65504, width=16) | st.just(math.nan), max_size=200),
                  st.integers(0, 400)),
        max_size=5,
    )
)  # fmt: skip
def test_sums_are_those_of_losses_one_by_one(documents: list[tuple[list[float], int]]) -> None:
    lengths = [len(losses) for losses, _ in documents]
    index: Any = SimpleNamespace(
        num_text_bytes=np.array([size for _, size in documents], np.int64),
        num_teacher_tokens=np.array(lengths, np.int64),
    )
    losses = np.array([loss for own, _ in documents for loss in own], np.float16)
    stored = ShardLosses(losses, np.append(0, np.cumsum(lengths)).astype(np.int64), "", "")
    found = vars(summarise_losses(stored, index))
    for place, (own, size) in enumerate(documents):
        expected = summarise([float(np.float16(loss)) for loss in own], size)
        for name, value in expected.items():
            got = float(found[name][place])
            assert math.isnan(got) if value is None else got == pytest.approx(value, rel=3e-7), name


@pytest.mark.parametrize("with_tables", [True, False])
@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("qwen.bits_per_byte < 1.5", lambda a, b, n: a["bits_per_byte"] < 1.5),
        ('"models/qwen".RANK <= 0.65', lambda a, b, n: a["rank"] <= 0.65),
        (
            'qwen.bits_per_byte - "Small-2.5B".bits_per_byte < 0.2 -- the 差',
            lambda a, b, n: a["bits_per_byte"] - b["bits_per_byte"] < 0.2,
        ),
        (
            "source = 'web' or \"Small-2.5B\" . bits_per_byte_rank between 0.25 and 0.75",
            lambda a, b, n: n % 3 == 0 or 0.25 <= b["bits_per_byte_rank"] <= 0.75,
        ),
        (
            "document_id <> '🤗' and greatest(qwen.largest_window, qwen.bits_per_byte_later) > 2",
            lambda a, b, n: max(a["largest_window"], a["bits_per_byte_later"] or 0) > 2,
        ),
        ("qwen.bits_per_byte_later is null", lambda a, b, n: a["bits_per_byte_later"] is None),
        ("not (qwen.tokens_per_byte < 0.4)", lambda a, b, n: not a["tokens_per_byte"] < 0.4),
    ],
)  # fmt: skip
def test_documents_are_chosen_by_losses(
    scored: tuple[Path, Any], where: str, expected: Any, with_tables: bool, tmp_path: Path
) -> None:
    folder, made = scored
    if not with_tables:
        ignored = shutil.ignore_patterns("*.documents.parquet")
        folder = shutil.copytree(folder, tmp_path / "data", ignore=ignored)
    qwen, small = (document_scores(folder, made[name]) for name in NAMES)
    right = {
        number
        for name in qwen
        if expected(qwen[name], small[name], number := int(name.rpartition("-")[2]))
    }
    assert chosen(open_dataset(folder), where) == right
    assert 0 < len(right) < 25


def test_remote_datasets_have_the_same_columns(scored: tuple[Path, Any]) -> None:
    where = "qwen.rank < 0.5 and qwen.bits_per_byte_rank < 0.6"
    store = fsspec.filesystem("memory")
    store.put(str(scored[0]), "/scored", recursive=True)
    expected = chosen(open_dataset(scored[0]), where)
    assert chosen(open_dataset("memory://scored"), where) == expected
    assert expected
    store.rm("/scored", recursive=True)


def test_columns_are_what_the_losses_give(scored: tuple[Path, Any]) -> None:
    folder, made = scored
    dataset, num_compared = open_dataset(folder), 0
    for name, manifest in made.items():
        expected, scores = document_scores(folder, manifest), open_scored_documents(name, dataset)
        for shard in range(len(dataset.manifest.shards)):
            index = dataset.read_index(shard, with_names=True)
            found = scores.read(shard, SCORE_COLUMNS, index)
            for column, numbers in found.items():
                right = [expected[own][column] for own in index.document_id]
                right = [math.nan if value is None else value for value in right]
                np.testing.assert_allclose(numbers, right, rtol=1e-6)
                num_compared += len(right)
    assert num_compared == 2 * 25 * len(SCORE_COLUMNS)


def test_a_condition_keeps_the_score_that_it_named(copied_scores: tuple[Path, Any]) -> None:
    folder, made = copied_scores
    dataset = open_dataset(folder)
    selection = select_documents(dataset, " qwen.rank < 0.5 and year > 3")
    digits = made["models/qwen"].rule.fingerprint[:16]
    assert selection.where == f'"{digits}".rank < 0.5 and year > 3'
    write_scores(folder, "other/qwen", losses_of(3))
    again = select_documents(dataset, selection.where)
    assert again == selection
    twice = "qwen.rank < 0.5 and qwen.bits_per_byte > 0"
    with pytest.raises(WhereError, match=r'2 teachers .* "qwen".*"models/qwen", float32') as error:
        select_documents(dataset, twice)
    [hint] = hints_of(error.value)
    [written] = shlex.split(hint.removeprefix("hint: where="))
    assert select_documents(dataset, written).where == written


@pytest.mark.parametrize(
    ("where", "message"),
    [
        (
            "mine.rank < 1",
            r'no scores by teacher "mine" in .*: name one of [0-9a-f]{16} \("',
        ),
        ("qwen.bits < 1", r'"qwen.bits" not found; .*as "TEACHER".COLUMN, bits_per_byte, '),
        ("Small-2.5B.rank < 1", r"syntax error.*as \"TEACHER\".COLUMN"),
        ("rank < 1", r'column "rank" not found; .*"TEACHER".COLUMN'),
        ("qwen.rank", r"it is a value of type DOUBLE, not a condition"),
        ("a.qwen.rank < 1", r'column "a.qwen.rank" not found'),
    ],
)
def test_what_scores_can_not_be(scored: tuple[Path, Any], where: str, message: str) -> None:
    with pytest.raises(WhereError, match=message):
        select_documents(open_dataset(scored[0]), where)


def test_documents_that_were_not_scored_are_named_unless_the_condition_leaves_them_out(
    copied_scores: tuple[Path, Any],
) -> None:
    folder, _ = copied_scores
    part = write_scores(folder, "part", losses_of(4), where="good")
    dataset = open_dataset(folder)
    scores = {name: own["bits_per_byte"] for name, own in document_scores(folder, part).items()}
    right = {int(name[6:]) for name, bits in scores.items() if bits and bits < 2}
    assert chosen(dataset, "good and part.bits_per_byte < 2") == right
    assert right
    with pytest.raises(WhereError, match=r"document \d+ of docs-0.* more have no score in .*good"):
        chosen(dataset, "part.bits_per_byte < 2")


def test_a_removal_moves_no_rank(copied_scores: tuple[Path, Any]) -> None:
    folder, _ = copied_scores
    where = "qwen.rank < 0.6 and qwen.bits_per_byte_rank < 0.8"
    before = chosen(open_dataset(folder), where)
    gone = min(before)
    remove_documents(folder, f"doc-0-{gone}")
    assert chosen(open_dataset(folder), where) == before - {gone}
    assert chosen(open_dataset(folder, generation=0), where) == before


def test_what_came_since_must_be_scored(tmp_path: Path) -> None:
    grow(tmp_path, "a", [f"a{n}" for n in range(20)])
    folder, where = tmp_path / "aligned", "t.rank < 0.5"
    write_scores(folder, "t", losses_of(5))
    ranks = AlignedRows(StreamConfig(Reading(str(folder), where), seq_length=64))
    before = set(np.unique(ranks.datasets[0].plan.segments["document"]).tolist())
    grow(tmp_path, "b", [f"b{n}" for n in range(9)])
    with pytest.raises(WhereError, match=r"lists sidecars of \d+ shards, the dataset has \d+"):
        select_documents(open_dataset(folder), where)
    manifest = write_scores(folder, "t", losses_of(5))
    scores = document_scores(folder, manifest)
    right = {name for name, own in scores.items() if own["rank"] < 0.5}
    align_part(folder, tmp_path / "part", where)
    assert seen_ids(tmp_path / "part") == right
    reading = Reading(str(folder), where, generation=0)
    old = AlignedRows(StreamConfig(reading, seq_length=64))
    assert set(np.unique(old.datasets[0].plan.segments["document"]).tolist()) == before
    moved = AlignedRows(StreamConfig(Reading(str(folder), where, "latest"), seq_length=64))
    assert moved.restore(old.state(0)) == 0


def align_part(source: Path, output: Path, where: str) -> None:
    from beam_jobs.align.options import AlignOptions

    align(AlignOptions(input=(str(source),), output=str(output), where=where, run=QUIET))


def test_a_run_goes_on_with_the_losses_that_chose_its_documents(
    copied_scores: tuple[Path, Any],
) -> None:
    folder, _ = copied_scores
    where = "qwen.bits_per_byte < 2.5"
    parts = {n: {"path": "data", "where": w} for n, w in (("a", where), ("b", f"not ({where})"))}
    file = write_mixture(folder.parent / "mixture.toml", **parts)
    configs = [StreamConfig(Reading(str(folder), where), seq_length=64),
               StreamConfig(Reading(str(file)), seq_length=64)]  # fmt: skip
    runs = [AlignedRows(config) for config in configs]
    for config, rows in zip(configs, runs, strict=True):
        assert AlignedRows(config).restore(rows.state(0)) == 0
    whole = AlignedRows(StreamConfig(Reading(str(folder)), seq_length=64))
    assert whole.state(0).scores == ""
    dear = next(name for name in seen_ids(folder) if len(name) == 7)
    write_scores(folder, "models/qwen", losses_of(1, dear=dear))
    for config, rows in zip(configs, runs, strict=True):
        with pytest.raises(StreamMismatchError, match=r"with scores .*restore the teacher's"):
            AlignedRows(config).restore(rows.state(0))


def test_tables_that_are_not_the_sidecars_are_refused(copied_scores: tuple[Path, Any]) -> None:
    folder, made = copied_scores
    names = [document_scores_name(record.file) for record in made["models/qwen"].sidecars]
    (folder / names[0]).write_bytes((folder / names[0]).read_bytes()[:-9])
    shutil.copyfile(folder / names[2], folder / names[1])
    dataset = open_dataset(folder)
    selection = select_documents(dataset, "qwen.bits_per_byte < 9 and qwen.tokens_per_byte < 9")
    for shard in (0, 1):
        with pytest.raises(
            DamagedShardError,
            match=r"is not the table that .* names.*delete it and run vocag score",
        ):
            selection.read(shard)
    assert selection.read(2)[1] is None
    # A score manifest that names no digests: what the table says of itself is compared.
    path = folder / score_manifest_name(made["models/qwen"].rule.fingerprint)
    scores = made["models/qwen"]
    early = [replace(record, documents_sha256=None) for record in scores.sidecars]
    path.write_bytes(encode_score_manifest(replace(scores, sidecars=tuple(early))))
    assert b"documents_sha256" not in path.read_bytes()
    selection = select_documents(dataset, selection.where)
    for shard, message in ((0, "is not a table of this"), (1, "made from its sidecar's losses")):
        with pytest.raises(DamagedShardError, match=message):
            selection.read(shard)
    assert selection.read(2)[1] is None


def test_a_table_of_another_version_is_made_anew(
    copied_scores: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a lost one is, from the losses, also where it was read before."""
    folder, _ = copied_scores
    where = "qwen.bits_per_byte < 2.5 and qwen.largest_window < 9"

    def read() -> list[Any]:
        selection = select_documents(open_dataset(folder), where)
        kept = [selection.read(shard)[1] for shard in range(3)]
        return [None if each is None else each.tolist() for each in kept]

    before, findings = read(), validate_dataset(str(folder)).findings
    assert any(each is not None and not all(each) for each in before)
    monkeypatch.setattr("schemas.document_score_table.DOCUMENT_SCORES_VERSION", 2)
    assert read() == before
    report = validate_dataset(str(folder))
    assert [*report.findings] == [*findings]
    assert any(": missing or of another version, and made from" in note for note in report.notes)


def test_another_column_s_version_changes_no_run(
    copied_scores: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans and checkpoints keep a digest of what chose their documents."""
    folder, made = copied_scores
    config = StreamConfig(Reading(str(folder), "qwen.bits_per_byte_rank < 0.9"), seq_length=64)
    state = AlignedRows(config).state(0)
    sidecars = [record.sha256 for record in made["models/qwen"].sidecars]
    own = sha256(json.dumps([1, *sidecars]).encode()).hexdigest()
    of_dataset = [sha256(own.encode()).hexdigest()]
    runs = sha256(json.dumps(of_dataset).encode()).hexdigest()
    assert state.scores == runs, "those that began before go on"
    monkeypatch.setitem(COLUMN_VERSIONS, "largest_window", 2)
    assert AlignedRows(config).restore(state) == 0
    monkeypatch.setitem(COLUMN_VERSIONS, "bits_per_byte", 2)
    with pytest.raises(StreamMismatchError, match="with scores "):
        AlignedRows(config).restore(state)


def test_a_sidecar_of_another_number_of_documents_is_refused(
    copied_scores: tuple[Path, Any],
) -> None:
    """A liar that hashes its lies: the sums would be written beyond the documents."""
    folder, made = copied_scores
    scores = made["models/qwen"]
    record = scores.sidecars[0]
    stored = decode_sidecar((folder / record.file).read_bytes(), at="")
    few = replace(stored, starts=stored.starts[[0, -1]])
    data = encode_sidecar(few)
    (folder / record.file).write_bytes(data)
    (folder / document_scores_name(record.file)).unlink()
    sidecars = (replace(record, sha256=sha256(data).hexdigest()), *scores.sidecars[1:])
    path = folder / score_manifest_name(scores.rule.fingerprint)
    path.write_bytes(encode_score_manifest(replace(scores, sidecars=sidecars)))
    selection = select_documents(open_dataset(folder), "qwen.bits_per_byte < 1.5")
    with pytest.raises(DamagedShardError, match=r"holds losses of 1 documents, the shard \d+"):
        selection.read(0)
