"""The datasets of a mixture: opened, and refused where they can't be trained on together."""

import json
from collections.abc import Iterable, Sequence
from hashlib import sha256

from pipeline.dataset.conventions import choose_conventions
from pipeline.dataset.files import Dataset, open_dataset
from pipeline.packing.mixture_file import Mixture, is_mixture, read_mixture
from pipeline.packing.rules import Convention, PackingRules, suggest_teacher_seq_length
from schemas.errors import DatasetError, ForeignTokenizerError


def open_datasets(mixture: Mixture) -> tuple[Dataset, ...]:
    """Return a mixture's datasets, in the file's order.

    Raises:
        DatasetError: one is no finished dataset, or stands in the mixture twice.
        ForeignTokenizerError: one was made with other tokenizers than the first.

    Example:
        >>> open_datasets(read_mixture("mixture.toml"))[0].location  # doctest: +SKIP
        '/data/aligned/web'
    """
    datasets = tuple(open_dataset(entry.path) for entry in mixture.datasets)
    seen: dict[str, str] = {}
    for entry, dataset in zip(mixture.datasets, datasets, strict=True):
        first = seen.setdefault(dataset.manifest.fingerprint, entry.name)
        if first != entry.name:
            raise DatasetError(
                f'{mixture.path}: "{first}" and "{entry.name}" are one dataset (fingerprint '
                f"{dataset.manifest.fingerprint[:16]}…), whose documents would be read twice: "
                "leave one out"
            )
        _require_tokenizers(mixture, entry.name, dataset, datasets[0])
    return datasets


def open_any(path: str) -> Dataset:
    """Return a dataset, or one that can stand for all of a mixture.

    Its tokenizers are those of all; of the teacher's tokens it has the most by the student's, so
    that `suggest_teacher_seq_length` gives the mixture's.

    Raises:
        ValueError: see `open_datasets`.
    """
    if not is_mixture(path):
        return open_dataset(path)
    return max(open_datasets(read_mixture(path)), key=_teacher_share)


def mixture_rules(
    mixture: Mixture,
    datasets: Sequence[Dataset],
    *,
    seq_length: int,
    teacher_seq_length: int | None = None,
    student: Convention | None = None,
    teacher: Convention | None = None,
    student_bos: str | None = None,
    student_eos: str | None = None,
    teacher_context: str | None = None,
    window_rows: int = 1024,
) -> PackingRules:
    """Return the one set of rules by which all of a mixture's datasets are packed.

    Args:
        mixture: for messages.
        datasets: of the mixture.
        seq_length: student tokens per row.
        teacher_seq_length: teacher tokens per row; None takes the longest that one of them needs,
            see `suggest_teacher_seq_length`.
        student: the student's convention; None takes the datasets', with the next two in place.
        teacher: the teacher's.
        student_bos: stands before a student's text, see `choose_conventions`.
        student_eos: stands after a document's last student token, likewise.
        teacher_context: stands before a teacher's text, likewise.
        window_rows: see `PackingRules`.

    Raises:
        ValueError: datasets with other tokens around their texts than the first, no such token, or
            a length that has no room for text.
    """
    left_to_the_datasets = {
        ("student", "first_token_id"): student is None and student_bos is None,
        ("student", "continued_token_id"): student is None and student_bos is None,
        ("student", "end_token_id"): student is None and student_eos is None,
        ("teacher", "first_token_id"): teacher is None and teacher_context is None,
        ("teacher", "continued_token_id"): teacher is None and teacher_context is None,
    }
    for (side, field), is_left in left_to_the_datasets.items():
        if is_left:
            _require_one_convention(mixture, datasets, side, field)
    chosen = choose_conventions(
        datasets[0],
        student_bos=student_bos,
        student_eos=student_eos,
        teacher_context=teacher_context,
    )
    longest = max(suggest_teacher_seq_length(each.manifest, seq_length) for each in datasets)
    return PackingRules.of_dataset(
        chosen,
        seq_length=seq_length,
        teacher_seq_length=teacher_seq_length or longest,
        student=student,
        teacher=teacher,
        window_rows=window_rows,
    )


def mixture_fingerprint(mixture: Mixture, datasets: Iterable[Dataset]) -> str:
    """Return 64 hex digits: equal for mixtures that give the same rows, whatever names they use."""
    names = [entry.name for entry in mixture.datasets]
    told = {
        "seed": mixture.seed,
        "datasets": [
            [dataset.manifest.fingerprint, entry.max_epochs]
            for entry, dataset in zip(mixture.datasets, datasets, strict=True)
        ],
        "stages": [
            [stage.from_tokens, [stage.weights.get(name, 0.0) for name in names]]
            for stage in mixture.stages
        ],
    }
    return sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def _teacher_share(dataset: Dataset) -> float:
    totals = dataset.manifest.totals
    return totals["num_teacher_tokens"] / max(1, totals["num_student_tokens"])


def _require_tokenizers(mixture: Mixture, name: str, dataset: Dataset, first: Dataset) -> None:
    for side in ("student", "teacher"):
        own, other = getattr(dataset.manifest, side), getattr(first.manifest, side)
        if own.sha256 != other.sha256:
            raise ForeignTokenizerError(
                f'{mixture.path}: "{name}" was made with {side} tokenizer {own.source} '
                f'({own.sha256[:16]}…), "{mixture.datasets[0].name}" with {other.source} '
                f"({other.sha256[:16]}…): align both with the same tokenizers"
            )


def _require_one_convention(
    mixture: Mixture, datasets: Sequence[Dataset], side: str, field: str
) -> None:
    """Check that all datasets have the same token at one place around their texts."""
    tokens = [getattr(getattr(each.manifest, side).around_text, field) for each in datasets]
    for entry, token in zip(mixture.datasets, tokens, strict=True):
        if token != tokens[0]:
            raise DatasetError(
                f'{mixture.path}: the {side}\'s {field} is {token} in "{entry.name}" and '
                f'{tokens[0]} in "{mixture.datasets[0].name}": name the tokens that shall stand '
                "around all texts, or align both with the same ones"
            )
