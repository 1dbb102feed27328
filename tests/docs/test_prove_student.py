"""A model with another vocabulary and fewer layers: against slow counts, and against itself."""

import copy
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from prove.vocabulary_transfer import (
    TokenPairs,
    count_pairs,
    keep_layers,
    transfer_embeddings,
    transfer_vocabulary,
)
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.alignment import align_batch
from pipeline.batches import AlignedBatch, SourceDocument
from tests.support.datasets import byte_level, make_texts

NEW, OLD = byte_level(400), byte_level(480)


def _documents() -> list[SourceDocument]:
    return [SourceDocument(document_id, text.encode()) for document_id, text in make_texts(12)]


def _batches() -> list[AlignedBatch]:
    documents = _documents()
    return [align_batch(part, NEW, OLD) for part in (documents[:5], documents[5:])]


def _model(*, tied: bool = True, layers: int = 4) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=OLD.vocab_size,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        tie_word_embeddings=tied,
        initializer_range=0.5,
    )
    return LlamaForCausalLM(config).eval()


def _slow_embeddings(
    batches: list[AlignedBatch], embeddings: torch.Tensor
) -> dict[int, np.ndarray]:
    """Mean over a token's occurrences of the mean over the bytes' owners, document by document."""
    seen: dict[int, list[np.ndarray]] = defaultdict(list)
    for batch in batches:
        for document in range(len(batch.documents)):
            own = slice(*batch.student.cu_tokens[document : document + 2])
            other = slice(*batch.teacher.cu_tokens[document : document + 2])
            old_ids = batch.teacher.input_ids[other].tolist()
            old_ranges = batch.teacher.byte_offsets[other].tolist()
            for new_id, (start, stop) in zip(
                batch.student.input_ids[own].tolist(),
                batch.student.byte_offsets[own].tolist(),
                strict=True,
            ):
                covering = [
                    embeddings[old_id].double().numpy()
                    for old_id, (a, b) in zip(old_ids, old_ranges, strict=True)
                    if a < stop and start < b
                ]
                seen[new_id].append(np.mean(covering, axis=0))
    return {token: np.mean(values, axis=0) for token, values in seen.items()}


def test_embeddings_are_the_means_of_a_slow_count() -> None:
    batches = _batches()
    embeddings = _model().get_input_embeddings().weight.detach()
    found, occurred = transfer_embeddings(embeddings, count_pairs(batches), NEW.vocab_size)
    expected = _slow_embeddings(batches, embeddings)
    assert 50 < len(expected) < NEW.vocab_size
    assert set(np.flatnonzero(occurred).tolist()) == set(expected)
    for token, value in expected.items():
        torch.testing.assert_close(
            found[token].double(), torch.from_numpy(value), rtol=1e-5, atol=1e-6
        )
    unseen = torch.from_numpy(~occurred)
    torch.testing.assert_close(
        found[unseen], embeddings.mean(0).expand(int(unseen.sum()), -1), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_gets_another_vocabulary_and_can_be_saved(tmp_path: Path, tied: bool) -> None:
    model = _model(tied=tied)
    start = copy.deepcopy(model)
    pairs = count_pairs(_batches())
    num_unseen = transfer_vocabulary(
        model, pairs, NEW.vocab_size, same={0: 3}, bos_token_id=0, eos_token_id=0
    )
    assert 0 < num_unseen < NEW.vocab_size
    for name in ("get_input_embeddings", "get_output_embeddings"):
        old, new = getattr(start, name)().weight, getattr(model, name)().weight
        assert new.shape == (NEW.vocab_size, 16)
        torch.testing.assert_close(new[0], old[3])
        expected, _ = transfer_embeddings(old, pairs, NEW.vocab_size)
        torch.testing.assert_close(new[1:], expected[1:])
    model.save_pretrained(tmp_path)
    again = LlamaForCausalLM.from_pretrained(tmp_path)
    assert again.config.vocab_size == NEW.vocab_size
    assert again.config.eos_token_id == 0
    torch.testing.assert_close(
        again.get_output_embeddings().weight, model.get_output_embeddings().weight
    )


def test_ids_beyond_a_vocabulary_are_refused() -> None:
    pairs = TokenPairs(np.array([2]), np.array([5]), np.array([1.0]))
    with pytest.raises(ValueError, match="new token 2 exceeds the new vocabulary's 2"):
        transfer_embeddings(torch.zeros(6, 1), pairs, 2)
    with pytest.raises(ValueError, match="old token 5 exceeds the old vocabulary's 5"):
        transfer_embeddings(torch.zeros(5, 1), pairs, 3)


def test_pruned_models_compute_what_the_layers_left_compute() -> None:
    """The same as a model whose other layers are taken out of its list by hand."""
    model = _model(layers=5)
    pruned = keep_layers(model, (0, 3, 4)).eval()
    assert pruned.config.num_hidden_layers == 3
    assert model.config.num_hidden_layers == 5
    by_hand = copy.deepcopy(model)
    by_hand.model.layers = torch.nn.ModuleList([by_hand.model.layers[n] for n in (0, 3, 4)])
    ids = torch.tensor([[5, 300, 7, 41]])
    with torch.inference_mode():
        expected = by_hand(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(pruned(input_ids=ids).logits, expected)
        assert not torch.allclose(model(input_ids=ids).logits, expected)
    with pytest.raises(ValueError, match=r"layers \[0, 5\] must be some of 0 … 4"):
        keep_layers(model, (0, 5))
