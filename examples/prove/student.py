r"""A student that knows English: SmolLM2 with few of its layers and a vocabulary of its own.

    python examples/prove/student.py --text prove/text/heal.jsonl --source prove/smollm2 \
        --output prove/student --vocab-size 8192 --layers 0 1 2 15 28 29

The vocabulary is a byte-level BPE of the text, its embeddings are made as `vocag transfer` makes
them; what a cut model has forgotten, healing has to mend.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from itertools import batched
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM

from pipeline.transfer.model import keep_layers, transfer_vocabulary
from pipeline.transfer.origins import find_origins
from pipeline.transfer.pairs import count_pairs
from vocag import AlignedBatch, SourceDocument, align_batch, load_tokenizer

END = "<|endoftext|>"


def train_tokenizer(texts: Sequence[str], vocab_size: int, folder: Path) -> None:
    """Write a byte-level BPE that splits numbers into digits, as SmolLM2's does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": END, "eos_token": END, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n", "utf-8")


def align_texts(texts: Sequence[str], new: Path, old: Path) -> Iterator[AlignedBatch]:
    """Yield the texts tokenized by both and aligned, the new vocabulary in the student's place."""
    student, teacher = load_tokenizer(str(new)), load_tokenizer(str(old))
    for part in batched(enumerate(texts), 1000):
        documents = [SourceDocument(str(number), text.encode()) for number, text in part]
        yield align_batch(documents, student, teacher)


def main() -> None:
    """Write the student's folder."""
    parser = argparse.ArgumentParser(description="Make a student from a larger model.")
    parser.add_argument("--text", type=Path, required=True, help="JSON lines of general text")
    parser.add_argument(
        "--source", type=Path, required=True, help="folder of the model that it is cut from"
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--layers", type=int, nargs="+", default=[0, 1, 2, 15, 28, 29])
    options = parser.parse_args()
    with options.text.open(encoding="utf-8", newline="\n") as file:
        texts = [json.loads(line)["text"] for line in file]
    train_tokenizer(texts, options.vocab_size, options.output)
    old = load_tokenizer(str(options.source))
    new = load_tokenizer(str(options.output))
    model = keep_layers(AutoModelForCausalLM.from_pretrained(options.source), options.layers)
    end = new.find_token(END)
    pairs = count_pairs(align_texts(texts, options.output, options.source))
    origins = find_origins(new, old, pairs)
    transfer_vocabulary(model, origins, bos_token_id=end, eos_token_id=end)
    model.save_pretrained(options.output)
    size = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"{options.output}: {size / 1e6:.1f} M parameters, layers {options.layers}, "
        f"{new.vocab_size} tokens: {origins.counts()}"
    )


if __name__ == "__main__":
    main()
