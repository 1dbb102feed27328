"""Check a whole dataset."""

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from threading import Thread
from typing import Any

import msgspec
import numpy as np

from pipeline.alignment.quality import OVER_WIDE, AlignmentStatistics
from pipeline.dataset.dataset_reading import read_generation, read_manifest_bytes
from pipeline.dataset.files import Dataset
from pipeline.dataset.tokenizers import load_dataset_tokenizer
from pipeline.packing.saved_plans import check_plans
from pipeline.validate.findings import Finding, Findings
from pipeline.validate.sample_checks import SIDES
from pipeline.validate.score_checks import check_scores, find_scoring_teacher
from pipeline.validate.shard import Advance, ShardResult, check_digest, check_shard, describe
from pipeline.validate.tar import digest_file
from schemas.errors import RESTORE, DatasetError, SchemaVersionError
from schemas.manifest import DeadLetterRecord, Manifest, decode_manifest
from schemas.records import RecordError, read_record

FLOAT_TOLERANCE = 1e-9
"""Relative; sums of floats depend on the order of their parts."""


@dataclass(frozen=True)
class ValidationReport:
    """Findings, by check, shard and key; notes name what could not be checked.

    The fingerprint is computed from the manifest, "" if unreadable; totals are the manifest's.
    `num_tokenized_again` counts kept texts, None if none was to be tokenized.
    """

    dataset: str
    fingerprint: str
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    totals: dict[str, int]
    elapsed_seconds: float
    num_tokenized_again: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain values, and whether all is `clean`."""
        return {"clean": not self.findings, **asdict(self)}


def validate_dataset(
    dataset: str,
    *,
    with_tokenizers: bool = False,
    teacher: str | None = None,
    num_processes: int = 1,
    advance: Advance = int,
) -> ValidationReport:
    """Check every byte of a dataset, a folder or a manifest, by every rule of the format.

    Memory: 16 bytes per document, and one shard's index and window of samples per process.
    Tokenizers tokenize kept text again; a teacher, which needs the extra hf, scores some documents
    again. `advance` gets the bytes of tars read since its last call.

    Raises:
        DatasetError: the manifest is missing, or of another version; the teacher scored nothing.
        TokenizerError: a tokenizer's copy isn't one.
        OSError: the manifest or a tokenizer can't be read.
    """
    start = time.perf_counter()
    findings = Findings()
    path, data = read_manifest_bytes(dataset)
    folder = path.rpartition("/")[0]
    # Before the shards, which may take hours.
    scoring_teacher = None if teacher is None else find_scoring_teacher(teacher, folder)
    manifest = _decode(data, path, findings)
    if manifest is not None:
        opened = Dataset(folder, manifest)
        _check_side_files(opened, findings)
        _check_generations(opened, findings)
        if with_tokenizers:
            with_tokenizers = _can_tokenize(opened, findings)
        results = _check_shards(opened, with_tokenizers, num_processes, advance)
        for result in results:
            findings.take_over(result.findings)
        findings.found += _find_duplicate_keys(manifest, results)
        _check_statistics(manifest.statistics, [result.statistics for result in results], findings)
        findings.take_over(check_scores(opened, teacher=scoring_teacher))
        altered, stale = check_plans(opened) if opened.is_local else ([], [])
        findings.found += [Finding("plans", "", "", message) for message in altered]
        findings.notes += stale
    return ValidationReport(
        dataset=folder,
        fingerprint="" if manifest is None else manifest.fingerprint,
        findings=tuple(sorted(findings.found)),
        notes=tuple(findings.notes),
        totals={} if manifest is None else _totals(manifest),
        elapsed_seconds=time.perf_counter() - start,
        num_tokenized_again=findings.num_tokenized_again if with_tokenizers else None,
    )


def _decode(data: bytes, path: str, findings: Findings) -> Manifest | None:
    """Return the manifest, even with wrong totals or fingerprint."""
    try:
        manifest = decode_manifest(data, at=path)
    except SchemaVersionError:
        raise
    except DatasetError as error:
        findings.add("manifest", str(error))
        try:
            manifest = read_record(data, Manifest)
        except RecordError:
            text = "shards were not checked: the manifest does not say what they are"
            findings.note(text)
            return None
    for name, count in Counter(shard.file for shard in manifest.shards).items():
        if count > 1:
            findings.add("manifest", f"shard {name} is listed {count} times")
    return manifest


def _totals(manifest: Manifest) -> dict[str, int]:
    num_removed = 0 if manifest.removed is None else manifest.removed.count
    num_shards = len(manifest.shards)
    return {"num_shards": num_shards, **manifest.totals, "num_removed": num_removed}


def _check_side_files(dataset: Dataset, findings: Findings) -> None:
    manifest, letters = dataset.manifest, dataset.manifest.dead_letters
    chats = manifest.chats
    templates = () if chats is None else (chats.student, chats.teacher)
    copies = [(r.file, r.sha256) for r in (manifest.student, manifest.teacher, *templates)]
    for name, sha256_hex in [*copies, (letters.file, letters.sha256)]:
        try:
            with dataset.open_file(name) as file:
                check_digest(name, digest_file(file, int), None, sha256_hex, findings)
            if name == letters.file:
                _check_dead_letters(dataset, letters, findings)
        except OSError as error:
            findings.add("files", f"{name} can't be read: {describe(error, RESTORE)}")


def _check_dead_letters(dataset: Dataset, letters: DeadLetterRecord, findings: Findings) -> None:
    reasons: Counter[str] = Counter()
    with dataset.open_file(letters.file) as file:
        for number, line in enumerate(file, 1):
            try:
                reasons[json.loads(line)["reason"]] += 1
            except (ValueError, KeyError, TypeError):
                findings.add("dead_letters", f"{letters.file} line {number} names no reason")
    if reasons != Counter(letters.by_reason):
        found, claimed = dict(sorted(reasons.items())), dict(sorted(letters.by_reason.items()))
        text = f"{letters.file} holds {found}, the manifest says {claimed}"
        findings.add("dead_letters", text)
    if letters.count != sum(letters.by_reason.values()):
        text = f"the manifest counts {letters.count}, its reasons {sum(letters.by_reason.values())}"
        findings.add("dead_letters", text)


def _check_generations(dataset: Dataset, findings: Findings) -> None:
    manifest = dataset.manifest
    numbers = [entry.number for entry in manifest.generations]
    if numbers != list(range(len(numbers))) or len(numbers) != manifest.generation:
        text = f"generation {manifest.generation} lists {numbers} as the earlier ones"
        findings.add("generations", text)
    for number in sorted(set(numbers) - {manifest.generation}):
        try:
            before = read_generation(dataset.location, manifest, number)
        except (DatasetError, SchemaVersionError, OSError) as error:
            findings.add("generations", str(error))
            continue
        if before.shards != manifest.shards[: len(before.shards)]:
            text = f"the shards of generation {number} are not the first ones of this"
            findings.add("generations", text)
    _check_removed(dataset, findings)


def _check_removed(dataset: Dataset, findings: Findings) -> None:
    try:
        removed = dataset.removed
    except (DatasetError, OSError) as error:
        findings.add("removed", str(error))
        return
    if removed is None:
        return
    shards = dataset.manifest.shards
    counts = np.array([*(shard.num_documents for shard in shards), 0], np.int64)
    limits = counts[np.minimum(removed.shard, len(shards))]
    for place in np.flatnonzero(removed.document >= limits).tolist():
        shard, document = int(removed.shard[place]), int(removed.document[place])
        text = f"the list names document {document} of shard {shard}: there is none"
        findings.add("removed", text)


def _can_tokenize(dataset: Dataset, findings: Findings) -> bool:
    """Whether kept text can be tokenized again; checks tokenizers' records, too."""
    manifest = dataset.manifest
    copies = (manifest.student.file, manifest.teacher.file)
    damaged = [f for f in findings.found if f.message.startswith(copies)]
    if damaged:
        findings.note("kept text was not tokenized again: a tokenizer's copy is not the manifest's")
        return False
    for side in SIDES:
        own, record = load_dataset_tokenizer(dataset, side), getattr(manifest, side)
        for name in ("vocab_size", "bos_token_id", "eos_token_id", "adds_bos", "adds_eos"):
            if getattr(own, name) != getattr(record, name):
                claim = f"{side}.{name} is {getattr(record, name)}"
                findings.add("manifest", f"{claim}, its tokenizer says {getattr(own, name)}")
    if manifest.configuration.get("keep_text") is False:
        findings.note("kept text was not tokenized again: the dataset was made without --keep-text")
        return False
    return True


def _check_shards(
    dataset: Dataset, with_tokenizers: bool, num_processes: int, advance: Advance
) -> list[ShardResult]:
    shards = dataset.manifest.shards
    # Processes don't need the list of shards, perhaps 100,000.
    manifest = replace(dataset.manifest, shards=(), statistics={})
    small = replace(dataset, manifest=manifest)
    if num_processes == 1 or len(shards) < 2:
        return [
            check_shard(small, shard, with_tokenizers=with_tokenizers, advance=advance)
            for shard in shards
        ]
    # Spawned, not forked: arrow and numba hold threads, which a fork would leave half alive.
    spawn = get_context("spawn")
    ended, end = spawn.Pipe(duplex=False)
    with ProcessPoolExecutor(num_processes, spawn, _end_with_command, (ended,)) as pool:
        try:
            with _deaf_to_interrupts():
                futures = {
                    pool.submit(check_shard, small, shard, with_tokenizers=with_tokenizers): shard
                    for shard in shards
                }
            for future in as_completed(futures):
                future.result()
                advance(futures[future].num_bytes)
            return [future.result() for future in futures]
        except BaseException:
            end.close()  # else the pool waits for all shards
            raise


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """Start processes that no Ctrl-C reaches, from their first line on; here it comes later."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_with_command(ended: Connection) -> None:
    """End this worker with its command, even a killed one, or once that needs none."""
    command = parent_process()
    assert command is not None

    def watch() -> None:
        wait([command.sentinel, ended])
        os._exit(1)

    Thread(target=watch, daemon=True).start()


def _find_duplicate_keys(manifest: Manifest, results: Sequence[ShardResult]) -> Iterator[Finding]:
    keys = np.concatenate([np.empty(0, "S16"), *(result.keys for result in results)])
    owners = np.repeat(np.arange(len(results)), [len(result.keys) for result in results])
    order = np.argsort(keys, kind="stable")
    keys, owners = keys[order], owners[order]
    repeats = np.flatnonzero(keys[1:] == keys[:-1]) + 1
    for n in repeats.tolist():
        key = bytes(keys[n]).ljust(16, b"\0").hex()
        shard, earlier = manifest.shards[owners[n]].file, manifest.shards[owners[n - 1]].file
        yield Finding("duplicate_keys", shard, key, f"the key is already in {earlier}")


def _check_statistics(
    claims: Mapping[str, Any], parts: Iterable[AlignmentStatistics], findings: Findings
) -> None:
    if findings.found:
        findings.note("statistics were not recomputed: with other findings they can't agree")
        return
    for name, value in AlignmentStatistics.merge(parts).to_json().items():
        if name in OVER_WIDE and name not in claims:
            continue  # omitted if 0
        claim: Any = claims.get(name)
        if not _is_close(claim, value):
            findings.add("statistics", f"{name} is {value}, the manifest says {claim}")


def _is_close(claim: Any, value: float | list[int]) -> bool:
    try:
        numbers = msgspec.convert(claim, float | list[float])
    except msgspec.ValidationError:
        return False
    return np.shape(numbers) == np.shape(value) and np.allclose(
        numbers, value, rtol=FLOAT_TOLERANCE, atol=0
    )
