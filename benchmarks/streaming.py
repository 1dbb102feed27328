"""How fast rows stream, against webdataset and against read(), alone and with workers.

    python benchmarks/streaming.py OUTPUT [--seq-length 2048] [--only speed workers]
    python benchmarks/streaming.py OUTPUT --only distributions --stored-losses NAME

OUTPUT is a dataset made by `beam_jobs.align`; a few million tokens are enough. `distributions`
needs one that `vocag score --top-k 16` has scored. Times are the best of several rounds,
rivals measured in turn in the same rounds: trust the ratios.
"""

import argparse
import io
import os
import resource
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from unittest.mock import patch

import numpy as np
import webdataset
from torch.utils.data import DataLoader

from pipeline.dataset.files import open_dataset
from pipeline.dataset.webdataset_documents import decoded_documents
from pipeline.scoring.teaching import NOBODY, Teaching
from pipeline.streaming import AlignedRows, Reading, Rows, StreamConfig, collate_rows, load_batches
from pipeline.streaming.next_tokens import NextTokens
from schemas.document import AlignedDocument

BATCH = 8


def main() -> None:
    """Run the benchmarks that are asked for."""
    parts = {"speed": speed, "workers": workers, "distributions": distributions}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dataset")
    parser.add_argument("--seq-length", type=int, default=2048)
    parser.add_argument("--only", nargs="+", choices=parts, default=["speed", "workers"])
    parser.add_argument("--stored-losses", default="")
    options = parser.parse_args()
    for name in options.only:
        print(f"\n{name}")
        parts[name](options)


def speed(options: argparse.Namespace) -> None:
    """Compare rows in one process with webdataset over .npy members and with read()."""
    rows = AlignedRows(StreamConfig(Reading(options.dataset), seq_length=options.seq_length))
    dataset = open_dataset(options.dataset)
    paths = [dataset.shard(shard).url for shard in range(len(dataset.manifest.shards))]
    num_tokens = dataset.manifest.totals["num_student_tokens"]
    with tempfile.TemporaryDirectory() as folder:
        naive = list(write_naive_shards(options.dataset, Path(folder)))
        rivals: dict[str, Callable[[], object]] = {
            "rows, shuffled, CRC-32 checked": lambda: read_rows(rows),
            "webdataset, .npy members": lambda: read_webdataset(naive),
            "read(), a new buffer per shard": lambda: [Path(path).read_bytes() for path in paths],
            "readinto(), one buffer": lambda: read_into(paths),
        }
        seconds = best_of(rivals)
    ours = seconds["rows, shuffled, CRC-32 checked"]
    for name, value in seconds.items():
        print(
            f"  {name:32} {num_tokens / value / 1e6:8.1f} Mtok/s   ours / this {value / ours:6.2f}"
        )
    stored = dataset.manifest.totals["num_bytes"] / num_tokens
    print(f"  bytes per student token: {stored:.1f} stored, {row_bytes(rows):.1f} in a row")


def workers(options: argparse.Namespace) -> None:
    """Compare workers that fill slots with torch's DataLoader, and with copying one tensor."""
    config = StreamConfig(
        Reading(options.dataset),
        seq_length=options.seq_length,
        global_batch_size=BATCH,
        num_epochs=4,
    )
    rows = AlignedRows(config)
    plan = rows.datasets[0].plan
    tokens = plan.row_lengths()[0].sum() / len(plan) * len(rows)
    source = rows.__getitems__(range(BATCH)).buffer.numpy()

    def copy() -> None:
        for _ in range(len(rows) // BATCH):
            source.copy()

    def slots(num_workers: int) -> Callable[[], object]:
        return lambda: drain(load_batches(rows, micro_batch_size=BATCH, num_workers=num_workers))

    def plain(num_workers: int) -> Callable[[], object]:
        loader = DataLoader(
            rows, batch_size=BATCH, collate_fn=collate_rows, num_workers=num_workers
        )
        return lambda: drain(loader)

    rivals = {"copying each batch once": copy, "in this process": slots(0)}
    rivals |= {"1 worker": slots(1), "2 workers": slots(2), "2 workers, DataLoader": plain(2)}
    cpu = {name: cpu_seconds(run) for name, run in rivals.items()}
    seconds = best_of(rivals, rounds=3)
    batches = len(rows) // BATCH
    print("  CPU time is per batch; with idle cores the busier side sets the pace")
    for name, value in seconds.items():
        main, children = (1e6 * part / batches for part in cpu[name])
        print(
            f"  {name:24} {tokens / value / 1e6:6.1f} Mtok/s   this process {main:5.0f} µs, "
            f"workers {children:5.0f} µs in all"
        )


def distributions(options: argparse.Namespace) -> None:
    """Compare rows without losses, with them, and with distributions of their labels."""
    reading, seq_length = Reading(options.dataset), options.seq_length
    teaching = Teaching(stored_losses=options.stored_losses)
    stored = StreamConfig(reading, seq_length=seq_length, teaching=teaching)
    plain = AlignedRows(replace(stored, teaching=NOBODY))
    losses, every = AlignedRows(stored), AlignedRows(replace(stored, with_distributions=True))

    def unpacked() -> None:
        with patch.object(NextTokens, "finish", lambda *_: None):
            read_rows(every)

    names = ("rows", "with losses", "with entries unpacked", "with distributions")
    runs = (lambda: read_rows(plain), lambda: read_rows(losses), unpacked, lambda: read_rows(every))
    # All of it is arithmetic of one thread: its CPU time, which other work changes least.
    seconds = best_of(dict(zip(names, runs, strict=True)), 25, clock=time.thread_time)
    before = 0.0
    print(f"  {every.layout.entries.width} entries a place, rows of {seq_length} tokens")
    for name, value in seconds.items():
        more = 1e6 * (value - before) / len(every)
        print(f"  {name:24} {len(every) / value:8.0f} rows/s   {more:6.0f} µs a row more")
        before = value
    # 1.1 times what it was while labels had nothing of the text's own token, with the same entries.
    ratio = seconds["with distributions"] / seconds["with entries unpacked"]
    print(f"  with distributions / with entries unpacked: {ratio:.2f} x, aim 2.7 x")


def best_of(
    rivals: dict[str, Callable[[], object]],
    rounds: int = 5,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Return each rival's best seconds, measured in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in rivals}
    for _ in range(rounds):
        for name, run in rivals.items():
            start = clock()
            run()
            seconds[name].append(clock() - start)
    return {name: min(values) for name, values in seconds.items()}


def read_rows(rows: AlignedRows) -> None:
    """Read one epoch in batches."""
    for start in range(0, len(rows), BATCH):
        rows.__getitems__(range(start, min(start + BATCH, len(rows))))


def drain(batches: Iterable[Rows]) -> None:
    """Read all batches."""
    for _ in batches:
        pass


def cpu_seconds(run: Callable[[], object]) -> tuple[float, float]:
    """Return the CPU seconds of this process and of the processes that it starts and ends."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    before = [resource.getrusage(kind) for kind in kinds]
    run()
    after = [resource.getrusage(kind) for kind in kinds]
    own, children = (
        (b.ru_utime - a.ru_utime) + (b.ru_stime - a.ru_stime)
        for a, b in zip(before, after, strict=True)
    )
    return own, children


def read_webdataset(paths: list[str]) -> None:
    """Read naive shards as webdataset users do."""
    for _ in webdataset.WebDataset(paths, shardshuffle=False).shuffle(1000).decode():
        pass


def read_into(paths: list[str]) -> None:
    """Read all bytes into one buffer: nothing but the kernel's copy."""
    buffer = bytearray(max(os.path.getsize(path) for path in paths))
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            file.readinto(buffer)


def write_naive_shards(dataset: str, folder: Path) -> Iterator[str]:
    """Write the dataset's documents as shards with one int32 .npy member per array."""
    documents = decoded_documents(dataset)
    for name, samples in groupby(documents, key=lambda sample: Path(sample["__url__"]).name):
        with tarfile.open(folder / name, "w") as tar:
            for sample in samples:
                _add_arrays(tar, sample["__key__"], sample["document"])
        yield str(folder / name)


def _add_arrays(tar: tarfile.TarFile, key: str, document: AlignedDocument) -> None:
    arrays = {
        "student_input_ids": document.student.input_ids,
        "student_byte_offsets": document.student.byte_offsets,
        "teacher_input_ids": document.teacher.input_ids,
        "teacher_byte_offsets": document.teacher.byte_offsets,
        "teacher_spans": document.teacher_spans,
    }
    for field, array in arrays.items():
        member = io.BytesIO()
        np.save(member, array.astype(np.int32))
        info = tarfile.TarInfo(f"{key}.{field}.npy")
        info.size = member.tell()
        member.seek(0)
        tar.addfile(info, member)


def row_bytes(rows: AlignedRows) -> float:
    """Return bytes of a row per student token in it."""
    plan = rows.datasets[0].plan
    return 4 * rows.layout.num_words * len(plan) / float(plan.row_lengths()[0].sum())


if __name__ == "__main__":
    main()
