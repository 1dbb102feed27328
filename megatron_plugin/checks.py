"""What can't work is refused before anything is loaded, with the remedy."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any, Literal

from megatron_plugin.arguments import ArgumentError, TeacherOptions, VocagOptions
from megatron_plugin.bridge import Pairing
from megatron_plugin.models.shape import ModelShape
from pipeline.models.fit import require_room, require_tokenizer
from pipeline.packing.opening import OpenedRun
from pipeline.packing.rules import suggest_teacher_seq_length
from schemas.errors import ForeignTokenizerError
from schemas.manifest import Manifest

# Attribute of Megatron's arguments, the value that works, why no other does.
_UNSUPPORTED: tuple[tuple[str, Any, str], ...] = (
    ("num_experts", None, "only dense students are supported"),
    ("mtp_num_layers", None, "multi-token prediction has no teacher losses"),
    ("multi_latent_attention", False, "its attention doesn't keep to documents here"),
    ("hybrid_layer_pattern", None, "only transformer students are supported"),
    ("use_mup", False, "losses come from logits without a scale"),
    ("cross_entropy_loss_fusion", False, "the loss is one pass with the output layer anyway"),
    ("fp16_lm_cross_entropy", False, "tokens are chosen by fp32 losses"),
    ("defer_embedding_wgrad_compute", False, "the loss makes the output layer's gradient"),
    ("attention_dropout", 0, "the packed attention has no dropout"),
    ("rampup_batch_size", None, "steps of changing size would break the exact resume"),
    ("step_batch_size_schedule", None, "steps of changing size would break the exact resume"),
    ("iterations_to_skip", [], "every row is learned from in its turn"),
    ("full_validation", False, "validation reads --eval-iters steps"),
    ("multiple_validation_sets", False, "one --vocag-validation-data is read"),
    ("data_path", None, "--vocag-data is what is read"),
    ("mock_data", False, "--vocag-data is what is read"),
    ("sft", False, "rows come packed from --vocag-data"),
    ("cuda_graph_impl", "none", "documents have other bounds in every row"),
    ("inprocess_restart", False, "both worlds must restart; torchrun --max-restarts does"),
    ("use_megatron_fsdp", False, "weights are loaded into tensor-parallel slices"),
    ("use_torch_fsdp2", False, "weights are loaded into tensor-parallel slices"),
    ("ckpt_format", "torch_dist", "runs are resumed, and students exported, from this format only"),
    ("dataloader_type", "external", "the rows' order is the dataset's own"),
)


def require_student(args: Namespace, options: VocagOptions, manifest: Manifest) -> None:
    """Check Megatron's arguments against what the plugin can do and what the dataset holds.

    Raises:
        ArgumentError: names the argument, its value and the remedy.
    """
    if not args.calculate_per_token_loss:
        raise ArgumentError(
            "--calculate-per-token-loss is missing: without it Megatron averages each micro-batch "
            "by itself, and those with few kept tokens would weigh too much; add it"
        )
    for name, works, reason in _UNSUPPORTED:
        given = getattr(args, name)
        if given != works:
            option = "--" + name.replace("_", "-")
            raise ArgumentError(f"{option} {given} isn't supported ({reason}): leave it at {works}")
    if args.padded_vocab_size < manifest.student.vocab_size:
        raise ArgumentError(
            f"the student's vocabulary of {args.padded_vocab_size} is smaller than that of the "
            f"dataset's student tokenizer ({manifest.student.vocab_size}): raise --vocab-size, or "
            "align again with this student's tokenizer"
        )
    if args.eval_iters and options.validation_data is None:
        raise ArgumentError(
            f"--eval-iters {args.eval_iters} needs --vocag-validation-data: name an aligned "
            "dataset that isn't trained on, or pass --eval-iters 0"
        )


def num_microbatches(args: Namespace, prefix: Literal["", "eval_"] = "") -> int:
    """Return the micro-batches of a step on each replica of the student.

    Args:
        args: Megatron's, validated.
        prefix: of the arguments: a training step's, or a validation step's.
    """
    rows: int = getattr(args, f"{prefix}micro_batch_size") * args.data_parallel_size
    step: int = getattr(args, f"{prefix}global_batch_size")
    return step // rows


def require_service(args: Namespace, teacher: TeacherOptions) -> None:
    """Check that the teacher can serve every replica evenly, in whole micro-batches.

    Raises:
        ValueError: with the numbers.
    """
    parts = 1
    if teacher.world_size:
        pairing = Pairing(args.data_parallel_size, teacher.num_replicas)
        parts = len(pairing.teachers_of(0))
    elif args.virtual_pipeline_model_parallel_size is not None:
        raise ArgumentError(
            "a colocated teacher (--vocag-teacher-world-size 0) has no virtual pipeline stages: "
            "give it ranks of its own, or leave out the student's virtual pipeline"
        )
    steps = {"a training step": args.global_batch_size // args.data_parallel_size}
    if args.eval_iters:
        steps["a validation step"] = args.eval_global_batch_size // args.data_parallel_size
    for step, rows in steps.items():
        if rows % (parts * teacher.micro_batch_size):
            raise ArgumentError(
                f"{step} has {rows} rows per student replica, which {parts} teacher replicas can't "
                f"share in micro-batches of {teacher.micro_batch_size}: change "
                "--vocag-teacher-micro-batch-size, or the batch size to a multiple of "
                f"{parts * teacher.micro_batch_size} rows"
            )


def teacher_seq_length(options: VocagOptions, manifest: Manifest, seq_length: int) -> int:
    """Return the teacher tokens of a row, given or from the dataset."""
    return options.teacher_seq_length or suggest_teacher_seq_length(manifest, seq_length)


def require_teacher(shape: ModelShape, folder: Path, opened: OpenedRun, *, seq_length: int) -> None:
    """Check that a teacher fits the run's rows, of `seq_length` teacher tokens.

    Raises:
        ValueError: vocabulary or length don't fit.
        ForeignTokenizerError: it comes with another tokenizer.
    """
    require_room(
        opened.manifest.teacher,
        str(folder),
        side="teacher",
        vocab_size=shape.vocab_size,
        seq_length=seq_length,
        max_length=shape.max_position_embeddings,
        remedy="lower --seq-length or the teacher's",
    )
    shape.require_window(seq_length, what="teacher")
    require_tokenizer(folder, opened.dataset, side="teacher")


def require_same_tokenizers(path: str, held_out: Manifest, manifest: Manifest) -> None:
    """Check that validation data was made with the training data's tokenizers.

    Raises:
        ForeignTokenizerError: it was not.
    """
    try:
        held_out.require_tokenizers(
            student_sha256=manifest.student.sha256, teacher_sha256=manifest.teacher.sha256
        )
    except ForeignTokenizerError as error:
        raise ForeignTokenizerError(f"--vocag-validation-data {path}: {error}") from error
