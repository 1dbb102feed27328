"""lm-eval's tasks: a measure's YAML file with a set's items."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.resources import as_file, files
from typing import Any

import datasets
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from pipeline.evaluation.likelihood import text_to_score
from pipeline.evaluation.set_files import read_items
from pipeline.evaluation.sets import SETS, Item, make_prompt
from pipeline.evaluation.settings import MEASURES, Measure


def load_documents(
    set_name: str, measure: Measure, data: str, limit: int, **_: Any
) -> dict[str, datasets.Dataset]:
    """Return a set's items: the YAML files' `custom_dataset`."""
    evaluation_set = SETS[set_name]
    documents = [
        asdict(item)
        | {
            "place": place,
            "by_letter": evaluation_set.by_letter,
            "prompt": make_prompt(item.question, evaluation_set.shots),
            "scored": text_to_score(item, measure),
        }
        for place, item in spread(read_items(set_name, data), limit)
        if _has(item, measure)
    ]
    return {"test": datasets.Dataset.from_list(documents)}


def measures_of(set_name: str, items: Sequence[Item]) -> list[Measure]:
    """Return the measures that a set allows."""
    found = [measure for measure in MEASURES if any(_has(item, measure) for item in items)]
    in_solution = SETS[set_name].file == "math"  # whose answers are there
    return [measure for measure in found if not (in_solution and measure == "answer")]


def load_task(set_name: str, measure: Measure, data: str, limit: int = 0) -> ConfigurableTask:
    """Return a task for lm-eval; ValueError without its set's data."""
    with as_file(files("pipeline.evaluation").joinpath("tasks")) as folder:
        config: Mapping[str, Any] = load_yaml(folder / f"{measure}.yaml")
    name = f"vocag_{set_name}_{measure}"
    chosen = {"set_name": set_name, "measure": measure, "data": data, "limit": limit}
    spec = {**config, "task": name, "dataset_kwargs": chosen}
    return TaskManager(include_defaults=False).load([spec])["tasks"][name]


def spread[T](items: Sequence[T], limit: int) -> list[tuple[int, T]]:
    """Return `limit` items, evenly spread, with their places: sets are sorted by topic."""
    if not 0 < limit < len(items):
        return list(enumerate(items))
    places = [number * len(items) // limit for number in range(limit)]
    return [(place, items[place]) for place in places]


def _has(item: Item, measure: Measure) -> bool:
    if item.chat:
        return measure == "text"
    if measure == "options":
        return bool(item.options)
    return measure != "solution" or bool(item.solution)
