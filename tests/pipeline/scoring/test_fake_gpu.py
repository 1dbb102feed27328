"""Scoring on a GPU that isn't there: where the host waits for it, so that it would run dry."""

from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.packing.opening import open_run
from pipeline.packing.rules import PackingRules
from pipeline.scoring.contexts import ContextRule
from pipeline.scoring.engines.transformers import Scorer
from pipeline.scoring.sidecars import ShardToScore
from pipeline.streaming import Reading
from schemas.distribution_rule import DistributionRule
from tests.support.datasets import build_dataset, make_texts
from tests.support.fake_gpu import FakeGpu

STORED = "Scorer.score.<locals>.store copies to the host"
# In a batch; a batch's results are read while the next one is under way.
LIKELIEST = {"_RunningTop.add nonzero": 1, "_RunningTop.tell_apart nonzero": 2, STORED: 3}
WAITS = {
    None: {STORED: 1},
    0: LIKELIEST,
    2: LIKELIEST
    | {
        "TailDraws.draw nonzero": 1,
        "TailDraws.draw _unique2": 1,
        "_Tail.of_blocks unique_consecutive": 2,
        "_Tail.of_blocks tolist": 4,
        STORED: 4,
    },
}


@pytest.mark.parametrize("draws", WAITS)
def test_the_host_waits_only_for_results(tmp_path, draws):
    build_dataset(tmp_path / "data", make_texts(4), num_shards=1)
    opened = open_run(Reading(str(tmp_path / "data")))
    rule = ContextRule.of_rows(PackingRules.of_dataset(opened.manifest, seq_length=64))
    shard = ShardToScore.open(opened.datasets[0].documents, 0, rule)
    tokens, pieces = shard.read_tokens(), shard.pieces
    asked = None
    if draws is not None:
        asked = DistributionRule(4, 1.0, vocab_size=470, log_probs="float16", draws=draws)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=480, num_attention_heads=4, **sizes)).bfloat16()
    batches = []
    with FakeGpu() as gpu, torch.no_grad():
        scorer = Scorer(gpu.move(model), rule, batch_tokens=256, distributions=asked)
        # Without its inference mode, in which fake tensors look for a driver.
        score = cast(Any, Scorer.score).__wrapped__
        found = score(scorer, tokens, pieces, advance=batches.append)
    assert np.isfinite(found.losses).mean() > 0.8
    assert len(batches) > 1
    assert gpu.waits == {place: count * len(batches) for place, count in WAITS[draws].items()}
