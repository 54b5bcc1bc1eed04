"""`ragen serve`: an OpenAI-compatible server for one model.

    serve("pocket", port=8000)                       # until Ctrl-C
    with running(local_model("pocket")) as server:   # inside a program, on a free port
        server.base                                  # http://127.0.0.1:41325/v1

A request passes `limits.py` (sizes and times), `access.py` (Host, key), `request.py` (fields), `chat.py` (messages to
tokens), `batch.py` and `engine.py` (sampling), `completion.py` (the answer). `web.py` has the routes.
"""

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ragen.errors import ConfigError
from ragen.evaluate.models import LocalModel, local_model

if TYPE_CHECKING:
    from ragen.serve.web import Server


def serve(
    model: str,
    host: str = "127.0.0.1",
    port: int = 8000,
    max_model_len: int | None = None,
    name: str | None = None,
    dry_run: bool = False,
    api_key_env: str | None = None,
    allowed_hosts: Sequence[str] = (),
) -> int:
    """Serve until interrupted; returns the exit status. `api_key_env` names the variable with the required key."""
    if not 0 <= port < 1 << 16:
        raise ConfigError(f"--port {port}: must be between 0 and 65535")
    if max_model_len is not None and max_model_len < 2:
        raise ConfigError(f"--max-model-len {max_model_len}: must be at least 2")
    key = os.environ.get(api_key_env, "").strip() if api_key_env else ""
    if api_key_env and not (key.isascii() and key.isprintable() and key and " " not in key):
        raise ConfigError(f"--api-key-env {api_key_env}: the variable is not set, or is not a key without blanks")
    found = local_model(model)
    _require_web()
    from ragen.serve.access import is_loopback

    if not (is_loopback(host) or key):
        print(
            f"warning: other machines can reach {host}, and no key is required: anyone there can use this model. "
            "Require one with --api-key-env VARIABLE",
            file=sys.stderr,
        )
    if dry_run:
        print(f"would serve {name or found.label} ({found.name}) at {base_of(host, port)}")
        return 0
    with running(found, host, port, max_model_len, name, key=key, allowed_hosts=allowed_hosts) as server, _terminated():
        print(f"serving {server.name} at {server.base} (Ctrl-C ends it)", flush=True)
        try:
            server.wait()
        except KeyboardInterrupt:
            print("stopping", file=sys.stderr)
    return 0


def base_of(host: str, port: int) -> str:
    """The address for clients; an IPv6 address is in brackets."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"


@contextmanager
def running(
    model: LocalModel,
    host: str = "127.0.0.1",
    port: int = 0,
    max_model_len: int | None = None,
    name: str | None = None,
    **access: Any,
) -> Iterator["Server"]:
    """A server that answers while the block runs. Port 0 is any free one; `access` is `Server`'s key and hosts."""
    _require_web()
    from ragen.model.load import find_model, load_model
    from ragen.serve.web import Server

    loaded = load_model(find_model(model.name), merge=False)
    with Server(loaded, name or model.label, host, port, max_model_len, **access) as server:
        yield server


def _require_web() -> None:
    missing = [package for package in ("starlette", "uvicorn", "pydantic") if find_spec(package) is None]
    if missing:
        raise ConfigError(f"ragen serve needs {', '.join(missing)}: pip install 'ragen[serve]'")


@contextmanager
def _terminated() -> Iterator[None]:
    """SIGTERM is treated as Ctrl-C."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
