"""What a store of a teacher's distributions is worth, before anything is trained on it.

    python benchmarks/distributions.py aligned --teacher models/teacher --student models/student

For each way of storing: bytes a teacher token, and how far the gradient of all the student's
parameters is from that of the cross entropy with the teacher's whole distribution, relative to its
size, at four batch sizes. A bias stays as the batch grows; noise falls. Labels that start where a
teacher token starts are compared: there the whole distribution is known, and mapped if the student
has another vocabulary. Stored values are rounded as they are stored.
"""

import argparse
import time

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import log_softmax
from transformers import PreTrainedModel

from pipeline.distributions.mapping import map_batch
from pipeline.distributions.vocabulary_map import VocabularyMap
from pipeline.guidance.cross_entropy import linear_cross_entropy
from pipeline.guidance.distributions import distilled_loss
from pipeline.guidance.output_layer import OutputLayer
from pipeline.methods.hf_pass import student_states
from pipeline.methods.label_distributions import ask_entries
from pipeline.models.hf_models import hidden_states, load_language_model
from pipeline.models.output_layer import output_layer
from pipeline.streaming import AlignedRows, Rows, StreamConfig
from pipeline.streaming.next_tokens import vocabulary_map
from schemas.distribution_rule import DistributionRule
from schemas.distributions import stored_values, to_stored

WHOLE, LABEL = "the whole distribution", "the label alone"
SCHEMES = [(8, 0), (16, 0), (64, 0), (4, 4), (8, 4), (12, 6)]
_LOSS_AND_COUNT = 3


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dataset", help="aligned, of the tokenizers of both models")
    parser.add_argument("--teacher", required=True)
    parser.add_argument("--student", required=True, help="one that has learned something")
    parser.add_argument("--labels", type=int, default=4096, help="of the largest batch")
    parser.add_argument("--seq-length", type=int, default=256)
    parser.add_argument("--log-probs", choices=("uint8", "float16"), default="uint8")
    options = parser.parse_args()
    rows = AlignedRows(StreamConfig(options.dataset, seq_length=options.seq_length))
    tables = vocabulary_map(rows.dataset, rows.rules)
    teacher, student = (load_language_model(m) for m in (options.teacher, options.student))
    size, kind = rows.manifest.teacher.vocab_size, options.log_probs
    rules = [DistributionRule(k, 1.0, size, kind, draws) for k, draws in SCHEMES]
    measured = measure(rows, (teacher, student), tables, rules, options.labels)
    sizes = list(next(iter(measured.values())))
    print(f"{'stored':<50} bytes   error at {', '.join(f'{n:,}' for n in sizes)} labels")
    for name, errors in measured.items():
        of_rule = {rule.describe(): rule for rule in rules}.get(name)
        num_bytes = "-" if of_rule is None else f"{bytes_of(of_rule):.1f}"
        shown = "  ".join(f"{errors[size]:.3f}" for size in sizes)
        print(f"{name:<50} {num_bytes:>5}   {shown}")


def bytes_of(rule: DistributionRule) -> float:
    """Return what a teacher token takes with its loss."""
    return _LOSS_AND_COUNT + rule.top_k * rule.entry_bytes + rule.draws_bytes


def measure(
    rows: AlignedRows,
    models: tuple[PreTrainedModel, PreTrainedModel],
    tables: VocabularyMap,
    rules: list[DistributionRule],
    num_labels: int,
) -> dict[str, dict[int, float]]:
    """Return the relative error of each way by the number of labels."""
    student = models[1].requires_grad_(True)
    parameters = [p for p in student.parameters() if p.requires_grad]
    names = [WHOLE, LABEL, *(rule.describe() for rule in rules)]
    sums = {name: [torch.zeros_like(p) for p in parameters] for name in names}
    found: dict[str, dict[int, float]] = {name: {} for name in names[1:]}
    due = [num_labels // 8, num_labels // 4, num_labels // 2, num_labels]
    seen, start = 0, time.perf_counter()
    for position in range(len(rows)):
        losses, count = losses_of_row(rows.__getitems__([position]), models, tables, rules)
        for name, loss in zip(names, losses, strict=True):
            for total, own in zip(
                sums[name], torch.autograd.grad(loss, parameters, retain_graph=True), strict=True
            ):
                total += own
        seen += count
        while due and seen >= due[0]:
            size = due.pop(0)
            for name in found:
                found[name][size] = relative_error(sums[name], sums[WHOLE])
        print(f"{seen:,} labels, {time.perf_counter() - start:.0f} s", flush=True)
        if not due:
            return found
    raise SystemExit(f"the dataset has {seen} labels to compare, not {num_labels}: lower --labels")


def relative_error(found: list[Tensor], whole: list[Tensor]) -> float:
    """Return the norm of the difference by that of the whole."""
    pairs = list(zip(found, whole, strict=True))
    squares = (sum(float((a - b).square().sum()) for a, b in pairs),
               sum(float(b.square().sum()) for _, b in pairs))  # fmt: skip
    return float((squares[0] / squares[1]) ** 0.5)


def losses_of_row(
    batch: Rows,
    models: tuple[PreTrainedModel, PreTrainedModel],
    tables: VocabularyMap,
    rules: list[DistributionRule],
) -> tuple[list[Tensor], int]:
    """Return the losses of a row in the order of names, and how many labels they are over."""
    teacher, student = models
    with torch.no_grad():
        places = batch["teacher_position_ids"]
        states = hidden_states(teacher, batch["teacher_input_ids"], position_ids=places)
    given = states, output_layer(teacher), batch, tables
    hidden, layer = student_states(student, batch), output_layer(student)
    state = boundary_states(batch, tables)
    # A text's first label may be mapped with a space before it, by another table.
    chosen = (state >= 0) & (batch["position_ids"] > 0) & batch["loss_mask"].bool()
    whole = whole_distributions(states[0], output_layer(teacher), tables, state[chosen])
    _give_labels(whole, batch, chosen, state, stored_distributions(*given, rules[-1])[2], tables)
    own = log_softmax(layer.logits(hidden[chosen]), -1)
    losses = [-(whole * own[:, : whole.shape[1]]).sum()]
    labels = batch["labels"].long()
    losses.append(linear_cross_entropy(hidden, layer, labels, loss_mask=chosen).losses.sum())
    for rule in rules:
        ids, probs, moved = stored_distributions(*given, rule)
        scores = linear_cross_entropy(hidden, layer, labels, loss_mask=chosen, entry_ids=ids)
        found = distilled_loss(
            scores,
            ids,
            probs,
            moved=moved,
            loss_mask=chosen,
            weight=1.0,
            draws=rule.draws,
        )
        losses.append(found.loss_sum)
    return losses, int(chosen.sum())


def boundary_states(batch: Rows, tables: VocabularyMap) -> Tensor:
    """Return the teacher's place behind which each label at a boundary begins, int64; else -1.

    Read from the mapping itself: what an entry leaves over to a draw is the place's number.
    """
    shape = batch["teacher_input_ids"].shape
    numbers = (np.arange(shape[1], dtype=np.float32) + 1) / (2 * shape[1])
    known = int(np.flatnonzero(tables.tables.mapped[0] >= 0)[0])
    ids = np.broadcast_to(np.array([known, -1, known], np.int32), (*shape, 3)).copy()
    log_probs = np.broadcast_to(np.log1p(-numbers)[:, None], ids.shape).astype(np.float32)
    no_losses = np.full(shape, np.float32(np.nan))
    found, masses, _ = map_batch(batch, ids, log_probs, tables, no_losses, draws=1)
    state = np.rint(masses[..., 2] * 2 * shape[1]).astype(np.int64) - 1
    return torch.from_numpy(np.where(found[..., 2] >= 0, state, -1))


@torch.no_grad()
def whole_distributions(
    states: Tensor, layer: OutputLayer, tables: VocabularyMap, wanted: Tensor
) -> Tensor:
    """Return the whole mapped distributions behind some places, fp32 [n, student's tokens]."""
    probs = layer.logits(states[wanted]).softmax(-1)
    to = torch.from_numpy(tables.tables.mapped[0]).long()
    probs, is_known = probs[:, : len(to)], to >= 0
    size = len(tables.tables.student_starts) - 1
    return probs.new_zeros(len(wanted), size).index_add_(1, to[is_known], probs[:, is_known])


def _give_labels(
    whole: Tensor, batch: Rows, chosen: Tensor, state: Tensor, moved: Tensor, tables: VocabularyMap
) -> None:
    """Give labels what the mapping gives them of the mass of the text's own next token."""
    own = batch["teacher_input_ids"].long().gather(1, state.clamp_min(0) + 1)[chosen]
    to = torch.from_numpy(tables.tables.mapped[0]).long()[own]
    mass, places = moved[chosen], torch.arange(len(whole))
    whole[places, batch["labels"].long()[chosen]] += mass
    whole[places, to.clamp_min(0)] -= mass.where(to >= 0, 0.0)


def stored_distributions(
    states: Tensor,
    layer: OutputLayer,
    batch: Rows,
    tables: VocabularyMap,
    rule: DistributionRule,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, masses and moved masses of labels as rows hold them, rounded as stored."""
    losses, ids, log_probs = ask_entries(
        states, layer, batch, top_k=rule.top_k, draws=rule.draws, vocab_size=rule.vocab_size
    )
    codes = to_stored(log_probs[..., : rule.top_k], rule.log_probs)
    codes = codes if codes.dtype == np.uint8 else codes.view(np.uint16)
    log_probs[..., : rule.top_k] = stored_values(rule.log_probs)[0][codes]
    losses = losses.astype(np.float16).astype(np.float32)
    found = map_batch(batch, ids, log_probs, tables, losses, draws=rule.draws)
    masses, moved = (torch.from_numpy(each) for each in found[1:])
    return torch.from_numpy(found.ids).long(), masses, moved


if __name__ == "__main__":
    main()
