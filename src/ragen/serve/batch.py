"""Answers requests together, whenever they arrive.

    with Batcher(engine) as batcher:
        batcher.submit(replies, sampling)       # returns at once; the replies fill up

One thread runs the model in bursts of a few tokens. Between two bursts, new requests join those that are sampled in the
same way; those sampled in different ways take turns. A token's draw depends on its own prompt and seed alone, so a
reply does not depend on what shares its batch.
"""

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from ragen.engine.base import Sampling
from ragen.engine.native.engine import EngineRun
from ragen.serve.engine import Reply

GATHER_S = 0.01  # clients that were answered together return together, within this time


class Batcher:
    def __init__(self, engine: Any):
        self.engine = engine
        self._waiting: deque[tuple[Sampling, Reply]] = deque()
        self._has_news = threading.Event()
        self._runs: dict[Sampling, EngineRun] = {}
        self._thread = threading.Thread(target=self._work, name="model", daemon=True)
        self._is_closed = False

    def __enter__(self) -> "Batcher":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Refuses what runs, what waits, and what is submitted later."""
        self._is_closed = True
        self._has_news.set()
        self._thread.join()
        self._refuse_all()

    def submit(self, replies: Sequence[Reply], sampling: Sampling) -> None:
        self._waiting.extend((sampling, reply) for reply in replies)
        self._has_news.set()
        if not self._thread.is_alive():
            self._refuse_all()

    def _work(self) -> None:
        while not self._is_closed:
            self._admit()
            for sampling, run in list(self._runs.items()):
                self._step(run)
                if not run.rows:
                    del self._runs[sampling]

    def _refuse_all(self) -> None:
        for reply in [*self._in_flight(), *(reply for _, reply in list(self._waiting))]:
            reply.is_cancelled = True
            reply.fail(RuntimeError("the server is stopping"))

    def _admit(self) -> None:
        """First come, first served, while there are free rows. When idle, wait a moment after the first."""
        if not self._runs and not self._waiting:
            self._has_news.wait()
            self._has_news.clear()
            time.sleep(GATHER_S)
        room = self.engine.max_rows - len(self._in_flight())
        for _ in range(min(room, len(self._waiting))):
            sampling, reply = self._waiting.popleft()
            if sampling not in self._runs:
                self._runs[sampling] = self.engine.start([], sampling)
            self._runs[sampling].waiting.append(reply)

    def _in_flight(self) -> list[Reply]:
        return [reply for run in self._runs.values() for reply in _replies(run)]

    def _step(self, run: EngineRun) -> None:
        try:
            run.admit(self.engine.max_rows)
            run.step()
        except Exception as error:  # the clients get any error, and the server keeps running
            for reply in _replies(run):
                reply.fail(error)
            run.rows = []


def _replies(run: EngineRun) -> list[Any]:
    return [*(row.conversation for row in run.rows if row is not None), *run.waiting]
