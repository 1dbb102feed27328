"""The table as Markdown, and its plots."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.drawing.charts import Interval, interval_chart, write_figure

STAGES = ("main", "last")
CLEAN_SETS = ("gsm8k", "math", "docstrings")
_NAMES = {"main": "before the last stage", "last": "after the last stage"}
_RESTS_ON: Mapping[str, Mapping[str, Sequence[str]]] = {
    "for": {
        "noisy": ("full", "random-0.4", "teacher-0.4"),
        "clean": ("full", "teacher-0.4"),
    },
    "against": {"noisy": ("full", "random-0.4", "teacher-0.4", "teacher-0.6")},
    "against the difference": {"noisy": ("teacher-0.4", "teacher_loss-0.4")},
    "worth its teacher": {"noisy": ("teacher-0.4", "full-equal-scored")},
}
_ACCURACIES = (("gsm8k", "results"), ("gsm8k", "solution"), ("math", "solution"))


def render(table: Mapping[str, Any]) -> str:
    """Return the whole as Markdown.

    Args:
        table: what table.json holds.
    """
    parts = ["# Table", "", _rules(table), ""]
    for data, arms in table["arms"].items():
        for stage in reversed(STAGES):
            parts += _bits(f"{data}, {_NAMES[stage]}", arms, stage, table["costs"]["arms"][data])
        parts += _accuracies(f"{data}, after the last stage", arms)
    parts += _equal_compute(table)
    parts += _shares("Kept at the gate, by selector", table["gate"]["kept"])
    shares = table["kept_by_teacher_after_training"]
    parts += _shares("Kept by the teacher's choice after the main stage, by arm", shares)
    parts += _rates(table["rates"])
    return "\n".join(parts)


def _rules(table: Mapping[str, Any]) -> str:
    num_runs = sum(len(own["seeds"]) for arms in table["arms"].values() for own in arms.values())
    done = f"{num_runs} of {table['costs']['num_runs']} runs are done"
    known = {
        rule: holds
        for rule, holds in table["verdicts"].items()
        if _is_known(rule, table)
        # Whoever doesn't win needs no control.
        or (rule == "for" and not table["wins"] and _is_known("against", table))
    }
    lines = [f"**{rule}** {'yes' if holds else 'no'}" for rule, holds in known.items()]
    lines += [f"**{rule}** not measured" for rule in table["verdicts"] if rule not in known]
    open_question = {"for", "against"} <= known.keys() and not (known["for"] or known["against"])
    undecided = " The method is **undecided**." if open_question else ""
    return f"Rules of docs/evidence.md, {done}: {', '.join(lines)}.{undecided}"


def _is_known(rule: str, table: Mapping[str, Any]) -> bool:
    """Say whether all runs are there that a rule rests on."""
    costs = table["costs"]["arms"]
    return all(
        arm in costs[data]  # a tiny scale has not all of them
        and len(table["arms"].get(data, {}).get(arm, {}).get("seeds", ()))
        == costs[data][arm]["seeds"]
        for data, arms in _RESTS_ON[rule].items()
        for arm in arms
    )


def _bits(
    title: str, arms: Mapping[str, Any], stage: str, costs: Mapping[str, Any]
) -> Iterator[str]:
    sets = list(next(iter(arms.values()))[stage])
    rows = [
        [
            *(arm, len(own["seeds"]), *_cost(costs[arm])),
            *(_cell(own[stage][name]["bits_per_byte"], 4) for name in sets),
        ]
        for arm, own in arms.items()
    ]
    heads = ["arm", "seeds", "steps", "student, TFLOP", "teacher, TFLOP", *sets]
    return _table(f"{title}: bits per byte, and difference to `full`", heads, rows)


def _cost(cost: Mapping[str, float]) -> list[str]:
    both = (cost["student_operations"], cost["teacher_operations"])
    return [str(cost["steps"]), *(f"{operations / 1e12:,.1f}" for operations in both)]


def _accuracies(title: str, arms: Mapping[str, Any]) -> Iterator[str]:
    sets = list(next(iter(arms.values()))["last"])
    rows = [
        [
            arm,
            *(_cell(own["last"][name]["top_1"], 2, 100) for name in sets),
            *(
                _cell(
                    own["last"][name].get(measure), *((4, 1) if measure == "solution" else (2, 100))
                )
                for name, measure in _ACCURACIES
            ),
        ]
        for arm, own in arms.items()
    ]
    heads = [
        *("arm", *(f"{name}, top-1 %" for name in sets), "gsm8k, results %"),
        *("gsm8k, solutions, bits per byte", "math, solutions, bits per byte"),
    ]
    return _table(f"{title}: accuracies, and solutions given their problems", heads, rows)


def _equal_compute(table: Mapping[str, Any]) -> Iterator[str]:
    own_cost = table["costs"]["arms"]["noisy"]
    rows = [
        [
            *(arm, *_cost(own_cost[arm])),
            *(_difference(sets[name]["bits_per_byte"], 4) for name in sets),
        ]
        for arm, sets in table["equal_compute"].items()
    ]
    sets = list(next(iter(table["equal_compute"].values()), {}))
    heads = ["against", "steps", "student, TFLOP", "teacher, TFLOP", *sets]
    title = "Equal compute: `teacher` at k = 0.4 less `full`, after the last stage, bits per byte"
    return _table(title, heads, rows)


def _shares(title: str, shares: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    kinds = list(next(iter(shares.values()), {}))
    rows = [[name, *(f"{own[kind]:.3f}" for kind in kinds)] for name, own in shares.items()]
    return _table(title, ["", *kinds], rows)


def _rates(rates: Mapping[str, Any]) -> Iterator[str]:
    tried = list(next(iter(rates["searched"].values())))
    rows = [
        [arm, *(f"{values[rate]:.4f}" for rate in tried), f"{rates['best'][arm]:g}"]
        for arm, values in rates["searched"].items()
    ]
    title = "Learning rates: bits per byte of the development set after short runs"
    return _table(title, ["arm", *tried, "chosen"], rows)


def _table(title: str, heads: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    yield from (f"## {title}", "")
    for cells in (heads, ["---"] * len(heads), *rows):
        yield "| " + " | ".join(map(str, cells)) + " |"
    yield ""


def _cell(value: Mapping[str, Any] | None, digits: int, scale: float = 1.0) -> str:
    if value is None:
        return "–"
    text = f"{scale * value['mean']:.{digits}f}"
    if not value["difference"]:  # none to compare with, or itself
        return text
    return f"{text} ({_difference(value, digits, scale)})"


def _difference(value: Mapping[str, Any], digits: int, scale: float = 1.0) -> str:
    if value["difference"] is None:
        return "–"
    text = f"{scale * value['difference']:+.{digits}f}"
    return text if value["error"] is None else f"{text} ± {scale * value['error']:.{digits}f}"


def draw(summary: Mapping[str, Any], folder: Path) -> None:
    """Write the differences to `full` for both mixtures before and after the last stage.

    The stages have a plot each: what selection skews before the last would hide what stays.
    """
    for data, of_data in summary.items():
        arms = {arm: own for arm, own in of_data.items() if arm != "full"}
        for stage in STAGES:
            series = {
                held_out: [_point(own[stage][held_out]["bits_per_byte"]) for own in arms.values()]
                for held_out in CLEAN_SETS
            }
            chart = interval_chart(
                f"Trained on {data} text, {_NAMES[stage]}: bits per byte, difference to full",
                list(arms),
                series,
                x_label="bits per byte more than full: less is better; ± standard error over seeds",
                form="+.3f",
            )
            write_figure(chart, folder / f"{data}-{stage}.svg")


def _point(bits: Mapping[str, Any]) -> Interval | None:
    difference, error = bits["difference"], bits["error"] or 0.0
    return None if difference is None else (difference - error, difference, difference + error)
