"""Split JSON lines into documents to train on and documents to measure on.

    python examples/hold_out.py --input demo/corpus.jsonl --output demo --every 100

Writes train.jsonl and heldout.jsonl, which share no run of 13 words: text that comes twice (near
copies, shared paragraphs) would measure memory. Documents that share such a run, directly or
through others, form a group, and a group stays on one side; about one document in N is held out,
evenly over the file. The largest group, which boilerplate ties together, is always trained on.
"""

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

RUN_WORDS = 13
_WORD = re.compile(r"\w+")


def hold_out(corpus: Path, output: Path, *, every: int, text_field: str = "text") -> dict[str, int]:
    """Write both files; return their numbers of documents.

    Raises:
        ValueError: nothing would be held out, a line has no text, or a file would be replaced.
    """
    files = {name: output / f"{name}.jsonl" for name in ("heldout", "train")}
    if corpus.resolve() in [file.resolve() for file in files.values()]:
        raise ValueError(f"--output {output} would replace {corpus}: name another folder")
    # Bytes: a JSON string may hold U+2028, which splitlines takes for a line's end.
    numbered = [*enumerate(corpus.read_bytes().split(b"\n"), 1)]
    texts = [_text_of(f"{corpus}:{n}", line, text_field) for n, line in numbered if line.strip()]
    lines = [line + b"\n" for _, line in numbered if line.strip()]
    if not 1 < every <= len(lines):
        raise ValueError(f"--every {every} must lie in 2..{len(lines)}, the documents of {corpus}")
    groups = group_documents(texts)
    held = choose_groups(groups, every=every)
    if not held:
        raise ValueError(
            f"{corpus}: its {len(lines)} documents share so many runs of {RUN_WORDS} words that "
            f"none can be held out with --every {every}: remove copies, or hold out another corpus"
        )
    parts = {
        "heldout": [line for line, group in zip(lines, groups, strict=True) if group in held],
        "train": [line for line, group in zip(lines, groups, strict=True) if group not in held],
    }
    output.mkdir(parents=True, exist_ok=True)
    for name, part in parts.items():
        files[name].write_bytes(b"".join(part))
    return {name: len(part) for name, part in parts.items()}


def _text_of(place: str, line: bytes, field: str) -> str:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{place} isn't a line of JSON in UTF-8 ({error})") from None
    text = found.get(field) if isinstance(found, dict) else None
    if not isinstance(text, str):
        raise ValueError(f'{place} has no text "{field}"')
    return text


def group_documents(texts: Sequence[str]) -> list[int]:
    """Return each text's group: the first text that it shares a run of words with, and so on.

    Example:
        >>> group_documents(["a " * 13, "b " * 20, "c " + "a " * 13])
        [0, 1, 0]
    """
    parents = list(range(len(texts)))

    def root(number: int) -> int:
        while parents[number] != number:
            parents[number] = parents[parents[number]]
            number = parents[number]
        return number

    first_with: dict[int, int] = {}
    for number, text in enumerate(texts):
        for run in word_runs(text):
            other = root(first_with.setdefault(run, number))
            own = root(number)
            parents[max(own, other)] = min(own, other)
    return [root(number) for number in range(len(texts))]


def choose_groups(groups: Sequence[int], *, every: int) -> set[int]:
    """Return the groups to hold out: about one document in `every`, evenly over the file."""
    sizes = dict.fromkeys(groups, 0)
    for group in groups:
        sizes[group] += 1
    largest = max(sizes, key=lambda group: sizes[group]) if len(sizes) > 1 else groups[0]
    held: set[int] = set()
    num_held = 0
    for number, group in enumerate(groups, start=1):
        fits = (num_held + sizes[group]) * every <= number + every
        if number - 1 == group != largest and fits:
            held.add(group)
            num_held += sizes[group]
    return held


def word_runs(text: str, num_words: int = RUN_WORDS) -> Iterator[int]:
    """Yield a number for every run of words; a shorter text is one run."""
    words = _WORD.findall(text.lower())
    for start in range(max(1, len(words) - num_words + 1)):
        yield hash(tuple(words[start : start + num_words]))


def main() -> None:
    """Split one file and say how."""
    parser = argparse.ArgumentParser(description="Split JSON lines into train and held-out.")
    parser.add_argument("--input", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--every", type=int, default=100, help="one of so many is held out (100)")
    options = parser.parse_args()
    try:
        print(hold_out(options.input, options.output, every=options.every))
    except (OSError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
