"""Attention over packed rows equals a dense mask, without having one."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import varlen
from torch.nn.functional import scaled_dot_product_attention

pytest.importorskip("megatron.core")

from megatron_plugin.models.attention import (
    PackedAttention,
    attend_documents,
    kernel_name,
    row_segments,
)
from megatron_plugin.models.places import RowShare
from megatron_plugin.upstream import AttnMaskType, TransformerConfig
from pipeline.models import varlen as kernels
from tests.support.largest_tensor import LargestTensor

HEADS, SIZE, SEQ_LENGTH = 4, 8, 24


def dense(query, key, value, bounds):
    """Attend with a full mask: an obvious twin."""
    places = torch.arange(len(query))
    document = torch.bucketize(places, bounds, right=True)
    mask = (document[:, None] == document[None]) & (places[:, None] >= places[None])
    heads_first = [tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, key, value)]
    attended = scaled_dot_product_attention(*heads_first, attn_mask=mask, enable_gqa=True)
    return attended.squeeze(0).transpose(0, 1)


def make_inputs(num_rows, groups, *, dtype=torch.float64, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    heads = (HEADS, groups, groups)
    return [
        torch.randn(num_rows * SEQ_LENGTH, n, SIZE, generator=generator, dtype=dtype)
        .to(device)
        .requires_grad_()
        for n in heads
    ]


@st.composite
def rows_of_bounds(draw):
    inner = st.lists(st.integers(1, SEQ_LENGTH - 1), unique=True, max_size=6).map(sorted)
    rows = draw(st.lists(inner, min_size=1, max_size=3))
    return torch.tensor([[0, *row, *[SEQ_LENGTH] * (7 - len(row))] for row in rows])


@settings(max_examples=20, deadline=None)
@given(cu_seqlens=rows_of_bounds(), groups=st.sampled_from([1, 2, 4]))
def test_documents_attend_to_themselves_alone(cu_seqlens, groups):
    segments = row_segments(cu_seqlens, SEQ_LENGTH, "cpu")
    inputs = make_inputs(len(cu_seqlens), groups)
    found = attend_documents(*inputs, segments)
    expected = dense(*inputs, segments.cu_seqlens_q)
    torch.testing.assert_close(found, expected)
    weights = torch.randn_like(found)
    gradients = torch.autograd.grad((found * weights).sum(), inputs)
    references = torch.autograd.grad((expected * weights).sum(), inputs)
    for gradient, reference in zip(gradients, references, strict=True):
        torch.testing.assert_close(gradient, reference)


@settings(max_examples=20, deadline=None)
@given(cu_seqlens=rows_of_bounds(), size=st.sampled_from([2, 3]))
def test_ranks_that_share_rows_attend_to_whole_documents(cu_seqlens, size):
    inputs = make_inputs(len(cu_seqlens), 2)
    expected = dense(*inputs, row_segments(cu_seqlens, SEQ_LENGTH, "cpu").cu_seqlens_q)
    query, key, value = inputs
    for rank in range(size):
        share = RowShare(rank, size)
        own = row_segments(cu_seqlens, SEQ_LENGTH, "cpu", share)
        queries, wanted = (
            share.take(each.unflatten(0, (-1, SEQ_LENGTH))).flatten(0, 1)
            for each in (query, expected)
        )
        torch.testing.assert_close(attend_documents(queries, key, value, own), wanted)
        # What flash attention is given: a piece's queries are the last of its keys.
        assert own.cu_seqlens_q[-1] == len(queries)
        lengths = [length for length in own.cu_seqlens_kv.diff().tolist() if length]
        ends = [int(keys[-1]) for keys in own.key_places.split(lengths)]
        assert ends == [piece.key_stop - 1 for piece in own.pieces]
        assert max(lengths) <= own.max_seqlen_kv


def test_parts_of_all_ranks_make_whole_rows():
    rows = torch.arange(24).view(2, 12)
    parts = [RowShare(rank, 3).take(rows) for rank in range(3)]
    assert parts[0].tolist() == [[0, 1, 10, 11], [12, 13, 22, 23]]
    assert sorted(torch.cat(parts, 1)[0].tolist()) == list(range(12))
    assert RowShare().take(rows) is rows


@pytest.mark.skipif(torch.__version__ < "2.15", reason="cuDNN is left out altogether")
@pytest.mark.parametrize("size", [1, 2])
def test_cudnn_on_hopper_is_refused_only_where_rows_are_shared(size):
    """By torch's own check, for which an equal copy of the bounds is not enough."""
    segments = row_segments(torch.tensor([[0, 700, 2048]] * 2), 2048, "cpu", RowShare(0, size))
    query, key = (torch.empty(4096, n, 64, dtype=torch.bfloat16) for n in (32, 4))
    bounds = segments.cu_seqlens_q, segments.cu_seqlens_kv
    reasons = varlen._cudnn_rejection_reasons(query, key, key, *bounds, 2048, [-1, 0])
    found = [reason for reason in reasons if "CUDA" not in reason]
    assert ["same cu_seq tensor" in reason for reason in found] == [True] * (size - 1)
    assert kernel_name(query, key, key, segments).endswith("torch.bfloat16 on cpu")


def test_micro_batches_share_a_few_of_cudnns_graphs(monkeypatch):
    """torch keeps one for each number of documents and each longest document that it is given."""
    graphs, numbers, seq_length = set(), set(), 2048

    def keep_key(query, key, value, bounds, _, longest, *others, **options):
        graphs.add((len(bounds), longest))
        return query

    monkeypatch.setattr(kernels, "fits_kernel", lambda *_: True)
    monkeypatch.setattr(kernels, "why_not_cudnn", lambda *_: None)
    monkeypatch.setattr(kernels, "varlen_attn", keep_key)
    generator, query = torch.Generator().manual_seed(0), torch.empty(8 * seq_length, 1, 1)
    for step in range(120):
        shape = 8, 3 + step % 9
        inner = torch.randint(1, seq_length, shape, generator=generator).sort().values
        ends = torch.tensor([[seq_length]] * 8)
        segments = row_segments(torch.cat((0 * ends, inner, ends), 1), seq_length, "cpu")
        numbers.add(len(segments.pieces))
        attend_documents(query, query, query, segments)
    assert len(numbers) > 3
    assert graphs == {(33 + 32 * number, seq_length) for number in range(3)}


def test_a_torch_without_the_kernel_is_refused_at_once(monkeypatch):
    monkeypatch.setattr(kernels, "missing_kernel", lambda: "torch 2.10.0 has no varlen_attn with")
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, bf16=True)
    with pytest.raises(RuntimeError, match=r"torch 2\.10\.0 has no varlen_attn"):
        PackedAttention(config, 1, AttnMaskType.causal, "self")


@pytest.mark.parametrize("groups", [1, 4])
def test_flash_attention_agrees(gpu, groups):
    cu_seqlens = torch.tensor([[0, 5, 24, 24], [0, 1, 12, 24]])
    segments = row_segments(cu_seqlens, SEQ_LENGTH, gpu)
    inputs = make_inputs(2, groups, dtype=torch.bfloat16, device=gpu)
    found = attend_documents(*inputs, segments)
    wide = [tensor.detach().cpu().double() for tensor in inputs]
    torch.testing.assert_close(
        found.cpu().double(), dense(*wide, segments.cu_seqlens_q.cpu()), rtol=2e-2, atol=2e-2
    )


def test_no_mask_of_the_whole_row_at_8192_places():
    seq_length, document = 8192, 512
    bounds = torch.arange(0, seq_length + 1, document).unsqueeze(0)
    segments = row_segments(bounds, seq_length, "cpu")
    query = torch.randn(seq_length, 1, 8, requires_grad=True)
    with LargestTensor() as seen:
        attend_documents(query, query, query, segments).sum().backward()
    assert seen.num_elements >= query.numel()
    assert seen.num_elements < seq_length * document
