"""What servers check of a draft, on pairs that differ in one thing each."""

import pytest

from pipeline.tokenization import Tokenizer
from pipeline.transfer.acceptance import TokenizedModel, judge_servers
from tests.support.datasets import byte_level, with_control_tokens
from tests.support.hf_folders import make_llama

VOCABULARY = byte_level(400)
PADDED = with_control_tokens(VOCABULARY, "[PAD400]")
OTHER = with_control_tokens(VOCABULARY, "<|tool|>")
UNLIKE = "token 400 is '[PAD400]' of the target, '<|tool|>' of the draft"


def _side(num_rows: int, tokenizer: Tokenizer = VOCABULARY) -> TokenizedModel:
    return TokenizedModel(make_llama(num_rows), tokenizer)


@pytest.mark.parametrize(
    ("target", "draft", "vllm", "llama"),
    [
        ((512,), (512,), "takes the draft", "takes the draft"),
        ((512,), (400,), "refuses the draft: the target has 512 rows, the draft 400 (", "takes"),
        ((640,), (400,), "refuses", "refuses the draft: the target has 640 rows, the draft 400, m"),
        ((512,), (512, OTHER), f"takes the draft by its rows alone, but {UNLIKE}", "refuses"),
        ((512,), (512, PADDED), "takes the draft", "takes the draft"),
        ((512,), (512, byte_level(350)), "takes the draft by its rows alone, but token", "refuses"),
    ],
)
def test_servers_take_drafts_with_the_same_tokens_in_as_many_rows(
    target: tuple, draft: tuple, vllm: str, llama: str
) -> None:
    found = list(judge_servers(_side(*target), _side(*draft)))
    for line, start in zip(found, (f"vLLM {vllm}", f"llama.cpp {llama}"), strict=True):
        assert line.startswith(start)
        if start.endswith(" takes the draft"):
            assert line == start


def test_a_draft_with_more_tokens_than_the_target_has_rows_gets_its_tokenizer() -> None:
    """`--rows-of` alone refuses a tokenizer with more tokens than that."""
    vllm, _ = judge_servers(_side(350, byte_level(350)), _side(400))
    assert "(vocag transfer with --tokenizer TARGET --rows-of TARGET makes" in vllm


def test_what_begins_a_text_counts_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = _side(512), _side(512, with_control_tokens(byte_level(400)))
    monkeypatch.setattr(draft.tokenizer, "bos_token_id", 7)
    monkeypatch.setattr(draft.tokenizer, "adds_bos", True)
    vllm, llama = judge_servers(target, draft)
    assert vllm == "vLLM takes the draft"
    assert llama.startswith("llama.cpp refuses the draft: texts begin and end with [")
    assert llama.endswith(" of the target, [7, None] of the draft")
