"""Datasets that a tiny teacher has scored, for tests to read and to damage."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from beam_jobs.score.command import main
from pipeline.dataset.score_files import list_scores
from pipeline.losses.cross_entropy import score_tokens
from pipeline.methods.method import Method
from pipeline.models.hf_models import hidden_states, load_language_model
from pipeline.models.output_layer import output_layer
from pipeline.packing.reading import Reading
from pipeline.scoring.teaching import Teaching
from pipeline.streaming import AlignedRows, Rows, StreamConfig
from pipeline.training.config import TrainConfig
from schemas.sidecar import ScoreManifest, ShardLosses, decode_sidecar
from tests.support.completions_server import MODEL, CompletionsServer
from tests.support.datasets import build_dataset, byte_level, make_texts
from tests.support.hf_folders import write_model
from tests.support.teaching import with_teaching

SEQ_LENGTH = 64
THREADS = torch.get_num_threads()
"""The jobs run in this process: another number of threads would also slow what follows."""


def write_world(root: Path) -> Path:
    """Write a dataset of 40 documents, most longer than a row, a teacher and a student."""
    build_dataset(root / "data", make_texts(40))
    write_model(root / "teacher", byte_level(480), seed=1)
    write_model(root / "student", byte_level(400), seed=2)
    return root


def train_config(root: Path, output: Path, **changes: Any) -> TrainConfig:
    """Return a run of `vocag train` on a world, at one learning rate and without weight decay."""
    steps = {"num_steps": 4, "warmup_steps": 0, "schedule": "constant", "learning_rate": 1e-3}
    sizes = {"seq_length": SEQ_LENGTH, "global_batch_size": 2, "micro_batch_size": 2}
    given = {**steps, **sizes, "weight_decay": 0.0, "method": Method("teacher"), **changes}
    data = Reading(str(root / "data"))
    return TrainConfig(
        data=data, student=str(root / "student"), output=output, **with_teaching(given)
    )


def score_arguments(root: Path, *more: str, seq_length: int | None = SEQ_LENGTH) -> list[str]:
    """Return the command line that scores the world's dataset with its untrained teacher."""
    lengths = [] if seq_length is None else ["--seq-length", str(seq_length)]
    # Not what is fastest here: stored losses are compared with those of training, in float32.
    dtype = [] if "--dtype" in more else ["--dtype", "float32"]
    fixed = ["--allow-untrained-teacher", "--threads", str(THREADS), *dtype]
    return [str(root / "data"), "--teacher", str(root / "teacher"), *lengths, *fixed, *more]


def served_arguments(root: Path, server: CompletionsServer, *more: str) -> list[str]:
    """Return the same where a server has the teacher."""
    quantization = [] if "--quantization" in more else ["--quantization", "none"]
    return [
        str(root / "data"), "--engine", "openai", "--endpoint", server.url, "--model", MODEL,
        "--dtype", "float32", "--seq-length", str(SEQ_LENGTH), "--allow-untrained-teacher",
        *quantization, *more,
    ]  # fmt: skip


def run_score(root: Path, *more: str, seq_length: int | None = SEQ_LENGTH) -> None:
    assert main(score_arguments(root, *more, seq_length=seq_length)) == 0


def sidecars(root: Path) -> dict[str, bytes]:
    """Return the bytes of everything that scoring wrote, by name."""
    return {path.name: path.read_bytes() for path in sorted((root / "data").glob("*teacher-*"))}


def scores_of(root: Path) -> ScoreManifest:
    """Return the only scores that there are."""
    (scores,) = list_scores(str(root / "data"))
    return scores.manifest


def read_sidecars(root: Path, scores: ScoreManifest | None = None) -> Iterator[ShardLosses]:
    """Yield what the only scores, or those given, hold of each shard."""
    for record in (scores or scores_of(root)).sidecars:
        yield decode_sidecar((root / "data" / record.file).read_bytes(), at=record.file)


def stored_rows(data: Path | str, where: str = "", *, losses: str = "teacher") -> AlignedRows:
    """Return a dataset's or a mixture's rows with a teacher's stored losses."""
    teaching = Teaching(stored_losses=losses)
    reading = Reading(str(data), where)
    return AlignedRows(StreamConfig(reading, seq_length=SEQ_LENGTH, teaching=teaching))


def online_losses(teacher: Path, batch: Rows) -> torch.Tensor:
    """Return the losses of a batch's teacher tokens as training computes them."""
    model = load_language_model(str(teacher))
    with torch.inference_mode():
        states = hidden_states(
            model, batch["teacher_input_ids"], position_ids=batch["teacher_position_ids"]
        )
        return score_tokens(
            states,
            output_layer(model),
            batch["teacher_input_ids"].long(),
            teacher_loss_mask=batch["teacher_position_ids"] > 0,
        )


def retrain(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.norm.weight.mul_(1.01)
    model.save_pretrained(folder)
