"""Do the warnings of a run come before its success falls? Runs healthy and failing trainings, and counts.

    PYTHONPATH=src .venv/bin/python scripts/studies/health.py                              # half an hour on two cores
    PYTHONPATH=src .venv/bin/python scripts/studies/health.py --seeds 6 7 8 --only-table --picture health.png

The limits (`ragen.diagnose.history.Limits`) were chosen by looking at seeds 0 to 5; seeds 6 to 8 judge them. Success
falls at the first validation that is significantly below the first one or the best one so far, level by level, if the
next one is too. A warning that begins at that step or later is late. Finished runs are not repeated.
"""

import argparse
import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from ragen.diagnose.checks import CHECKS
from ragen.diagnose.health import Health
from ragen.diagnose.history import series_of
from ragen.report.verdict import validation_tags, validations
from ragen.statistics import paired_difference
from ragen.store.episodes import read_episodes
from ragen.store.run_folder import RunFolder

ROOT = Path(__file__).parents[2]
SMALL = (
    "model.base_model=pocket", "trainer.total_training_steps=20", "trainer.test_freq=5", "trainer.logger=[console]",
    "es_manager.train.env_groups=8", "es_manager.val.env_groups=128", "ppo_mini_batch_size=32",
)  # fmt: skip
ACTOR, FILTER = "actor_rollout_ref.actor", "actor_rollout_ref.rollout.rollout_filter_"
NO_FILTER = (f"{FILTER}value=1.0", f"{FILTER}include_zero=True")
FAST = "trainer.total_training_steps=10"  # it is over by then
NO_TASK = ("algorithm.zero_task_advantage=True", f"{ACTOR}.entropy_coeff=0.03", *NO_FILTER)
SCENARIOS: dict[str, tuple[str, ...]] = {
    "healthy": ("frozenlake",),
    "KL": ("frozenlake", f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_coef=0.01"),
    "entropy": ("frozenlake", f"{ACTOR}.entropy_coeff=0.001"),
    "no filter": ("sokoban", *NO_FILTER),
    "rate 2e-3": ("frozenlake", FAST, f"{ACTOR}.optim.lr=2e-3"),
    "rate 1e-2": ("frozenlake", FAST, f"{ACTOR}.optim.lr=1e-2", *NO_FILTER),
    "entropy only": ("frozenlake", *NO_TASK, f"{ACTOR}.optim.lr=1e-4"),
    "entropy only 3e-4": ("frozenlake", *NO_TASK),
}
OUTCOMES = ("in time", "late", "missed", "false alarm", "quiet")


@dataclass(frozen=True)
class Judged:
    """When success fell, if it did, and the first warning."""

    fell: int | None
    warned: int | None
    warning: str

    @property
    def outcome(self) -> str:
        if self.fell is None:
            return "quiet" if self.warned is None else "false alarm"
        return "missed" if self.warned is None else "in time" if self.warned < self.fell else "late"


def train(scenario: str, seed: int, folder: Path) -> None:
    environment, *words = SCENARIOS[scenario]
    words += [f"seed.train={10_000 + 100_000 * seed}", f"trainer.default_local_dir={folder}"]
    command = [sys.executable, "-m", "ragen", "train", environment, *SMALL, *words]
    ended = subprocess.run(command, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert ended.returncode in (0, 3), f"{scenario}, seed {seed}: exit status {ended.returncode}"


def fall(folder: RunFolder) -> int | None:
    """The validation at which success has fallen."""
    files = folder.episode_files("val")
    played = [sorted(read_episodes(file.path), key=lambda episode: episode["seed"]) for file in files]
    won = [[episode["success"] for episode in episodes] for episodes in played]
    best, low = won[0], []
    for now in won:
        low.append(any(paired_difference(before, now).high < 0 for before in (won[0], best)))
        best = max(best, now, key=sum)
    return next((file.step for index, file in enumerate(files) if all(low[index : index + 2])), None)


def judge(folder: RunFolder) -> Judged:
    first = next(iter(Health.of(folder.read_metrics().rows).warnings), None)
    return Judged(fall(folder), first and first.first_step, first.name if first else "")


def line(scenario: str, judged: list[Judged]) -> str:
    counts = Counter(one.outcome for one in judged)
    leads = [one.fell - one.warned for one in judged if one.outcome == "in time"]
    lead = f"{median(leads):g} ({min(leads)} to {max(leads)})" if leads else "–"
    names = ", ".join(f"{CHECKS[name].title} {n}" for name, n in Counter(one.warning for one in judged).items() if name)
    return f"| {scenario} | {' | '.join(str(counts[word]) for word in OUTCOMES)} | {lead} | {names or '–'} |"


def draw(runs: dict[str, dict[int, tuple[RunFolder, Judged]]], path: Path) -> None:
    """Success with the first warning and the fall, and the two numbers that tell the regimes apart."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.1 * len(runs), 6.2))
    axes = figure.subplots(3, len(runs), sharex=True, sharey="row", squeeze=False)
    for column, (scenario, found) in zip(axes.T, runs.items(), strict=True):
        column[0].set_title(scenario, fontsize=9)
        for (seed, (folder, judged)), style in zip(found.items(), ("-", "--", ":", "-.", "-", "--"), strict=False):
            metrics = folder.read_metrics()
            success = {value.step: value.success for value in validations(metrics, validation_tags(metrics)[0])}
            curves = (success, *(dict(series_of(metrics.rows, name)) for name in ("information", "thought entropy")))
            for axis, points in zip(column, curves, strict=True):
                (drawn,) = axis.plot(points.keys(), points.values(), style, lw=1.4, label=f"seed {seed}")
            for step, marker in ((judged.warned, "v"), (judged.fell, "X")):
                if step is not None:
                    at = success[min(success, key=lambda other: abs(other - step))]
                    column[0].plot(step, at, marker, color=drawn.get_color(), ms=8, mec="black", mew=0.7)
        column[2].set_xlabel("step")
    for axis, name in zip(axes[:, 0], ("validation success", "I(X;Z), nats", "H(Z|X), nats a token"), strict=True):
        axis.set(ylabel=name, **({"yscale": "log"} if "H(" in name else {"ylim": (0, None)}))
    axes[0][0].legend(fontsize=7, loc="lower right")
    figure.text(0.5, 0.005, "triangle: first warning; cross: success has fallen", ha="center", fontsize=9)
    figure.tight_layout(rect=(0, 0.02, 1, 1))
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="*", default=[6, 7, 8], help="which seeds (default 6 to 8)")
    parser.add_argument("--only", nargs="*", choices=list(SCENARIOS), default=list(SCENARIOS), help="which scenarios")
    parser.add_argument("--output", type=Path, default=ROOT / "runs/studies/health", help="where the runs go")
    parser.add_argument("--only-table", action="store_true", help="print the table of what is there")
    parser.add_argument("--picture", type=Path, help="draw what is there into this file")
    options = parser.parse_args()
    keys = [(name, seed) for seed in options.seeds for name in options.only]
    folders = {(name, seed): RunFolder(options.output / f"{name.replace(' ', '_')}-s{seed}") for name, seed in keys}
    if not options.only_table:
        todo = [(*key, folder.path) for key, folder in folders.items() if not folder.finished_path.exists()]
        with ThreadPoolExecutor(max_workers=2) as pool:
            list(pool.map(lambda run: train(*run), todo))
    runs: dict[str, dict[int, tuple[RunFolder, Judged]]] = {}
    for (name, seed), folder in folders.items():
        if folder.finished_path.exists():
            runs.setdefault(name, {})[seed] = (folder, judge(folder))
    print(f"| scenario | {' | '.join(OUTCOMES)} | lead, steps | first warnings |\n|{'---|' * (len(OUTCOMES) + 3)}")
    for name, found in runs.items():
        print(line(name, [judged for _, judged in found.values()]))
    if options.picture:
        draw(runs, options.picture)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
