"""What benchmarks/gpu.py works with: made on the machine, of what is installed there.

Texts are the packages' own Python sources, tokenizers are trained on them, models are random and
have the shapes of real ones.
"""

import json
import random
import shutil
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PretrainedConfig

_WINDOW = 3000
"""Characters of a document."""


@dataclass(frozen=True)
class Scale:
    """How large everything is.

    Attributes:
        text_bytes: of the corpus.
        tokenizer_bytes: of the texts that tokenizers are trained on, the corpus among them; 1.2 MB
            make 19,000 tokens, however many are asked for.
        student_tokens, teacher_tokens: of the vocabularies.
        seq_length, micro_batch_size, global_batch_size, steps: of the runs.
        matmul: side of the matrices whose product is timed.
    """

    text_bytes: int = 1_200_000
    tokenizer_bytes: int = 48_000_000
    student_tokens: int = 32_000
    teacher_tokens: int = 102_400
    seq_length: int = 2048
    micro_batch_size: int = 4
    global_batch_size: int = 32
    steps: int = 6
    matmul: int = 8192


SMALL = Scale(12_000, 12_000, 400, 480, 64, 2, 4, 4, 256)
TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def make_dataset(work: Path, scale: Scale) -> Path:
    """Write and align the corpus, unless it is there; return the dataset."""
    from beam_jobs.align.command import align
    from beam_jobs.align.options import AlignOptions

    if not (work / "aligned/manifest.json").exists():
        texts = list(_texts(scale.tokenizer_bytes))
        for side, size in (("student", scale.student_tokens), ("teacher", scale.teacher_tokens)):
            _train_tokenizer(work / f"{side}.json", texts, size, seed=side)
        corpus, texts = work / "corpus.jsonl", list(_texts(scale.text_bytes))
        lines = (json.dumps({"id": str(n), "text": text}) for n, text in enumerate(texts))
        corpus.write_text("".join(f"{line}\n" for line in lines), "utf-8")
        student, teacher = (str(work / f"{side}.json") for side in ("student", "teacher"))
        output = str(work / "aligned")
        # Several shards: the first one alone is what the 7 B teacher scores.
        align(AlignOptions((str(corpus),), output, student, teacher, shard_bytes=1 << 20))
    return work / "aligned"


def make_model(work: Path, name: str, scale: Scale, device: str) -> Path:
    """Write a random model, unless it is there; return its folder."""
    folder = work / name
    if not folder.exists():
        begun = work / f".{name}"  # a part that is stopped leaves half a model
        shutil.rmtree(begun, ignore_errors=True)
        with torch.device(device):
            shape = model_shape(name, scale)
            model = AutoModelForCausalLM.from_config(
                shape, dtype=torch.bfloat16, trust_remote_code=False
            )
        # Several files, as published ones have, are hashed at one time.
        model.save_pretrained(begun, max_shard_size="2GB")
        side = "student" if name == "student" else "teacher"
        shutil.copy(work / f"{side}.json", begun / "tokenizer.json")
        begun.rename(folder)
    return folder


def model_shape(name: str, scale: Scale) -> PretrainedConfig:
    """Return a shape: `student` is TinyLlama's, `seven` Mistral 7B's, `tiny` has two layers."""
    length: dict[str, Any] = {"max_position_embeddings": max(2 * scale.seq_length, 4096)}
    size = scale.student_tokens if name == "student" else scale.teacher_tokens
    if name == "tiny" or scale == SMALL:
        return LlamaConfig(vocab_size=size, **TINY, **length)
    if name == "seven":
        return MistralConfig(vocab_size=size, num_key_value_heads=8, sliding_window=None, **length)
    return LlamaConfig(
        vocab_size=size,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
        **length,
    )


def _texts(num_bytes: int) -> Iterator[str]:
    """Yield windows of whole lines of the installed packages' sources."""
    files = sorted(Path(sysconfig.get_paths()["purelib"]).rglob("*.py"))
    random.Random(0).shuffle(files)
    left = num_bytes
    for file in files:
        window = ""
        for line in file.read_text("utf-8", errors="ignore").splitlines(keepends=True):
            window += line if len(line) < 400 else ""
            if len(window) >= _WINDOW:
                yield window
                left, window = left - len(window), ""
            if left <= 0:
                return


def _train_tokenizer(path: Path, texts: list[str], size: int, *, seed: str) -> None:
    """Write a byte-level BPE; either side's comes from a half of the texts, so they differ."""
    tokenizer = ByteLevelBPETokenizer()
    half = random.Random(seed).sample(texts, len(texts) // 2 + 1)
    tokenizer.train_from_iterator(
        half, size, min_frequency=1, special_tokens=["<s>", "</s>"], show_progress=False
    )
    tokenizer.save(str(path))
