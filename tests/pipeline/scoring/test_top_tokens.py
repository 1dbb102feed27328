"""What a teacher expects at every position, as whole logits of one pass per piece give it."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.losses.loss_checks import NonFiniteLossError
from pipeline.scoring.contexts import ContextRule
from pipeline.scoring.engines.transformers import Scorer
from schemas.distribution_rule import DistributionRule
from schemas.stored_distributions import TopTokens, largest_error, stored_values
from tests.pipeline.scoring.test_scoring import VOCAB, data, model, rows, slow_positions
from tests.support.streaming_data import around

assert data, model  # fixtures


def require_top(top: TopTokens, expected: list[Any], rule: DistributionRule) -> None:
    values = stored_values(rule.log_probs)[0]
    codes = top.log_probs if rule.log_probs == "uint8" else top.log_probs.view(np.uint16)
    assert len(top.ids) == len(expected)
    num_cut = 0
    for ids, code, log_probs in zip(top.ids, codes, expected, strict=True):
        count = int((ids >= 0).sum())
        if log_probs is None:
            assert count == 0
            continue
        ranked = np.argsort(-log_probs[: rule.vocab_size], kind="stable")[: rule.top_k]
        masses = np.exp(log_probs[ranked]).cumsum()
        num_due = min(rule.top_k, int(np.searchsorted(masses, rule.top_mass)) + 1)
        assert count == num_due
        num_cut += count < rule.top_k
        assert ids[:count].tolist() == ranked[:count].tolist()
        off = np.abs(values[code[:count]] - log_probs[ranked[:count]])
        assert (off <= largest_error(log_probs[ranked[:count]], rule.log_probs) + 2e-5).all()
    assert bool(num_cut) == (rule.top_mass < 1)


@pytest.mark.parametrize("context", [rows(), rows(teacher=around())])
@pytest.mark.parametrize(
    ("rule", "batch_tokens"),
    [
        (DistributionRule(8, 1.0, VOCAB, "uint8"), 200),
        (DistributionRule(VOCAB - 1, 0.9, VOCAB - 1, "float16"), 4096),
        (DistributionRule(1, 1.0, 4 * VOCAB, "float16"), 1),
    ],
)
def test_every_position_has_the_likeliest_tokens_after_it(
    model: Any, data: Any, context: ContextRule, rule: DistributionRule, batch_tokens: int
) -> None:
    index, tokens = data
    pieces = context.pieces(index)
    scorer = Scorer(model, context, batch_tokens=batch_tokens, distributions=rule)
    scored = scorer.score(tokens, pieces)
    assert scored.top is not None
    expected = slow_positions(model, tokens, pieces, context)
    num_bare = sum(each is None for each in expected)
    assert num_bare == (0 if context.first_token_id is not None else len(pieces))
    require_top(scored.top, expected, rule)
    losses = Scorer(model, context, batch_tokens=batch_tokens).score(tokens, pieces)
    np.testing.assert_allclose(scored.losses, losses.losses, rtol=0, atol=2e-5)
    assert losses.top is None


def test_some_documents_leave_the_others_empty(model: Any, data: Any) -> None:
    index, tokens = data
    wanted = np.arange(len(index)) % 2 == 1
    rule = DistributionRule(4, 1.0, VOCAB, "uint8")
    pieces = rows().pieces(index).of_documents(wanted)
    top = Scorer(model, rows(), distributions=rule).score(tokens, pieces).top
    assert top is not None
    of_document = np.repeat(wanted, np.diff(tokens.position_starts))
    assert ((top.ids[:, 0] >= 0) == of_document).all()


def test_what_is_not_a_number_names_the_position(model: Any, data: Any) -> None:
    index, tokens = data
    with torch.no_grad():
        broken = type(model)(model.config)
        broken.load_state_dict(model.state_dict())
        broken.model.embed_tokens.weight[5] = torch.nan
    ids = np.where(tokens.input_ids == 5, 6, tokens.input_ids)
    ids[tokens.starts[4] - 1] = 5
    rule = DistributionRule(4, 1.0, VOCAB, "uint8")
    scorer = Scorer(broken, rows(), distributions=rule)
    with pytest.raises(
        NonFiniteLossError, match=r'expects after \d+ tokens of document "doc-3" is nan'
    ):
        scorer.score(replace(tokens, input_ids=ids), rows().pieces(index), names=index.document_id)
