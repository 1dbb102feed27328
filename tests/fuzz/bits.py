"""The third part: flipped bits in all that a dataset's folder holds, and what a reader makes of it.

It gives the same rows, or says what is wrong. A liar that hashes its lies may get other rows, but
never a crash: what hashes can't tell, the loops over rows must bear.
"""

import json
import os
import random
import resource
import shutil
import tempfile
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.dataset.dataset_reading import read_manifest
from pipeline.dataset.files import open_dataset
from pipeline.scoring.teaching import Teaching
from pipeline.streaming import AlignedRows, Reading, StreamConfig
from schemas.distribution_rule import DistributionRule
from schemas.index import decode_index
from schemas.manifest import encode_manifest
from schemas.sidecar import decode_score_manifest, encode_score_manifest
from tests.fuzz.report import Fault, Report
from tests.support.datasets import build_dataset, byte_level, make_texts, record_shard
from tests.support.stored_scores import write_scores

CPU_SECONDS = 60
WHERE = "teacher.bits_per_byte < 2.2"
Try = dict[str, Any]  # a file's name, the bits to flip, and whether hashes are made to fit


def fuzz_bits(seed: str, until: float, report: Report) -> None:
    """Flip bits of one file after another until `time.monotonic` says that it is enough."""
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(prefix="vocag-fuzz-") as folder:
        good = write_sound(Path(folder, "sound"))
        choose = random.Random(f"{seed} bits")
        while time.monotonic() < until:
            drawn = draw_try(choose, Path(folder, "sound"))
            if fault := take(drawn, Path(folder), good, report.counts):
                report.add(fault, Path(drawn["file"]).suffix.strip("."), {"bits": drawn})


def replay(body: dict[str, Any]) -> int:
    """Try a failure again, say what is wrong, return the exit status."""
    with tempfile.TemporaryDirectory(prefix="vocag-fuzz-") as folder:
        good = write_sound(Path(folder, "sound"))
        fault = take(body["bits"], Path(folder), good, Counter())
    print(f"{fault.kind}: {fault.detail}" if fault else "no failure")
    return int(fault is not None)


def draw_try(choose: random.Random, folder: Path) -> Try:
    """Return a file and some bits of it: every kind of file as often as any other."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    kinds = sorted({_kind(path) for path in files})
    kind = choose.choice(kinds)
    path = choose.choice([path for path in files if _kind(path) == kind])
    bits = [choose.randrange(8 * path.stat().st_size) for _ in range(choose.choice((1, 1, 1, 4)))]
    return {"file": str(path.relative_to(folder)), "flip": bits, "hashed": choose.random() < 0.5}


def take(drawn: Try, root: Path, good: str, counts: Counter[str]) -> Fault | None:
    """Flip bits in a copy and read it; return what must not be."""
    folder, hashed = root / "flipped", drawn["hashed"]
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(root / "sound", folder)
    path = folder / drawn["file"]
    data = bytearray(path.read_bytes())
    for bit in drawn["flip"]:
        data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    if hashed:
        make_hashes_fit(folder, path)
    status, told = _in_a_process(lambda: read_rows(folder))
    kind = "dies" if status else told.split(":")[0]
    counts[
        f"files with flipped bits, {'hashed, ' * hashed}{kind if told != good else 'same rows'}"
    ] += 1
    if status or told.startswith("raw"):
        return Fault("dies" if status else "raw", f"{drawn}: status {status} {told}")
    if not hashed and told != good and not told.startswith("refused"):
        return Fault("rows", f"{drawn}: other rows without a word: {told}")
    return None


def write_sound(folder: Path) -> str:
    """Write a dataset with losses, distributions and a plan; return what reading it gives."""
    manifest = build_dataset(
        folder, make_texts(24), student=byte_level(400), teacher=byte_level(480)
    )
    student, teacher = (
        replace(record, convention=record.around_text)
        for record in (manifest.student, manifest.teacher)
    )
    manifest = replace(manifest, student=student, teacher=teacher)
    (folder / "manifest.json").write_bytes(encode_manifest(manifest))
    rule = DistributionRule(3, 0.9, teacher.vocab_size, "uint8")
    draw = np.random.default_rng(1)
    write_scores(
        folder, "teacher", lambda _, count: draw.exponential(1.5, count), distributions=rule
    )
    good = read_rows(folder)  # here: kernels are compiled for all
    assert _in_a_process(lambda: read_rows(folder)) == (0, good)
    return good


def read_rows(folder: Path) -> str:
    """Return a digest of all rows that a reader gets with all that is stored."""
    options: Any = {"teaching": Teaching(stored_losses="teacher"), "with_distributions": True}
    config = StreamConfig(Reading(str(folder), WHERE), seq_length=64, window_rows=4, **options)
    rows, digest = AlignedRows(config), sha256()
    for number in range(rows.samples_per_epoch):
        digest.update(rows[number].buffer.numpy().tobytes())
    return f"rows: {rows.samples_per_epoch} {digest.hexdigest()}"


def make_hashes_fit(folder: Path, path: Path) -> None:
    """Let everything that names a file's hash name what it is now, if it can still be read."""
    name, digest = path.name, sha256(path.read_bytes()).hexdigest()
    try:
        if path.suffix == ".npy":
            about = json.loads((path.parent / "plan.json").read_text())
            about["sha256"][path.stem] = digest
            (path.parent / "plan.json").write_text(json.dumps(about))
        elif ".teacher-" in name:
            (scores,) = folder.glob("teacher-*.json")
            manifest = decode_score_manifest(scores.read_bytes(), at="")
            field = "sha256" if path.suffix == ".safetensors" else "documents_sha256"
            own = name.replace(".documents.parquet", ".safetensors")
            records = tuple(
                replace(record, **{field: digest}) if record.file == own else record
                for record in manifest.sidecars
            )
            scores.write_bytes(encode_score_manifest(replace(manifest, sidecars=records)))
        elif path.suffix in (".tar", ".parquet"):
            _record(folder, name)
    except ValueError:
        pass


def _record(folder: Path, name: str) -> None:
    """Let the index have a tar's CRC-32s, and the manifest both files' hashes."""
    shards = read_manifest(str(folder)).shards
    (number,) = [n for n, shard in enumerate(shards) if name in (shard.file, shard.index_file)]
    index = decode_index((folder / shards[number].index_file).read_bytes())
    tar = (folder / shards[number].file).read_bytes()
    places = zip(index.payload_offset.tolist(), index.payload_bytes.tolist(), strict=True)
    crc32 = np.array([zlib.crc32(tar[start : start + size]) for start, size in places], np.int64)
    record_shard(folder, number, replace(index, crc32=crc32))
    # Its plans and scores are of the dataset that it was.
    now = open_dataset(folder).manifest.fingerprint
    (scores,) = folder.glob("teacher-*.json")
    manifest = decode_score_manifest(scores.read_bytes(), at="")
    scores.write_bytes(encode_score_manifest(replace(manifest, dataset=now)))
    shutil.rmtree(folder / "plans")


def _kind(path: Path) -> str:
    return "".join(path.suffixes[-2:]) if path.suffix == ".parquet" else path.suffix + path.stem[:4]


def _in_a_process(work: Callable[[], str]) -> tuple[int, str]:
    """Return how a process ended, and what it returned or raised."""
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))  # of one that hangs
        try:
            told = work()
        except (OSError, ValueError) as error:
            told = f"refused: {type(error).__name__}: {error}"
        except BaseException as error:
            told = f"raw: {type(error).__name__}: {error}"
        os.write(theirs, told.encode()[:60_000])
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        told = pipe.read().decode("utf-8", "replace")
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), told
