"""A label's distribution is the same by stored entries, a running teacher, and Megatron's."""

import pytest
import torch
from torch.nn.functional import pad

pytest.importorskip("megatron.core")

from megatron_plugin.bridge import TeacherAnswer
from megatron_plugin.models.places import WHOLE_ROWS
from megatron_plugin.student.guide import Guide
from megatron_plugin.student.micro_batch import micro_batch
from pipeline.losses.cell_sums import Cells
from pipeline.methods.label_distributions import ask_distributions, read_distributions
from pipeline.models.hf_models import hidden_states, load_language_model
from pipeline.models.output_layer import output_layer
from pipeline.scoring.teaching import Teaching
from pipeline.streaming import AlignedRows, Reading, StreamConfig
from pipeline.streaming.vocabularies import vocabulary_map
from schemas.distribution_rule import EntryShape
from tests.support import tokenizer_zoo
from tests.support.datasets import build_dataset, byte_level, make_texts
from tests.support.hf_folders import write_model
from tests.support.scored_data import SEQ_LENGTH, online_losses, run_score

TOP_K, PLACES = 32, tuple(range(16))
ASKED = EntryShape(TOP_K + 1)


def scored_world(root, student):
    build_dataset(root / "data", make_texts(20), student=student, teacher=byte_level(480))
    write_model(root / "teacher", byte_level(480), seed=1)
    run_score(root, "--top-k", str(TOP_K), "--draws", "0", "--top-log-probs", "float16")
    return load_language_model(str(root / "teacher"))


def by_megatron(read, states, teacher, tables, root):
    """Return what a student of Megatron's makes of an answer."""
    batch = micro_batch(read, 0, PLACES, device=torch.device("cpu"), share=WHOLE_ROWS)
    log_probs, ids = teacher.lm_head(states).log_softmax(-1).topk(TOP_K)
    losses = online_losses(root / "teacher", read).unsqueeze(-1)
    ids, log_probs = pad(ids.float(), (0, 1), value=-1), pad(log_probs, (0, 1))
    answer = TeacherAnswer(torch.cat((losses, ids, log_probs), -1))
    guide = Guide(lambda *_: None, lambda: tables, ASKED, uses_cells=True)
    values = guide.read_answer([batch], answer)
    assert values.shape == (len(PLACES), guide.num_values(batch))
    (taught,) = guide.by_teacher([batch], values, waited_seconds=0.0)
    return taught.next_tokens


def whole(found, vocab_size):
    """Return the mass of every student token, [rows, seq_length, V]."""
    probs = torch.zeros(*found.ids.shape[:2], vocab_size + 1)
    return probs.scatter_add_(-1, found.ids + 1, found.probs)[..., 1:]


@pytest.mark.parametrize("name", ["llama_like", "sentencepiece_unigram", "gpt2_like"])
def test_one_teacher_says_the_same_however_it_is_asked(tmp_path, name):
    student = tokenizer_zoo.load(name, fast=False)
    teacher = scored_world(tmp_path, student)
    config = StreamConfig(Reading(str(tmp_path / "data")), seq_length=SEQ_LENGTH)
    rows = AlignedRows(config)
    read, tables = rows.__getitems__(PLACES), vocabulary_map(rows)
    with torch.no_grad():
        states = hidden_states(
            teacher, read["teacher_input_ids"], position_ids=read["teacher_position_ids"]
        )
        online = ask_distributions(states, output_layer(teacher), read, tables, ASKED)
        megatron = by_megatron(read, states, teacher, tables, tmp_path)
    teaching = {"teaching": Teaching(stored_losses=""), "with_distributions": True}
    stored_rows = AlignedRows(StreamConfig(config.reading, seq_length=SEQ_LENGTH, **teaching))
    stored = read_distributions(stored_rows.__getitems__(PLACES))
    labels = read["labels"].long()
    assert (online.is_known & (online.own_ids != labels)).sum() > 10
    online = online.in_cells(Cells.of(*tables.cells), read["input_ids"])
    stored = stored.in_cells(online.cells, read["input_ids"])
    both = megatron.is_known
    assert torch.equal(megatron.can_teach(labels)[both], online.can_teach(labels)[both])
    # An untrained teacher finds all tokens about equally likely, and fp16 which is the smallest.
    for found, atol in ((megatron, 1e-6), (stored, 2 * float(online.probs[..., -1].max()))):
        both = found.is_known & online.is_known  # rounding moves a mass over a threshold
        assert both.sum() > 0.99 * online.is_known.sum()
        assert torch.equal(found.own_ids[both], online.own_ids[both])
        expected, given = (whole(each, student.vocab_size)[both] for each in (online, found))
        rtol = 5e-3 if found is stored else 0  # losses in fp16
        torch.testing.assert_close(given, expected, rtol=rtol, atol=atol)
