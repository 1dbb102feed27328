"""Sweep the tokenizers that are here and ship what is found: `make known-sweeps` (minutes).

Holds for the installed versions of the libraries. With others nothing of it is used, and each
machine sweeps once: run it again when one of them is raised.
"""

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial

from pipeline.remote.user_cache import cache_folder
from pipeline.tokenization import load_tokenizer
from pipeline.tokenization.comparison import differing_splits, show_splits, splits_ascii_alike
from pipeline.tokenization.rank_models import BYTES
from pipeline.tokenization.sweep import KNOWN_SWEEPS, known_sweeps
from tests.support.split_patterns import SPLIT_PATTERNS, byte_level
from tests.support.tokenizer_zoo import KNOWN

NORMALIZERS = {"qwen2": (None, "NFC"), "qwen35": ("NFC",)}


def main() -> None:
    """Write `KNOWN_SWEEPS` anew."""
    KNOWN_SWEEPS.write_text("{}")
    known_sweeps.cache_clear()
    entries: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        for of, sweep in sweeps():
            sweep()
            for file in sorted(cache_folder("fast-path").glob("*.json")):
                entry = {"of": of, "ranges": json.loads(file.read_bytes())}
                entries.setdefault(file.stem, entry)
            print(of, len(entries), flush=True)
    lines = [f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries.items()]
    KNOWN_SWEEPS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def sweeps() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield what is swept, and a call that does so and keeps the result in the cache folder."""
    for name, patterns in SPLIT_PATTERNS.items():
        for normalizer in NORMALIZERS.get(name, (None,)):
            copied = byte_level(patterns, normalizer)
            copy = show_splits(copied)
            assert copy is not None
            yield f"splits of {name}, {normalizer}", partial(splits_ascii_alike, copied)
            yield f"splits of {name}, {normalizer}", partial(differing_splits, copy)
    for name, path in (KNOWN | {BYTES.name: BYTES.name}).items():
        yield f"ids of {name}", partial(lambda path: load_tokenizer(str(path)).differing, path)


if __name__ == "__main__":
    main()
