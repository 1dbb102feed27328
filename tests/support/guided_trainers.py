"""GuidedTrainer on a scored world, with what tests set otherwise."""

from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, TrainingArguments

from pipeline.methods.method import Method
from pipeline.streaming import Reading, StreamConfig
from pipeline.training.hf_trainer import GuidedTrainer
from tests.support.scored_data import SEQ_LENGTH
from tests.support.teaching import with_teaching


def data_of(world: Path, **more: Any) -> StreamConfig:
    given = {"seq_length": SEQ_LENGTH, "stored_losses": "", **more}
    return StreamConfig(Reading(str(world / "data")), **with_teaching(given))


def arguments(output: Path, **more: Any) -> TrainingArguments:
    given = {
        **{"max_steps": 4, "per_device_train_batch_size": 2, "learning_rate": 1e-3},
        **{"logging_steps": 1, "save_steps": 2, "use_cpu": True, "report_to": "none"},
        **{"lr_scheduler_type": "constant", "weight_decay": 0.0, "disable_tqdm": True},
    }
    return TrainingArguments(str(output), **given | more)


def trainer_of(world: Path, output: Path, *, settings: dict[str, Any], **more: Any) -> Any:
    student = AutoModelForCausalLM.from_pretrained(world / "student")
    data = more.pop("data", data_of(world))
    given = {"method": Method("teacher"), **more}
    return GuidedTrainer(student, arguments(output, **settings), data=data, **given)


def logged(trainer: Any, name: str = "loss") -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]
