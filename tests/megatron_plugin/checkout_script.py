"""A script of the shape of Megatron-LM 0.19's pretrain_gpt.py, for the documented lines to change.

It has that file's imports from `megatron.training`, its functions' signatures and its order of
calls; none of its functions may be called any more once the lines are in.
"""

import time

_PROGRAM_START_TIME = time.time()

from megatron.core.enums import ModelType  # noqa: E402
from megatron.training import (  # noqa: E402
    get_args,
    inprocess_restart,
    pretrain,
    print_rank_0,
    set_startup_timestamps,
)
from megatron.training.argument_utils import (  # noqa: E402
    gpt_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import parse_and_validate_args  # noqa: E402


def add_own_arguments(parser):
    """Add an argument of the user's."""
    parser.add_argument_group("own").add_argument("--own-argument", default="none")
    return parser


def forward_step(data_iterator, model, return_schedule_plan=False):
    """Megatron-LM's own step, which knows no guidance."""
    raise AssertionError(f"the script's own forward_step was called: {get_args().own_argument}")


def train_valid_test_datasets_provider(train_val_test_num_samples, vp_stage=None):
    """Megatron-LM's own datasets."""
    raise AssertionError("the script's own datasets were built")


def get_embedding_ranks(pp_ranks):
    """Return the ranks that hold an embedding."""
    raise AssertionError("the script's own embedding ranks were asked for")


if __name__ == "__main__":
    _MAIN_ENTRY_TIME = time.time()
    print_rank_0(f"> started at {_MAIN_ENTRY_TIME}")
    set_startup_timestamps(program_start=_PROGRAM_START_TIME, main_entry=_MAIN_ENTRY_TIME)

    # Temporary for transition to core datasets
    setattr(train_valid_test_datasets_provider, "is_distributed", True)  # noqa: B010

    # Optionally enable inprocess restart on pretrain
    pretrain, store = inprocess_restart.maybe_wrap_for_inprocess_restart(pretrain)

    args = parse_and_validate_args(
        extra_args_provider=add_own_arguments,
        args_defaults={"tokenizer_type": "GPT2BPETokenizer"},
    )
    model_cfg = gpt_config_from_args(args)
    full_config = pretrain_cfg_container_from_args(args, model_cfg)
    pretrain(
        full_config,
        train_valid_test_datasets_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        store=store,
        get_embedding_ranks=get_embedding_ranks,
    )
