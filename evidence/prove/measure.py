r"""What a student makes of held-out text, document by document, and how it goes on.

    python evidence/prove/measure.py gsm8k=held_gsm8k.jsonl math=held_math.jsonl \
        --students 3=run/step-000036 10=run/model --output run/measures.json

For each student and set the file has `bytes` of every document's text and `nats` of its tokens, so
that means, intervals and bootstraps can be made again. With `--numbers` it also has of each
document what `Numbers.sums` returns, and with `--prompts` of each prompt how many numbers and
indents the student wrote and how many of them its own tokenizer would split elsewhere.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path += [str(Path(__file__).parents[2] / name) for name in ("evidence", "examples")]

from pipeline.transfer.measure import text_logits
from prove.numerals import Numbers, find_odd, write_on
from prove.texts import read_texts
from vocag import Tokenizer, load_language_model, load_tokenizer


def measure_set(
    model: Any,
    tokenizer: Tokenizer,
    texts: Sequence[bytes],
    *,
    context: int,
    seq_length: int,
    numbers: Numbers | None = None,
) -> dict[str, list[Any]]:
    """Return `bytes` and `nats` of every text, and with `numbers` its `numbers`."""
    nats, sums = np.zeros(len(texts)), np.zeros((len(texts), 6))
    read = text_logits(model, tokenizer, texts, context=context, seq_length=seq_length)
    for place, ids, logits in read:
        log_probs = logits.double().log_softmax(-1)
        nats[place] -= float(log_probs.gather(1, ids[:, None]).sum())
        if numbers is not None:
            sums[place] += numbers.sums(ids, log_probs)
    found: dict[str, list[Any]] = {"bytes": list(map(len, texts)), "nats": nats.round(4).tolist()}
    return found | ({} if numbers is None else {"numbers": sums.round(4).tolist()})


def main() -> None:
    """Measure students on every set; write one file."""
    parser = argparse.ArgumentParser(description="Measure students on held-out text.")
    parser.add_argument("sets", nargs="+", metavar="NAME=FILE", help="JSON lines with a text each")
    parser.add_argument("--students", nargs="+", metavar="NAME=FOLDER", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seq-length", type=int, default=512)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--numbers", action="store_true", help="sums over packed numbers, too")
    parser.add_argument("--prompts", nargs="*", default=[], metavar="NAME=FILE", help="to go on")
    parser.add_argument("--tokens", type=int, default=24, help="of a continuation")
    options = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    for name, folder in (student.split("=", 1) for student in options.students):
        model = load_language_model(folder, device=options.device)
        tokenizer, found[name] = load_tokenizer(folder), {}
        context = tokenizer.bos_token_id if tokenizer.adds_bos else tokenizer.eos_token_id
        if context is None:
            parser.error(f"{folder}: its tokenizer has no token before a text, nor one after it")
        numbers = Numbers(tokenizer, model.get_output_embeddings().weight.shape[0])
        with torch.autocast(model.device.type, torch.bfloat16, enabled=options.bf16):
            for held_out, path in (source.split("=", 1) for source in options.sets):
                found[name][held_out] = measure_set(
                    model,
                    tokenizer,
                    [text.encode() for text in read_texts(Path(path)).values()],
                    context=context,
                    seq_length=options.seq_length,
                    numbers=numbers if options.numbers else None,
                )
            for begun, path in (source.split("=", 1) for source in options.prompts):
                prompts = [text.encode() for text in read_texts(Path(path)).values()]
                written = write_on(
                    model, tokenizer, prompts, context=context, num_tokens=options.tokens
                )
                pairs = zip(prompts, written, strict=True)
                found[name][begun] = {"odd": [find_odd(tokenizer, *pair) for pair in pairs]}
    options.output.write_text(json.dumps(found) + "\n", "utf-8")


if __name__ == "__main__":
    main()
