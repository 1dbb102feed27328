"""Check that the input is unchanged, while a job runs and when it is started again.

`inputs.json`, next to the manifest, keeps digests of samples, or an object store's checksums. The
configuration leaves them out: buckets' digests cover the documents.
"""

import json
import os
from collections.abc import Mapping, Sequence
from hashlib import file_digest, sha256
from typing import Any

from apache_beam.io.filesystem import BeamIOError
from apache_beam.io.filesystems import FileSystems

from beam_jobs import storage
from beam_jobs.align.inputs.parts import InputFile
from beam_jobs.align.inputs.standard_input import is_spooled
from beam_jobs.job_errors import InputError, JobError
from pipeline.drawing.formatting import format_plural

INPUTS_FILE = "inputs.json"
"""Each input file's size, time and content, next to the manifest and in the run's folder."""

NUM_SAMPLES = 8
SAMPLE_BYTES = 32 << 10
"""Files up to the product are read whole; longer ones in samples from start to end."""

_MAX_NAMED = 3


class InputChangedError(JobError):
    """An input file changed after the job was planned."""


def content_of(path: str, num_bytes: int) -> str:
    """Return a digest that cheaply distinguishes files of one size; "" if unavailable.

    Locally of eight samples of 32 KiB: an edit between them shows only in size or time. In an
    object store its checksum or ETag.
    """
    if not storage.is_local(path):
        try:
            checksum = FileSystems.checksum(path)
        except (BeamIOError, OSError, NotImplementedError):
            return ""  # a store without checksums; size and time are compared all the same
        return f"store:{checksum}" if checksum else ""
    if is_spooled(path):
        with open(path, "rb") as file:
            return f"whole:{file_digest(file, 'sha256').hexdigest()}"
    digest = sha256()
    with open(path, "rb") as file:
        if num_bytes <= NUM_SAMPLES * SAMPLE_BYTES:
            digest.update(file.read())
        else:
            for sample in range(NUM_SAMPLES):
                file.seek((num_bytes - SAMPLE_BYTES) * sample // (NUM_SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return f"samples:{digest.hexdigest()}"


def require_unchanged(file: InputFile) -> None:
    """Raise InputChangedError if a file differs from the job's plan.

    Locally by size and time; in an object store by checksum, if any.
    """
    change = _find_change(file)
    if change:
        raise InputChangedError(
            f"{file.path} {change} while the job ran: restore it, or wait until nothing writes to "
            "it; then run the same command again, which resumes or says how to start anew"
        )


def encode_inputs(files: Sequence[InputFile]) -> bytes:
    """Encode `inputs.json`."""
    listing = {
        file.source: {name: getattr(file, name) for name in ("num_bytes", "modified", "content")}
        for file in files
    }
    return (json.dumps(listing, indent=1, sort_keys=True) + "\n").encode()


def publish_inputs(run_folder: str, output: str) -> None:
    """Put a run's `inputs.json` next to its manifest."""
    path = storage.join(run_folder, INPUTS_FILE)
    if storage.num_bytes_of(path) is not None:
        body = storage.read_bytes(path)
        storage.write_atomically(storage.join(output, INPUTS_FILE), body, scratch=run_folder)


def require_same_inputs(output: str, files: Sequence[InputFile], *, appended: bool) -> str:
    """Raise InputError if the newest input changed; return a remark if only times did.

    `appended`: it was added to what was there.
    """
    path = storage.join(output, INPUTS_FILE)
    if storage.num_bytes_of(path) is None:
        return ""  # made before this was kept
    then: Mapping[str, Mapping[str, Any]] = json.loads(storage.read_bytes(path))
    changed, num_touched = [], 0
    for file in files:
        entry = then.get(file.source, {})
        num_touched += entry.get("modified") != file.modified
        content = str(entry.get("content", ""))
        # Samples of a local file and an object store's checksum can't be compared.
        is_comparable = content.partition(":")[0] == file.content.partition(":")[0]
        if is_comparable and content != file.content:
            changed.append(file.source)
    if changed:
        named = ", ".join(changed[:_MAX_NAMED])
        remedy = "choose another --output, or delete that folder"
        if appended:
            remedy = "give them other names to add what is new in them"
        raise InputError(
            f"--output {output} was made from other input: {format_plural(len(changed), 'file')} "
            f"changed since, such as {named}, though names and sizes are the same; {remedy}"
        )
    if not num_touched:
        return ""
    return (
        f"{num_touched} input files have different times from when it was made; their sizes are "
        "the same, and so are samples of their content if both can be had"
    )


def _find_change(file: InputFile) -> str:
    if not storage.is_local(file.path):
        content = content_of(file.path, file.num_bytes)
        return "was replaced" if file.content and content not in ("", file.content) else ""
    try:
        status = os.stat(file.path)
    except FileNotFoundError:
        return "was removed"
    if status.st_size != file.num_bytes:
        return f"changed from {file.num_bytes} to {status.st_size} bytes"
    return "" if status.st_mtime_ns == file.modified else "was written to"
