"""torch's kernel for documents of varying lengths: what it lacks, and where cuDNN is left out."""

import inspect

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from pipeline.models import varlen

HEADS, KEY_HEADS = 4, 2


@pytest.fixture(autouse=True)
def asked_anew():
    """Let no answer stay that a stand-in gave."""
    yield
    varlen.missing_kernel.cache_clear()
    varlen._why_not_cudnn.cache_clear()


def in_turn(query, key, value, lengths, scale=None):
    """Attend within each document: an obvious twin."""
    documents = zip(*(each.split(lengths) for each in (query, key, value)), strict=True)
    with sdpa_kernel(SDPBackend.MATH):
        attended = [
            scaled_dot_product_attention(
                *(each.transpose(0, 1) for each in document),
                is_causal=True,
                scale=scale,
                enable_gqa=True,
            )
            for document in documents
            if len(document[0])
        ]
    return torch.cat(attended, 1).transpose(0, 1)


def stand_in(cudnn_on_empty):
    """Return a kernel for the CPU, whose "cuDNN" calls a function where a document is empty."""
    calls = []

    def varlen_attn(q, k, v, bounds, _, max_q, max_k, *, scale=None, window_size, enable_gqa):
        by_cudnn = torch.backends.cuda.cudnn_sdp_enabled()
        calls.append(by_cudnn)
        lengths = bounds.diff().tolist()
        attended = in_turn(q, k, v, lengths, scale=scale)
        return cudnn_on_empty(attended) if by_cudnn and 0 in lengths else attended

    varlen_attn.calls = calls
    return varlen_attn


def replace_kernel(monkeypatch, kernel):
    known = frozenset(inspect.signature(kernel).parameters)
    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    monkeypatch.setattr(varlen, "_KNOWN", known)
    monkeypatch.setattr(varlen, "_ASKED_FOR_GROUPS", "enable_gqa" in known)
    varlen.missing_kernel.cache_clear()


def refuse(_):
    raise RuntimeError("no engine\n  for empty documents")


@pytest.mark.skipif(torch.__version__ < "2.15", reason="cuDNN is left out altogether")
@pytest.mark.parametrize(
    ("on_empty", "reason"),
    [
        (lambda attended: attended, None),
        (lambda attended: attended * torch.nan, "gives other results if documents are empty"),
        (refuse, "no engine for empty documents"),
    ],
)
def test_cudnn_is_left_out_where_it_fails_on_empty_documents(monkeypatch, on_empty, reason):
    kernel = stand_in(on_empty)
    replace_kernel(monkeypatch, kernel)
    query, key = torch.randn(6, HEADS, 8), torch.randn(6, KEY_HEADS, 8)
    with torch.inference_mode():  # as when a teacher scores
        found = varlen.why_not_cudnn(query, key)
    assert found is None if reason is None else found.endswith(reason)
    bounds = torch.tensor([0, 2, 6], dtype=torch.int32)
    attended = varlen.attend_varlen(query, key, key, bounds, bounds, longest=6)
    alone = varlen.attend_varlen(query[2:], key[2:], key[2:], *[bounds[1:] - 2] * 2, longest=6)
    torch.testing.assert_close(attended[2:], alone)
    assert kernel.calls[-2:] == [reason is None] * 2


def test_a_kernel_that_takes_grouped_heads_unasked_is_asked_for_nothing(monkeypatch):
    """The signature of 2.11, whose flash attention groups heads by their numbers."""
    inner = stand_in(None)

    def varlen_attn(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
        options = {"scale": scale, "window_size": window_size, "enable_gqa": True}
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return inner(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, **options)

    replace_kernel(monkeypatch, varlen_attn)
    monkeypatch.setattr(varlen, "why_not_cudnn", lambda *_: "not tried")
    assert varlen.missing_kernel() is None
    query, key = torch.randn(6, HEADS, 8), torch.randn(6, KEY_HEADS, 8)
    bounds = torch.tensor([0, 2, 6], dtype=torch.int32)
    attended = varlen.attend_varlen(query, key, key, bounds, bounds, longest=6)
    torch.testing.assert_close(attended, in_turn(query, key, key, [2, 4]))


def test_a_torch_without_windows_is_named(monkeypatch, caplog):
    """The signature of 2.10."""

    def varlen_attn(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None):
        raise AssertionError("must not be called")

    replace_kernel(monkeypatch, varlen_attn)
    message = varlen.missing_kernel()
    assert "has no varlen_attn with scale, window_size" in message
    assert "install torch>=2.11" in message
    assert [each.startswith(message) for each in caplog.messages] == [True]


def test_this_gpus_cudnn_takes_empty_documents_or_is_left_out(gpu, monkeypatch):
    device = torch.device(gpu)
    if gpu == "cpu":
        replace_kernel(monkeypatch, stand_in(lambda attended: attended))
    query, key = (torch.randn(128, n, 64, device=device).bfloat16() for n in (HEADS, KEY_HEADS))
    print(torch.backends.cudnn.version(), varlen.why_not_cudnn(query, key))
    lengths = [70, 0, 58, *[0] * 29]
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device=device)
    found = varlen.attend_varlen(query, key, key, bounds, bounds, longest=128)
    wanted = in_turn(*(each.cpu().float() for each in (query, key, key)), lengths)
    torch.testing.assert_close(found.cpu().float(), wanted, rtol=2e-2, atol=2e-2)
