"""Variations of the default commands over many seeds: judged by the lower quartile, not by the mean.

    PYTHONPATH=src .venv/bin/python scripts/studies/seeds.py run recipes --at-once 2
    PYTHONPATH=src python scripts/studies/seeds.py run levels kl --at-once 16 --minutes 9     # again and again, until 0
    PYTHONPATH=src .venv/bin/python scripts/studies/seeds.py table recipes

A plan (`plans/NAME.yaml`, or any path) names a command, its variants and its seeds. Each run is an ordinary
`ragen train` on the CPU in a separate process, with `--threads` threads. A finished run becomes one line of
`docs/results/seeds.jsonl`, which is committed: runs that have their line are not repeated. Where the time is over
(`--minutes`), or on SIGTERM or Ctrl-C, running ones save and stop; the script then exits with 143, and the same call
resumes them. Needs torch, transformers, numpy, hydra-core, omegaconf and filelock; neither Ray nor a network.
"""

import argparse
import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any

import yaml

from ragen import lifeline
from ragen.config.compose import resolve
from ragen.config.identity_keys import HOW, WHERE, identity_values
from ragen.config.schema import Config
from ragen.format import markdown_table
from ragen.statistics import mean_interval
from ragen.store import json_lines
from ragen.store.run_folder import RunFolder

ROOT = Path(__file__).parents[2]
PLANS, RESULTS, RUNS = ROOT / "scripts/studies/plans", ROOT / "docs/results/seeds.jsonl", ROOT / "runs/studies/seeds"
PREEMPTED, ENDINGS = 143, (0, 3)  # exit statuses; a run that a rule ends has a result too
ENDED = ("finished", "early_stopped")
SEED_STEP = 100_000  # levels of different seeds do not overlap
SECONDS_TO_STOP = 90.0


@dataclass(frozen=True)
class Plan:
    """A file of `plans/`."""

    name: str
    about: str
    environment: str  # sokoban, frozenlake, two_armed_bandit
    seeds: int
    variants: Mapping[str, list[str]]
    overrides: list[str] = field(default_factory=list)  # of all variants
    reference: str | None = None  # the variant that the others are compared with, seed by seed

    @classmethod
    def read(cls, name: str) -> "Plan":
        path = PLANS / f"{name}.yaml"
        path = path if path.exists() else Path(name)
        if not path.is_file():
            raise SystemExit(f"{name}: no such plan; {PLANS} has {', '.join(known_plans())}")
        plan = cls(path.stem, **yaml.safe_load(path.read_text(encoding="utf-8")))
        if plan.reference is not None and plan.reference not in plan.variants:
            raise SystemExit(f"{path}: reference: {plan.reference} is not one of {', '.join(plan.variants)}")
        return plan


def known_plans() -> list[str]:
    return sorted(path.stem for path in PLANS.glob("*.yaml"))


@dataclass(frozen=True)
class Task:
    """One run: a variant of a plan, with a seed, on a number of threads."""

    environment: str
    variant: str
    overrides: tuple[str, ...]
    seed: int
    threads: int

    @property
    def words(self) -> list[str]:
        return [
            self.environment,
            "model.base_model=pocket",
            *self.overrides,
            f"seed.train={10_000 + SEED_STEP * self.seed}",
        ]

    @property
    def recipe(self) -> str:
        return recipe_of(tuple(self.words[:-1]))


@cache
def recipe_of(words: tuple[str, ...]) -> str:
    """What a run computes, seed aside: it changes with the defaults of a command, not with its spelling."""
    trees = (resolve(list(words), environ={}).config, Config())
    values, defaults = (identity_values(tree, ignore=(*WHERE, *HOW)) for tree in trees)
    changed = {key: value for key, value in values.items() if defaults.get(key) != value}
    return hashlib.sha256(json.dumps(changed, sort_keys=True, default=str).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Result:
    """A finished run: one line of the results. Success is a share of the validation levels, at T = 0.5 and greedily."""

    environment: str
    overrides: list[str]
    recipe: str
    seed: int
    threads: int
    machine: str
    commit: str
    status: str  # finished, or early_stopped
    steps: int
    start: float
    best: float
    end: float
    greedy_start: float
    greedy_best: float
    greedy_end: float
    valid_end: float  # share of valid replies in the last validation
    valid_lowest: float  # and in the training step or validation where it was lowest
    varied: float  # share of groups that vary, mean over steps
    minutes: float
    episodes: int  # of training
    curve: list[list[float]]  # [step, training episodes, success, greedy success] of every validation

    @property
    def key(self) -> tuple[str, int, int, str]:
        return self.recipe, self.seed, self.threads, self.machine


# --- plans to runs --------------------------------------------------------------------------------------------------


def tasks_of(plan: Plan, options: argparse.Namespace) -> list[Task]:
    """Seed by seed, so that an unfinished study has equal numbers of each variant."""
    names = [name for name in plan.variants if not options.only or name in options.only]
    return [
        Task(plan.environment, name, (*plan.overrides, *plan.variants[name], *options.overrides), seed, options.threads)
        for seed in (range(plan.seeds) if options.seeds is None else options.seeds)
        for name in names
    ]


class Study:
    """Runs tasks, several at once, until all are finished or it is time to stop."""

    def __init__(self, options: argparse.Namespace, machine: str):
        self.options, self.machine, self.commit = options, machine, commit_of(ROOT)
        self.deadline = time.monotonic() + 60 * options.minutes if options.minutes else float("inf")
        self.stopping, self.lock = threading.Event(), threading.Lock()
        self.num_finished = self.num_failed = 0

    def run(self, tasks: Sequence[Task]) -> int:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.stopping.set())
        known = {result.key for result in read_results(self.options.results)}
        keyed = {(task.recipe, task.seed, task.threads, self.machine): task for task in tasks}
        waiting = {key: task for key, task in keyed.items() if key not in known}
        print(f"{len(keyed)} runs, {len(waiting)} without a result on this machine ({self.machine})", flush=True)
        with ThreadPoolExecutor(self.options.at_once) as pool:
            endings = [pool.submit(self._finish, task, key[0]) for key, task in waiting.items()]
            for ending in endings:
                ending.result()
        left = len(waiting) - self.num_finished - self.num_failed
        print(f"{self.num_finished} finished, {self.num_failed} failed, {left} left", flush=True)
        return 1 if self.num_failed else PREEMPTED if left else 0

    def _finish(self, task: Task, recipe: str) -> None:
        """Run one task; its result is on disk when this returns, unless it was stopped or failed."""
        if self._is_over():
            return
        folder = self.options.runs / f"{task.environment}-{recipe}-t{task.threads}-s{task.seed}"
        folder.parent.mkdir(parents=True, exist_ok=True)
        log = folder.with_suffix(".log")
        status = 0
        if ended_run(folder) is None:
            status = self._call([*task.words, f"trainer.default_local_dir={folder}"], task.threads, log)
        with self.lock:
            if status in ENDINGS and (ended := ended_run(folder)):
                result = result_of(ended, task, recipe, self.machine, self.commit)
                json_lines.append(self.options.results, asdict(result))
                self.num_finished += 1
                shown = f"{100 * result.start:.1f} → {100 * result.end:.1f} % in {result.minutes:.1f} minutes"
                print(f"{task.variant}, seed {task.seed}: {shown}", flush=True)
            elif status != PREEMPTED and not self._is_over():
                self.num_failed += 1
                print(f"{task.variant}, seed {task.seed}: failed with exit status {status}, see {log}", flush=True)

    def _call(self, words: Sequence[str], threads: int, log: Path) -> int:
        """The exit status of `ragen train`; it is asked to save and stop when the time is over."""
        end, held = os.pipe()  # however this process ends, its runs end with it
        environment = os.environ | {
            "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": "",
            lifeline.VARIABLE: str(end),
        }  # fmt: skip
        command = [sys.executable, "-m", "ragen", "train", *words]
        with log.open("ab") as output:
            process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, pass_fds=[end])
            os.close(end)
            try:
                while process.poll() is None and not self._is_over():
                    time.sleep(0.2)
                if process.poll() is None:
                    process.terminate()
                return process.wait(SECONDS_TO_STOP)
            except subprocess.TimeoutExpired:
                process.kill()
                return process.wait()
            finally:
                os.close(held)

    def _is_over(self) -> bool:
        return self.stopping.is_set() or time.monotonic() > self.deadline


# --- runs to results ------------------------------------------------------------------------------------------------


def ended_run(folder: Path) -> RunFolder | None:
    """The directory that holds the finished run: this one, or a numbered sibling if another version wrote this one."""
    candidates = [folder, *sorted(folder.parent.glob(f"{folder.name}-[0-9]*"))]
    ended = [run for run in map(RunFolder, candidates) if (run.read_finished() or {}).get("status") in ENDED]
    return ended[-1] if ended else None


def result_of(folder: RunFolder, task: Task, recipe: str, machine: str, commit: str) -> Result:
    rows, config = folder.read_metrics().rows, folder.read_config()
    curve = list(curve_of(rows, config))
    if not curve:
        raise SystemExit(f"{folder}: no validation; a study needs trainer.test_freq above 0")
    successes, greedy = ([row[part] for row in curve] for part in (2, 3))
    valid = [row[name] for row in rows for name in ("train/format_valid", "val-env/format_valid") if name in row]
    varied = [row["rollout/varied_ratio"] for row in rows if "rollout/varied_ratio" in row]
    timed = [row.get("timing_s/step", row.get("timing_s/testing", 0.0)) for row in rows]
    return Result(
        environment=task.environment,
        overrides=list(task.overrides),
        recipe=recipe,
        seed=task.seed,
        threads=task.threads,
        machine=machine,
        commit=commit,
        status=(folder.read_finished() or {}).get("status", ""),
        steps=rows[-1]["step"],
        start=successes[0],
        best=max(successes),
        end=successes[-1],
        greedy_start=greedy[0],
        greedy_best=max(greedy),
        greedy_end=greedy[-1],
        valid_end=[row["val-env/format_valid"] for row in rows if "val-env/format_valid" in row][-1],
        valid_lowest=min(valid),
        varied=fmean(varied) if varied else 0.0,
        minutes=sum(timed) / 60,
        episodes=int(curve[-1][1]),
        curve=curve,
    )


def curve_of(rows: Iterable[Mapping[str, Any]], config: Mapping[str, Any]) -> Iterator[list[float]]:
    """Step, training episodes so far, success and greedy success of every validation; a mean over tags."""
    train = config["es_manager"]["train"]
    of_a_step, num_episodes = train["env_groups"] * train["group_size"], 0.0
    for row in rows:
        if "train/reward" in row:
            num_episodes += of_a_step + row.get("rollout/resampled_episodes", 0.0)
        tags = [name.split("/")[1] for name in row if name.startswith("val-env/") and name.endswith("/greedy_success")]
        if tags:
            means = [fmean(row[f"val-env/{tag}/{kind}"] for tag in tags) for kind in ("success", "greedy_success")]
            yield [row["step"], num_episodes, *means]


def read_results(path: Path) -> list[Result]:
    return [Result(**record) for record in json_lines.read(path).records]


def machine_kind() -> str:
    """The CPU and its cores."""
    model = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    return f"{model}, {os.cpu_count()} cores"


def commit_of(root: Path) -> str:
    """The commit of the checkout; `unknown` where it is a copy without git."""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


# --- results to tables ----------------------------------------------------------------------------------------------

HEADS = (
    "variant", "seeds", "end, T = 0.5: min · lower quartile · mean · max, %", "greedy: the same, %", "gain: min · mean",
    "best, mean, %", "valid replies, min, %", "groups that vary, %", "episodes", "minutes", "difference [95 %]",
)  # fmt: skip


def lower_quartile(values: Sequence[float]) -> float:
    return quantiles(values, n=4, method="inclusive")[0] if len(values) > 1 else values[0]


def distribution(values: Sequence[float]) -> str:
    return " · ".join(
        f"{100 * value:.1f}" for value in (min(values), lower_quartile(values), fmean(values), max(values))
    )


def difference(results: Sequence[Result], reference: Sequence[Result]) -> str:
    """The paired difference at the end, over the seeds that both have, with Student's interval."""
    ends = {result.seed: result.end for result in reference}
    pairs = [result.end - ends[result.seed] for result in results if result.seed in ends]
    if not pairs:
        return "–"
    interval = mean_interval(pairs)
    bounds = f" [{100 * interval.low:+.1f}, {100 * interval.high:+.1f}]" if interval else ""
    return f"{100 * fmean(pairs):+.1f}{bounds}"


def table(plan: Plan, tasks: Sequence[Task], results: Sequence[Result]) -> str:
    """A row for each variant and machine, the highest lower quartile first."""
    wanted = {(task.recipe, task.seed, task.threads): task.variant for task in tasks}
    found: dict[str, dict[str, list[Result]]] = {}
    for result in results:
        if variant := wanted.get((result.recipe, result.seed, result.threads)):
            found.setdefault(result.machine, {}).setdefault(variant, []).append(result)
    parts = []
    for machine, variants in found.items():
        ranked = sorted(variants.items(), key=lambda item: -lower_quartile([one.end for one in item[1]]))
        reference = variants.get(plan.reference or "", [])
        rows = [_row(name, of_variant, reference, name == plan.reference) for name, of_variant in ranked]
        commits = ", ".join(sorted({one.commit for of_variant in variants.values() for one in of_variant}))
        threads = ", ".join(sorted({str(task.threads) for task in tasks}))
        parts.append(f"{machine}; threads per run: {threads}; commits: {commits}\n\n{markdown_table(HEADS, rows)}")
    return "\n\n".join(parts) or "no results yet"


def _row(name: str, results: Sequence[Result], reference: Sequence[Result], is_reference: bool) -> list[str]:
    ends, greedy = [one.end for one in results], [one.greedy_end for one in results]
    gains = [one.end - one.start for one in results]
    return [
        name,
        str(len(results)),
        distribution(ends),
        distribution(greedy),
        f"{100 * min(gains):+.1f} · {100 * fmean(gains):+.1f}",
        f"{100 * fmean(one.best for one in results):.1f}",
        f"{100 * min(one.valid_end for one in results):.1f}",
        f"{100 * fmean(one.varied for one in results):.0f}",
        f"{fmean(one.episodes for one in results):,.0f}",
        f"{fmean(one.minutes for one in results):.1f}",
        "reference" if is_reference else difference(results, reference),
    ]


# --- the command line -----------------------------------------------------------------------------------------------


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("run", "table"), help="make runs, or print the tables of what is there")
    parser.add_argument("plans", nargs="+", metavar="PLAN", help=f"a name ({', '.join(known_plans())}) or a path")
    parser.add_argument("--only", nargs="+", metavar="VARIANT", help="these variants")
    parser.add_argument("--seeds", nargs="+", type=int, metavar="N", help="these seeds (default: 0 … as the plan says)")
    parser.add_argument("--threads", type=int, default=1, help="threads of each run (default 1)")
    parser.add_argument("--at-once", type=int, default=2, help="runs at a time (default 2)")
    parser.add_argument("--minutes", type=float, help="then save, stop and exit with 143 (default: no limit)")
    parser.add_argument("--overrides", nargs="+", default=[], metavar="KEY=VALUE", help="added to every run")
    parser.add_argument("--runs", type=Path, default=RUNS, help="where run directories go")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the file of results")
    parser.add_argument("--machine", help="the machine's name in the results (default: its CPU)")
    return parser


def main() -> int:
    options = arguments().parse_args()
    plans = [Plan.read(name) for name in options.plans]
    if unknown := set(options.only or ()) - {name for plan in plans for name in plan.variants}:
        raise SystemExit(f"--only {', '.join(sorted(unknown))}: no such variant in {', '.join(options.plans)}")
    if options.action == "run":
        tasks = [task for plan in plans for task in tasks_of(plan, options)]
        return Study(options, options.machine or machine_kind()).run(tasks)
    for plan in plans:
        print(
            f"**{plan.name}**: {plan.about}\n\n{table(plan, tasks_of(plan, options), read_results(options.results))}\n"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
