"""Compare how encoders split texts and ship what is alike: `make known-splits` (minutes).

Holds for the installed versions of the libraries. With others nothing of it is used, and each
machine compares once: run it again when one of them is raised.
"""

import json

from pipeline.tokenization.backends import LibraryError
from pipeline.tokenization.pretokenizer_splits import (
    KNOWN_SPLITS,
    find_difference,
    name_of,
    show_splits,
)
from pipeline.tokenization.rank_models import BYTES
from pipeline.tokenization.sources import TokenizerError, find_tokenizer
from tests.support.split_patterns import SPLIT_PATTERNS, byte_level
from tests.support.tokenizer_zoo import KNOWN, TRAINED, definition

NORMALIZERS = {"qwen2": (None, "NFC"), "qwen35": (None, "NFC")}


def main() -> None:
    """Write `KNOWN_SPLITS` anew."""
    definitions = {
        f"{name}, {normalizer}": byte_level(patterns, normalizer)
        for name, patterns in SPLIT_PATTERNS.items()
        for normalizer in NORMALIZERS.get(name, (None,))
    }
    definitions |= {name: definition(name) for name in TRAINED}
    for name, path in (KNOWN | {BYTES.name: BYTES.name}).items():
        try:
            read = find_tokenizer(str(path)).definition
        except TokenizerError:  # a SentencePiece folder that holds no tokenizer.json
            continue
        definitions |= {name: read} if read else {}
    alike: dict[str, str] = {}
    for of, compared in definitions.items():
        copy = show_splits(compared)
        if copy is None or name_of(copy) in alike:
            continue
        try:
            difference = find_difference(compared)
        except LibraryError as error:
            difference = str(error)
        print(of, difference or "alike", flush=True)
        if difference is None:
            alike[name_of(copy)] = of
    KNOWN_SPLITS.write_text(json.dumps(alike, indent=1) + "\n")


if __name__ == "__main__":
    main()
