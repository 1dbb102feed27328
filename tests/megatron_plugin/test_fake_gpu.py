"""The plugin's own part of a step on a GPU that isn't there: devices, dtypes, kernels and waits."""

from collections import Counter

import pytest
import torch
from torch import distributed as dist

pytest.importorskip("megatron.core")

from megatron_plugin.bridge import TeacherAnswer
from megatron_plugin.models.attention import PackedAttention
from megatron_plugin.models.copies import to_device
from megatron_plugin.models.places import own_share
from megatron_plugin.student.forward_step import StepRules, _token_scores, training_loss
from megatron_plugin.student.guide import Guide
from megatron_plugin.student.micro_batch import micro_batch
from megatron_plugin.teacher.model import _values_ahead
from megatron_plugin.upstream import AttnMaskType, TransformerConfig, parallel_state
from pipeline.losses.tail import TailDraws, row_draw_keys
from pipeline.methods import kind_of
from pipeline.methods.method import Method
from pipeline.streaming import AlignedRows, Reading, StreamConfig, load_batches
from pipeline.streaming.vocabularies import vocabulary_map
from schemas.distribution_rule import NO_ENTRIES, EntryShape
from tests.support.datasets import build_dataset, make_texts
from tests.support.fake_gpu import CUDA, FakeGpu

VOCAB_SIZE, HIDDEN, MICRO_BATCHES, WIDTH, DRAWS = 400, 64, 2, 7, 2
# In a micro-batch, and in a step.
IN_EACH = {"refuse_any _local_scalar_dense": 1, "_LinearCrossEntropy.backward nonzero": 1}
IN_A_STEP = {"Guide.by_teacher tolist": 1}


@pytest.fixture
def one_rank():
    """Megatron's groups, of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


class Layer(torch.nn.Module):
    sequence_parallel = False


@pytest.mark.parametrize("asked", [NO_ENTRIES, EntryShape(WIDTH), EntryShape(WIDTH, DRAWS)])
def test_a_step_stays_on_its_device_and_waits_as_documented(one_rank, tmp_path, asked):
    build_dataset(tmp_path / "data", make_texts(40), num_shards=1)
    stream = StreamConfig(Reading(str(tmp_path / "data")), seq_length=64, global_batch_size=4)
    rows = AlignedRows(stream)
    known = vocabulary_map(rows)
    guide = Guide(pytest.fail, lambda: known, asked, uses_cells=True)
    method = Method("distill" if asked.width else "teacher")
    rules = StepRules(kind_of(method), method, VOCAB_SIZE, MICRO_BATCHES)
    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=4, num_query_groups=2, bf16=True
    )
    attention = PackedAttention(config, 1, AttnMaskType.causal, "self")
    with FakeGpu() as gpu:
        embedding, output_weight = (
            gpu.place(torch.randn(VOCAB_SIZE, HIDDEN).bfloat16()).requires_grad_() for _ in "eo"
        )
        batches = guide_batches(guide, rows)
        if asked.drawn:
            ids = torch.cat([batch.next_tokens.ids for batch in batches])[..., -DRAWS:].twin
            assert (ids >= 0).double().mean() > 0.1
        for batch in batches:
            hidden = torch.nn.functional.embedding(batch.tokens, embedding).transpose(0, 1)
            query = hidden.unflatten(2, (4, -1))
            key = query[:, :, :2]
            hidden = hidden + attention(query, key, key, None, packed_seq_params=batch.segments)
            output = _token_scores(
                rules,
                batch.next_tokens,
                batch.moved["labels"],
                hidden_states=hidden,
                output_layer=Layer(),
                output_weight=output_weight,
                labels=batch.labels,
            )
            loss, num_tokens, reported = training_loss(rules, batch, output)
            loss.backward()
            assert {each.device for each in (loss, num_tokens, *reported.values())} == {CUDA}
            assert {each.dtype for each in (loss, *reported.values())} == {torch.float32}
        assert num_tokens.dtype == torch.int32
        for weight in (embedding, output_weight):
            assert weight.grad.dtype == torch.bfloat16
            assert weight.grad.twin.isfinite().all()
            assert weight.grad.twin.any()
    waits = {place: count * MICRO_BATCHES for place, count in IN_EACH.items()}
    if asked.width:  # cells, in a run's first step
        waits["_place copies to the device"] = 5
    assert gpu.waits == Counter(waits | IN_A_STEP)
    for name in ("_varlen_attn", "_varlen_attn_backward"):
        assert gpu.operations[name] == MICRO_BATCHES


def test_a_teacher_draws_on_its_device(one_rank):
    places, num_ids = 40, 470
    keys = row_draw_keys(
        torch.arange(2 * places, dtype=torch.int32).view(2, places),
        torch.tensor([[0, 9, places], [0, places, places]]),
    )
    with FakeGpu() as gpu:
        tail = TailDraws(to_device(keys.transpose(0, 1).flatten(0, 1), CUDA), DRAWS)
        values = _values_ahead(
            gpu.place(torch.randint(num_ids, (2, places))),
            gpu.place(torch.arange(places).expand(2, -1) > 0),
            480,
            4,
            num_ids,
            tail,
            hidden_states=gpu.place(torch.randn(places, 2, HIDDEN).bfloat16()),
            output_layer=Layer(),
            output_weight=gpu.place(torch.randn(480, HIDDEN).bfloat16()),
        )
    assert (values.device, values.dtype) == (CUDA, torch.float32)
    answer = TeacherAnswer(values.twin)
    exact, free, drawn = answer.next_ids.split([4, 1, DRAWS], -1)
    assert (free == -1).all()
    assert ((drawn >= 0) & (drawn < num_ids)).all()
    assert not (drawn.unsqueeze(-1) == exact.unsqueeze(-2)).any()
    assert len(drawn.unique()) > 20


def guide_batches(guide, rows):
    """Return a step's micro-batches, copied as the loader and the bridge do."""
    loader = load_batches(rows, micro_batch_size=2, pin_memory=True)
    batches = [
        micro_batch(batch, number, tuple(samples), device=CUDA, share=own_share())
        for number, samples, batch in zip(
            range(MICRO_BATCHES), loader.batches, loader, strict=False
        )
    ]
    places = batches[0].rows["teacher_input_ids"].shape[1]
    width, free = guide.asked.width, guide.asked.exact - 1
    ids = torch.arange(width).float().expand(2 * MICRO_BATCHES, places, width)
    log_probs = (-ids - 1).masked_fill(ids >= free, -torch.inf)
    ids = ids.masked_fill(ids == free, -1)
    losses = torch.rand(2 * MICRO_BATCHES, places, 1)
    answer = TeacherAnswer(torch.cat((losses, ids, log_probs), 2))
    values = to_device(guide.read_answer(batches, answer), CUDA)
    return guide.by_teacher(batches, values, waited_seconds=0.1)
