"""Datasets with views, and the fresh alignments that these must equal."""

from pathlib import Path

from beam_jobs.views.command import add_view
from beam_jobs.views.options import ViewRequest
from schemas.manifest import Manifest
from schemas.view_file import Side
from tests.support.datasets import build_dataset, make_texts
from tests.support.tokenizer_zoo import load, source

STUDENT, TEACHER = "llama_like", "gpt2_like"


def write_dataset(
    folder: Path,
    *,
    student: str = STUDENT,
    teacher: str = TEACHER,
    keep_text: bool = False,
    num_documents: int = 24,
    seed: int = 0,
) -> Manifest:
    """Write documents aligned by two tokenizers of the zoo: the same texts for the same seed."""
    texts = make_texts(num_documents, seed=seed)
    return build_dataset(
        folder, texts, student=load(student), teacher=load(teacher), keep_text=keep_text
    )


def add(folder: Path, tokenizer: str, *, side: Side = "teacher", name: str = "other") -> Manifest:
    """Add a view to a dataset, by a tokenizer of the zoo."""
    return add_view(ViewRequest(str(folder), side, str(source(tokenizer)), name))


def write_pair(root: Path, side: Side, other: str, *, num_documents: int = 24) -> None:
    """Write `data` with a view, and `fresh`, aligned by what the view shows."""
    write_dataset(root / "data", num_documents=num_documents)
    add(root / "data", other, side=side)
    pair = {"student": STUDENT, "teacher": TEACHER, side: other}
    write_dataset(root / "fresh", **pair, num_documents=num_documents)
