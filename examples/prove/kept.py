r"""What each selector keeps of each kind of text, as training would: the gate before the hours.

    python examples/prove/kept.py --student prove/healed/model --data prove/gate \
        --teacher prove/smollm2 --output prove/kept.json

Reads rows as `vocag train` does, chooses within micro-batches as it does, and counts mapped tokens
by the kind that their document's id names. Ends with status 3 if the teacher's choice does not
tell noise from clean text: docs/evidence.md has the rule.
"""

import argparse
import json
import sys
from collections import Counter, defaultdict
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pipeline.drawing.formatting import format_table
from pipeline.selection_rule import Selector
from vocag import (
    AlignedRows,
    Reading,
    Rows,
    SelectionRule,
    StreamConfig,
    aggregate_teacher_losses,
    hidden_states,
    linear_cross_entropy,
    load_language_model,
    open_dataset,
    output_layer,
    select_tokens,
)

SELECTORS: tuple[Selector, ...] = (
    "teacher", "teacher_loss", "student_loss", "student_entropy", "random",
)  # fmt: skip
MARGIN = 0.1
CLEAN = "clean"


def kinds_of_rows(rows: AlignedRows, positions: range) -> list[list[str]]:
    """Return the kind of each segment of each row, in the row's order."""
    dataset = open_dataset(rows.config.data.path)
    names = [
        name
        for shard in range(len(rows.manifest.shards))
        for name in dataset.read_index(shard, with_names=True).document_id
    ]
    own = rows.datasets[0]
    starts, documents = own.plan.row_starts, own.plan.segments["document"]
    places = [own.order.row_index(*divmod(at, rows.samples_per_epoch)) for at in positions]
    return [
        [names[document].partition(":")[0] for document in documents[starts[row] : starts[row + 1]]]
        for row in places
    ]


@torch.inference_mode()
def count_kept(
    student: PreTrainedModel,
    rows: AlignedRows,
    *,
    num_rows: int,
    micro_batch_size: int,
    keep_fraction: float,
    bf16: bool,
) -> dict[str, Counter[str]]:
    """Return kept tokens by selector and kind, and all mapped ones under `tokens`."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for start in range(0, num_rows - micro_batch_size + 1, micro_batch_size):
        positions = range(start, start + micro_batch_size)
        batch = rows.__getitems__(positions).to(student.device)
        with torch.autocast(student.device.type, dtype=torch.bfloat16, enabled=bf16):
            scores = linear_cross_entropy(
                hidden_states(student, batch["input_ids"], position_ids=batch["position_ids"]),
                output_layer(student),
                batch["labels"].long(),
                loss_mask=batch["loss_mask"],
                with_entropy=True,
            )
        guidance = aggregate_teacher_losses(
            batch["teacher_losses"].masked_fill(~batch.teacher_has_loss, torch.nan),
            batch["teacher_spans"],
            teacher_loss_mask=batch.teacher_has_loss,
        )
        kinds = kinds_of_rows(rows, positions)
        for selector in SELECTORS:
            selection = select_tokens(
                scores.losses,
                guidance,
                loss_mask=batch["loss_mask"],
                rule=SelectionRule(selector, keep_fraction),
                student_entropies=scores.entropies,
                step=start,
            )
            _add(counts[selector], selection.kept & selection.mapped, batch, kinds)
        _add(counts["tokens"], selection.mapped, batch, kinds)
    return counts


def _add(counts: Counter[str], chosen: Tensor, batch: Rows, kinds: list[list[str]]) -> None:
    for row, of_segments in enumerate(kinds):
        bounds = batch["cu_seqlens"][row].tolist()
        for segment, kind in enumerate(of_segments):
            counts[kind] += int(chosen[row, bounds[segment] : bounds[segment + 1]].sum())


def kept_shares(counts: dict[str, Counter[str]]) -> dict[str, dict[str, float]]:
    """Return by selector and kind, `noise` among them, the share of mapped tokens that is kept.

    Example:
        >>> counts = {"tokens": Counter(clean=4, ocr=2), "random": Counter(clean=2, ocr=1)}
        >>> kept_shares(counts)["random"]
        {'clean': 0.5, 'ocr': 0.5, 'noise': 0.5}
    """
    tokens = counts["tokens"]
    shares = {}
    for selector, kept in counts.items():
        if selector != "tokens":
            own = {kind: kept[kind] / tokens[kind] for kind in sorted(tokens) if tokens[kind]}
            noise = sum(kept.values()) - kept[CLEAN], sum(tokens.values()) - tokens[CLEAN]
            shares[selector] = own | {"noise": noise[0] / max(noise[1], 1)}
    return shares


def tells_noise(shares: dict[str, dict[str, float]]) -> bool:
    """Say whether the teacher's choice tells noise from clean text, and better than the student.

    Example:
        >>> tells_noise({"teacher": {"clean": 0.5, "noise": 0.2},
        ...              "student_loss": {"clean": 0.4, "noise": 0.4}})
        True
    """
    gap = {name: own[CLEAN] - own["noise"] for name, own in shares.items()}
    return gap["teacher"] >= MARGIN and gap["teacher"] > gap["student_loss"]


def main() -> int:
    """Count, write, print; return the gate's verdict as a status."""
    parser = argparse.ArgumentParser(description="Count what each selector keeps, by kind.")
    parser.add_argument("--student", required=True, help="folder")
    parser.add_argument("--data", required=True, help="aligned and scored, with noise")
    parser.add_argument("--teacher", required=True, help="whose stored losses")
    parser.add_argument("--output", type=Path, required=True, help="a JSON file")
    parser.add_argument("--seq-length", type=int, default=512)
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--num-rows", type=int, default=200)
    parser.add_argument("--keep-fraction", type=float, default=0.4)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bf16", action="store_true")
    options = parser.parse_args()
    rows = AlignedRows(
        StreamConfig(
            Reading(options.data), seq_length=options.seq_length, stored_losses=options.teacher
        )
    )
    counts = count_kept(
        load_language_model(options.student, device=options.device),
        rows,
        num_rows=min(options.num_rows, len(rows)),
        micro_batch_size=min(options.micro_batch_size, len(rows)),
        keep_fraction=options.keep_fraction,
        bf16=options.bf16,
    )
    shares = kept_shares(counts)
    passed = tells_noise(shares)
    found = {"passed": passed, "tokens": counts["tokens"], "kept": shares}
    options.output.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    kinds = list(shares["teacher"])
    num = {**counts["tokens"], "noise": sum(counts["tokens"].values()) - counts["tokens"][CLEAN]}
    table = [["kind", "tokens", *shares]]
    table += [[k, f"{num[k]:,}", *(f"{own[k]:.3f}" for own in shares.values())] for k in kinds]
    print("\n".join(format_table(table, align="<" + ">" * (len(shares) + 1))))
    print(f"The teacher's choice {'tells' if passed else 'does NOT tell'} noise from clean text.")
    return 0 if passed else 3


if __name__ == "__main__":
    sys.exit(main())
