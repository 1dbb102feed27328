"""What a view's command says in the end."""

from collections.abc import Sequence

from beam_jobs.views.steps import ShardSeen
from pipeline.alignment.quality import AlignmentStatistics
from pipeline.drawing.formatting import (
    format_bytes,
    format_count,
    format_duration,
    format_plural,
    format_share,
    format_short,
)
from schemas.viewed import ViewedManifest


def summarise(
    manifest: ViewedManifest, seen: Sequence[ShardSeen], output: str, seconds: float
) -> str:
    """Return the lines that end a run.

    Args:
        manifest: through the view.
        seen: the shards that this run did, or took over.
        output: the dataset's folder.
        seconds: that it took.
    """
    view, totals = manifest.view, manifest.totals
    quality = AlignmentStatistics.from_json(view.statistics)
    side = view.side
    num_tokens = totals[f"num_{side}_tokens"]
    num_bytes = sum(file.num_bytes + file.index_num_bytes for file in view.files)
    num_documents = sum(shard.num_documents for shard in seen if not shard.reused)
    done = sum(s.record.num_tokens for s in seen if s.record is not None and not s.reused)
    left_out = sum(file.num_left_out for file in view.files)
    num_unmapped = quality.num_student_tokens - quality.num_mapped
    unmapped = format_share(num_unmapped, quality.num_student_tokens)
    lines = [
        f'view "{view.name}": {format_plural(num_documents, "document")} in '
        f"{format_duration(seconds)}: {format_short(done / max(seconds, 1e-9))} {side} tokens/s",
        f"  {side} tokens  {format_count(num_tokens)} of {view.tokenizer.source}",
        f"  files           {len(view.files)} and their indices, {format_bytes(num_bytes)}, "
        f"{num_bytes / max(1, num_tokens):.2f} bytes a {side} token",
        f"  alignment       {unmapped} of student tokens unmapped, IoU {quality.byte_iou:.3f}",
    ]
    if left_out:
        lines.append(
            f"  left out        {format_plural(left_out, 'document')} that the tokenizer can't "
            "tokenize; readers of the view leave them out"
        )
    if any(shard.reused for shard in seen):
        lines.append(f"  resumed         {sum(s.reused for s in seen)} shards were taken over")
    return "\n".join([*lines, f"next: vocag validate {output}; then give --view {view.name}"])
