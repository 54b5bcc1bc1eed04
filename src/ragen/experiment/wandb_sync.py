"""Uploads the offline W&B runs of a batch in one go.

    before = offline_runs()
    …
    for line in sync(offline_runs() - before): log.append([line])

A failed upload is logged, with the command that repeats it, and stops nothing: the runs stay on disk.
"""

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Set
from pathlib import Path

from ragen.run.sinks import wandb_mode

LIMIT = 1800.0  # seconds for one upload
MAX_LINES = 20


def offline_runs(environ: Mapping[str, str] = os.environ) -> set[Path]:
    """Those in `wandb/` of the current directory, or of WANDB_DIR."""
    return set((Path(environ.get("WANDB_DIR") or ".") / "wandb").glob("offline-run-*"))


def sync(
    runs: Set[Path], environ: Mapping[str, str] = os.environ, command: tuple[str, ...] = (sys.executable, "-m", "wandb")
) -> list[str]:
    """Upload these runs; returns lines for the summary log."""
    if not runs:
        return ["W&B: no new offline runs"]
    arguments = [*command, "sync", *map(str, sorted(runs))]
    later = f"later: {shlex.join(['wandb', *arguments[len(command) :]])}"
    mode, why = wandb_mode(environ)
    if mode != "online":
        return [f"W&B: {len(runs)} offline runs are not uploaded ({why}); {later}"]
    try:
        done = subprocess.run(arguments, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return [f"W&B: the upload of {len(runs)} offline runs timed out after {LIMIT:.0f} s; {later}"]
    output = [f"  {line}" for line in (done.stdout + done.stderr).splitlines() if line.strip()][-MAX_LINES:]
    if done.returncode:
        return [f"W&B: the upload of {len(runs)} offline runs failed (exit status {done.returncode}); {later}", *output]
    return [f"W&B: uploaded {len(runs)} offline runs", *output]
