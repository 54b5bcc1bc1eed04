"""`ragen serve`: an OpenAI-compatible server for one model.

    serve("pocket", port=8000)                       # until Ctrl-C
    with web.Server(loaded, "pocket") as server:     # inside a program, on a free port
        server.base                                  # http://127.0.0.1:41325/v1

A request passes `limits.py` (Host, key, sizes and times), `request.py` (fields), `chat.py` (messages to tokens),
`engine.py` (batches, sampling) and `completion.py` (the answer). `web.py` has the routes.
"""

import os
import signal
import sys
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address

from ragen.errors import ConfigError
from ragen.evaluate.models import local_model


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
    if api_key_env and not (key and key.isascii() and key.isprintable() and " " not in key):
        raise ConfigError(f"--api-key-env {api_key_env}: the variable is not set, or is not a key without blanks")
    found = local_model(model)
    if not (is_loopback(host) or key):
        text = "anyone there can use this model. Require a key with --api-key-env VARIABLE"
        print(f"warning: other machines can reach {host}, and no key is required: {text}", file=sys.stderr)
    if dry_run:
        print(f"would serve {name or found.label} ({found.name}) at {base_of(host, port)}")
        return 0
    from ragen.model.load import find_model, load_model
    from ragen.serve.web import Server

    loaded = load_model(find_model(found.name), merge=False)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM does what Ctrl-C does
    with Server(loaded, name or found.label, host, port, max_model_len, key, allowed_hosts) as server:
        try:
            print(f"serving {server.name} at {server.base} (Ctrl-C ends it)", flush=True)
            server.wait()
        except KeyboardInterrupt:
            print("stopping", file=sys.stderr)
        finally:
            signal.signal(signal.SIGTERM, before)
    return 0


def base_of(host: str, port: int) -> str:
    """The address for clients; an IPv6 address is in brackets."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"


def is_loopback(name: str) -> bool:
    """Whether a host name or address means this machine alone."""
    address = address_of(name)
    return address.is_loopback if address else name == "localhost" or name.endswith(".localhost")


def address_of(name: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(name)
    except ValueError:
        return None
