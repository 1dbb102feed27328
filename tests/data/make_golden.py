"""Write the golden files: run once, kept in the repository ever since.

    python -m tests.data.make_golden

The tests hold what today's code writes next to these files, so that a change of the format shows.
Never write them anew to make a test pass: a change of the format is a new version of it.
"""

from dataclasses import replace
from hashlib import sha256
from io import BytesIO
from pathlib import Path

import numpy as np

from pipeline.alignment.quality import AlignmentStatistics
from pipeline.dataset.writing import ShardWriter, shard_record
from schemas.document import AlignedDocument
from schemas.index import encode_index
from schemas.manifest import (
    DeadLetterRecord,
    GenerationRecord,
    Manifest,
    MetadataColumn,
    RemovedRecord,
    ShardRecord,
    TokenizerRecord,
    encode_manifest,
)
from schemas.removed import RemovedDocuments, encode_removed
from tests.support.documents import make_document, to_batch
from tests.support.sample_encoder import encode_document

FOLDER = Path(__file__).parent / "golden_v2"
METADATA = (
    MetadataColumn("source", "string"),
    MetadataColumn("meta.score", "float64"),
    MetadataColumn("year", "int64"),
    MetadataColumn("is_good", "bool"),
)
VALUES: tuple[tuple[str | int | float | bool | None, ...], ...] = (
    ("web", 0.5, 2024, True),
    ("数学", None, -1, None),
    ("web", 1e-300, None, False),
    (None, float("inf"), (1 << 63) - 1, True),
)
DEAD_LETTERS = (
    b'{"source":"notes.jsonl","position":120,"document_id":"lost","reason":"empty_text",'
    b'"detail":"the text is empty"}\n'
)
TOKENIZERS = {
    "student": b'{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "added_tokens": []}\n',
    "teacher": b"a SentencePiece model would stand here\n",
}
TEXTS = (
    b"Probability, Uncertainty",
    "数学 🤗".encode(),
    b"sixteen tokens and more: " + b"abc" * 20,
    b" ",
)


def golden_documents(*, keep_text: bool) -> list[AlignedDocument]:
    """Return documents with every case that the format distinguishes."""
    plain = make_document(
        "doc-1",
        TEXTS[0],
        [(0, 4), (4, 11), (11, 12), (12, 24)],
        [(0, 11), (11, 12), (12, 16), (16, 20), (20, 24)],
        student_ids=[255, 256, 0, 31999],
        teacher_ids=[65535, 65536, 7, 151643, 1],
        keep_text=keep_text,
    )
    gaps_overlaps_and_unmapped_tokens = make_document(
        'naïve "quoted" id/数',
        TEXTS[1],
        [(0, 0), (0, 3), (3, 6), (6, 7), (7, 11)],
        [(0, 6), (7, 11), (7, 11)],
        student_ids=[3, 4, 5, 6, 7],
        keep_text=keep_text,
    )
    long = make_document(
        "doc-3",
        TEXTS[2],
        [(i, i + 1) for i in range(len(TEXTS[2]))],
        [(j, min(j + 4, len(TEXTS[2]))) for j in range(0, len(TEXTS[2]), 4)],
        keep_text=keep_text,
    )
    no_teacher_tokens = make_document("blank", TEXTS[3], [(0, 1)], [], keep_text=keep_text)
    return [plain, gaps_overlaps_and_unmapped_tokens, long, no_teacher_tokens]


def golden_files() -> dict[str, bytes]:
    """Return every golden file's bytes by its path in the folder."""
    files = {f"tokenizers/{side}/tokenizer.json": data for side, data in TOKENIZERS.items()}
    files["dead_letters.jsonl"] = DEAD_LETTERS
    files["sample.safetensors"] = encode_document(golden_documents(keep_text=False)[0])
    files["sample-with-text.safetensors"] = encode_document(golden_documents(keep_text=True)[1])
    records, statistics = [], []
    for number, keep_text in enumerate((False, True)):
        stem = f"golden-{number:06d}-of-000002"
        file = BytesIO()
        writer = ShardWriter(file, keep_text=keep_text, metadata=METADATA)
        batch = to_batch(golden_documents(keep_text=keep_text), TEXTS)
        documents = [
            replace(document, metadata=values)
            for document, values in zip(batch.documents, VALUES, strict=True)
        ]
        writer.add(replace(batch, documents=documents))
        written = writer.close()
        index = encode_index(written.index)
        files |= {f"{stem}.tar": file.getvalue(), f"{stem}.index.parquet": index}
        records.append(shard_record(written, f"{stem}.tar", f"{stem}.index.parquet", index))
        statistics.append(written.statistics)
    first = _manifest(records, statistics)
    files["manifests/000.json"] = encode_manifest(first)
    removed = encode_removed(RemovedDocuments(np.array([1]), np.array([2])))
    files["removed-g001.parquet"] = removed
    second = replace(
        first,
        generation=1,
        generations=(GenerationRecord(0, "manifests/000.json", first.fingerprint),),
        removed=RemovedRecord("removed-g001.parquet", sha256(removed).hexdigest(), 1),
    )
    files["manifest.json"] = encode_manifest(second)
    return files


def _manifest(records: list[ShardRecord], statistics: list[AlignmentStatistics]) -> Manifest:
    student, teacher = (
        TokenizerRecord(
            source=f"golden/{side}",
            file=f"tokenizers/{side}/tokenizer.json",
            sha256=sha256(data).hexdigest(),
            vocab_size=200_000,
            special_strings="plain",
            bos_token_id=1,
            eos_token_id=None,
            adds_bos=True,
            adds_eos=False,
        )
        for side, data in TOKENIZERS.items()
    )
    letters = sha256(DEAD_LETTERS).hexdigest()
    return Manifest(
        name="golden",
        student=student,
        teacher=teacher,
        shards=tuple(records),
        dead_letters=DeadLetterRecord("dead_letters.jsonl", letters, 1, {"empty_text": 1}),
        configuration={"keep_text": "in the second shard only"},
        statistics=AlignmentStatistics.merge(statistics).to_json(),
        metadata=METADATA,
    )


def main() -> None:
    """Write the files."""
    for name, data in golden_files().items():
        path = FOLDER / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


if __name__ == "__main__":
    main()
