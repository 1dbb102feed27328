"""A SentencePiece model's file, read here, says what `sentencepiece` reads from it."""

import json

import numpy as np
import pytest
import sentencepiece

from pipeline.tokenization import PROBES
from pipeline.tokenization.conversion import (
    ModelKind,
    PieceKind,
    convert_sentencepiece,
    read_sentencepiece_model,
)
from pipeline.tokenization.sentencepiece_files import sentencepiece_file
from tests.support.datasets import make_texts
from tests.support.tokenizer_zoo import load


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sentencepiece_bpe", ModelKind.BPE),
        ("sentencepiece_nfkc", ModelKind.BPE),
        ("sentencepiece_unigram", ModelKind.UNIGRAM),
        ("mistral_v1", ModelKind.BPE),
    ],
)
def test_pieces_and_settings_are_the_librarys(name: str, kind: ModelKind) -> None:
    data = load(name).file_bytes
    model = read_sentencepiece_model(data)
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(data)
    ids = range(processor.vocab_size())
    assert [piece.text for piece in model.pieces] == [processor.id_to_piece(i) for i in ids]
    assert [piece.score for piece in model.pieces] == [processor.get_score(i) for i in ids]
    for kind_of_piece, is_kind in (
        (PieceKind.UNKNOWN, processor.is_unknown),
        (PieceKind.CONTROL, processor.is_control),
        (PieceKind.BYTE, processor.is_byte),
        (PieceKind.UNUSED, processor.is_unused),
    ):
        found = [piece.kind is kind_of_piece for piece in model.pieces]
        assert found == [is_kind(i) for i in ids]
    assert (model.kind, model.unk_id, model.byte_fallback) == (kind, processor.unk_id(), True)
    assert bool(model.charsmap) == model.removes_extra_spaces == (name not in KEEPS_SPACES)


@pytest.mark.parametrize("name", ["sentencepiece_bpe", "mistral_v1"])
def test_a_converted_model_becomes_a_file_of_the_same_ids(name: str) -> None:
    """By way of the merges of a tokenizer.json, whose order is all that is left of the scores."""
    own = load(name)
    data = sentencepiece_file(convert_sentencepiece(own.file_bytes, source=name))
    assert data is not None
    pieces, again = (read_sentencepiece_model(each).pieces for each in (own.file_bytes, data))
    assert [(piece.text, piece.kind) for piece in again] == [(p.text, p.kind) for p in pieces]
    processor = sentencepiece.SentencePieceProcessor(model_proto=data)
    texts = [*PROBES, *(text for _, text in make_texts(40))]
    batch = own.tokenize_batch([text.encode() for text in texts])
    found = [processor.encode(text) for text in texts]
    assert not batch.failures
    assert found == [ids.tolist() for ids in np.split(batch.input_ids, batch.cu_tokens[1:-1])]


@pytest.mark.parametrize("name", ["gpt2_like", "sentencepiece_unigram"])
def test_what_has_no_merges_with_bytes_has_no_such_file(name: str) -> None:
    data = load(name).file_bytes
    is_model = name.startswith("sentencepiece")
    definition = convert_sentencepiece(data, source=name) if is_model else json.loads(data)
    assert sentencepiece_file(definition) is None


KEEPS_SPACES = ("sentencepiece_bpe", "mistral_v1")
