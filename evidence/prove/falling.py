"""`vocag train` whose weight of the teacher falls with the learning rate.

    python evidence/prove/falling.py --data aligned --student model --method distill --weight 0.5 …

The teacher's share of the loss is --weight in the warm-up and at the peak rate, and nearly 0 where
the rate is: at the schedule's end cross entropy alone is learned.
"""

import sys
from dataclasses import replace
from typing import Any

from pipeline.methods import kind_of
from pipeline.training import loop
from pipeline.training.config import TrainConfig

make_step = loop.train_step


def weight_at(config: TrainConfig, step: int) -> float:
    """Return the weight of a step, from 0: it falls to 0 as the rate falls to its least."""
    full = kind_of(config.method).weight_of(config.method)
    if step < config.warmup_steps:
        return full
    least = config.min_lr_fraction
    return full * (loop.learning_rate(config, step) / config.learning_rate - least) / (1 - least)


def train_step(run: loop.Run, loader: Any, step: int) -> dict[str, float]:
    """Make a step with its own weight."""
    guided: Any = run.guided
    guided.method = replace(run.config.method, weight=weight_at(run.config, step))
    return make_step(run, loader, step)


if __name__ == "__main__":
    from pipeline.training.command import main

    loop.train_step = train_step
    sys.exit(main(sys.argv[1:]))
