"""A script of the shape of Megatron-LM 0.19's pretrain_gpt.py, for the documented lines to change.

It has that file's imports from `megatron.training` and its last lines from where they are replaced;
none of its functions may be called any more once the lines are in.
"""

from megatron.core.enums import ModelType
from megatron.training import inprocess_restart, pretrain
from megatron.training.arguments import parse_and_validate_args


def add_own_arguments(parser):
    parser.add_argument_group("own").add_argument("--own-argument", default="none")
    return parser


def forward_step(data_iterator, model, return_schedule_plan=False):
    raise AssertionError("the script's own forward_step was called")


def train_valid_test_datasets_provider(train_val_test_num_samples, vp_stage=None):
    raise AssertionError("the script's own datasets were built")


if __name__ == "__main__":
    # Optionally enable inprocess restart on pretrain
    pretrain, store = inprocess_restart.maybe_wrap_for_inprocess_restart(pretrain)

    args = parse_and_validate_args(extra_args_provider=add_own_arguments)
    raise AssertionError(f"the script's own main was run: {ModelType}")
