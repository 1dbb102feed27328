"""Compile numba's kernels into its cache, so that workers start without a compiler's delay.

    NUMBA_CACHE_DIR=/opt/vocag/kernels python docker/compile_kernels.py

Aligns a few words with a made-up tokenizer, on the fast path and on the reference path: each hands
the kernels arrays of other types, and numba compiles for types.
"""

import io
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.alignment import align_batch
from pipeline.batches import SourceDocument
from pipeline.dataset.writing import ShardWriter
from pipeline.distributions.cells import count_cells
from pipeline.distributions.vocabulary_map import VocabularyMap
from pipeline.distributions.walk import RowFields
from pipeline.tokenization import Tokenizer, load_tokenizer

TEXTS = ("The quick brown fox", " e\u0301 数学 🤗", "▁▁\n")


def main() -> None:
    """Run every kernel of the align job once."""
    documents = [SourceDocument(text, text.encode()) for text in TEXTS]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tokenizer.json")
        path.write_text(json.dumps(byte_level_tokenizer()))
        for fast in (True, False):
            tokenizer = load_tokenizer(str(path), fast=fast)
            if tokenizer.fast != fast:
                raise SystemExit(f"no fast path: {tokenizer.slow_reason}")
            for keep_text in (False, True):
                writer = ShardWriter(io.BytesIO(), keep_text=keep_text)
                writer.add(align_batch(documents, tokenizer, tokenizer))
                writer.close()
        # What the job's last line says of the pair.
        count_cells([one_row(tokenizer)], VocabularyMap.of(tokenizer, tokenizer))


def one_row(tokenizer: Tokenizer) -> RowFields:
    """Return a text as its own student and teacher read it, in the types of a sample's row."""
    ids = np.array(tokenizer.tokenize_batch([TEXTS[0].encode()]).input_ids, np.int32)
    places = np.arange(1, len(ids) + 1, dtype=np.int32)
    spans, bounds = np.stack([places, places + 1], 1), np.array([0, len(ids)], np.int32)
    mask, no_losses = np.ones(len(ids), np.float32), np.empty(0, np.float32)
    return RowFields(ids, mask, spans, ids, bounds, bounds, no_losses)


def byte_level_tokenizer() -> dict[str, Any]:
    """Return GPT-2's tokenizer with a token for each byte, two more, and one merge."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [256 + place for place in range(256 - len(printable))]
    pieces = [chr(code) for code in printable + others] + ["he", "The"]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {**byte_level, "use_regex": True},
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {piece: place for place, piece in enumerate(pieces)},
            "merges": [["h", "e"], ["T", "he"]],
        },
    }


if __name__ == "__main__":
    main()
