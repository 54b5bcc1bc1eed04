"""Every documented experiment for real, on the embedded model: tiny runs, all parts. Prints a table, exits 1 on a gap.

    .venv/bin/python scripts/studies/every_experiment.py                # all of them: about an hour on two cores
    .venv/bin/python scripts/studies/every_experiment.py --only kl      # those whose script's name has "kl" in it

Each script is started as a user would, with three steps a run and few levels, and then once more with `--resume`, which
has to skip everything. It is held to its dry run: every run that the plan lists has its line in the summary log, its
`.log`, its `.result` and its run folder, and the report of the whole can be made.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
QUICK = ("--model", "pocket", "--gpus", "cpu,cpu", "--steps", "3", "--cooldown", "0")
FEW = (
    "es_manager.train.env_groups=2", "es_manager.train.group_size=4", "es_manager.val.env_groups=4",
    "ppo_mini_batch_size=8", "trainer.logger=[console]",
)  # fmt: skip
SEARCH = ("--env_name=two_armed_bandit", "--exp_base_name=every", "--micro_batch_size", "4", "--parallel")


@dataclass(frozen=True)
class Experiment:
    script: str
    options: tuple[str, ...] = ()
    overrides: tuple[str, ...] = FEW


EXPERIMENTS = (
    Experiment("scripts/runs/run_top_p_sweep.sh"),
    Experiment("scripts/runs/run_kl_sweep.sh"),
    Experiment("scripts/runs/run_entropy_sweep.sh"),
    Experiment("scripts/runs/smoke_test_for_ke.sh"),
    Experiment("run_all_kl_entropy_exps.sh", ("--rollout_filter_strategy", "top_k", "--only", "3")),
    *(
        Experiment("scripts/hyperparam_search.sh", (*SEARCH, "--search_group", group), ("trainer.logger=[console]",))
        for group in "1234"
    ),
    Experiment("scripts/runs/run_model_scaling.sh", ("--models", "pocket")),
    Experiment("scripts/runs/run_main_table_diff_algo.sh"),
    Experiment("scripts/runs/run_main_table_diff_size.sh"),
    Experiment("scripts/runs/run_main_table_diff_model.sh"),
    Experiment("scripts/runs/run_frozen_lake_slipper_rate_sweep.sh", ("--slipper-rate", "0,50")),
)


def command(experiment: Experiment, *more: str) -> list[str]:
    given = [word for word in QUICK if not (word in ("--model", "pocket") and "--models" in experiment.options)]
    return ["bash", experiment.script, *experiment.options, *given, *more, "--", *experiment.overrides]


def call(words: Sequence[str]) -> subprocess.CompletedProcess:
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"WANDB_MODE": "disabled"})


def status_of(run: dict) -> str:
    """What the summary log says last about a run, or what is missing of it."""
    for kind, path in {"log": run["log"], "result": run["log"].removesuffix(".log") + ".result"}.items():
        if not (ROOT / path).is_file():
            return f"no .{kind}"
    if not list((ROOT / run["checkpoints"]).glob("metrics.jsonl")):
        return "no run folder"
    result = (ROOT / run["log"]).with_suffix(".result").read_text().strip()
    if result not in (ROOT / run["summary"]).read_text():
        return "not in the summary"
    return result.rpartition("status=")[2].split(" ")[0]


def check(experiment: Experiment) -> tuple[str, list[str]]:
    """One line of the table, and what is wrong."""
    plan = [json.loads(line) for line in call(command(experiment, "--dry-run")).stdout.splitlines()]
    problems = [] if plan else ["the dry run lists nothing"]
    started = time.monotonic()
    ended = call(command(experiment))
    seconds = time.monotonic() - started
    statuses = {run["name"]: status_of(run) for run in plan}
    problems += [f"{name}: {status}" for name, status in statuses.items() if status != "success"]
    if ended.returncode:
        problems.append(f"exit status {ended.returncode}: {(ended.stdout + ended.stderr)[-600:]}")
    again = call(command(experiment, "--resume"))
    if again.returncode or "start " in again.stdout:
        problems.append(f"--resume did not skip everything: {(again.stdout + again.stderr)[-600:]}")
    for summary in dict.fromkeys(run["summary"] for run in plan):
        report = call(["./ragen", "report", summary])
        if report.returncode:
            problems.append(f"no report of {summary}: {report.stderr[-600:]}")
    num = sum(status == "success" for status in statuses.values())
    shown = " ".join([experiment.script, *experiment.options])
    missing = "; ".join(problems)[:80] or "nothing"
    return f"| `{shown}` | {len(plan)} | {num} | {seconds / 60:.1f} | {missing} |", problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[""], help="parts of the scripts' names")
    wanted = parser.parse_args().only
    chosen = [one for one in EXPERIMENTS if any(part in f"{one.script} {one.options}" for part in wanted)]
    print("| Script | runs | succeeded | minutes | missing |\n|---|---|---|---|---|", flush=True)
    failed = False
    for experiment in chosen:
        line, problems = check(experiment)
        print(line, flush=True)
        print("".join(f"  {problem}\n" for problem in problems), end="", file=sys.stderr, flush=True)
        failed |= bool(problems)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
