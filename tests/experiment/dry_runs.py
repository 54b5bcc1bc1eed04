"""Documented commands, run with --dry-run in this process.

Resolving a config takes a tenth of a second, and the same ones come many times.
"""

import contextlib
import io
import json
import re
import shlex
from functools import cache
from pathlib import Path
from typing import NamedTuple

import ragen.config.compose
from ragen.cli import main

ROOT = Path(__file__).parents[2]
SEEDS = ROOT / "tests/data/seeds"
_RESOLVE = ragen.config.compose.resolve


class DryRun(NamedTuple):
    status: int
    runs: list[dict]
    errors: str

    @property
    def names(self) -> list[str]:
        return [run["name"] for run in self.runs]


@cache
def _resolved(arguments, config_name, environ):
    return _RESOLVE(arguments, config_name, environ=None if environ is None else dict(environ))


def resolve_once(arguments, config_name=None, environ=None, config_dir=None):
    assert config_dir is None
    return _resolved(tuple(arguments), config_name, None if environ is None else tuple(sorted(environ.items())))


def seed_text(start: str) -> str:
    return next(SEEDS.glob(f"{start}_*.txt")).read_text()


def sweep_of(script: str) -> list[str]:
    """What a script gives to `ragen sweep` before the user's own words."""
    text = (ROOT / script).read_text().replace("\\\n", " ")
    if script == "run_all_kl_entropy_exps.sh":
        plan = re.search(r"SMOKE_PLAN=(\w+)", text)[1]
        return [plan, *sweep_of("scripts/runs/smoke_test_for_ke.sh")[1:]]
    words = shlex.split(re.search(r"-m ragen sweep (.*)", text)[1])
    if script == "scripts/runs/smoke_test_for_ke.sh":
        return ["smoke_test_for_ke", "--gpus", "0,1,2,3,4,5,6,7"]
    assert words[1:] == ["$@"]
    return words[:1]


@cache
def dry_run(command: str) -> DryRun:
    """`bash scripts/…` or `./ragen sweep …`, up to a comment."""
    words = shlex.split(command, comments=True)
    words = words[2:] if words[0] == "./ragen" else [*sweep_of(words[1]), *words[2:]]
    place = words.index("--") if "--" in words else len(words)
    words = [*words[:place], *([] if "--dry-run" in words else ["--dry-run"]), *words[place:]]
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        status = main(["sweep", *words])
    return DryRun(status, [json.loads(line) for line in out.getvalue().splitlines()], errors.getvalue())


def effective(run: dict) -> dict[str, str]:
    """Key -> value of a run's overrides; the last one counts."""
    return dict(word.split("=", 1) for word in run["overrides"])
