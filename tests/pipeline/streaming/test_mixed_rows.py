"""Rows of a mixture: those of its datasets, in one order, whoever reads them and from where."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

from pipeline.scoring.teaching import Teaching
from pipeline.streaming import AlignedRows, Reading, StreamMismatchError, StreamState
from schemas.distribution_rule import DistributionRule
from schemas.errors import DamagedSampleError, DatasetError, ForeignTokenizerError
from schemas.manifest import ConventionRecord, encode_manifest
from tests.support.mixtures import write_mixture
from tests.support.stored_scores import write_scores
from tests.support.streaming_data import (
    GLOBAL_BATCH_SIZE,
    make_documents,
    read_quarantine,
    read_run,
    small_rows,
    write_dataset,
)

NUM_DOCUMENTS = {"web": 110, "math": 40, "code": 60, "wiki": 25, "tiny": 9}
STAGES = """
[[stages]]
weights = { web = 0.5, math = 0.2, code = 0.2, tiny = 0.1 }
[[stages]]
from_tokens = 12_000
weights = { web = 0.25, math = 0.25, code = 0.25, wiki = 0.125, tiny = 0.125 }
[[stages]]
from_tokens = 24_000
weights = { code = 0.5, wiki = 0.5 }
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Five datasets of unequal size and a mixture in three stages, as litData#694 asks for."""
    folder = tmp_path_factory.mktemp("mixed")
    for seed, (name, count) in enumerate(NUM_DOCUMENTS.items()):
        lengths = [(37 * number + 11 * seed) % (90 + 20 * seed) + 5 for number in range(count)]
        half = count // 2
        documents = make_documents(lengths, seed=seed)
        write_dataset(folder / name, documents, shard_sizes=[half, count - half])
    (folder / "mixture.toml").write_text(mixture_text())
    return folder


def mixture_text(stages=STAGES, *, seed=7, **limits):
    """Return a mixture of which web and code have no end, and tiny has five epochs."""
    limits = {"web": "repeat = true", "code": "repeat = true", "math": "max_epochs = 3"} | limits
    lines = [f"seed = {seed}"]
    for name in NUM_DOCUMENTS:
        lines += [f"[datasets.{name}]", f'path = "{name}"', limits.get(name, "max_epochs = 5")]
    return "\n".join(lines) + stages


def open_mixture(folder, file="mixture.toml", **options):
    return small_rows(folder / file, **options)


def source_of(rows, run_position):
    return rows.layout.sources[rows.locate(run_position)[0]]


@pytest.fixture(scope="module")
def expected(folder):
    """Every row of the run, each read by itself."""
    rows = open_mixture(folder, global_batch_size=1)
    num_rows = rows.plan.stretches[-1].start + 40
    return [tuple(rows[position].buffer.tolist()) for position in range(num_rows)]


@pytest.mark.parametrize(("num_replicas", "num_workers", "stride"), [(3, 0, 97), (2, 1, 400)])
def test_a_run_resumed_anywhere_reads_the_same_rows(
    folder, expected, num_replicas, num_workers, stride
):
    num_samples = len(expected) // GLOBAL_BATCH_SIZE * GLOBAL_BATCH_SIZE
    starts = range(0, num_samples, stride)
    assert len(starts) > 1
    for row in starts:
        rows = open_mixture(folder)
        saved = json.loads(json.dumps(asdict(rows.state(row - row % GLOBAL_BATCH_SIZE))))
        consumed = rows.restore(StreamState(**saved))
        found = read_run(
            rows,
            num_samples,
            num_replicas=num_replicas,
            num_workers=num_workers,
            consumed_samples=consumed,
        )
        assert all(found[position] == expected[position] for position in found)


def test_rows_are_those_of_the_datasets_each_epoch_whole_in_its_own_order(folder):
    rows = open_mixture(folder)
    sources = {}
    for entry in rows.opened.mixture.datasets:
        config = replace(
            rows.config, data=Reading(entry.path), seed=7, global_batch_size=1, num_epochs=None
        )
        single = AlignedRows(config)
        sources[entry.name] = (single, [])
    for position in range(rows.plan.stretches[-1].start):
        row = rows[position]
        name = source_of(rows, position)
        assert rows.layout.sources[row["source"]] == name
        single, seen = sources[name]
        own = single[len(seen)]
        for field in ("input_ids", "labels", "loss_mask", "teacher_spans", "teacher_input_ids"):
            assert torch.equal(row[field], own[field])
        seen.append(tuple(row["input_ids"].tolist()))
    single, seen = sources["tiny"]
    epoch = single.samples_per_epoch
    assert len(seen) > 2 * epoch, "more than one epoch of the smallest"
    assert sorted(seen[:epoch]) == sorted(seen[epoch : 2 * epoch])
    assert seen[:epoch] != seen[epoch : 2 * epoch]


@pytest.mark.parametrize(
    "text",
    [
        mixture_text(seed=8),
        mixture_text(STAGES.replace("12_000", "12_001")),
        mixture_text(math="max_epochs = 4"),
        mixture_text(STAGES.replace("code = 0.5, wiki", "code = 0.4, web = 0.1, wiki")),
    ],
)
def test_another_mixture_is_another_run(folder, text):
    saved = open_mixture(folder).state(24)
    (folder / "other.toml").write_text(text)
    with pytest.raises(StreamMismatchError, match="made with fingerprint"):
        open_mixture(folder, "other.toml").restore(saved)


def test_names_are_no_part_of_a_run(folder):
    saved = open_mixture(folder).state(24)
    renamed = mixture_text().replace("web = ", "www = ").replace("[datasets.web]", "[datasets.www]")
    (folder / "renamed.toml").write_text(renamed)
    assert open_mixture(folder, "renamed.toml").restore(saved) == 24


def write_other_dataset(folder, **changes):
    """Write a dataset whose tokenizer records differ."""
    documents = make_documents([50] * 70, seed=9)
    manifest = write_dataset(folder, documents, shard_sizes=[70]).manifest
    records = {side: replace(getattr(manifest, side), **new) for side, new in changes.items()}
    (folder / "manifest.json").write_bytes(encode_manifest(replace(manifest, **records)))


def test_datasets_that_do_not_belong_together_are_refused(folder, tmp_path):
    def mixed_with_web(path):
        tables = {"web": {"path": str(folder / "web")}, "other": {"path": str(path)}}
        return small_rows(write_mixture(tmp_path / "mixture.toml", **tables))

    with pytest.raises(DatasetError, match=r'mixture.toml: "web" and "other" share 2 shards'):
        mixed_with_web(folder / "web")
    write_other_dataset(tmp_path / "foreign", teacher={"sha256": "0" * 64})
    with pytest.raises(
        ForeignTokenizerError, match=r'mixture.toml: "other" and "web" differ: teacher tokenizer'
    ):
        mixed_with_web(tmp_path / "foreign")
    convention = ConventionRecord(None, None, 2)
    write_other_dataset(tmp_path / "bare", student={"convention": convention})
    with pytest.raises(
        DatasetError, match=r'student\'s first_token_id is None in "other" and 1 in "web": name'
    ):
        mixed_with_web(tmp_path / "bare")
    with pytest.raises(DatasetError, match=r"nowhere isn't a dataset, or its align job"):
        mixed_with_web(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"none.toml"):
        open_mixture(tmp_path, "none.toml")


def test_losses_of_one_teacher_with_and_without_distributions_are_one_teachers(tmp_path):
    rules = {"web": None, "math": DistributionRule(2, 1.0, 400, "uint8")}
    for name, rule in rules.items():
        folder, documents = tmp_path / name, make_documents([50] * 70)
        write_dataset(folder, documents, shard_sizes=[70] if rule else [30, 40])
        write_scores(folder, "7B", lambda _, count: np.full(count, 0.5), distributions=rule)
    file = write_mixture(tmp_path / "both.toml", **{name: {"path": name} for name in rules})
    rows = small_rows(file, teaching=Teaching(stored_losses="7B"))
    assert {rows[number]["source"].item() for number in range(len(rows))} == {0, 1}


def test_damage_is_raised_or_listed_with_its_dataset(tmp_path):
    for seed, name in enumerate(("web", "tiny")):
        write_dataset(tmp_path / name, make_documents([40] * 20, seed=seed), shard_sizes=[10, 10])
    tar = tmp_path / "tiny" / "data-000001-of-000002.tar"
    tar.write_bytes(tar.read_bytes()[:1024] + b"\xff" * 64 + tar.read_bytes()[1088:])
    write_mixture(tmp_path / "mixture.toml", web={"path": "web"}, tiny={"path": "tiny"})
    rows = open_mixture(tmp_path, global_batch_size=4)
    with pytest.raises(DamagedSampleError, match="data-000001-of-000002"):
        rows.__getitems__(range(len(rows)))
    rows = open_mixture(tmp_path, global_batch_size=4, on_damage="quarantine")
    found = rows.__getitems__(range(len(rows)))
    masked = found["num_quarantined_tokens"]
    assert masked.sum() == 40
    assert found["source"][masked > 0].tolist() == [1]
    assert len(read_quarantine(rows.datasets[1].damage.file)) == 1
    assert not rows.datasets[0].damage.samples


def test_a_broken_loss_is_named_with_the_step_of_the_run(folder):
    rows = open_mixture(folder)
    position = 5 * GLOBAL_BATCH_SIZE + 1
    with pytest.raises(ValueError, match=rf"step 6 on {folder}/{source_of(rows, position)}\)"):
        rows.leave_out(position, 0, "the teacher's loss is NaN")
