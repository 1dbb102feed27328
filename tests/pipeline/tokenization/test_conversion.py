"""A SentencePiece model's file, read here, says what `sentencepiece` reads from it."""

import pytest
import sentencepiece

from pipeline.tokenization.conversion import ModelKind, PieceKind, read_sentencepiece_model
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


KEEPS_SPACES = ("sentencepiece_bpe", "mistral_v1")
