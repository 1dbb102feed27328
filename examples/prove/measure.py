r"""What a student makes of held-out text: bits per byte, top-1 accuracy, results of calculations.

    python examples/prove/measure.py gsm8k=prove/text/held_gsm8k.jsonl \
        math=prove/text/held_math.jsonl --students run/main/model run/last/model

Bits per byte are those of the text; what the end of a document costs stands apart. GSM8K writes
its calculations as <<48/2=24>>: a result counts as right if every token of it is the likeliest,
given the text before it.
"""

import argparse
import json
import math
import re
from collections import defaultdict
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

_RESULT = re.compile(rb"<<[^<>]*=([^<>=]+)>>")
_ROWS_AT_ONCE = 8


@dataclass(frozen=True)
class Piece:
    """What a model reads at one time: a document, or a part of one.

    Attributes:
        input_ids: the context token and the piece's tokens but the last.
        labels: its tokens, and what ends a document behind its last.
        ends: whether the last label is the document's end.
        results: half-open ranges of labels that are results of calculations.
    """

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
    data = [text.encode() for text in texts]
    tokens = tokenizer.tokenize_batch(data)
    if tokens.failures or end is None:
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
            pieces.append(Piece([end, *part][: len(labels)], labels, ends, inside))
    return sorted(pieces, key=lambda piece: -len(piece.labels))


def _covering(ranges: list[list[int]], start: int, stop: int) -> tuple[int, int]:
    """Return the tokens that overlap a range of bytes."""
    places = [n for n, (a, b) in enumerate(ranges) if a < stop and start < b]
    return places[0], places[-1] + 1


@torch.inference_mode()
def measure(
    student: PreTrainedModel, pieces: Sequence[Piece], num_bytes: int, *, bf16: bool
) -> dict[str, float]:
    """Return the measures of a set, and the counts that they are of."""
    sums: dict[str, float] = defaultdict(float)
    for part, losses, right in _run(student, pieces, bf16=bf16):
        for piece, own_losses, own_right in zip(part, losses, right, strict=True):
            length = len(piece.labels) - piece.ends
            sums["nats"] += float(own_losses[:length].sum())
            sums["right"] += int(own_right[:length].sum())
            sums["tokens"] += length
            if piece.ends:
                sums["end_nats"] += float(own_losses[length])
                sums["documents"] += 1
            sums["results"] += len(piece.results)
            sums["results_right"] += sum(bool(own_right[a:b].all()) for a, b in piece.results)
    found = {
        "bits_per_byte": sums["nats"] / math.log(2) / num_bytes,
        "end_bits": sums["end_nats"] / math.log(2) / sums["documents"],
        "top_1": sums["right"] / sums["tokens"],
    }
    if sums["results"]:
        found["results"] = sums["results_right"] / sums["results"]
    counts = {f"num_{name}": int(sums[name]) for name in ("tokens", "documents", "results")}
    return {**found, "num_bytes": num_bytes, **counts}


def _run(
    student: PreTrainedModel, pieces: Sequence[Piece], *, bf16: bool
) -> Iterator[tuple[Sequence[Piece], Tensor, Tensor]]:
    """Yield pieces with each label's loss, fp64 nats, and whether it was the likeliest token."""
    layer = output_layer(student)
    for start in range(0, len(pieces), _ROWS_AT_ONCE):
        part = pieces[start : start + _ROWS_AT_ONCE]
        # Padding stands behind the text, where no token of it looks.
        width = len(part[0].labels)
        inputs, labels = (
            torch.tensor([ids + [0] * (width - len(ids)) for ids in side]).to(student.device)
            for side in ([p.input_ids for p in part], [p.labels for p in part])
        )
        positions = torch.arange(width, device=student.device).expand(len(part), -1)
        with torch.autocast(student.device.type, dtype=torch.bfloat16, enabled=bf16):
            hidden = hidden_states(student, inputs, position_ids=positions)
            losses = linear_cross_entropy(hidden, layer, labels).losses
            right = layer.logits(hidden).argmax(-1) == labels
        yield part, losses.double().cpu(), right.cpu()


def measure_sets(
    folder: Path, sets: dict[str, list[str]], *, seq_length: int, bf16: bool, device: str
) -> dict[str, dict[str, float]]:
    """Measure the student of a folder on every set."""
    student = load_language_model(str(folder), device=device)
    tokenizer = load_tokenizer(str(folder))
    found = {}
    for name, texts in sets.items():
        pieces = cut_pieces(tokenizer, texts, seq_length)
        num_bytes = sum(len(text.encode()) for text in texts)
        found[name] = measure(student, pieces, num_bytes, bf16=bf16)
        shown = {key: round(value, 4) for key, value in found[name].items()}
        print(folder, name, shown, flush=True)
    return found


def main() -> None:
    """Measure students on every set; write measures.json into each one's folder."""
    parser = argparse.ArgumentParser(description="Measure students on held-out text.")
    parser.add_argument("sets", nargs="+", metavar="NAME=FILE", help="JSON lines with a text each")
    parser.add_argument("--students", type=Path, nargs="+", required=True, help="folders")
    parser.add_argument("--seq-length", type=int, default=512)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bf16", action="store_true")
    options = parser.parse_args()
    sets = {}
    for source in options.sets:
        name, _, path = source.partition("=")
        with Path(path).open(encoding="utf-8", newline="\n") as file:
            sets[name] = [json.loads(line)["text"] for line in file]
    for folder in options.students:
        found = measure_sets(
            folder,
            sets,
            seq_length=options.seq_length,
            bf16=options.bf16,
            device=options.device,
        )
        (folder / "measures.json").write_text(json.dumps(found, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
