r"""What a student makes of held-out text, document by document.

    python evidence/prove/measure.py gsm8k=held_gsm8k.jsonl math=held_math.jsonl \
        --students 3=run/step-000036 10=run/model --output run/measures.json

For each student and set the file has `bytes` of every document's text and `nats` of its tokens, so
that means, intervals and bootstraps can be made again.
"""

import argparse
import json
import sys
from pathlib import Path

import torch

sys.path += [str(Path(__file__).parents[2] / name) for name in ("evidence", "examples")]

from pipeline.transfer.measure import code_lengths
from prove.texts import read_texts
from vocag import load_language_model, load_tokenizer


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
    length = options.seq_length
    found: dict[str, dict[str, dict[str, list[float]]]] = {}
    for name, folder in (student.split("=", 1) for student in options.students):
        model = load_language_model(folder, device=options.device)
        tokenizer, found[name] = load_tokenizer(folder), {}
        context = tokenizer.bos_token_id if tokenizer.adds_bos else tokenizer.eos_token_id
        if context is None:
            parser.error(f"{folder}: its tokenizer has no token before a text, nor one after it")
        for held_out, path in (source.split("=", 1) for source in options.sets):
            texts = [text.encode() for text in read_texts(Path(path)).values()]
            with torch.autocast(model.device.type, torch.bfloat16, enabled=options.bf16):
                nats = code_lengths(model, tokenizer, texts, context=context, seq_length=length)
            found[name][held_out] = {
                "bytes": [len(text) for text in texts],
                "nats": [round(value, 4) for value in nats],
            }
    options.output.write_text(json.dumps(found) + "\n", "utf-8")


if __name__ == "__main__":
    main()
