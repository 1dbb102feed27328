r"""What a student makes of held-out text, document by document.

    python examples/prove/measure.py gsm8k=held_gsm8k.jsonl math=held_math.jsonl \
        --students 3=run/step-000036 10=run/model --output run/measures.json

Sums are kept by document, so that means, intervals and bootstraps can be made again.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from vocag import (
    Tokenizer,
    hidden_states,
    linear_cross_entropy,
    load_language_model,
    load_tokenizer,
    output_layer,
)

_ROWS_AT_ONCE = 8

Sums = dict[str, list[float]]
"""One value a document: `bytes` of its text, `nats` of its tokens."""


@dataclass(frozen=True)
class Piece:
    """What a model reads at one time: a document, or a part of one.

    Attributes:
        document: number of the document.
        input_ids: the token before a text, by the tokenizer's convention or else the one that ends
            texts, and the piece's tokens but the last.
        labels: its tokens.
    """

    document: int
    input_ids: list[int]
    labels: list[int]


def cut_pieces(tokenizer: Tokenizer, texts: Sequence[str], seq_length: int) -> list[Piece]:
    """Return the texts as pieces of at most `seq_length` tokens, longest first.

    Raises:
        ValueError: a text that can't be tokenized, or a tokenizer without a token before a text.
    """
    start_token = tokenizer.bos_token_id if tokenizer.adds_bos else tokenizer.eos_token_id
    tokens = tokenizer.tokenize_batch([text.encode() for text in texts])
    if tokens.failures or start_token is None:
        raise ValueError(f"no token before a text, or texts without tokens: {tokens.failures}")
    pieces = []
    for number in range(len(texts)):
        ids = tokens.input_ids[slice(*tokens.cu_tokens[number : number + 2])].tolist()
        for start in range(0, len(ids), seq_length):
            labels = ids[start : start + seq_length]
            pieces.append(Piece(number, [start_token, *labels[:-1]], labels))
    return sorted(pieces, key=lambda piece: -len(piece.labels))


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
    nats, layer = [0.0] * len(num_bytes), output_layer(student)
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
            losses = linear_cross_entropy(hidden, layer, labels).losses.double().cpu()
        for piece, own in zip(part, losses, strict=True):
            nats[piece.document] += float(own[: len(piece.labels)].sum())
    return {"bytes": list(num_bytes), "nats": [round(value, 4) for value in nats]}


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
