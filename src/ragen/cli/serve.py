"""Serve a checkpoint, a model directory or the embedded model to programs on this machine, at /v1/chat/completions.
Ctrl-C stops it.

examples:
  ragen serve pocket
  ragen serve checkpoints/RAGEN/pocket-sokoban/global_step_150 --name mine
  MODEL_KEY=… ragen serve pocket --host 0.0.0.0 --api-key-env MODEL_KEY
  ragen eval --api-base http://127.0.0.1:8000/v1 --api-model mine --env sokoban
"""

import argparse
from collections.abc import Sequence

from ragen.cli import CommandParser
from ragen.extras import require
from ragen.invocation_dir import caller_folder, model_from


def parser() -> argparse.ArgumentParser:
    made = CommandParser("serve", __doc__)
    add = made.add_argument
    add("model", metavar="MODEL", help="a run, a checkpoint, a model directory, or pocket")
    add("--host", default="127.0.0.1", help="address to listen at (default 127.0.0.1)")
    add("--port", type=int, default=8000, help="port (default 8000; 0: any free port)")
    add("--max-model-len", type=int, metavar="N", help="tokens of prompt and reply (default: the model's)")
    add("--name", help="model name that requests use (default: the model's own)")
    add("--api-key-env", metavar="VARIABLE", help="require the API key that this variable holds")
    add("--allowed-host", action="append", default=[], metavar="NAME", help="also answer requests to this host name")
    add("--dry-run", action="store_true", help="print what would be served and stop")
    return made


def run(arguments: Sequence[str]) -> int:
    options = parser().parse_args(arguments)
    if not options.dry_run:
        require("api")
    from ragen.serve import serve

    model = model_from(options.model, caller_folder())
    access = {"api_key_env": options.api_key_env, "allowed_hosts": options.allowed_host}
    return serve(model, options.host, options.port, options.max_model_len, options.name, options.dry_run, **access)
