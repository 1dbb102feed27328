"""Mixtures against one dataset: rows per second, planning at scale, and resuming.

    python benchmarks/mixtures.py DATASET [--seq-length 2048] [--only rows plan scores resume]

DATASET is a dataset of five shards or more, made by `beam_jobs.align`; its shards are dealt out to
five datasets. Contenders take turns in the same rounds: trust the ratios.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
from measure import Report, measure

from pipeline.dataset.chosen_documents import select_documents
from pipeline.dataset.files import Dataset, open_dataset
from pipeline.packing.mixture_file import Stage
from pipeline.packing.mixture_plan import Source, plan_mixture
from pipeline.packing.plan import RowPlan, plan_rows
from pipeline.packing.rules import PackingRules
from pipeline.streaming import AlignedRows, Reading, StreamConfig
from schemas.document_score_table import (
    DocumentScores,
    document_scores_name,
    encode_document_scores,
)
from schemas.index import CUT_STRIDE, ShardIndex, encode_index
from schemas.manifest import ConventionRecord, encode_manifest
from schemas.sidecar import (
    ScoreManifest,
    SidecarRecord,
    TeacherRule,
    encode_score_manifest,
    score_manifest_name,
)

BATCH = 8
WEIGHTS = (0.4, 0.3, 0.15, 0.1, 0.05)
DOCUMENTS_PER_SHARD = 10_000
FAR = 10**9
"""A row that no run of these datasets would reach in days."""


def main() -> None:
    """Run the benchmarks that are asked for."""
    parts = {"rows": rows_per_second, "plan": plan, "scores": scores, "resume": resume}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dataset")
    parser.add_argument("--seq-length", type=int, default=2048)
    parser.add_argument("--only", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--num-rows", type=int, default=4000, help="read in each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--documents", type=float, default=100e6, help="of the planned mixture")
    parser.add_argument("--datasets", type=int, default=50, help="of the planned mixture")
    options = parser.parse_args()
    report = Report()
    for name in options.only:
        print(f"\n{name}")
        parts[name](options, report)
    if report.missed:
        raise SystemExit(f"missed: {', '.join(report.missed)}")


def rows_per_second(options: argparse.Namespace, report: Report) -> None:
    """Read the same number of rows of one dataset and of a mixture of its shards."""
    with tempfile.TemporaryDirectory() as folder:
        paths = {"one dataset": options.dataset, "mixture": write_mixture(options, Path(folder))}
        opened = {
            name: AlignedRows(
                StreamConfig(Reading(str(path)), seq_length=options.seq_length, num_epochs=1 << 30)
            )
            for name, path in paths.items()
        }

        def reader(rows: AlignedRows) -> Callable[[], Callable[[], None]]:
            return lambda: lambda: read(rows, options.num_rows)

        for rows in opened.values():
            read(rows, BATCH)
        times = measure({name: reader(rows) for name, rows in opened.items()}, options.rounds)
    for name in opened:
        report.say(name, f"{options.num_rows / times.seconds(name):.0f} rows/s, {times.show(name)}")
    # Of CPU time: one process does it all, and other work on the machine doesn't count.
    ratio = times.cpu_ratio("one dataset", "mixture")
    report.check("rows/s of a mixture of five by one dataset's", ratio, least=0.9)


def plan(options: argparse.Namespace, report: Report) -> None:
    """Plan many datasets from simulated indices, each read and decoded, and their mixture."""
    shards = int(options.documents / options.datasets / DOCUMENTS_PER_SHARD)
    conventions = ConventionRecord(1, 1, 2), ConventionRecord(3, 3, None)
    rules = PackingRules(options.seq_length, 1792, *conventions)
    sources: list[Source] = []
    with tempfile.TemporaryDirectory() as folder:
        dataset = simulate_dataset(options, Path(folder), shards)
        # Kernels are compiled once a machine, not in each run.
        plan_rows(select_documents(first_shard(dataset)).each, rules)
        started, started_cpu = time.perf_counter(), time.process_time()
        for number in range(options.datasets):
            planned = plan_rows(select_documents(dataset).each, rules)
            tokens = planned.num_text_tokens[0]
            sources.append(Source(f"d{number}", len(planned), tokens, None if number % 2 else 3))
        cpu_seconds = time.process_time() - started_cpu
    first = {source.name: 1 / len(sources) for source in sources}
    later = {source.name: 2 / len(sources) for source in sources if source.max_epochs is None}
    started_mixing = time.perf_counter()
    mixed = plan_mixture(sources, [Stage(first), Stage(later, sources[0].num_tokens)])
    mixed.locate(FAR)
    ended = time.perf_counter()
    documents = shards * DOCUMENTS_PER_SHARD * len(sources)
    report.say("documents, datasets, cores", f"{documents}, {len(sources)}, {os.cpu_count()}")
    report.say("… of it the mixture itself", f"{ended - started_mixing:.2f} s")
    per_shard = 1e3 * cpu_seconds / (shards * options.datasets)
    report.say(f"CPU time for {DOCUMENTS_PER_SHARD} documents", f"{per_shard:.2f} ms")
    report.say("CPU time of planning", f"{cpu_seconds:.1f} s")
    report.check("planning", ended - started, most=75, unit="s")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    report.check("peak memory", peak, most=4, unit="GB")


def scores(options: argparse.Namespace, report: Report) -> None:
    """Plan one simulated dataset whole, by its own counts, and by two teachers' scores."""
    shards = int(options.documents / options.datasets / DOCUMENTS_PER_SHARD)
    rules = PackingRules(
        options.seq_length, 1792, ConventionRecord(1, 1, 2), ConventionRecord(3, 3, None)
    )
    conditions = {
        "all documents": "",
        "by counts": "num_text_bytes - num_teacher_tokens > -1",
        "by two scores": "one.bits_per_byte - two.bits_per_byte < 99",
        "by rank": "one.rank <= 1",
    }
    with tempfile.TemporaryDirectory() as folder:
        dataset = simulate_dataset(options, Path(folder), shards)
        for name in ("one", "two"):
            simulate_scores(dataset, name)

        def planner(where: str) -> Callable[[], Callable[[], None]]:
            return lambda: (
                lambda: require_all(
                    plan_rows(select_documents(dataset, where).each, rules), dataset
                )
            )

        contenders = {name: planner(where) for name, where in conditions.items()}
        plan_rows(select_documents(first_shard(dataset)).each, rules)
        times = measure(contenders, options.rounds)
    for name in conditions:
        report.say(name, f"{shards * DOCUMENTS_PER_SHARD} documents, {times.show(name)}")
    for name in list(conditions)[1:]:
        # Of CPU time: other work on the machine doesn't count.
        ratio = times.cpu_ratio(name, "all documents")
        report.check(f"{name} by all documents, CPU time", ratio, most=1.2)


def require_all(planned: RowPlan, dataset: Dataset) -> None:
    """Check that a condition has left nothing out, which would make planning cheaper."""
    documents = sum(shard.num_documents for shard in dataset.manifest.shards)
    assert len(np.unique(planned.segments["document"])) == documents


def simulate_scores(dataset: Dataset, name: str) -> None:
    """Write a teacher's score manifest and one table, which all simulated shards share."""
    shard, folder = dataset.manifest.shards[0], Path(dataset.location)
    index, rng = dataset.read_index(0, with_names=True), np.random.default_rng(len(name))
    columns = rng.lognormal(0, 0.5, (4, len(index))).astype(np.float32)
    rule = TeacherRule(
        sha256(name.encode()).hexdigest(), "float32", dataset.manifest.teacher.sha256, {}
    )
    sidecar, digest = f"{name}.safetensors", "0" * 64
    table = encode_document_scores(
        DocumentScores(*columns),
        document_id=index.document_id,
        num_text_bytes=index.num_text_bytes,
        sidecar_sha256=digest,
    )
    (folder / document_scores_name(sidecar)).write_bytes(table)
    record = SidecarRecord(
        sidecar, 0, digest, shard.file, shard.num_teacher_tokens, 0, 0.0, 0, digest
    )
    records = (record,) * len(dataset.manifest.shards)
    made = ScoreManifest(dataset.manifest.fingerprint, rule, name, records)
    (folder / score_manifest_name(rule.fingerprint)).write_bytes(encode_score_manifest(made))


def simulate_dataset(options: argparse.Namespace, folder: Path, num_shards: int) -> Dataset:
    """Return a dataset of many shards with one simulated index, each read as if it were its own."""
    encoded = encode_index(simulated_index(DOCUMENTS_PER_SHARD))
    (folder / "index.parquet").write_bytes(encoded)
    manifest = open_dataset(options.dataset).manifest
    record = replace(
        manifest.shards[0],
        index_file="index.parquet",
        index_sha256=sha256(encoded).hexdigest(),
        num_documents=DOCUMENTS_PER_SHARD,
    )
    return Dataset(str(folder), replace(manifest, shards=(record,) * num_shards))


def simulated_index(num_documents: int) -> ShardIndex:
    """Return documents of log-normal length, 1,200 tokens on average, boundaries shared often."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(1200) - 0.5, 1, num_documents), 16, 200_000)
    student = lengths.astype(np.int64)
    teacher = np.maximum(1, student * rng.uniform(0.7, 0.9, num_documents)).astype(np.int64)
    counts = student // CUT_STRIDE
    starts = np.concatenate([[0], np.cumsum(counts)])
    place = np.arange(starts[-1]) - np.repeat(starts[:-1], counts)
    cut = place * CUT_STRIDE + rng.integers(1, CUT_STRIDE + 1, len(place))
    zeros = np.zeros(num_documents, np.int64)
    return ShardIndex(
        key=[f"{number:032x}" for number in range(num_documents)],
        document_id=[f"doc-{number}" for number in range(num_documents)],
        payload_offset=np.arange(num_documents) * 12_000,
        payload_bytes=zeros + 11_000,
        crc32=rng.integers(0, 1 << 32, num_documents),
        num_text_bytes=student * 4,
        num_student_tokens=student,
        num_teacher_tokens=teacher,
        cut_starts=starts,
        cut_student=cut,
        cut_teacher=(cut * np.repeat(teacher / student, counts)).astype(np.int64),
        num_mapped=student,
        byte_iou_sum=student.astype(np.float32),
    )


def first_shard(dataset: Dataset) -> Dataset:
    """Return a dataset that ends behind its first shard."""
    return replace(dataset, manifest=replace(dataset.manifest, shards=dataset.manifest.shards[:1]))


def resume(options: argparse.Namespace, report: Report) -> None:
    """Time a new process from opening a mixture to a batch far into its run."""
    with tempfile.TemporaryDirectory() as folder:
        path = write_mixture(options, Path(folder))
        code = (
            "import time; from pipeline.streaming import *;"
            "start, cpu = time.perf_counter(), time.process_time();"
            f"config = StreamConfig(Reading({str(path)!r}), seq_length={options.seq_length});"
            "rows = AlignedRows(config);"
            f"rows.__getitems__(range({FAR}, {FAR} + {BATCH}));"
            "print(time.perf_counter() - start, time.process_time() - cpu)"
        )
        # The first one makes the plans.
        told = [
            subprocess.check_output([sys.executable, "-c", code], text=True).split()
            for _ in range(options.rounds + 1)
        ]
    first, *resumed = [(float(wall), float(cpu)) for wall, cpu in told]
    report.say("planning and the first batch", f"{first[0]:.2f} s, CPU time {first[1]:.2f} s")
    report.say("resuming, CPU time", f"{max(cpu for _, cpu in resumed):.2f} s at most")
    report.check("resuming to the first batch", max(wall for wall, _ in resumed), most=1, unit="s")


def read(rows: AlignedRows, num_rows: int) -> None:
    """Read rows in batches."""
    for start in range(0, num_rows, BATCH):
        rows.__getitems__(range(start, start + BATCH))


def write_mixture(options: argparse.Namespace, folder: Path) -> Path:
    """Deal a dataset's shards out to five datasets, and mix them."""
    dataset = open_dataset(options.dataset)
    shards = dataset.manifest.shards
    lines = []
    for number in range(len(WEIGHTS)):
        own = folder / f"d{number}"
        own.mkdir()
        records = shards[number :: len(WEIGHTS)]
        for name in (file for record in records for file in (record.file, record.index_file)):
            os.symlink(Path(dataset.location) / name, own / name)
        manifest = replace(dataset.manifest, shards=records)
        (own / "manifest.json").write_bytes(encode_manifest(manifest))
        lines += [f"[datasets.d{number}]", f'path = "d{number}"', "repeat = true"]
    shares = ", ".join(f"d{number} = {weight}" for number, weight in enumerate(WEIGHTS))
    path = folder / "mixture.toml"
    path.write_text("\n".join([*lines, "[[stages]]", f"weights = {{ {shares} }}"]))
    return path


if __name__ == "__main__":
    main()
