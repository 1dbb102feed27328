"""How two tokenizers relate on a dataset, in numbers and words."""

from dataclasses import dataclass

import numpy as np

from pipeline.dataset.chosen_documents import ChosenDocuments
from pipeline.dataset.files import Dataset
from pipeline.dataset.tokenizers import load_dataset_tokenizer
from pipeline.distributions.cells import count_pairs, describe_cell, join_pairs, largest_cells
from pipeline.distributions.sample import SAMPLE_TOKENS, sample_documents
from pipeline.distributions.vocabulary_map import VocabularyMap

FEW_TOKENS = 1 << 18
"""Student tokens that show the shares of a pair to a percent."""


@dataclass(frozen=True)
class PairSummary:
    """How a dataset's student tokens relate to its teacher's.

    Attributes:
        num_labels: student tokens with a known start among the teacher's bytes.
        inside: share of them that start inside a teacher token.
        differing: share of the others that differ from the token which the teacher's begins with.
        crossing: share of all outside the cell of the text's own teacher token.
        num_cells: cells of several tokens.
        cells: the largest in words.
    """

    num_labels: int
    inside: float
    differing: float
    crossing: float
    num_cells: int
    cells: tuple[str, ...]

    def describe(self) -> str:
        """Return one line for the end of a job.

        Example:
            >>> PairSummary(100, 0.05, 0.144, 0.01, 1, ("digits, 96 tokens",)).describe()
            "14% of labels differ from the teacher's beginning; largest cell: digits, 96 tokens"
        """
        shown = "; ".join(self.cells[:2])
        name = "largest cells" if len(self.cells) > 1 else "largest cell"
        cells = f"{name}: {shown}" if shown else "no two tokens stand for each other"
        return f"{self.differing:.0%} of labels differ from the teacher's beginning; {cells}"


def look_at_pair(
    dataset: Dataset, *, num_tokens: int = SAMPLE_TOKENS, num_cells: int = 3
) -> PairSummary:
    """Summarise a sample of a dataset, see `sample_documents`.

    Raises:
        NoSharedStartError: no label's start is known.
        ValueError: a tokenizer's tokens don't spell their text.
    """
    student = load_dataset_tokenizer(dataset, "student")
    tables = VocabularyMap.of(
        student,
        load_dataset_tokenizer(dataset, "teacher"),
        of_chats=dataset.manifest.chats is not None,
    )
    documents = sample_documents([ChosenDocuments(dataset)], num_tokens=num_tokens)
    pairs = count_pairs(documents, tables)
    cells = join_pairs(pairs, student.vocab_size)
    counts, inside = pairs.counts, pairs.inside > 0
    total, at_boundary = int(counts.sum()), int(counts[~inside].sum())
    differs = ~inside & (pairs.targets != pairs.labels)
    crosses = (pairs.targets < 0) | (cells[pairs.targets.clip(0)] != cells[pairs.labels])
    return PairSummary(
        num_labels=total,
        inside=1 - at_boundary / total,
        differing=int(counts[differs].sum()) / max(at_boundary, 1),
        crossing=int(counts[crosses].sum()) / total,
        num_cells=int((np.bincount(cells) > 1).sum()),
        cells=tuple(
            describe_cell([student.token_bytes(token) for token in cell.tolist()])
            for cell in largest_cells(cells, num_cells)
        ),
    )
