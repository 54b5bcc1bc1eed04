"""A step of a run as one line of text, for people who grep.

step_line(10, metrics)  # "step:10 - actor/entropy:0.4123 - …", all numbers
short_step_line(10, metrics)  # those that people follow, at most 200 characters
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from ragen.format import short
from ragen.run.sinks import numbers

LONGEST_LINE = 200  # of the short one
FOLLOWED = (  # metrics of the short line, the most important first
    "val-env/*/success",
    "train/*/success",
    "train/reward",
    "train/loss",
    "val/loss",
    "actor/entropy",
    "actor/grad_norm",
    "rollout/filter_kept_ratio",
    "timing_s/step",
    "actor/kl_loss",
    "critic/vf_loss",
    "train/format_valid",
    "health/num_warnings",
)


def step_line(step: int, metrics: Mapping[str, Any]) -> str:
    """`step:10 - actor/entropy:0.4123 - …`: numbers only, one line, whatever a metric is called."""
    return " - ".join([f"step:{step}", *(f"{key}:{short(value)}" for key, value in numbers(metrics).items())])


def short_step_line(step: int, metrics: Mapping[str, Any]) -> str:
    """`step_line` with the metrics that people follow, as many as fit."""
    values = numbers(metrics)
    followed = [key for pattern in FOLLOWED for key in values if fnmatchcase(key, pattern)]
    line = f"step:{step}"
    for key in dict.fromkeys(followed or values):
        item = f" - {key}:{short(values[key])}"
        line += item if len(line) + len(item) <= LONGEST_LINE else ""
    return line
