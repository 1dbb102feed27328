"""Write the golden view of version 1: python -m tests.data.make_golden_view

It is of the documents of the golden dataset, by another teacher. Run once; the files are never
written anew to make a test pass.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np

from pipeline.alignment.kernels import find_cut_points
from pipeline.alignment.quality import measure_documents
from pipeline.dataset.view_encoding import encode_views
from schemas.document import AlignedDocument
from schemas.index import CUT_STRIDE
from schemas.view_file import VIEW_MAGIC
from schemas.view_index import ViewIndex, encode_view_index
from tests.data.make_golden import TEXTS, golden_documents
from tests.support.documents import make_document, to_batch

FOLDER = Path(__file__).parent / "golden_view_v1"
BIN, INDEX = "golden.view-other.bin", "golden.view-other.parquet"


def viewed_documents() -> list[AlignedDocument]:
    """Return the golden documents with another teacher's tokens; it can't tokenize the last."""
    plain, gaps, long, _ = golden_documents(keep_text=False)
    teachers = (
        [(0, 5), (5, 11), (11, 24)],
        [(0, 0), (0, 6), (0, 6), (7, 11)],
        [(0, 1), *((j, min(j + 300, len(TEXTS[2]))) for j in range(1, len(TEXTS[2]), 300))],
    )
    ids = ([151643, 0, 4_294_967_295], [1, 2, 3, 4], [7, 8])
    made = []
    for document, text, offsets, own in zip(
        (plain, gaps, long), TEXTS[:3], teachers, ids, strict=True
    ):
        student = [(int(start), int(end)) for start, end in document.student.byte_offsets]
        other = make_document(document.document_id, text, student, offsets, teacher_ids=own)
        made.append(replace(other, student=document.student))
    return made


def golden_view() -> dict[str, bytes]:
    """Return the bytes of both files by name."""
    batch = to_batch(viewed_documents(), TEXTS[:3])
    encoded = encode_views(batch, "teacher")
    starts, student, teacher = find_cut_points(
        batch.student.byte_offsets,
        batch.student.cu_tokens,
        batch.teacher.byte_offsets,
        batch.teacher.cu_tokens,
        batch.teacher_spans,
        CUT_STRIDE,
    )
    quality = measure_documents(batch)[1]
    index = ViewIndex(
        payload_bytes=np.append(encoded.payload_bytes, 0),
        crc32=np.append(encoded.crc32, 0),
        num_tokens=np.append(np.diff(batch.teacher.cu_tokens), 0),
        cut_starts=np.append(starts, starts[-1]),
        cut_student=student,
        cut_teacher=teacher,
        num_mapped=np.append(quality.num_mapped, 0),
        byte_iou_sum=np.append(quality.byte_iou_sum, 0).astype(np.float32),
    )
    data = VIEW_MAGIC + encoded.data.tobytes()
    return {BIN: data, INDEX: encode_view_index(index)}


def main() -> None:
    """Write the files."""
    FOLDER.mkdir(exist_ok=True)
    for name, data in golden_view().items():
        (FOLDER / name).write_bytes(data)


if __name__ == "__main__":
    main()
