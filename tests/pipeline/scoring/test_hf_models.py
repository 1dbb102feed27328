"""Models over packed rows see nothing of other documents."""

from itertools import pairwise

import pytest
import torch
from transformers import LlamaForCausalLM

from pipeline.guidance.cross_entropy import linear_cross_entropy
from pipeline.models.hf_models import hidden_states, load_language_model
from pipeline.models.output_layer import output_layer
from tests.support.datasets import byte_level
from tests.support.hf_folders import write_model

BOUNDS = torch.tensor([[0, 5, 11, 16, 16], [0, 3, 16, 16, 16]])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LlamaForCausalLM:
    return load_language_model(str(write_model(tmp_path_factory.mktemp("m"), byte_level(400))))


def _positions(bounds: torch.Tensor) -> torch.Tensor:
    return torch.stack([torch.cat([torch.arange(n) for n in row.diff()]) for row in bounds])


def test_packed_rows_equal_each_segment_alone(model: LlamaForCausalLM) -> None:
    input_ids = torch.randint(400, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        packed = hidden_states(model, input_ids, position_ids=_positions(BOUNDS))
        num_compared = 0
        for row, bounds in enumerate(BOUNDS.tolist()):
            for start, end in pairwise(bounds):
                if start == end:
                    continue
                alone = model.base_model(input_ids[row : row + 1, start:end]).last_hidden_state
                torch.testing.assert_close(packed[row, start:end], alone[0])
                num_compared += 1
    assert num_compared == 5


def test_chunked_losses_equal_the_model_s_own(model: LlamaForCausalLM) -> None:
    input_ids = torch.randint(400, (1, 16), generator=torch.Generator().manual_seed(2))
    bounds = torch.tensor([[0, 16]])
    hidden = hidden_states(model, input_ids, position_ids=_positions(bounds))
    labels = input_ids.roll(-1, 1)
    losses = linear_cross_entropy(hidden, output_layer(model), labels).losses
    logits = model(input_ids).logits
    own = torch.nn.functional.cross_entropy(logits[0], labels[0], reduction="none")
    torch.testing.assert_close(losses[0], own)
