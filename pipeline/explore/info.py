"""A dataset's content and plan of rows as text tables."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from pipeline.alignment.quality import IOU_SCALE, LENGTH_EDGES, AlignmentStatistics, count_lengths
from pipeline.command_line.failures import printable
from pipeline.dataset.files import Dataset
from pipeline.dataset.groups import count_by, count_read
from pipeline.drawing.formatting import (
    format_bytes,
    format_count,
    format_facts,
    format_plural,
    format_ratio,
    format_share,
    format_table,
)
from pipeline.explore.scores import describe_quantiles
from pipeline.packing.plan import RowPlan
from schemas.manifest import Manifest

BAR_COLUMNS = 32
MAX_GROUPS = 20


def describe_dataset(dataset: Dataset) -> Iterator[str]:
    """Yield `explore info`'s lines."""
    manifest, statistics = count_read(dataset), _statistics_read(dataset)
    yield printable(f"{manifest.name}  {dataset.location}")
    yield f"fingerprint {manifest.fingerprint}"
    yield ""
    yield from format_facts(_totals(manifest, statistics) | _tokenizers(manifest))
    yield ""
    if manifest.metadata:
        named = ", ".join(f"{entry.name} ({entry.type})" for entry in manifest.metadata)
        count = f"{named}; count by one with --by {manifest.metadata[0].name}"
        yield from format_facts({"metadata:": count})
        yield ""
    yield from _lengths(statistics)
    yield ""
    yield from describe_quantiles(dataset)
    yield from _dead_letters(manifest)


def describe_groups(dataset: Dataset, name: str) -> Iterator[str]:
    """Yield `explore info --by NAME`'s lines; ValueError for an unknown field."""
    groups = count_by(dataset, name)  # those with the most tokens first
    all_tokens = sum(group.num_student_tokens for group in groups)
    heading = "documents", "student tokens", "share", "teacher tokens", "unmapped", "byte IoU"
    rows = [[printable(name), *heading]]
    for group in groups[:MAX_GROUPS]:
        rows.append(
            [
                "(none)" if group.value is None else printable(str(group.value)),
                format_count(group.num_documents),
                format_count(group.num_student_tokens),
                format_share(group.num_student_tokens, all_tokens),
                format_count(group.num_teacher_tokens),
                format_share(group.num_unmapped, group.num_student_tokens),
                f"{group.byte_iou:.4f}" if group.num_mapped else "n/a",
            ]
        )
    yield from format_table(rows, align="<" + ">" * len(heading))
    if rest := groups[MAX_GROUPS:]:
        tokens = format_count(sum(group.num_student_tokens for group in rest))
        yield f"and {format_plural(len(rest), 'more value')} with {tokens} tokens"


def describe_plan(plan: RowPlan, *, global_batch_size: int) -> Iterator[str]:
    """Yield `explore plan`'s lines."""
    rules, num_rows = plan.rules, len(plan)
    student, teacher = (int(side.sum()) for side in plan.row_lengths())
    student_padding, teacher_padding = plan.padding()
    steps, dropped = divmod(len(plan), global_batch_size)
    student_text, teacher_text = plan.num_text_tokens
    yield from format_facts(
        {
            "rows": format_count(num_rows),
            "student tokens of text": format_count(student_text),
            "student tokens per row": format_count(rules.seq_length),
            "teacher tokens per row": format_count(rules.teacher_seq_length),
            "padding": (
                f"student {format_share(student_padding, 1)}, "
                f"teacher {format_share(teacher_padding, 1)}"
            ),
            "segments": (
                f"{format_count(len(plan.segments))}, "
                f"{format_ratio(len(plan.segments), num_rows)} per row, "
                f"at most {format_count(plan.max_segments)}"
            ),
            "segments cut without a shared byte boundary": format_count(plan.num_forced_segments),
            "tokens added around texts": (
                f"{format_count(student - student_text)} student, "
                f"{format_count(teacher - teacher_text)} teacher"
            ),
            "steps per epoch": (
                f"{format_count(steps)} of {format_plural(global_batch_size, 'row')}"
            ),
            "rows left out at an epoch's end": (
                f"{format_count(dropped)} ({format_share(dropped, num_rows)})"
            ),
        }
    )


def _totals(manifest: Manifest, statistics: AlignmentStatistics) -> dict[str, str]:
    totals = manifest.totals
    student, teacher = totals["num_student_tokens"], totals["num_teacher_tokens"]
    stored = totals["num_bytes"] + sum(shard.index_num_bytes for shard in manifest.shards)
    text = totals["num_text_bytes"]
    removed, unmapped = manifest.removed, student - statistics.num_mapped
    byte_iou = f"{statistics.byte_iou:.4f} ({IOU_SCALE})" if statistics.num_mapped else "n/a"
    left_out = f", and {format_count(removed.count)} removed" if removed else ""
    return {
        "generation": format_count(manifest.generation),
        "documents": format_count(totals["num_documents"]) + left_out,
        "text": format_bytes(text),
        "student tokens": f"{format_count(student)}, {format_ratio(text, student)} bytes each",
        "teacher tokens": f"{format_count(teacher)}, {format_ratio(text, teacher)} bytes each",
        "teacher / student tokens": format_ratio(teacher, student),
        "unmapped": f"{format_count(unmapped)} ({format_share(unmapped, student)})",
        "byte IoU": byte_iou,
        "on disk": f"{format_bytes(stored)}, {format_ratio(stored, student)} B per student token",
        "shards": format_count(len(manifest.shards)),
    }


def _statistics_read(dataset: Dataset) -> AlignmentStatistics:
    """Return the statistics without removed documents, whose samples may be damaged."""
    read = AlignmentStatistics.from_json(dict(dataset.manifest.statistics))
    for shard in range(len(dataset.manifest.shards)):
        if not len(removed := dataset.removed_of(shard)):
            continue
        index = dataset.read_index(shard, with_names=True, metadata=[])
        students, teachers = index.num_student_tokens, index.num_teacher_tokens
        read = replace(
            read,
            num_mapped=read.num_mapped - int(index.num_mapped[removed].sum()),
            byte_iou_sum=read.byte_iou_sum - float(index.byte_iou_sum[removed].sum()),
            student_length_counts=read.student_length_counts - count_lengths(students[removed]),
            teacher_length_counts=read.teacher_length_counts - count_lengths(teachers[removed]),
        )
    return read


def _tokenizers(manifest: Manifest) -> dict[str, str]:
    facts = {}
    for side, record in (("student", manifest.student), ("teacher", manifest.teacher)):
        around = record.around_text
        # Rows put nothing after a teacher's text.
        after = _name(around.end_token_id if side == "student" else None)
        facts[f"{side} tokenizer"] = (
            f"{record.source} ({record.sha256[:16]}…), {format_count(record.vocab_size)} ids, "
            f"{_name(around.first_token_id)} before a text, {after} after it, special strings "
            f"{record.special_strings}"
        )
    return facts


def _name(token_id: int | None) -> str:
    return "nothing" if token_id is None else f"token {token_id}"


def _lengths(statistics: AlignmentStatistics) -> list[str]:
    student, teacher = statistics.student_length_counts, statistics.teacher_length_counts
    used, top = np.flatnonzero(student + teacher), max(student.max(), 1)
    rows = [["tokens from", "documents by student", "by teacher", ""]]
    for place in range(used[0], used[-1] + 1) if len(used) else ():
        counts = (LENGTH_EDGES[place], int(student[place]), int(teacher[place]))
        rows.append([*map(format_count, counts), "█" * round(BAR_COLUMNS * student[place] / top)])
    return format_table(rows, align=">>><")


def _dead_letters(manifest: Manifest) -> Iterator[str]:
    letters = manifest.dead_letters
    if not letters.count:
        yield "dead letters: none"
        return
    yield printable(f"dead letters: {format_count(letters.count)}, named in {letters.file}")
    yield ""
    for reason, count in sorted(letters.by_reason.items(), key=lambda item: (-item[1], item[0])):
        yield from format_facts({f"{format_count(count):>9}": reason})
