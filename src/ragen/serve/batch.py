"""Requests are answered together, whenever they come.

    with Batcher(engine) as batcher:
        batcher.submit(replies, how)            # returns at once; the replies fill themselves

One thread runs the model, in bursts of a few tokens. Between two bursts, requests that have come join those that are
drawn in the same way; those that are drawn in different ways take turns. A token's draw depends on its own prompt and
seed, so nobody sees whom they shared a batch with.
"""

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from ragen.engine.base import Sampling
from ragen.engine.native.engine import EngineRun
from ragen.serve.engine import Reply

GATHER_S = 0.01  # clients that were answered together come back together, within this time


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
        """What runs and what waits is refused."""
        self._is_closed = True
        self._has_news.set()
        self._thread.join()

    def submit(self, replies: Sequence[Reply], sampling: Sampling) -> None:
        self._waiting.extend((sampling, reply) for reply in replies)
        self._has_news.set()

    def _work(self) -> None:
        while not self._is_closed:
            self._admit()
            for sampling, run in list(self._runs.items()):
                self._step(run)
                if not run.rows:
                    del self._runs[sampling]
        for reply in [*self._in_flight(), *(reply for _, reply in list(self._waiting))]:
            reply.is_cancelled = True
            reply.fail(RuntimeError("the server is stopping"))

    def _admit(self) -> None:
        """Those that came first, as many as there are rows for; when idle, a moment after the first of them."""
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
        except Exception as error:  # whatever it is, the clients hear of it and the server goes on
            for reply in _replies(run):
                reply.fail(error)
            run.rows = []


def _replies(run: EngineRun) -> list[Reply]:
    return [*(row.conversation for row in run.rows if row is not None), *run.waiting]
