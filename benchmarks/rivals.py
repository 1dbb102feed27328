"""What the library path is measured against: the plain way, and the least that it can cost.

The plain loop is what one writes without a library: `tokenizers` one text at a time, offsets as
Python lists, Algorithm 1 with `bisect`, one `.npy` member for each array.
"""

import io
import json
import tarfile
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path

import fastokens
import numpy as np
import orjson
import sentencepiece
import tokenizers
from corpus import read_documents

from pipeline.tokenization.conversion import convert_sentencepiece

Ranges = Sequence[tuple[int, int]]
Encoder = Callable[[str], tuple[list[int], Ranges]]


def plain_loop(files: Sequence[Path], student: Encoder, teacher: Encoder, target: Path) -> int:
    """Align every document of some files into a tar; return the number of student tokens."""
    num_tokens = 0
    with tarfile.open(target, "w") as tar:
        for name, data in read_documents(files):
            text = data.decode()
            student_ids, student_offsets = student(text)
            teacher_ids, teacher_offsets = teacher(text)
            arrays: dict[str, Sequence[int] | Ranges] = {
                "student_ids": student_ids,
                "student_offsets": student_offsets,
                "teacher_ids": teacher_ids,
                "teacher_offsets": teacher_offsets,
                "spans": align_with_bisect(student_offsets, teacher_offsets),
            }
            key = sha256(name.encode()).hexdigest()[:32]
            for array, values in arrays.items():
                _add(tar, f"{key}.{array}.npy", _npy(values))
            _add(tar, f"{key}.json", json.dumps({"id": name}).encode())
            num_tokens += len(student_ids)
    return num_tokens


def align_with_bisect(student_offsets: Ranges, teacher_offsets: Ranges) -> Ranges:
    """Return each student token's half-open range of teacher tokens by two binary searches."""
    starts = [start for start, _ in teacher_offsets]
    ends = [end for _, end in teacher_offsets]
    spans = []
    for start, end in student_offsets:
        first, last = bisect_right(ends, start), bisect_left(starts, end)
        spans.append((first, last) if start < end and first < last else (0, 0))
    return spans


def load_encoder(path: Path) -> Encoder:
    """Return the reference library's own way from a text to ids and character offsets."""
    if path.suffix == ".json":
        tokenizer = tokenizers.Tokenizer.from_file(str(path))

        def encode(text: str) -> tuple[list[int], Ranges]:
            encoding = tokenizer.encode(text, add_special_tokens=False)
            return encoding.ids, encoding.offsets

        return encode
    processor = sentencepiece.SentencePieceProcessor(model_file=str(path))

    def encode_pieces(text: str) -> tuple[list[int], Ranges]:
        encoding = processor.encode(text, return_type="offset_mapping")
        return encoding["ids"], encoding["offsets"]

    return encode_pieces


def load_limit(path: Path) -> fastokens.Tokenizer:
    """Return the fast library's own tokenizer of a file, with an empty cache of words."""
    data = path.read_bytes()
    json_file = path.suffix == ".json"
    read = orjson.loads(data) if json_file else convert_sentencepiece(data, source=str(path))
    encoding = orjson.dumps(read | {"decoder": None, "post_processor": None})
    return fastokens.Tokenizer.from_json_str(encoding.decode())


def encode_only(batches: Sequence[Sequence[str]], *tokenizers: fastokens.Tokenizer) -> None:
    """Encode texts that are already in memory with each tokenizer and drop the ids."""
    for texts in batches:
        for tokenizer in tokenizers:
            tokenizer.encode_batch_flat(texts)


def _npy(values: Sequence[int] | Ranges) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.array(values, np.int32), allow_pickle=False)
    return buffer.getvalue()


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))
