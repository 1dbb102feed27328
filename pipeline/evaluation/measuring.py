"""Measure one student on the chosen sets."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lm_eval.api.model import LM
from lm_eval.api.task import ConfigurableTask
from lm_eval.evaluator import evaluate

from pipeline.evaluation.answer_log import AnswerLog
from pipeline.evaluation.answers import answer_of, chosen_letter, reference_of
from pipeline.evaluation.context_room import Room, find_room
from pipeline.evaluation.conversations import score_chats
from pipeline.evaluation.lm_tasks import load_task, measures_of, spread
from pipeline.evaluation.results import (
    RESULTS_FILE,
    Measurement,
    Results,
    read_results,
    replace_file,
    summarise,
)
from pipeline.evaluation.set_files import describe_data, read_items
from pipeline.evaluation.sets import CHATS
from pipeline.evaluation.settings import Asked, Measure, StudentEngine
from pipeline.evaluation.students import Student, find_files, unnamed

_LIBRARIES = ("lm-eval", "math-verify", "sympy", "transformers", "torch")


def open_results(student: Student, folder: Path, engine: StudentEngine) -> Results:
    """Return the folder's results, or new ones; ValueError if student or dtype differ."""
    fresh = Results(student.name, student.source, student.sha256)
    if not (folder / RESULTS_FILE).exists():
        return fresh
    found, source = read_results(folder), unnamed(student.source)
    if found.sha256 != student.sha256:
        raise ValueError(
            f"{folder} has results of a different student (files {found.sha256[:12]}…, this one "
            f"{student.sha256[:12]}…): name this one, NAME={source}, or remove the folder"
        )
    for _, _, made in found.all():
        if (then := made.settings["dtype"]) != engine.dtype:
            raise ValueError(
                f"{folder} has results with dtype={then}, this run has {engine.dtype}: one table "
                f"must not mix them; give this student another name, NAME={source}, or "
                "remove the folder"
            )
    fresh.measurements = found.measurements
    return fresh


def plan(asked: Asked) -> list[tuple[str, Measure]]:
    """Return the chosen measures that each set allows; ValueError without any, or without data."""
    allowed = list[tuple[str, Measure]]()
    for name in dict.fromkeys(asked.tasks):
        items = [item for _, item in spread(read_items(name, asked.data), asked.limit)]
        allowed += [(name, made) for made in measures_of(name, items)]
    steps = [(name, made) for name, made in allowed if made in asked.measures]
    if not steps:
        given = f"tasks={' '.join(asked.tasks)} measures={' '.join(asked.measures)}"
        others = " ".join(dict.fromkeys(made for _, made in allowed))
        raise ValueError(
            f"{given}: none of these sets allows any of these measures, but measures={others}"
        )
    return steps


def measure_all(
    model: LM,
    results: Results,
    steps: Sequence[tuple[str, Measure]],
    *,
    asked: Asked,
    engine: StudentEngine,
    folder: Path,
) -> Iterator[tuple[str, Measure, Measurement]]:
    """Measure each step, write its result and samples, and yield it."""
    settings = asdict(engine) | {name: version(name) for name in _LIBRARIES}
    with closing(AnswerLog(model, folder / answers_name(results.sha256, engine))) as log:
        for name, measure in steps:
            made, samples = _measure(log, model, name, measure, asked, settings, results.source)
            results.measurements.setdefault(name, {})[measure] = made
            # Last, for it tells of the samples.
            _write_samples(folder / "samples" / f"{name}.{measure}.jsonl", samples)
            results.write(folder)
            yield name, measure, made


def answers_name(student_sha256: str, engine: StudentEngine) -> str:
    """Return an answer file's name, specific to weights, dtype, kind of device and libraries."""
    kind = engine.device.partition(":")[0]
    how = ["softmax in float32", "no penalties", *map(version, _LIBRARIES)]
    identity = json.dumps([student_sha256, engine.dtype, kind, *how])
    return f"answers-{sha256(identity.encode()).hexdigest()[:12]}.jsonl"


def _measure(
    log: AnswerLog,
    model: LM,
    name: str,
    measure: Measure,
    asked: Asked,
    settings: Mapping[str, Any],
    source: str,
) -> tuple[Measurement, list[dict[str, Any]]]:
    if name == CHATS:
        items = spread(read_items(name, asked.data), asked.limit)
        samples, room = score_chats(items, model, log, find_files(source).path)
    else:
        samples, room = _ask(log, model, load_task(name, measure, asked.data, asked.limit), asked)
    measurement = Measurement(
        num_items=len(samples),
        values=summarise(samples) if samples else {},
        limit=asked.limit,
        num_left_out=room.num_left_out,
        answer_tokens=room.answer_tokens,
        data=describe_data(name, asked.data),
        settings=settings,
        note=room.note,
    )
    return measurement, [_sample(sample, measure) for sample in samples]


def _ask(
    log: AnswerLog, model: LM, task: ConfigurableTask, asked: Asked
) -> tuple[list[dict[str, Any]], Room]:
    room = find_room(task, model, asked.max_answer_tokens)
    if room.answer_tokens:
        longest = {"max_gen_toks": room.answer_tokens}
        task.set_config(key="generation_kwargs", value=longest, update=True)
    if not room.documents:
        return [], room
    made = evaluate(
        log,
        {"tasks": {task.task_name: task}},
        samples={task.task_name: list(room.documents)},
        bootstrap_iters=0,
    )
    return made["samples"][task.task_name], room


def _sample(sample: Mapping[str, Any], measure: Measure) -> dict[str, Any]:
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
    replace_file(path, "".join(lines))
