"""A slow, obvious row: what `pipeline.streaming` must deliver for a row of the plan."""

import numpy as np

from pipeline.packing.kernels import ENDS, FORCED, STARTS


def reference_row(plan, number, documents, max_segments):
    """Return the fields of a row, built token by token in Python lists."""
    rules = plan.rules
    row = {name: [] for name in ("input_ids", "labels", "loss_mask", "position_ids", "spans")}
    teacher_ids, teacher_positions = [], []
    bounds, teacher_bounds = [0], [0]
    start, stop = plan.row_starts[number : number + 2]
    for document_number, s0, s1, t0, t1, flags in plan.segments[start:stop].tolist():
        document = documents[document_number]
        context = "first_token_id" if flags & STARTS else "continued_token_id"
        student = _around(rules.student, context, flags, document.student.input_ids[s0:s1])
        teacher = _around(rules.teacher, context, flags, document.teacher.input_ids[t0:t1])
        shift = len(teacher_ids) + (getattr(rules.teacher, context) is not None) - t0
        spans = [(0, 0)] * len(student)
        before = getattr(rules.student, context) is not None
        for token in range(s0, s1):
            a, b = document.teacher_spans[token].tolist()
            place = token - s0 + before - 1
            inside = t0 <= a and b <= t1
            assert inside or flags & FORCED or a == b
            if a < b and inside and place >= 0:
                spans[place] = (a + shift, b + shift)
        row["input_ids"] += student
        row["labels"] += [*student[1:], 0]
        row["loss_mask"] += [1] * (len(student) - 1) + [0]
        row["position_ids"] += range(len(student))
        row["spans"] += spans
        teacher_ids += teacher
        teacher_positions += range(len(teacher))
        bounds.append(len(row["input_ids"]))
        teacher_bounds.append(len(teacher_ids))
    pad = rules.seq_length - bounds[-1]
    teacher_pad = rules.teacher_seq_length - teacher_bounds[-1]
    places = max_segments + 2
    return {
        "input_ids": np.array(row["input_ids"] + [0] * pad),
        "labels": np.array(row["labels"] + [0] * pad),
        "loss_mask": np.array(row["loss_mask"] + [0] * pad),
        "position_ids": np.array([*row["position_ids"], *range(pad)]),
        "teacher_spans": np.array(row["spans"] + [(0, 0)] * pad),
        "teacher_input_ids": np.array(teacher_ids + [0] * teacher_pad),
        "teacher_position_ids": np.array([*teacher_positions, *range(teacher_pad)]),
        "cu_seqlens": np.array((bounds + [rules.seq_length] * places)[:places]),
        "teacher_cu_seqlens": np.array(
            (teacher_bounds + [rules.teacher_seq_length] * places)[:places]
        ),
        "num_quarantined_tokens": np.array(0),
    }


def _around(convention, context, flags, ids):
    before = getattr(convention, context)
    after = convention.end_token_id if flags & ENDS else None
    return [token for token in (before, *ids.tolist(), after) if token is not None]
