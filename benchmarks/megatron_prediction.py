"""How fast a run is, and what memory a rank needs: arithmetic with stated efficiencies.

    python benchmarks/megatron_prediction.py --student S --teacher T --gpus 32 --gpu h100

Counted are products and attention, the bubbles of pipelines, and tensors that live long. Not
counted: sums of gradients and parameters over ranks (overlapped with the computation), reading
rows, checkpoints, validation. What is assumed is a field of `Plan`; benchmarks/gpu.py
measures.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Annotated, Literal

from megatron_plugin.models.shape import ModelShape, read_shape
from megatron_plugin.models.stage_cut import cut_layers, output_cost
from megatron_plugin.splits import Batch, balance, best_of_each, legal_splits
from pipeline.command_line.option_parsing import ModelSource, Option, parse_options

GpuName = Literal["a100", "h100", "h200", "b200"]
# Dense bf16 operations per second and GiB, as their maker says.
GPUS: dict[GpuName, tuple[float, float]] = {
    "a100": (312e12, 80),
    "h100": (989e12, 80),
    "h200": (989e12, 141),
    "b200": (2250e12, 180),
}
_GIB = 2**30
_WEIGHT_BYTES, _GRADIENT_BYTES, _OPTIMIZER_BYTES = 2, 4, 12  # bf16; fp32; fp32 copy and Adam's two
_CHUNK_BYTES = 3 * 4 * 2**25  # of logits, of either model, and what is made of them


@dataclass(frozen=True)
class Plan:
    """Predict tokens per second, hours and memory of a run with a teacher.

    Attributes:
        student: Hugging Face folder or repository; its config is read, not its weights.
        teacher: the same of the teacher.
        gpu: kind of GPU.
        gpus: GPUs of the job.
        teacher_gpus: of them for the teacher alone; 0: it is colocated.
        tokens: student tokens to train on.
        seq_length: tokens of a row.
        micro_batch_size: rows of a student's micro-batch.
        global_batch_size: rows of a step.
        teacher_micro_batch_size: rows of a teacher's micro-batch.
        tensor_parallel: ranks that share the student's layers.
        pipeline_parallel: stages of the student.
        teacher_tensor_parallel: ranks that share the teacher's layers, in its own world.
        teacher_pipeline_parallel: stages of the teacher, in its own world.
        teacher_tokens: per student token (vocag explore info shows it).
        document_tokens: mean length of a document's part of a row, which attention is counted by.
        distributed_optimizer: with --use-distributed-optimizer.
        student_efficiency: share of the GPU's peak that the student's step reaches; assumed.
        teacher_efficiency: share of it that the teacher's pass reaches; assumed.
        overhead_gib: GiB of a rank for CUDA, NCCL and what the allocator can't use; assumed.
    """

    student: ModelSource
    teacher: ModelSource
    gpu: GpuName = "h100"
    gpus: int = 32
    teacher_gpus: int = 0
    tokens: float = 15e9
    seq_length: int = 2048
    micro_batch_size: int = 8
    global_batch_size: int = 1024
    teacher_micro_batch_size: int = 8
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    teacher_tensor_parallel: int = 1
    teacher_pipeline_parallel: int = 1
    teacher_tokens: float = 1.0
    document_tokens: float = 1024.0
    distributed_optimizer: bool = False
    student_efficiency: Annotated[float, Option("SHARE")] = 0.35
    teacher_efficiency: Annotated[float, Option("SHARE")] = 0.5
    overhead_gib: float = 4.0

    @property
    def batch(self) -> Batch:
        """What a step's rows are divided into."""
        return Batch(
            self.global_batch_size,
            self.micro_batch_size,
            self.teacher_micro_batch_size,
            self.tensor_parallel * self.pipeline_parallel,
            prod(self._teacher_sizes) if self.teacher_gpus else 1,
        )

    @property
    def _teacher_sizes(self) -> tuple[int, int]:
        if self.teacher_gpus:
            return self.teacher_tensor_parallel, self.teacher_pipeline_parallel
        return self.tensor_parallel, self.pipeline_parallel


@dataclass(frozen=True)
class Prediction:
    """What a plan comes to.

    Attributes:
        student_seconds: of a step, the student's part.
        teacher_seconds: of a step, the teacher's part.
        step_seconds: of a step: the slower part, or both if the teacher is colocated.
        tokens_per_second: student tokens, of the whole job.
        hours: for all tokens.
        student_gib: memory of the fullest rank with the student, with a colocated teacher's part.
        teacher_gib: memory of a rank with the teacher.
    """

    student_seconds: float
    teacher_seconds: float
    step_seconds: float
    tokens_per_second: float
    hours: float
    student_gib: float
    teacher_gib: float


def predict(plan: Plan, student: ModelShape, teacher: ModelShape | None) -> Prediction:
    """Return what a plan comes to.

    Args:
        plan: of the run.
        student: its shape.
        teacher: its shape; None: no teacher runs in the job.

    Raises:
        ValueError: the ranks can't share the rows.
    """
    student_gpus = plan.gpus - plan.teacher_gpus
    refusal = plan.batch.refusal(student_gpus, plan.teacher_gpus)
    if refusal is not None:
        raise ValueError(refusal)
    tokens = plan.global_batch_size * plan.seq_length
    peak, _ = GPUS[plan.gpu]
    replicas = student_gpus // plan.batch.ranks_of_student
    steps = plan.global_batch_size // (replicas * plan.micro_batch_size)
    bubble = 1 + (plan.pipeline_parallel - 1) / steps
    rate = student_gpus * peak * plan.student_efficiency
    student_seconds = 3 * operations(plan, student) * tokens * bubble / rate
    teacher_seconds = 0.0
    if teacher is not None:
        scoring = plan.teacher_gpus or plan.gpus
        rate = scoring * peak * plan.teacher_efficiency / _pipeline_loss(plan, teacher)
        teacher_seconds = operations(plan, teacher) * tokens * plan.teacher_tokens / rate
    parts = (student_seconds, teacher_seconds)
    step_seconds = max(parts) if plan.teacher_gpus else sum(parts)
    teacher_gib = 0.0 if teacher is None else teacher_bytes(plan, teacher) / _GIB
    own_gib = plan.overhead_gib + student_bytes(plan, student, replicas) / _GIB
    return Prediction(
        *parts,
        step_seconds,
        tokens / step_seconds,
        plan.tokens / tokens * step_seconds / 3600,
        own_gib + (0 if plan.teacher_gpus else teacher_gib),
        plan.overhead_gib + teacher_gib,
    )


def operations(plan: Plan, shape: ModelShape) -> float:
    """Return the operations of a forward pass per token: of products, and of causal attention."""
    attended = plan.document_tokens / 2
    heads = shape.num_attention_heads * shape.head_size
    return 2 * shape.weights_per_token + 4 * shape.num_layers * heads * attended


def student_bytes(plan: Plan, shape: ModelShape, replicas: int) -> float:
    """Return the bytes of a student's rank: its part of the model, and of a micro-batch's pass."""
    part = shape.num_parameters / plan.batch.ranks_of_student
    optimizer = _OPTIMIZER_BYTES / (replicas if plan.distributed_optimizer else 1)
    model = part * (_WEIGHT_BYTES + _GRADIENT_BYTES + optimizer)
    tokens = plan.micro_batch_size * plan.seq_length
    # Of one micro-batch for each stage on its way, with its part of the layers: all layers of one.
    activations = shape.num_layers * activation_bytes(shape) / plan.tensor_parallel
    return model + tokens * activations + _CHUNK_BYTES


def activation_bytes(shape: ModelShape) -> int:
    """Return what a layer keeps of a token for its backward pass, in bf16, without recomputation.

    Two norms: input and output; queries, keys and values, queries and keys once more after they are
    rotated; what attention gives, twice (rows are put together again), with a normaliser of each
    head in fp32; of the MLP both halves and their product (Megatron's fused activation).
    """
    heads, groups = shape.num_attention_heads, shape.num_query_groups
    attention = shape.head_size * (4 * heads + 3 * groups)
    return 2 * (4 * shape.hidden_size + attention + 3 * shape.ffn_hidden_size) + 4 * heads


def teacher_bytes(plan: Plan, shape: ModelShape) -> float:
    """Return the bytes of a teacher's rank: its part of the weights, and of a forward pass."""
    tensor, pipeline = plan._teacher_sizes
    tokens = plan.teacher_micro_batch_size * plan.seq_length * plan.teacher_tokens
    # A layer's widest tensors at one time: the MLP's, and the residual stream's.
    passing = tokens * 2 * (3 * shape.ffn_hidden_size / tensor + 3 * shape.hidden_size)
    weights = _WEIGHT_BYTES * shape.num_parameters / (tensor * pipeline)
    return weights + passing + _CHUNK_BYTES


def _pipeline_loss(plan: Plan, shape: ModelShape) -> float:
    """Return how much longer the teacher's pipeline takes than its even share of the work."""
    tensor, stages = plan._teacher_sizes
    if stages == 1:
        return 1.0
    output = output_cost(shape)
    layers = cut_layers(shape.num_layers, stages, output)
    slowest = max(*layers[:-1], layers[-1] + output) * stages / (shape.num_layers + output)
    ranks = plan.teacher_gpus or plan.gpus
    rows = plan.global_batch_size * tensor * stages // ranks
    steps = max(1, rows // plan.teacher_micro_batch_size)
    return slowest * (1 + (stages - 1) / steps)


def describe(plan: Plan) -> str:
    """Return a plan's prediction, and the splits that would do, for people."""
    student, teacher = read_shape(plan.student), read_shape(plan.teacher)
    found = predict(plan, student, teacher)
    _, memory = GPUS[plan.gpu]
    where = f"{plan.teacher_gpus} for the teacher" if plan.teacher_gpus else "teacher colocated"
    lines = [
        f"{plan.gpus} × {plan.gpu}, {where}; {plan.global_batch_size} rows of {plan.seq_length}",
        f"step         {found.step_seconds:.2f} s (student {found.student_seconds:.2f}, teacher "
        f"{found.teacher_seconds:.2f})",
        f"speed        {found.tokens_per_second:,.0f} student tokens/s",
        f"all tokens   {found.hours:.1f} h for {plan.tokens / 1e9:g} B",
        f"memory       {found.student_gib:.0f} GiB of {memory:g} on a student's rank",
    ]
    if plan.teacher_gpus:
        lines.append(f"             {found.teacher_gib:.0f} GiB of {memory:g} on a teacher's rank")
    ratio = balance(student, teacher, plan.teacher_tokens)
    ratio *= plan.student_efficiency / plan.teacher_efficiency
    splits = legal_splits(plan.gpus, plan.batch, ratio)
    listed = ", ".join(map(str, best_of_each(splits, 4))) or "none"
    lines.append(f"splits       {listed} (student's + teacher's, share of colocated speed)")
    lines.append(
        f"assumed      {plan.student_efficiency:.0%} of peak for the student, "
        f"{plan.teacher_efficiency:.0%} for the teacher, {plan.overhead_gib:g} GiB overhead; "
        "communication not counted"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    print(describe(parse_options(Plan, prog="megatron_prediction.py")))
