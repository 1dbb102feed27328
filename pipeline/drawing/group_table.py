"""Documents by a field of their metadata, as cells of a table for the terminal and the report."""

from collections.abc import Sequence

from pipeline.dataset.groups import Group
from pipeline.drawing.formatting import format_count, format_plural, format_share

MAX_GROUPS = 20
"""Values that are named; those with the most tokens."""

HEADING = ["documents", "student tokens", "share", "teacher tokens", "unmapped", "byte IoU"]


def table_of_groups(name: str, groups: Sequence[Group]) -> tuple[list[list[str]], str]:
    """Return the rows of a table, its heading first, and a remark on what is not in it, or "".

    Example:
        >>> table_of_groups("source", groups)[0][1]
        ['web', '1,000', '250,000', '83 %', '190,000', '0.12 %', '0.8213']
    """
    all_tokens = sum(group.num_student_tokens for group in groups)
    rows = [[name, *HEADING]]
    for group in groups[:MAX_GROUPS]:
        rows.append(
            [
                "(none)" if group.value is None else str(group.value),
                format_count(group.num_documents),
                format_count(group.num_student_tokens),
                format_share(group.num_student_tokens, all_tokens),
                format_count(group.num_teacher_tokens),
                format_share(group.num_unmapped, group.num_student_tokens),
                f"{group.byte_iou:.4f}",
            ]
        )
    rest = groups[MAX_GROUPS:]
    if not rest:
        return rows, ""
    tokens = sum(group.num_student_tokens for group in rest)
    return rows, f"and {format_plural(len(rest), 'more value')} with {format_count(tokens)} tokens"
