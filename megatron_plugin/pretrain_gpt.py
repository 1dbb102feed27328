r"""Pretrain a student under a teacher's guidance, with Megatron's own trainer.

    torchrun --nproc-per-node 8 -m megatron_plugin.pretrain_gpt \
        --vocag-data aligned --vocag-student models/student \
        --vocag-teacher models/teacher --vocag-teacher-world-size 4 \
        --vocag-teacher-pipeline-model-parallel-size 4 \
        --seq-length 2048 --micro-batch-size 4 --global-batch-size 1024 \
        --train-iters 1000 --lr 8e-5 --calculate-per-token-loss --eval-iters 0 --bf16

`--help` lists all arguments; docs/guides/megatron.md explains them, and how to use a Megatron-LM
checkout's own `pretrain_gpt.py`.
"""

import logging
import os
import sys
from argparse import ArgumentParser
from pathlib import Path

from torch import distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from megatron_plugin.arguments import add_arguments, naming_arguments, read_options
from megatron_plugin.checks import require_split
from megatron_plugin.models.build import forget_engine_attention
from megatron_plugin.models.megatron_arguments import installed_arguments, model_arguments
from megatron_plugin.models.weight_sources import open_weights
from megatron_plugin.student.run_identity import read_checkpoint, saved_stream
from megatron_plugin.student.student_run import StudentRun
from megatron_plugin.teacher.world import serve
from megatron_plugin.upstream import (
    ModelType,
    add_megatron_arguments,
    dataset_utils,
    load_args_from_checkpoint,
    parse_and_validate_args,
    parse_args,
    pretrain,
)
from megatron_plugin.worlds import enter_world
from pipeline.packing.opening import open_run

logger = logging.getLogger(__name__)


@record
def main() -> None:
    """Run one rank of the job."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    run = enter()
    args = parse_and_validate_args(
        extra_args_provider=add_arguments, args_defaults=run.argument_defaults
    )
    config = run.configure(args)
    with run:
        pretrain(
            config, run.datasets, ModelType.encoder_or_decoder, run.forward_step, store=run.store
        )
    dist.destroy_process_group()


def enter() -> StudentRun:
    """Join this rank's world; call it before Megatron parses its arguments.

    Teacher ranks serve the student, then exit. Student ranks' `sys.argv` gets arguments for the
    student's model and missing packages, before the user's own. ArgumentError for impossible
    options; DatasetError for an unfinished dataset.
    """
    skip_missing_makefile()
    forget_engine_attention()
    options = read_options(sys.argv[1:])
    if options is None:
        print_help()
        sys.exit(0)
    # Arguments of a user's own script are unknown here; the student's ranks check them.
    parsed = parse_args(extra_args_provider=add_arguments, ignore_unknown_args=True)
    checkpoint = read_checkpoint(parsed)
    if parsed.use_checkpoint_args:  # as Megatron does, for the teacher's ranks, too
        for source in ("pretrained_checkpoint", "load"):
            load_args_from_checkpoint(parsed, load_arg=source)
    parsed.seq_length = parsed.seq_length or parsed.encoder_seq_length  # as Megatron's checks do
    with naming_arguments():
        opened = open_run(options.data, saved_stream(checkpoint), seed=parsed.seed, max_epochs=None)
    world = enter_world(options.teacher.world_size)
    if options.teacher.world_size:
        require_split(parsed, options, opened.manifest, num_ranks=world.job_size)
    derived = installed_arguments()
    if options.student is not None:
        derived += model_arguments(open_weights(options.student).shape)
    sys.argv[1:1] = derived
    if world.role == "teacher":
        serve(options, world, opened, parsed)
        sys.exit(0)
    return StudentRun(options, world, opened, checkpoint)


def print_help() -> None:
    """Print all arguments, Megatron's first.

    Megatron 0.19's own --help fails on a bare "%".
    """
    parser = add_megatron_arguments(ArgumentParser("pretrain_gpt", allow_abbrev=False))
    for action in parser._actions:
        if action.help and "%(" not in action.help:
            action.help = action.help.replace("%%", "%").replace("%", "%%")
    add_arguments(parser).print_help()


def skip_missing_makefile() -> None:
    """Let Megatron 0.19 start without `make`: its wheel has compiled helpers, but no Makefile."""
    if not Path(dataset_utils.__file__).with_name("Makefile").exists():
        dataset_utils.compile_helpers = lambda: None


if __name__ == "__main__":
    # Megatron asks for it where tensor-parallel ranks overlap work on GPUs before Blackwell.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    main()
