"""What a store of a teacher's distributions is worth, before anything is trained on it.

    python benchmarks/distributions.py aligned --teacher models/teacher --student models/student

For each way of storing: bytes a teacher token, and how far the gradient of all the student's
parameters is from that of the cross entropy with the teacher's whole distribution, relative to its
size, at four batch sizes. A bias stays as the batch grows; noise falls. All labels are compared
that learn a distribution whatever is stored, those inside a teacher token too, where the whole is
what the teacher expects given the bytes before. Stored values are rounded as they are stored.
"""

import argparse
import time
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import log_softmax
from transformers import PreTrainedModel

from pipeline.distributions.mapping import map_batch
from pipeline.distributions.prefixes import find_prefixes
from pipeline.distributions.vocabulary_map import VocabularyMap
from pipeline.distributions.walk import AMID, LabelStarts, RowFields, find_starts
from pipeline.losses.cell_sums import Cells, PlacedCells
from pipeline.losses.cross_entropy import linear_cross_entropy
from pipeline.losses.divergences import LabelDistributions, distilled_loss
from pipeline.losses.logits import OutputLayer
from pipeline.methods.hf_pass import student_states
from pipeline.methods.label_distributions import ask_entries
from pipeline.models.hf_models import hidden_states, load_language_model
from pipeline.models.output_layer import output_layer
from pipeline.streaming import AlignedRows, Rows, StreamConfig
from pipeline.streaming.vocabularies import vocabulary_map
from schemas.distribution_rule import DistributionRule
from schemas.stored_distributions import stored_values, to_stored

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
    tables = vocabulary_map(rows)
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
    assert tables.cells is not None
    with torch.no_grad():
        places = batch["teacher_position_ids"]
        states = hidden_states(teacher, batch["teacher_input_ids"], position_ids=places)
    given = states, output_layer(teacher), batch, tables
    hidden, layer = student_states(student, batch), output_layer(student)
    labels, cells = batch["labels"].long(), Cells.of(*tables.cells)
    starts = find_starts(RowFields(**row_of(batch)), tables.tables, tables.edges)
    stored = (stored_distributions(*given, rule) for rule in rules)
    known = [each.in_cells(cells, batch["input_ids"]) for each in stored]
    # A text's first label may be mapped with a space before it, by another table.
    chosen = torch.from_numpy((starts.token >= 0) & (starts.where == AMID))[None]
    chosen &= batch["loss_mask"].bool()
    for each in known:  # those that learn a distribution whatever is stored
        chosen &= each.can_teach(labels)
    # What the token before rules out goes to the text's own, as stored distributions' does.
    asked = WholeLabels(starts, chosen[0], known[0].own_ids[0], cells.on(hidden.device))
    whole = whole_distributions(states[0], output_layer(teacher), batch, tables, asked)
    own = log_softmax(layer.logits(hidden[chosen]), -1)
    placed = cells.on(own.device)
    of_cell = torch.zeros_like(own).index_add_(1, placed.numbers, own.exp()).clamp_min(1e-30).log()
    of_cell = of_cell[:, placed.numbers]
    own_labels = labels[chosen].unsqueeze(-1)
    within = own.gather(1, own_labels) - of_cell.gather(1, own_labels)
    losses = [-(whole * of_cell).sum() - within.sum()]
    losses.append(linear_cross_entropy(hidden, layer, labels, loss_mask=chosen).losses.sum())
    for each in known:
        scores = linear_cross_entropy(
            hidden,
            layer,
            labels,
            loss_mask=chosen,
            entry_ids=each.asked_of(labels),
            cells=cells,
        )
        found = distilled_loss(scores, each, labels, loss_mask=chosen, weight=1.0)
        losses.append(found.loss_sum)
    return losses, int(chosen.sum())


def row_of(batch: Rows) -> dict[str, NDArray[Any]]:
    """Return the only row of a batch as the walk reads it."""
    names = [name for name in RowFields._fields if name != "teacher_losses"]
    unread = {"teacher_losses": np.empty(0, np.float32)}
    return {name: batch[name][0].numpy() for name in names} | unread


class WholeLabels(NamedTuple):
    """Labels of a row whose whole distributions are wanted.

    Attributes:
        starts: where each label starts among the teacher's tokens.
        chosen: which labels, bool [S].
        own_ids: the student token for the rest of the text's own teacher token, int64 [S].
        cells: what is ruled out after a token.
    """

    starts: LabelStarts
    chosen: Tensor
    own_ids: Tensor
    cells: PlacedCells


@torch.no_grad()
def whole_distributions(
    states: Tensor, layer: OutputLayer, batch: Rows, tables: VocabularyMap, labels: WholeLabels
) -> Tensor:
    """Return the whole mapped distributions of some labels, fp32 [n, student's tokens].

    At a boundary of all that the teacher expects; inside a token of all that begin with its bytes.
    """
    flat, bounds = tables.tables.teacher_bytes.tobytes(), tables.tables.teacher_starts.tolist()
    texts = [flat[start:stop] for start, stop in pairwise(bounds)]
    to = torch.from_numpy(tables.tables.mapped[AMID]).long()
    ids, size = batch["teacher_input_ids"][0].tolist(), len(tables.tables.student_starts) - 1
    starts, chosen = labels.starts, labels.chosen
    found = torch.zeros(int(chosen.sum()), size)
    behind: dict[bytes, tuple[Tensor, Tensor]] = {b"": (torch.arange(len(to)), to)}
    for line, place in enumerate(chosen.nonzero()[:, 0].tolist()):
        token = int(starts.token[place])
        prefix = texts[ids[token]][: starts.offset[place]]
        if prefix not in behind:
            longer = [
                i for i, text in enumerate(texts) if text.startswith(prefix) and text != prefix
            ]
            rests = [texts[i][len(prefix) :] for i in longer]
            lengths = np.cumsum([0, *map(len, rests)], dtype=np.int64)
            spelled = np.frombuffer(b"".join(rests), np.uint8)
            targets = find_prefixes(spelled, lengths, tables.tables)
            behind[prefix] = torch.tensor(longer), torch.from_numpy(targets).long()
        tokens, targets_of = behind[prefix]
        probs = layer.logits(states[token - 1]).softmax(-1)[tokens]
        probs = probs / probs.sum() if prefix else probs
        before = batch["input_ids"][0, place].long().expand_as(targets_of)
        is_out = labels.cells.rule_out(targets_of, before)
        targets_of = torch.where(is_out, labels.own_ids[place], targets_of)
        spelt = targets_of >= 0
        found[line].index_add_(0, targets_of[spelt], probs[spelt])
    return found


def stored_distributions(
    states: Tensor,
    layer: OutputLayer,
    batch: Rows,
    tables: VocabularyMap,
    rule: DistributionRule,
) -> LabelDistributions:
    """Return the distributions of labels as rows hold them, rounded as stored."""
    losses, ids, log_probs = ask_entries(
        states, layer, batch, rule.shape, vocab_size=rule.vocab_size
    )
    codes = to_stored(log_probs[..., : rule.top_k], rule.log_probs)
    codes = codes if codes.dtype == np.uint8 else codes.view(np.uint16)
    log_probs[..., : rule.top_k] = stored_values(rule.log_probs)[0][codes]
    losses = losses.astype(np.float16).astype(np.float32)
    found = map_batch(batch, ids, log_probs, tables, losses, exact=rule.shape.exact)
    to, probs, own_ids = (torch.from_numpy(each) for each in found)
    return LabelDistributions(to.long(), probs, own_ids.long(), rule.shape)


if __name__ == "__main__":
    main()
