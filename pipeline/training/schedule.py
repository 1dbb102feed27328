"""The learning rate by step."""

import math

from pipeline.training.config import TrainConfig


def learning_rate(config: TrainConfig, step: int) -> float:
    """Return the rate of a step: linear warm-up, then the schedule down to its end.

    Args:
        config: maximum, schedule, warm-up and end.
        step: from 0.

    Example:
        >>> learning_rate(config, config.warmup_steps) == config.learning_rate
        True
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / (config.num_steps - config.warmup_steps)
    left = {"cosine": 0.5 * (1 + math.cos(math.pi * done)), "linear": 1 - done, "constant": 1.0}
    share = config.min_lr_fraction + (1 - config.min_lr_fraction) * left[config.schedule]
    return config.learning_rate * share
