"""torch's kernel for documents of varying lengths: what it lacks, and where cuDNN is left out."""

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


def stand_in(cudnn_on_empty):
    """Return a kernel for the CPU, whose "cuDNN" calls a function where a document is empty."""
    calls = []

    def varlen_attn(q, k, v, bounds, _, max_q, max_k, *, scale=None, window_size, enable_gqa):
        by_cudnn = torch.backends.cuda.cudnn_sdp_enabled()
        calls.append(by_cudnn)
        lengths = bounds.diff().tolist()
        options = {"is_causal": True, "scale": scale, "enable_gqa": enable_gqa}
        with sdpa_kernel(SDPBackend.MATH):
            attended = [
                scaled_dot_product_attention(
                    *(each.transpose(0, 1) for each in document), **options
                )
                for document in zip(*(each.split(lengths) for each in (q, k, v)), strict=True)
                if len(document[0])
            ]
        attended = torch.cat(attended, 1).transpose(0, 1)
        return cudnn_on_empty(attended) if by_cudnn and 0 in lengths else attended

    varlen_attn.calls = calls
    return varlen_attn


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
    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    query, key = torch.randn(6, HEADS, 8), torch.randn(6, KEY_HEADS, 8)
    with torch.inference_mode():  # as when a teacher scores
        found = varlen.why_not_cudnn(query, key)
    assert found is None if reason is None else found.endswith(reason)
    bounds = torch.tensor([0, 2, 6], dtype=torch.int32)
    attended = varlen.attend_varlen(query, key, key, bounds, bounds, longest=6)
    alone = varlen.attend_varlen(query[2:], key[2:], key[2:], *[bounds[1:] - 2] * 2, longest=6)
    torch.testing.assert_close(attended[2:], alone)
    assert kernel.calls[-2:] == [reason is None] * 2


def test_a_torch_without_grouped_heads_is_named(monkeypatch, caplog):
    """The signature of 2.11."""

    def varlen_attn(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
        raise AssertionError("must not be called")

    assert varlen.missing_kernel() is None, "this torch has it"
    varlen.missing_kernel.cache_clear()
    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    message = varlen.missing_kernel()
    assert "has no varlen_attn with enable_gqa" in message
    assert "install torch>=2.12" in message
    assert [each.startswith(message) for each in caplog.messages] == [True]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_this_gpus_cudnn_takes_empty_documents_or_is_left_out():
    device = torch.device("cuda", 0)
    query, key = (torch.randn(128, n, 64, device=device) for n in (HEADS, KEY_HEADS))
    print(torch.backends.cudnn.version(), varlen.why_not_cudnn(query.bfloat16(), key.bfloat16()))
    lengths = [70, 0, 58, *[0] * 29]
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device=device)
    half = query.bfloat16(), key.bfloat16(), key.bfloat16()
    found = varlen.attend_varlen(*half, bounds, bounds, longest=128)
    wide = [each.cpu().float() for each in half]
    wanted = stand_in(None)(*wide, bounds.cpu(), None, 0, 0, window_size=None, enable_gqa=True)
    torch.testing.assert_close(found.cpu().float(), wanted, rtol=2e-2, atol=2e-2)
