"""Requests that wait together are answered together.

    with Batcher(engine) as batcher:
        batcher.submit(replies, how)            # returns at once; the replies fill themselves

One thread runs the model. While it answers a batch, requests gather; those that are drawn in the same way go together
into the next one. A token's draw depends on its own prompt and seed, so nobody sees whom they shared a batch with.
"""

import threading
import time
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from typing import Any

from ragen.engine.base import Sampling
from ragen.serve.engine import Reply

GATHER_S = 0.01  # clients that were answered together come back together, within this time


class Batcher:
    def __init__(self, engine: Any):
        self.engine = engine
        self._waiting: SimpleQueue[tuple[Sampling, Reply] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="model", daemon=True)
        self._running: list[Reply] = []
        self._is_closed = False

    def __enter__(self) -> "Batcher":
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """What runs is cut short, what waits is refused."""
        self._is_closed = True
        for reply in list(self._running):
            reply.is_cancelled = True
        self._waiting.put(None)
        self._thread.join()

    def submit(self, replies: Sequence[Reply], sampling: Sampling) -> None:
        for reply in replies:
            self._waiting.put((sampling, reply))

    def _work(self) -> None:
        while (batch := self._gather()) is not None:
            for sampling in dict.fromkeys(sampling for sampling, _ in batch):
                self._answer([reply for how, reply in batch if how == sampling], sampling)

    def _gather(self) -> list[tuple[Sampling, Reply]] | None:
        """All that waits, a moment after the first of it has come; None at the end."""
        first = self._waiting.get()
        time.sleep(GATHER_S)
        batch = [first]
        while True:
            try:
                batch.append(self._waiting.get_nowait())
            except Empty:
                break
        if None not in batch:
            return batch
        for _, reply in filter(None, batch):
            reply.is_cancelled = True
            reply.fail(RuntimeError("the server is stopping"))
        return None

    def _answer(self, replies: list[Reply], sampling: Sampling) -> None:
        self._running = replies
        for reply in replies:
            reply.is_cancelled |= self._is_closed
        try:
            self.engine.run(replies, sampling)
        except Exception as error:  # whatever it is, the clients hear of it and the server goes on
            for reply in replies:
                reply.fail(error)
        finally:
            self._running = []
