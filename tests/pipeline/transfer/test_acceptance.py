"""Acceptance counts against transformers' assisted generation, and against drawn rounds."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM

from pipeline.tokenization import load_tokenizer
from pipeline.transfer.acceptance import Acceptance, TokenizedModel, measure_acceptance
from pipeline.transfer.acceptance_command import main as measure
from pipeline.transfer.command import main as transfer
from tests.support.datasets import byte_level, make_texts
from tests.support.hf_folders import make_llama

VOCABULARY = byte_level(400)
PROMPTS = [text.encode()[:40] for _, text in make_texts(4)]


def _similar(model: LlamaForCausalLM, noise: float) -> LlamaForCausalLM:
    other = make_llama(400)
    other.load_state_dict(model.state_dict())
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += noise * torch.randn_like(parameter)
    return other


def _assisted_passes(
    target: TokenizedModel, draft: TokenizedModel, prompt: bytes, num_tokens: int, **given
) -> int:
    """Count the target's passes in transformers' own assisted generation."""
    passes = 0

    def count(*_: object) -> None:
        nonlocal passes
        passes += 1

    settings = draft.model.generation_config
    settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = 5, "constant"
    settings.assistant_confidence_threshold = 0
    ids = torch.tensor([target.encode(prompt)])
    end = target.tokenizer.eos_token_id
    how = GenerationConfig(
        max_new_tokens=num_tokens, do_sample=False, eos_token_id=end, pad_token_id=end or 0
    )
    handle = target.model.register_forward_hook(count)
    target.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        generation_config=how,
        assistant_model=draft.model,
        **given,
    )
    handle.remove()
    return passes


def test_greedy_rounds_are_those_of_assisted_generation() -> None:
    target = TokenizedModel(make_llama(400, initializer_range=0.4), VOCABULARY)
    draft = TokenizedModel(_similar(target.model, 0.03), VOCABULARY)
    found = list(measure_acceptance(target, draft, PROMPTS, sampled=False, num_tokens=24))
    passes = [_assisted_passes(target, draft, prompt, 24) for prompt in PROMPTS]
    assert [one.rounds for one in found] == passes
    assert 0 < sum(found, Acceptance()).rate < 1
    alone = next(measure_acceptance(target, target, PROMPTS, sampled=False, num_tokens=24))
    assert (alone.rounds, alone.rate, alone.length) == (4, 1.0, 6.0)


def test_sampled_rounds_are_those_of_drawn_ones() -> None:
    """Speculative sampling as its paper has it, drawn many times, with slow loops."""
    target, draft = (
        TokenizedModel(make_llama(400, initializer_range=0.3), VOCABULARY),
        TokenizedModel(make_llama(400, seed=3, initializer_range=0.05), VOCABULARY),
    )
    torch.manual_seed(0)
    expected = sum(
        measure_acceptance(target, draft, PROMPTS[:1] * 60, sampled=True, num_tokens=6),
        Acceptance(),
    )
    generator, drawn = np.random.default_rng(0), Acceptance()
    for _ in range(150):
        drawn += _draw(target, draft, PROMPTS[0], 6, generator)
    assert expected.rate == pytest.approx(drawn.rate, abs=0.06)
    assert expected.length == pytest.approx(drawn.length, abs=0.12)


def _draw(
    target: TokenizedModel,
    draft: TokenizedModel,
    prompt: bytes,
    num_tokens: int,
    generator: np.random.Generator,
) -> Acceptance:
    ids, total, left = target.encode(prompt) or [], Acceptance(), num_tokens
    while left > 0:
        proposed, kept = min(5, left - 1), 0
        for _ in range(proposed):
            p, q = (_distribution(side, ids) for side in (target, draft))
            token = int(generator.choice(len(q), p=q))
            if generator.random() >= p[token] / q[token]:
                rest = np.maximum(p - q, 0)
                ids = [*ids, int(generator.choice(len(p), p=rest / rest.sum()))]
                break
            ids, kept = [*ids, token], kept + 1
        else:
            p = _distribution(target, ids)
            ids = [*ids, int(generator.choice(len(p), p=p))]
        total += Acceptance(1, proposed, kept)
        left -= kept + 1
    return total


def _distribution(side: TokenizedModel, ids: list[int]) -> np.ndarray:
    with torch.inference_mode():
        logits = side.model(input_ids=torch.tensor([ids])).logits[0, -1]
    found: np.ndarray = logits.double().softmax(-1).numpy()
    return found / found.sum()


@pytest.mark.long
@pytest.mark.slow
def test_a_transplanted_model_drafts_for_its_original(
    smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both commands on a real model: two vocabularies, against universal assisted generation."""
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(text for _, text in make_texts(40)), "utf-8")
    own = tmp_path / "new"
    own.mkdir()
    (own / "tokenizer.json").write_bytes(byte_level(2000).file_bytes)
    assert transfer(
        [str(smollm2), "--tokenizer", str(own), "--text", str(texts), "--output",
         str(tmp_path / "student")]
    ) == 0  # fmt: skip
    told = capsys.readouterr().out
    assert "bits per byte of 1 text that embeddings were made of" in told
    sides = [
        TokenizedModel(
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(),
            load_tokenizer(str(folder)),
        )
        for folder in (smollm2, tmp_path / "student")
    ]
    prompt = random.Random(0).choice(make_texts(3))[1].encode()[:60]
    found = next(measure_acceptance(*sides, [prompt], sampled=False, num_tokens=16))
    loaded = [AutoTokenizer.from_pretrained(f) for f in (smollm2, tmp_path / "student")]
    passes = _assisted_passes(
        *sides, prompt, 16, tokenizer=loaded[0], assistant_tokenizer=loaded[1]
    )
    assert found.rounds == pytest.approx(passes, abs=2)
    assert measure(
        [str(smollm2), str(tmp_path / "student"), "--text", str(texts), "--prompts", "1",
         "--tokens", "8", "--prompt-bytes", "60"]
    ) == 0  # fmt: skip
    assert "two vocabularies" in capsys.readouterr().out


def test_what_a_model_has_no_row_or_position_for_is_refused() -> None:
    model = make_llama(400, max_position_embeddings=48)
    target, few = TokenizedModel(model, VOCABULARY), TokenizedModel(make_llama(300), VOCABULARY)
    with pytest.raises(ValueError, match="was made for 48: lower --prompt-bytes or --tokens"):
        list(measure_acceptance(target, target, PROMPTS, sampled=False, num_tokens=48))
    with pytest.raises(ValueError, match=r": token 3\d\d exceeds the model's 300 rows: give it"):
        list(measure_acceptance(target, few, PROMPTS, sampled=False, num_tokens=2))


@pytest.mark.parametrize("sampled", [False, True])
def test_a_draft_whose_logits_are_not_numbers_is_refused(sampled: bool) -> None:
    """A greedy one was never accepted, without a word; a sampled one had a rate of nan."""
    model = make_llama(VOCABULARY.vocab_size)
    target = TokenizedModel(make_llama(VOCABULARY.vocab_size), VOCABULARY)
    model.model.norm.weight.data.fill_(float("nan"))
    draft = TokenizedModel(model, VOCABULARY)
    with pytest.raises(ValueError, match="its logits aren't numbers: it diverged in training"):
        list(measure_acceptance(target, draft, PROMPTS, sampled=sampled, num_tokens=4))


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize(
    "defaults",
    [
        {"do_sample": True, "temperature": 0.1, "top_p": 0.1, "top_k": 1},
        {"repetition_penalty": 5.0},
        {"num_beams": 3},
    ],
)
def test_generation_defaults_change_nothing(defaults: dict[str, float], sampled: bool) -> None:
    """An instruct model's: what is accepted is judged by the models' own distributions."""

    def written(**own: float) -> list[int]:
        model = make_llama(400, initializer_range=0.3)
        model.generation_config = GenerationConfig(**own)
        torch.manual_seed(0)
        one = TokenizedModel(model, VOCABULARY)
        return one.write(one.encode(PROMPTS[0]) or [], 12, sampled=sampled)

    assert written(**defaults) == written()
