r"""What a student makes of held-out text, document by document.

    python examples/prove/measure.py gsm8k=held_gsm8k.jsonl math=held_math.jsonl \
        --students 3=run/step-000036 10=run/model --output run/measures.json

Sums are kept by document, so that means, intervals and bootstraps can be made again: nats of the
text and of its end (what ends a document is kept apart), labels, labels that were the likeliest,
and results of calculations. GSM8K writes a calculation as <<48/2=24>>: a result is right if every
token of it is the likeliest, given the text before it.
"""

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from vocag import (
    Tokenizer,
    hidden_states,
    linear_cross_entropy,
    load_language_model,
    load_tokenizer,
    output_layer,
)

_RESULT = re.compile(rb"<<[^<>]*=([^<>]+)>>")
_ROWS_AT_ONCE = 8
SUMS = ("bytes", "nats", "end_nats", "labels", "right", "results", "results_right")

Sums = dict[str, list[float]]
"""One value a document, by the names of `SUMS`."""


@dataclass(frozen=True)
class Piece:
    """What a model reads at one time: a document, or a part of one.

    Attributes:
        document: number of the document.
        input_ids: the token before a text, by the tokenizer's convention or else the one that ends
            texts, and the piece's tokens but the last.
        labels: its tokens, and what ends a document behind its last.
        ends: whether the last label is the document's end.
        results: half-open ranges of labels that are results of calculations.
    """

    document: int
    input_ids: list[int]
    labels: list[int]
    ends: bool
    results: list[tuple[int, int]]


def cut_pieces(tokenizer: Tokenizer, texts: Sequence[str], seq_length: int) -> list[Piece]:
    """Return the texts as pieces of at most `seq_length` tokens, longest first.

    Raises:
        ValueError: a text that can't be tokenized, or a tokenizer without a token for the end.
    """
    end = tokenizer.eos_token_id
    start_token = tokenizer.bos_token_id if tokenizer.adds_bos else end
    data = [text.encode() for text in texts]
    tokens = tokenizer.tokenize_batch(data)
    if tokens.failures or end is None or start_token is None:
        raise ValueError(f"no end token, or texts that have no tokens: {dict(tokens.failures)}")
    pieces = []
    for number, text in enumerate(data):
        own = slice(*tokens.cu_tokens[number : number + 2])
        ids, ranges = tokens.input_ids[own].tolist(), tokens.byte_offsets[own].tolist()
        results = [_covering(ranges, *found.span(1)) for found in _RESULT.finditer(text)]
        for start in range(0, len(ids), seq_length - 1):
            part = ids[start : start + seq_length - 1]
            stop = start + len(part)
            ends = stop == len(ids)
            inside = [(a - start, b - start) for a, b in results if start <= a and b <= stop]
            labels = [*part, end] if ends else part
            pieces.append(Piece(number, [start_token, *part][: len(labels)], labels, ends, inside))
    return sorted(pieces, key=lambda piece: -len(piece.labels))


def _covering(ranges: list[list[int]], start: int, stop: int) -> tuple[int, int]:
    """Return the tokens that overlap a range of bytes."""
    places = [n for n, (a, b) in enumerate(ranges) if a < stop and start < b]
    return places[0], places[-1] + 1


@torch.inference_mode()
def measure(
    student: PreTrainedModel, pieces: Sequence[Piece], num_bytes: Sequence[int], *, bf16: bool
) -> Sums:
    """Return the sums of every document.

    Args:
        student: is measured.
        pieces: of the documents.
        num_bytes: of each document's text.
        bf16: compute in bfloat16.
    """
    sums: Sums = {name: [0] * len(num_bytes) for name in SUMS}
    sums["bytes"] = list(num_bytes)
    for part, losses, right in _run(student, pieces, bf16=bf16):
        for piece, own_losses, own_right in zip(part, losses, right, strict=True):
            length, at = len(piece.labels) - piece.ends, piece.document
            sums["nats"][at] += float(own_losses[:length].sum())
            sums["right"][at] += int(own_right[:length].sum())
            sums["labels"][at] += length
            sums["end_nats"][at] += float(own_losses[length:].sum()) if piece.ends else 0.0
            sums["results"][at] += len(piece.results)
            sums["results_right"][at] += sum(bool(own_right[a:b].all()) for a, b in piece.results)
    return {name: [round(value, 4) for value in values] for name, values in sums.items()}


def _run(
    student: PreTrainedModel, pieces: Sequence[Piece], *, bf16: bool
) -> Iterator[tuple[Sequence[Piece], Tensor, Tensor]]:
    """Yield pieces with each label's loss, fp64 nats, and whether it was the likeliest token."""
    layer = output_layer(student)
    for start in range(0, len(pieces), _ROWS_AT_ONCE):
        part = pieces[start : start + _ROWS_AT_ONCE]
        # Padding comes after the text, where no token of it looks.
        width = max(len(piece.labels) for piece in part)
        inputs, labels = (
            torch.tensor([ids + [0] * (width - len(ids)) for ids in side]).to(student.device)
            for side in ([p.input_ids for p in part], [p.labels for p in part])
        )
        positions = torch.arange(width, device=student.device).expand(len(part), -1)
        with torch.autocast(student.device.type, dtype=torch.bfloat16, enabled=bf16):
            hidden = hidden_states(student, inputs, position_ids=positions)
            losses = linear_cross_entropy(hidden, layer, labels).losses
            right = layer.logits(hidden).argmax(-1) == labels
        # A padded row's losses behind its labels belong to nobody.
        inside = torch.tensor([[n < len(p.labels) for n in range(width)] for p in part])
        yield part, losses.double().cpu() * inside, right.cpu() & inside


def main() -> None:
    """Measure students on every set; write one file."""
    parser = argparse.ArgumentParser(description="Measure students on held-out text.")
    parser.add_argument("sets", nargs="+", metavar="NAME=FILE", help="JSON lines with a text each")
    parser.add_argument("--students", nargs="+", metavar="NAME=FOLDER", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seq-length", type=int, default=512)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bf16", action="store_true")
    options = parser.parse_args()
    found: dict[str, dict[str, Sums]] = {}
    for student in options.students:
        name, _, folder = student.partition("=")
        model, tokenizer = (
            load_language_model(folder, device=options.device),
            load_tokenizer(folder),
        )
        for source in options.sets:
            held_out, _, path = source.partition("=")
            with Path(path).open(encoding="utf-8", newline="\n") as file:
                texts = [json.loads(line)["text"] for line in file]
            pieces = cut_pieces(tokenizer, texts, options.seq_length)
            num_bytes = [len(text.encode()) for text in texts]
            sums = measure(model, pieces, num_bytes, bf16=options.bf16)
            found.setdefault(name, {})[held_out] = sums
    options.output.write_text(json.dumps(found) + "\n", "utf-8")


if __name__ == "__main__":
    main()
