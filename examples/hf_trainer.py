"""The teacher-guided loss inside the `Trainer` of Hugging Face transformers.

    vocag score aligned --teacher Qwen/Qwen2.5-Math-7B --seq-length 2048 --top-k 8
    python examples/hf_trainer.py --data aligned --student TinyLlama/TinyLlama_v1.1 \
        --method distill --stored_losses Qwen/Qwen2.5-Math-7B --seq_length 2048 \
        --learning_rate 8e-5 --per_device_train_batch_size 4 --max_steps 1000 \
        --output_dir runs/trainer      # and any other option of TrainingArguments
    torchrun --nproc-per-node 8 examples/hf_trainer.py …

What is ours is in `GuidedTrainer`; the rest of this file reads options.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from transformers import HfArgumentParser, TrainingArguments

from pipeline.command_line.failures import report
from vocag import GuidedTrainer, Method, StreamConfig, Teaching, load_language_model


@dataclass
class GuidedArguments:
    """What the Trainer does not know."""

    data: str = field(metadata={"help": "aligned dataset"})
    student: str = field(metadata={"help": "folder or repository"})
    method: str = field(metadata={"help": "how the loss is made, as in vocag train"})
    stored_losses: str | None = field(
        default=None, metadata={"help": "teacher that vocag score has stored, as in vocag train"}
    )
    seq_length: int = field(default=512, metadata={"help": "student tokens per row"})
    heldout: str | None = field(default=None, metadata={"help": "aligned dataset to measure"})


def main(argv: Sequence[str] | None = None) -> None:
    """Train, and leave a folder that transformers loads."""
    parser = HfArgumentParser(
        (GuidedArguments, TrainingArguments)  # type: ignore[arg-type]  # its type fits no dataclass
    )
    guided, args = parser.parse_args_into_dataclasses(args=argv)
    trainer = GuidedTrainer(
        load_language_model(guided.student),
        args,
        data=StreamConfig(
            guided.data,
            seq_length=guided.seq_length,
            seed=args.seed,
            teaching=Teaching(stored_losses=guided.stored_losses),
        ),
        method=Method(guided.method),
        heldout=guided.heldout,
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ValueError, OSError) as error:
        report("hf_trainer.py", error)
        raise SystemExit(2) from None
