"""How often a label is what its teacher's bytes begin with, and how often it is in the same cell.

    python benchmarks/cells.py [TEACHER-STUDENT …]    # such as qwen2_5-gpt_neox

Prints the rows of docs/concepts/distributions.md: cells are counted on some texts of a kind, labels
on others, both of benchmarks/corpus.py. Names are of folders in ../shared/tokenizers.
"""

import argparse
from collections.abc import Iterator

import numpy as np
from corpus import SHARED, documents
from numpy.typing import NDArray

from pipeline.alignment import align_batch
from pipeline.batches import SourceDocument
from pipeline.distributions.cells import count_pairs, join_pairs
from pipeline.distributions.vocabulary_map import VocabularyMap
from pipeline.distributions.walk import RowFields
from pipeline.tokenization import Tokenizer, load_tokenizer

PAIRS = (
    "qwen2_5-gpt_neox",
    "qwen2_5-gemma3",
    "llama2-qwen2_5",
    "gpt_neox-qwen2_5",
    "smollm2-llama2",
    "qwen2_5-smollm2",
)
KINDS = {"mathematics": (".jsonl", 1875, 500), "Python": (".py", 300, 80)}
"""How files end, texts to count cells on, and others."""


def read_texts() -> dict[str, tuple[list[bytes], list[bytes]]]:
    """Return, of each kind, texts to count cells on, and others."""
    found: dict[str, list[bytes]] = {kind: [] for kind in KINDS}
    for _, name, text in documents():
        for kind, (suffix, *sizes) in KINDS.items():
            if name.partition("#")[0].endswith(suffix) and len(found[kind]) < sum(sizes):
                found[kind].append(text.encode())
    return {
        kind: (found[kind][:first], found[kind][first:]) for kind, (_, first, _) in KINDS.items()
    }


def align(texts: list[bytes], student: Tokenizer, teacher: Tokenizer) -> Iterator[RowFields]:
    """Yield each text's tokens as a row."""
    documents = [SourceDocument(str(n), text) for n, text in enumerate(texts)]
    batch = align_batch(documents, student, teacher)
    for number in range(len(batch.documents)):
        own, others = (
            slice(*side.cu_tokens[number : number + 2].tolist())
            for side in (batch.student, batch.teacher)
        )
        ids, teacher_ids = batch.student.input_ids[own], batch.teacher.input_ids[others]
        spans = batch.teacher_spans[own].astype(np.int32)
        yield RowFields(
            input_ids=ids.astype(np.int32),
            loss_mask=np.ones(len(ids), np.float32),
            teacher_spans=np.concatenate([spans[1:], np.zeros((1, 2), np.int32)]),
            teacher_input_ids=teacher_ids.astype(np.int32),
            cu_seqlens=np.array([0, len(ids)], np.int32),
            teacher_cu_seqlens=np.array([0, len(teacher_ids)], np.int32),
            teacher_losses=np.empty(0, np.float32),
        )


def compare(
    counted: list[bytes], others: list[bytes], student: Tokenizer, teacher: Tokenizer
) -> str:
    """Return the columns of a row of the page."""
    tables = VocabularyMap.of(student, teacher)
    cells = join_pairs(count_pairs(align(counted, student, teacher), tables), student.vocab_size)
    sizes = np.bincount(cells)
    pairs = count_pairs(align(others, student, teacher), tables)
    is_prefix = pairs.targets == pairs.labels
    in_cell = (pairs.targets >= 0) & (cells[pairs.targets.clip(0)] == cells[pairs.labels])

    def share(counts: NDArray[np.int64], which: NDArray[np.bool_]) -> float:
        return 100 * float(counts[which].sum() / counts.sum())

    columns = []
    for inside in (0, 1):
        counts = np.where(pairs.inside == inside, pairs.counts, 0)
        columns.append(f"{share(counts, is_prefix):.1f} → {share(counts, in_cell):.1f}")
    of_label = sizes[cells[pairs.labels]]
    columns += [f"{share(pairs.counts, of_label <= most):.0f}" for most in (1, 5)]
    return " | ".join([*columns, f"{sizes.max():,}"])


def main() -> None:
    """Print a row for each pair and kind of text."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pairs", nargs="*", default=PAIRS, metavar="TEACHER-STUDENT")
    options = parser.parse_args()
    texts = read_texts()
    for pair in options.pairs:
        teacher, student = (
            load_tokenizer(str(SHARED / "tokenizers" / name)) for name in pair.split("-")
        )
        for kind, (counted, others) in texts.items():
            columns = compare(counted, others, student, teacher)
            print(f"| {pair.replace('-', ' → ')} | {kind} | {columns} |", flush=True)


if __name__ == "__main__":
    main()
