"""Seconds by name: `with clock("gen"): …` adds to `timing_s/gen`."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    def __init__(self):
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    def metrics(self) -> dict[str, float]:
        return {f"timing_s/{name}": value for name, value in self.seconds.items()}
