"""One student on the chosen sets and measures, one after the other, each kept when it is done."""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lm_eval.api.model import LM
from lm_eval.evaluator import evaluate

from pipeline.evaluation.answer_log import AnswerLog
from pipeline.evaluation.answers import answer_of, chosen_letter, reference_of
from pipeline.evaluation.contexts import find_room, limit_answers
from pipeline.evaluation.data import describe_data, read_items
from pipeline.evaluation.lm_tasks import Measure, load_task, measures_of, spread
from pipeline.evaluation.results import (
    RESULTS_FILE,
    Measurement,
    Results,
    read_results,
    summarise,
)
from pipeline.evaluation.sets import SETS
from pipeline.evaluation.shots import load_shots
from pipeline.evaluation.students import Student

logger = logging.getLogger(__name__)

_LIBRARIES = ("lm-eval", "math-verify", "sympy", "transformers", "torch")
_SAME = ("dtype", "tokenizer")
"""Settings that all measurements of one student must share."""


def open_results(student: Student, folder: Path, settings: Mapping[str, Any]) -> Results:
    """Return the folder's results, to be added to, or new ones.

    Raises:
        ValueError: they are another student's, or this one's as it ran otherwise.
    """
    fresh = Results(student.name, student.source, student.sha256)
    if not (folder / RESULTS_FILE).exists():
        return fresh
    found = read_results(folder)
    if found.sha256 != student.sha256:
        raise ValueError(
            f"{folder} has results of another student (files {found.sha256[:12]}…, this one "
            f"{student.sha256[:12]}…): name this one, NAME={student.source}, or remove the folder"
        )
    for made in found.all():
        for name in _SAME:
            if made.settings[name] != settings[name]:
                raise ValueError(
                    f"{folder} has results with --{name} {made.settings[name] or '(none)'}, this "
                    f"run has {settings[name] or '(none)'}: one table must not mix them; name this "
                    f"student otherwise, NAME={student.source}, or remove the folder"
                )
    fresh.measurements = found.measurements
    return fresh


def plan(
    sets: Sequence[str], measures: Sequence[str], data: str, limit: int = 0
) -> list[tuple[str, Measure]]:
    """Return what to measure: of each set what its items, or those within the limit, allow.

    Raises:
        ValueError: a set's data can't be had.
    """
    return [
        (name, measure)
        for name in sets
        for measure in measures_of(
            name, [item for _, item in spread(read_items(name, data), limit)]
        )
        if measure in measures
    ]


def measure_all(
    model: LM,
    results: Results,
    steps: Sequence[tuple[str, Measure]],
    *,
    folder: Path,
    answers: Path,
    settings: Mapping[str, Any],
    data: str = "",
    prompts: str = "",
    limit: int = 0,
    max_answer_tokens: int = 1024,
) -> Iterator[tuple[str, Measure, Measurement]]:
    """Measure step by step; after each the folder's results are written anew.

    Args:
        model: the student.
        results: to add to.
        steps: sets and measures.
        folder: of the results.
        answers: the student's answer log.
        settings: how the student runs; kept with each measurement.
        data: as in `read_items`.
        prompts: as in `load_shots`, "" for none.
        limit: items of each set, 0 for all.
        max_answer_tokens: longest answer.

    Yields:
        each step with what came of it.
    """
    chosen = {"data": data, "prompts": prompts, "limit": limit}
    versions = {name: version(name) for name in _LIBRARIES}
    with AnswerLog(model, answers) as log:
        for name, measure in steps:
            made, samples = _measure(log, model, name, measure, max_answer_tokens, chosen)
            made = replace(made, settings=settings, versions=versions)
            results.measurements.setdefault(name, {})[measure] = made
            results.write(folder)
            _write_samples(folder / "samples" / f"{name}.{measure}.jsonl", samples)
            yield name, measure, made
        logger.info("%d answers were made, the others were known", log.num_asked)


def _measure(
    log: AnswerLog,
    model: LM,
    name: str,
    measure: Measure,
    max_answer_tokens: int,
    chosen: Mapping[str, Any],
) -> tuple[Measurement, list[dict[str, Any]]]:
    task = load_task(name, measure, **chosen)
    room = find_room(task, model, max_answer_tokens=max_answer_tokens)
    limit_answers(task, room)
    samples: list[dict[str, Any]] = []
    if room.documents:
        made = evaluate(
            log,
            {"tasks": {task.task_name: task}},
            samples={task.task_name: list(room.documents)},
            bootstrap_iters=0,
        )
        samples = made["samples"][task.task_name]
    prompts = Path(chosen["prompts"]) if chosen["prompts"] else None
    shots = load_shots(SETS[name].shots, prompts).source if measure == "accuracy" else ""
    measurement = Measurement(
        num_items=len(samples),
        values=summarise(samples) if samples else {},
        limit=chosen["limit"],
        num_left_out=room.num_left_out,
        answer_tokens=room.answer_tokens,
        shots=shots,
        data=describe_data(name, chosen["data"]),
        note=room.note,
    )
    return measurement, [_sample(sample, measure) for sample in samples]


def _sample(sample: Mapping[str, Any], measure: Measure) -> dict[str, Any]:
    """Return what is kept of an item: enough to read what went wrong."""
    document = sample["doc"]
    kept = {"place": document["place"], "question": document["question"]}
    kept |= {metric: sample[metric] for metric in sample["metrics"]}
    if measure != "accuracy":
        return kept
    text = sample["filtered_resps"][0]
    if document["by_letter"]:
        said, right = chosen_letter(text), "ABCDE"[document["label"]]
    else:
        said, right = answer_of(text.strip()), reference_of(document["answer"])
    return kept | {"right": right, "said": said, "text": text}


def _write_samples(path: Path, samples: Sequence[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples]
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(lines), "utf-8")
    temporary.replace(path)
