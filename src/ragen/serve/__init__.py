"""`ragen serve`: a model offered to other programs, as an OpenAI-compatible server on this machine.

    serve("pocket", port=8000)                       # until Ctrl-C
    with running(local_model("pocket")) as server:   # in a program of one's own, on a free port
        server.base                                  # http://127.0.0.1:41325/v1

`engine.py` hands out tokens as they come, `chat.py` puts messages into tokens, `batch.py` lets requests that wait
together be answered together, `web.py` speaks HTTP.
"""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ragen.errors import ConfigError
from ragen.evaluate.models import LocalModel, local_model

if TYPE_CHECKING:
    from ragen.serve.web import Server

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def serve(
    model: str,
    host: str = "127.0.0.1",
    port: int = 8000,
    max_model_len: int | None = None,
    name: str | None = None,
    dry_run: bool = False,
) -> int:
    """Serve until interrupted; returns the exit status."""
    if not 0 <= port < 1 << 16:
        raise ConfigError(f"--port {port}: must be between 0 and 65535")
    if max_model_len is not None and max_model_len < 2:
        raise ConfigError(f"--max-model-len {max_model_len}: must be at least 2")
    found = local_model(model)
    if host not in LOOPBACK:
        print(f"note: {host} can be reached from other machines, and no key is asked for", file=sys.stderr)
    if dry_run:
        print(f"would serve {name or found.label} ({found.name}) at {base_of(host, port)}")
        return 0
    with running(found, host, port, max_model_len, name) as server, _terminated():
        print(f"serving {server.name} at {server.base} (Ctrl-C ends it)", flush=True)
        try:
            server.wait()
        except KeyboardInterrupt:
            print("stopping", file=sys.stderr)
    return 0


def base_of(host: str, port: int) -> str:
    """What clients are given; an IPv6 address stands in brackets."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"


@contextmanager
def running(
    model: LocalModel,
    host: str = "127.0.0.1",
    port: int = 0,
    max_model_len: int | None = None,
    name: str | None = None,
) -> Iterator["Server"]:
    """A server that answers while the block runs. Port 0 is any that is free."""
    from ragen.model.load import find_model, load_model
    from ragen.serve.web import Server

    loaded = load_model(find_model(model.name), merge=False)
    with Server(loaded, name or model.label, host, port, max_model_len) as server:
        yield server


@contextmanager
def _terminated() -> Iterator[None]:
    """A request to end is treated as Ctrl-C."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
