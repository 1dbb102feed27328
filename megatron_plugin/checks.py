"""Refuse impossible settings, with the remedy, before anything is loaded."""

from argparse import ArgumentParser, Namespace
from math import prod
from typing import Any, Literal

from megatron_plugin.arguments import ArgumentError, TeacherOptions, VocagOptions
from megatron_plugin.models.weight_sources import open_weights
from megatron_plugin.splits import Batch, balance, best_of_each, legal_splits
from megatron_plugin.upstream import HAVE_APEX_OR_TE, add_megatron_arguments
from pipeline.command_line.failures import hinted
from pipeline.models.fit import require_room
from pipeline.packing.opening import OpenedRun
from pipeline.packing.rules import suggest_teacher_seq_length
from schemas.errors import ForeignTokenizerError
from schemas.manifest import Manifest

# Attribute of Megatron's arguments, the only supported value, the reason.
_UNSUPPORTED: tuple[tuple[str, Any, str], ...] = (
    ("num_experts", None, "only dense students are supported"),
    ("mtp_num_layers", None, "multi-token prediction has no teacher losses"),
    ("multi_latent_attention", False, "its attention doesn't keep to documents here"),
    ("hybrid_layer_pattern", None, "only transformer students are supported"),
    ("experimental_attention_variant", None, "its attention doesn't keep to documents here"),
    ("spec", None, "layers are made for packed documents"),
    ("use_mup", False, "losses come from logits without a scale"),
    ("cross_entropy_loss_fusion", False, "the loss is one pass with the output layer anyway"),
    ("fp8_output_proj", False, "the loss is one pass with the output layer"),
    ("fp16_lm_cross_entropy", False, "tokens are chosen by fp32 losses"),
    ("defer_embedding_wgrad_compute", False, "the loss makes the output layer's gradient"),
    ("attention_dropout", 0, "the packed attention has no dropout"),
    ("qk_clip", False, "torch's attention doesn't tell its largest logit"),
    ("log_max_attention_logit", False, "torch's attention doesn't tell its largest logit"),
    ("rampup_batch_size", None, "steps of changing size would break the exact resume"),
    ("step_batch_size_schedule", None, "steps of changing size would break the exact resume"),
    ("result_rejected_tracker_filename", None, "every row is learned from in its turn"),
    ("iterations_to_skip", [], "every row is learned from in its turn"),
    ("full_validation", False, "validation reads --eval-iters steps"),
    ("multiple_validation_sets", False, "one --vocag-validation-data is read"),
    ("data_path", None, "--vocag-data is what is read"),
    ("mock_data", False, "--vocag-data is what is read"),
    ("perform_rl_step", False, "--vocag-data is what is read"),
    ("sft", False, "rows come packed from --vocag-data"),
    ("cuda_graph_impl", "none", "documents have other bounds in every row"),
    ("inprocess_restart", False, "both worlds must restart; torchrun --max-restarts does"),
    ("use_megatron_fsdp", False, "weights are loaded into tensor-parallel slices"),
    ("use_torch_fsdp2", False, "weights are loaded into tensor-parallel slices"),
    ("init_model_with_meta_device", False, "the loaded weights would be lost"),
    ("ckpt_format", "torch_dist", "runs are resumed, and students exported, from this format only"),
    ("dataloader_type", "external", "the rows' order is the dataset's own"),
    ("window_size", None, "documents are attended to as a whole"),
    ("softmax_type", "vanilla", "torch's attention has no other"),
    ("layernorm_zero_centered_gamma", False, "norms are loaded and exported as they are"),
    ("rotary_seq_len_interpolation_factor", None, "vocag export would lose it"),
    ("cp_comm_type", ["p2p"], "ranks that share rows gather their keys and values"),
    ("check_for_spiky_loss", False, "only Megatron's own loss function does it"),
    ("logits_save_dir", None, "only Megatron's own loss function does it"),
    ("logits_load_dir", None, "only Megatron's own loss function does it"),
    ("non_persistent_save_interval", None, "runs continue from what --save-interval saves"),
    ("non_persistent_ckpt_type", None, "runs continue from what --save-interval saves"),
    ("ckpt_step", None, "latest_checkpointed_iteration.txt names the checkpoint that is continued"),
)
# Megatron's data arguments that are read; the others would have no effect.
_DATA_GROUP = "data and dataloader"
_READ_OF_DATA = ("seq_length", "encoder_seq_length", "num_workers", "data_path", "mock_data")
_NO_MASK = "create_attention_mask_in_dataloader"  # no mask is made
_LISTED_SPLITS = 4


def require_student(args: Namespace, options: VocagOptions) -> None:
    """Raise ArgumentError for unsupported arguments of Megatron."""
    if not args.calculate_per_token_loss:
        error = ArgumentError(
            "--calculate-per-token-loss is missing: without it Megatron averages each micro-batch "
            "on its own, and those with few kept tokens would weigh too much; add it"
        )
        raise hinted(error, "--calculate-per-token-loss")
    _require_defaults(args)
    _require_vocabulary(args)
    _require_resumable(args)
    if args.eval_iters and options.validation_data is None:
        error = ArgumentError(
            f"--eval-iters {args.eval_iters} needs --vocag-validation-data: name an aligned "
            "dataset that isn't trained on, or pass --eval-iters 0"
        )
        raise hinted(error, "--eval-iters 0")


def _require_defaults(args: Namespace) -> None:
    parser = add_megatron_arguments(ArgumentParser(allow_abbrev=False))
    options = {action.dest: action.option_strings[0] for action in parser._actions}
    (data,) = (group for group in parser._action_groups if group.title == _DATA_GROUP)
    unread = [
        (action.dest, action.default, "--vocag-data is what is read")
        for action in data._group_actions
        if action.dest not in (*_READ_OF_DATA, _NO_MASK)
    ]
    if args.transformer_impl == "local":
        reason = "only Transformer Engine's layers compute in it"
        unread += [("fp8", None, reason), ("fp4", None, reason)]
    if args.tensor_parallel_num_weight_shards is not None:
        ranks, reason = args.tensor_model_parallel_size, "its ranks aren't counted as replicas here"
        unread.append(("tensor_parallel_num_weight_shards", ranks, reason))
    for name, works, reason in (*_UNSUPPORTED, *unread):
        given = getattr(args, name)
        if given != works:
            remedy = f"leave it at {works}" if works else "leave it out"
            option = options[name]
            error = ArgumentError(f"{option} {given} isn't supported ({reason}): {remedy}")
            raise hinted(error, f"leave out {option}")


def _require_vocabulary(args: Namespace) -> None:
    """Refuse a padded vocabulary that is smaller, such as that of a tokenizer for Megatron."""
    padded, tokens = args.padded_vocab_size, args.vocab_size
    if padded is not None and tokens is not None and padded < tokens:
        multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
        fitting = -(-tokens // multiple) * multiple
        error = ArgumentError(
            f"--padded-vocab-size {padded}, given or made of --tokenizer-type "
            f"{args.tokenizer_type}, is less than --vocab-size {tokens}, which is the student's or "
            f"the data's unless given: pass --padded-vocab-size {fitting}"
        )
        raise hinted(error, f"--padded-vocab-size {fitting}")


def _require_resumable(args: Namespace) -> None:
    """Refuse checkpoints that Megatron 0.19 fails to load, with a bare AssertionError."""
    saves = args.save and not args.no_save_optim
    loads = args.load and not (args.no_load_optim or args.finetune)
    if args.use_distributed_optimizer and (saves or loads) and not HAVE_APEX_OR_TE:
        error = ArgumentError(
            f"--use-distributed-optimizer can't be used with {'--save' if saves else '--load'} "
            "here: without Transformer Engine or Apex, Megatron can't load what such an optimizer "
            "saves. Install one of them, or leave out --use-distributed-optimizer and "
            "--overlap-param-gather (each rank then holds the whole optimizer: 18 bytes per "
            "parameter of its part of the student, gradients included)"
        )
        raise hinted(error, "leave out --use-distributed-optimizer --overlap-param-gather")


def require_layout(args: Namespace, checkpoint: Namespace | None) -> None:
    """Raise ArgumentError if a checkpoint's optimizer can't continue in these parallel sizes."""
    if (
        checkpoint is None
        or not checkpoint.use_distributed_optimizer
        or checkpoint.dist_ckpt_optim_fully_reshardable
        or args.no_load_optim
    ):
        return
    for kind in ("tensor", "pipeline"):
        name = f"{kind}_model_parallel_size"
        was, now = getattr(checkpoint, name), getattr(args, name)
        if was != now:
            option = "--" + name.replace("_", "-")
            error = ArgumentError(
                f"{args.load} was saved at {option} {was}, this run has {now}: its distributed "
                f"optimizer was saved without --dist-ckpt-optim-fully-reshardable, so these sizes "
                f"can't change. Use {option} {was} again (a checkpoint that this saves with "
                "--dist-ckpt-optim-fully-reshardable continues in any layout)"
            )
            raise hinted(error, f"{option} {was}")


def require_micro_batch(
    args: Namespace, options: VocagOptions, checkpoint: Namespace | None
) -> None:
    """Raise ArgumentError if a resumed run's tokens would compete in other micro-batches."""
    method = options.method
    if checkpoint is None or method.scope != "microbatch" or not options.kind.chooses_by(method):
        return
    was, now = checkpoint.micro_batch_size, args.micro_batch_size
    if was != now:
        error = ArgumentError(
            f"{args.load} was saved at --micro-batch-size {was}, this run has {now}: tokens "
            f"compete within micro-batches, so use {was} again, or add --finetune to start a new "
            "run from its weights"
        )
        raise hinted(error, f"--micro-batch-size {was}")


def require_schedule(args: Namespace, checkpoint: Namespace | None) -> None:
    """Raise ArgumentError if a resumed run's length changes unasked."""
    may_change = args.override_opt_param_scheduler or args.use_checkpoint_opt_param_scheduler
    if checkpoint is None or args.no_load_optim or may_change:
        return
    steps = num_steps(args)
    if steps != checkpoint.train_iters:
        error = ArgumentError(
            f"{args.load} was saved at --train-iters {checkpoint.train_iters}, this run has "
            f"{steps}: add --override-opt-param-scheduler if its learning rates shall "
            "follow the new length, or --use-checkpoint-opt-param-scheduler to keep the old one's"
        )
        raise hinted(error, "--override-opt-param-scheduler")


def num_steps(args: Namespace) -> int:
    """Return the whole steps of a run; Megatron counts those of --train-samples later."""
    steps: int = args.train_iters or (args.train_samples or 0) // args.global_batch_size
    return steps


def num_microbatches(args: Namespace, prefix: Literal["", "eval_"] = "") -> int:
    """Return a student replica's micro-batches per step."""
    rows: int = getattr(args, f"{prefix}micro_batch_size") * args.data_parallel_size
    step: int = getattr(args, f"{prefix}global_batch_size")
    return step // rows


def ranks_of_student(args: Namespace) -> int:
    """Return the ranks that share one copy of the student."""
    kinds = ("tensor_model", "pipeline_model", "context")
    ranks: int = prod(getattr(args, f"{kind}_parallel_size") for kind in kinds)
    return ranks


def require_service(args: Namespace, teacher: TeacherOptions) -> None:
    """Raise ValueError unless the teacher serves all replicas evenly, in whole micro-batches."""
    if not teacher.world_size and args.virtual_pipeline_model_parallel_size is not None:
        error = ArgumentError(
            "a colocated teacher (--vocag-teacher-world-size 0) has no virtual pipeline stages: "
            "give it ranks of its own, or leave out the student's virtual pipeline"
        )
        raise hinted(error, f"--vocag-teacher-world-size {teacher.ranks_of_replica}")
    sizes = {"a training step": (args.global_batch_size, args.micro_batch_size)}
    if args.eval_iters:
        sizes["a validation step"] = (args.eval_global_batch_size, args.eval_micro_batch_size)
    for step, (rows, micro_batch_size) in sizes.items():
        batch = Batch(rows, micro_batch_size, teacher.micro_batch_size, what=step)
        teachers = teacher.num_replicas if teacher.world_size else 0
        refusal = batch.refusal(args.data_parallel_size, teachers)
        if refusal is not None:
            fitting = batch.fitting_rows(args.data_parallel_size, teachers)
            is_training = step != "a validation step"
            option = "--global-batch-size" if is_training else "--eval-global-batch-size"
            raise _refused(refusal, option, fitting)


def require_split(
    args: Namespace, options: VocagOptions, manifest: Manifest, *, num_ranks: int
) -> None:
    """Raise ArgumentError, with alternatives, unless the two worlds can share a step's rows."""
    teacher, rows, micro = options.teacher, args.global_batch_size, args.micro_batch_size
    of_student, student_ranks = ranks_of_student(args), num_ranks - teacher.world_size
    if not rows or not micro or student_ranks % of_student:
        return  # Megatron reports it
    batch = Batch(rows, micro, teacher.micro_batch_size, of_student, teacher.ranks_of_replica)
    refusal = batch.refusal(student_ranks, teacher.world_size)
    if refusal is None:
        return
    fitting = batch.fitting_rows(student_ranks, teacher.world_size)
    if fitting:
        refusal += f". --global-batch-size {' or '.join(map(str, fitting))} fits this split"
    if options.student is not None:
        tokens = manifest.totals["num_teacher_tokens"] / manifest.totals["num_student_tokens"]
        assert options.teaching.teacher is not None
        models = options.student, options.teaching.teacher
        student, master = (open_weights(name).shape for name in models)
        splits = legal_splits(num_ranks, batch, balance(student, master, tokens))
        listed = ", ".join(map(str, best_of_each(splits, _LISTED_SPLITS)))
        refusal += (
            f". Splits of {num_ranks} ranks that fit {rows} rows, student's + teacher's (share of "
            f"colocated models' speed, by arithmetic): {listed or 'none'}"
        )
    raise _refused(refusal, "--global-batch-size", fitting)


def _refused(refusal: str, option: str, fitting: list[int]) -> ArgumentError:
    error = ArgumentError(refusal)
    return hinted(error, f"{option} {fitting[0]}") if fitting else error


def teacher_seq_length(options: VocagOptions, manifest: Manifest, seq_length: int) -> int:
    """Return a row's teacher tokens, given or from the dataset."""
    if options.teacher_seq_length is None:
        return suggest_teacher_seq_length(manifest, seq_length)
    return options.teacher_seq_length


def require_rows(
    name: str | None,
    opened: OpenedRun,
    *,
    vocab_size: int,
    seq_length: int = 0,
    max_length: int | None = None,
) -> None:
    """Raise ValueError unless a student, pretrained if named, has room for all tokens."""
    try:
        require_room(
            opened,
            name or "the student",
            side="student",
            vocab_size=vocab_size,
            seq_length=seq_length,
            max_length=max_length,
            remedy="lower --seq-length",
        )
    except ValueError as error:
        if name is not None:
            raise
        hint = f"--vocab-size {opened.manifest.student.vocab_size}"
        raise hinted(ArgumentError(str(error)), hint) from error


def require_same_tokenizers(path: str, held_out: Manifest, manifest: Manifest) -> None:
    """Raise ForeignTokenizerError unless the same tokenizers made both data."""
    try:
        held_out.require_tokenizers(
            student_sha256=manifest.student.sha256, teacher_sha256=manifest.teacher.sha256
        )
    except ForeignTokenizerError as error:
        raise ForeignTokenizerError(f"--vocag-validation-data {path}: {error}") from error
