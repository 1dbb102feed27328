"""The teacher-guided loss inside the `Trainer` of Hugging Face transformers.

    vocag score aligned --teacher Qwen/Qwen2.5-Math-7B --seq-length 2048
    python examples/hf_trainer.py --data aligned --student TinyLlama/TinyLlama_v1.1 \
        --seq_length 2048 --learning_rate 8e-5 --per_device_train_batch_size 4 --max_steps 1000 \
        --output_dir runs/trainer                 # and any other option of TrainingArguments
    torchrun --nproc-per-node 8 examples/hf_trainer.py …

The Trainer keeps what it is good at: devices, mixed precision, checkpoints, logging, callbacks. Two
things are ours: rows instead of a tokenizer and a collator, and `compute_loss`.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformers import HfArgumentParser, Trainer, TrainingArguments

from pipeline.guidance import metric_values
from vocag import (
    AlignedRows,
    Reading,
    Rows,
    SelectionRule,
    StreamConfig,
    aggregate_teacher_losses,
    collate_rows,
    guided_loss,
    linear_cross_entropy,
    load_language_model,
    output_layer,
    packed_arguments,
    select_tokens,
)


@dataclass
class GuidedArguments:
    """What the Trainer does not know."""

    data: str = field(metadata={"help": "aligned dataset"})
    student: str = field(metadata={"help": "folder or repository"})
    stored_losses: str = field(default="", metadata={"help": 'what "vocag score" has stored'})
    seq_length: int = field(default=512, metadata={"help": "student tokens per row"})
    num_epochs: int = field(default=1, metadata={"help": "how often the data may be read"})
    keep_fraction: float = field(default=0.4, metadata={"help": "share of mapped tokens to keep"})


class GuidedTrainer(Trainer):
    """A Trainer whose loss counts the tokens that the teacher chooses."""

    def __init__(self, *, rows: AlignedRows, rule: SelectionRule, **kwargs: Any) -> None:
        """Train on `rows`; they come in the order of the run, so nothing may shuffle them."""
        super().__init__(train_dataset=rows, data_collator=collate, **kwargs)
        self.rule = rule
        self.rows = rows
        self.last_metrics: dict[str, float] = {}

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Return the mean loss over the kept tokens of one micro-batch."""
        batch = Rows(inputs["rows"], self.rows.layout)
        student = self.accelerator.unwrap_model(model)
        # Through `model`, which may be wrapped, and without labels: they are shifted already.
        output = model(
            input_ids=batch["input_ids"].long(),
            position_ids=batch["position_ids"].long(),
            use_cache=False,  # with a cache, documents of a row would see each other
            output_hidden_states=True,
            logits_to_keep=1,  # the logits of all places are never needed at once
            **packed_arguments(student, batch["position_ids"]),
        )
        losses = linear_cross_entropy(
            output.hidden_states[-1],
            output_layer(student),
            batch["labels"].long(),
            loss_mask=batch["loss_mask"],
        ).losses
        guidance = aggregate_teacher_losses(batch["teacher_losses"], batch["teacher_spans"], "max")
        selection = select_tokens(losses, guidance, loss_mask=batch["loss_mask"], rule=self.rule)
        result = guided_loss(losses, selection)
        self.last_metrics = metric_values(result.metrics)
        loss = result.loss_sum / result.num_tokens.clamp_min(1)
        return (loss, output) if return_outputs else loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log the last micro-batch's metrics, too: kept_fraction, teacher_loss and so on."""
        super().log({**logs, **self.last_metrics}, *args, **kwargs)


def collate(rows: Rows | Sequence[Rows]) -> dict[str, Tensor]:
    """Return a batch as the one tensor that it lies in; the Trainer moves it to the device."""
    return {"rows": collate_rows(rows).buffer}


def main(argv: Sequence[str] | None = None) -> None:
    """Train, and leave a folder that transformers loads."""
    parser = HfArgumentParser(
        (GuidedArguments, TrainingArguments)  # type: ignore[arg-type]  # its type fits no dataclass
    )
    guided, arguments = parser.parse_args_into_dataclasses(args=argv)
    rows = AlignedRows(
        StreamConfig(
            Reading(guided.data),
            seq_length=guided.seq_length,
            num_epochs=guided.num_epochs,
            seed=arguments.seed,
            stored_losses=guided.stored_losses,
        )
    )
    arguments.train_sampling_strategy = "sequential"
    arguments.remove_unused_columns = False
    trainer = GuidedTrainer(
        model=load_language_model(guided.student),
        args=arguments,
        rows=rows,
        rule=SelectionRule(keep_fraction=guided.keep_fraction, scope="row"),
    )
    trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
    trainer.save_model()


if __name__ == "__main__":
    main(sys.argv[1:])
