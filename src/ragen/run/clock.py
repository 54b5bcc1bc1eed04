"""Seconds by name, of a step and of a run.

clock = Clock()
with clock("step"), clock("gen"):
    ...
clock.metrics()                 # {"timing_s/gen": 1.2, "timing_s/step": 1.3}
totals.add(clock)               # {"timing_s/train_step": 1.3, …, "timing_s/total": 140.2}
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class Clock:
    """The seconds of one step."""

    def __init__(self, seconds: Mapping[str, float] | None = None):
        self.seconds = dict(seconds or {})

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    def metrics(self) -> dict[str, float]:
        return {f"timing_s/{name}": value for name, value in self.seconds.items()}


# Of a step's seconds, those that are no training, by the name of their total.
COLLAPSE = {
    "collapse_total": "collapse_metrics",
    "collapse_first_turn_total": "collapse_first_turn_step",
    "collapse_multi_turn_total": "collapse_multi_turn_step",
}


class Totals:
    """The seconds of a run, including those before a resume: training, validation and collapse metrics separately."""

    def __init__(self):
        self.train = self.eval = 0.0
        self.collapse: dict[str, float] = {}  # only what was measured, by its name in COLLAPSE

    def add(self, clock: Clock) -> dict[str, float]:
        """Count a step in. A validation outside of a step counts as one alone."""
        evaluated = clock.seconds.get("testing", 0.0)
        watched = clock.seconds.get("collapse_metrics", 0.0)
        trained = max(0.0, clock.seconds.get("step", 0.0) - evaluated - watched)
        self.train += trained
        self.eval += evaluated
        for total, part in COLLAPSE.items():
            if part in clock.seconds:
                self.collapse[total] = self.collapse.get(total, 0.0) + clock.seconds[part]
        return {
            "timing_s/train_step": trained,
            "timing_s/eval_step": evaluated,
            "timing_s/train_total": self.train,
            "timing_s/eval_total": self.eval,
            "timing_s/total": self.train + self.eval + self.collapse.get("collapse_total", 0.0),
        } | {f"timing_s/{total}": seconds for total, seconds in self.collapse.items()}

    def state(self) -> dict[str, float]:
        return {"train": self.train, "eval": self.eval} | self.collapse

    def restore(self, state: Mapping[str, float]) -> None:
        self.train, self.eval = state["train"], state["eval"]
        self.collapse = {total: state[total] for total in COLLAPSE if total in state}
