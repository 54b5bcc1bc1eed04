"""A real pretrained model, from demonstrations to RL: SmolLM2-135M on one GPU. Prints tables.

    PYTHONPATH=src .venv/bin/python scripts/studies/smollm2.py plan configs.yaml --model MODEL --folder OUT
    PYTHONPATH=src python scripts/studies/smollm2.py run configs.yaml --at-once 6
    PYTHONPATH=src python scripts/studies/smollm2.py run configs.yaml --only '*-short-1600' 'ppo-*' --at-once 6
    PYTHONPATH=src .venv/bin/python scripts/studies/smollm2.py table OUT --picture curves.png

`plan` resolves every run where Hydra is installed; `run` needs neither Hydra nor a network. First come short supervised
runs of several sizes, beside them those of the documented sizes and the model as it came. RL starts from the first
short one that ends with a success of 30 to 60 %: PPO and GRPO, with and without the filter, three seeds each
(`plan --seeds 3 4 5` for others). Many runs share the card: start `nvidia-cuda-mps-control -d` before.
"""

import argparse
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import yaml

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
GAMES = {"sokoban": "_2_sokoban", "frozenlake": "_3_frozen_lake"}
# Replies of a model that was shown answers only are short: 64 tokens cut none of them.
COMMON = (
    f"{ROLLOUT}.response_length=64",
    f"{ROLLOUT}.max_model_len=2048",
    "micro_batch_size_per_gpu=4",
    "log_prob_micro_batch_size_per_gpu=32",
    "data.val_batch_size=128",
)
DOCUMENTED = ("sft.data_generation.train_size=2000", "sft.data_generation.test_size=200", "sft.training.epochs=5")
SHORT = (1_600, 2_000, 2_400, 2_800)  # levels, each seen twice, all weights
FILTERS = {
    "filter": (f"{ROLLOUT}.rollout_filter_value=0.9", f"{ROLLOUT}.rollout_filter_include_zero=False"),
    "nofilter": (f"{ROLLOUT}.rollout_filter_value=1.0", f"{ROLLOUT}.rollout_filter_include_zero=True"),
}
ALGORITHMS = {"ppo": ("algorithm.adv_estimator=gae",), "grpo": ("algorithm.adv_estimator=grpo",)}
RL = (
    "trainer.logger=[console]",
    "trainer.save_freq=-1",
    "trainer.total_training_steps=100",
    "trainer.val_before_train=False",  # the supervised run was validated on the same levels
    "trainer.test_freq=50",
    "es_manager.train.group_size=8",
    "ppo_mini_batch_size=32",
    f"{ACTOR}.optim.lr=2e-5",
    "critic.optim.lr=6e-5",
    f"{ACTOR}.entropy_coeff=0.001",
    "collapse_detection.compute_freq=50",
)
SEEDS = [0, 1, 2]
COLOURS, STYLES = {"filter": "#0072b2", "nofilter": "#8a8a8a"}, ("-", "--", ":")
START = (0.30, 0.60)  # success from which there is something to learn, and something to lose


# --- the runs -----------------------------------------------------------------------------------------------------


def supervised(model: str, folder: Path) -> dict[str, tuple[str, list[str]]]:
    """Name -> (recipe, words)."""
    found = {}
    for game, recipe in GAMES.items():
        sizes = {"documented": DOCUMENTED}
        if game == "sokoban":
            sizes |= {f"short-{num_levels}": _short(num_levels) for num_levels in SHORT}
        for size, words in sizes.items():
            name = f"sft-{game}-{size}"
            found[name] = (
                recipe,
                [
                    "rl_or_sft=sft",
                    f"sft.training.base_model={model}",
                    f"sft.output_dir={folder / name}",
                    "sft.training.micro_batch_size=8",
                    "sft.training.logger=[console]",
                    f"sft.training.experiment_name={name}",
                    *words,
                    *COMMON,
                ],
            )
    return found


def _short(num_levels: int) -> tuple[str, ...]:
    return (
        f"sft.data_generation.train_size={num_levels}",
        "sft.data_generation.test_size=50",
        "sft.training.epochs=2",
        "sft.training.lora_rank=0",
        "sft.training.train_batch_size=64",
        "sft.training.learning_rate=3e-4",
    )


def untrained(model: str, folder: Path) -> dict[str, tuple[str, list[str]]]:
    """The model as it came, in both games."""
    words = [f"model_path={model}", "trainer.val_only=True", "trainer.logger=[console]", *COMMON]
    return {
        f"base-{game}": (recipe, [*words, f"trainer.default_local_dir={folder / f'base-{game}'}"])
        for game, recipe in GAMES.items()
    }


def reinforced(model: str, folder: Path, seeds: list[int]) -> dict[str, tuple[str, list[str]]]:
    found = {}
    for seed in seeds:
        for algorithm, estimator in ALGORITHMS.items():
            for condition, words in FILTERS.items():
                name = f"{algorithm}-{condition}-s{seed}"
                found[name] = (
                    "_2_sokoban",
                    [
                        f"model_path={model}",
                        f"trainer.default_local_dir={folder / name}",
                        f"trainer.experiment_name={name}",
                        f"seed.train={10_000 + 1_000_000 * seed}",
                        *estimator,
                        *words,
                        *COMMON,
                        *RL,
                    ],
                )
    return found


def plan(path: Path, model: str, folder: Path, seeds: list[int], more: list[str]) -> None:
    """Every run as a resolved config. What RL starts from is filled in when it is known."""
    from ragen.config.compose import resolve
    from ragen.config.tree import to_dict

    runs = supervised(model, folder) | untrained(model, folder) | reinforced(model, folder, seeds)
    configs = {
        name: to_dict(resolve([*words, *more], recipe, environ={}).config) for name, (recipe, words) in runs.items()
    }
    path.write_text(yaml.safe_dump(configs))
    print(f"{len(configs)} runs: {path}")


def one(path: Path, name: str, model: str | None) -> None:
    """One run in this process."""
    from ragen.api import run_config
    from ragen.config.schema import Config
    from ragen.config.tree import build

    config = build(Config, yaml.safe_load(path.read_text())[name])
    if model is not None:
        ours = replace(config.actor_rollout_ref, model=replace(config.actor_rollout_ref.model, path=model))
        critic = replace(config.critic, model=replace(config.critic.model, path=model))
        config = replace(config, model_path=model, actor_rollout_ref=ours, critic=critic)
    run_config(config)


def run(path: Path, at_once: int, only: list[str]) -> None:
    names = [name for name in yaml.safe_load(path.read_text()) if any(fnmatchcase(name, words) for words in only)]
    short = [name for name in names if "-short-" in name]
    aside = [name for name in names if name.startswith(("sft-", "base-")) and name not in short]
    reinforced = [name for name in names if name not in (*short, *aside)]
    if reinforced and not short:
        raise SystemExit("RL starts from a short fine-tuning: add one to --only, '*-short-1600'")
    with ThreadPoolExecutor(len(aside) or 1) as beside, ThreadPoolExecutor(at_once) as pool:
        done_aside = beside.map(lambda name: _finish(_start(path, name, None)), aside)
        if short:
            chosen = find_start(path, short)
            print(f"RL starts from {chosen}", flush=True)
            model = str(_folder(path) / chosen / "merged_model")
            list(pool.map(lambda name: _finish(_start(path, name, model)), reinforced))
        list(done_aside)


def find_start(path: Path, names: list[str]) -> str:
    """The first short run that ends where RL should start; the others are given up. If none does, the nearest."""
    running, success_of = [_start(path, name, None) for name in names], {}
    while running:
        time.sleep(1)
        for child in [child for child in running if child.process.poll() is not None]:
            running.remove(child)
            _finish(child)
            rows = validated(_folder(path) / child.name / "lora_weights")
            success_of |= {child.name: success(rows[-1])} if rows else {}
            if rows and START[0] <= success(rows[-1]) <= START[1]:
                for other in running:
                    other.process.kill()
                return child.name
    return min(success_of, key=lambda name: abs(success_of[name] - sum(START) / 2))


def _folder(path: Path) -> Path:
    """Where the runs are."""
    configs = yaml.safe_load(path.read_text())
    return next(Path(config["sft"]["output_dir"]).parent for name, config in configs.items() if "-short-" in name)


class Child(NamedTuple):
    name: str
    process: subprocess.Popen
    started: float


def _start(path: Path, name: str, model: str | None) -> Child:
    words = [sys.executable, __file__, "one", str(path), "--name", name, *(["--model", model] if model else [])]
    with open(path.with_name(f"{name}.log"), "ab") as log:
        process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT)
    return Child(name, process, time.monotonic())


def _finish(child: Child) -> None:
    status = child.process.wait()
    print(f"{child.name}: exit status {status} after {time.monotonic() - child.started:.0f} s", flush=True)


# --- what came out ------------------------------------------------------------------------------------------------


def validated(folder: Path) -> list[dict]:
    from ragen.store.run_folder import RunFolder

    rows = RunFolder(folder).read_metrics().rows
    return [row for row in rows if any(key.startswith("val-env/") and key.endswith("/success") for key in row)]


def success(row: dict, kind: str = "success") -> float:
    return next(value for key, value in row.items() if key.startswith("val-env/") and key.endswith(f"/{kind}"))


def table(folder: Path) -> None:
    print("| run | steps | success at T = 0.5, % | last [95 %] | greedy, % | minutes |\n|---|---|---|---|---|---|")
    for run in sorted(folder.iterdir()):
        place = run / "lora_weights" if run.name.startswith("sft-") else run
        if not (place / "metrics.jsonl").is_file():
            continue
        from ragen.store.run_folder import RunFolder

        rows, valid = RunFolder(place).read_metrics().rows, validated(place)
        if not valid:
            print(f"| {run.name} | {rows[-1]['step']} | not validated | | | |")
            continue
        curve = " → ".join(f"{100 * success(row):.1f}" for row in valid)
        low, high = (100 * success(valid[-1], f"success_{end}") for end in ("low", "high"))
        minutes = sum(row.get("timing_s/step", row.get("timing_s/testing", 0.0)) for row in rows) / 60
        greedy = 100 * success(valid[-1], "greedy_success")
        print(f"| {run.name} | {rows[-1]['step']} | {curve} | [{low:.1f}, {high:.1f}] | {greedy:.1f} | {minutes:.1f} |")


def draw(folder: Path, path: Path) -> None:
    """Success and entropy of the RL runs: a panel for each algorithm, a line style for each seed."""
    from matplotlib.figure import Figure

    from ragen.diagnose.history import series_of
    from ragen.store.run_folder import RunFolder

    shown = [algorithm for algorithm in ALGORITHMS if any(folder.glob(f"{algorithm}-*"))]
    figure = Figure(figsize=(10, 3.2 * len(shown)), layout="constrained")
    axes = figure.subplots(len(shown), 2, squeeze=False)
    for row, algorithm in zip(axes, shown, strict=True):
        for run in sorted(folder.glob(f"{algorithm}-*")):
            condition, seed = run.name.split("-")[1:3]
            look = {"color": COLOURS[condition], "ls": STYLES[int(seed[1:]) % len(STYLES)]}
            rows = RunFolder(run).read_metrics().rows
            trained = series_of(rows, "success")
            last_ten = ((trained[end - 1][0], trained[end - 10 : end]) for end in range(10, len(trained) + 1))
            means = [(step, fmean(value for _, value in values)) for step, values in last_ten]
            row[0].plot(*zip(*means, strict=True), lw=1.3, **look)
            valid = [(point["step"], success(point)) for point in validated(run)]
            row[0].plot(*zip(*valid, strict=True), "o", ms=7, mfc="white", mew=1.6, color=look["color"])
            label = f"{condition.replace('nofilter', 'no filter')}, seed {seed[1:]}"
            row[1].plot(*zip(*series_of(rows, "entropy"), strict=True), lw=1.3, label=label, **look)
        row[0].set(xlabel="step", ylabel="success", ylim=(0, None), title=f"{algorithm.upper()}: success")
        row[1].set(xlabel="step", ylabel="nats a token", yscale="log", title=f"{algorithm.upper()}: entropy")
        row[1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.supxlabel("lines: training episodes, means of ten steps; circles: validation, 512 levels", fontsize=9)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("plan", "run", "one", "table"))
    parser.add_argument("path", type=Path, help="the file with the configs; for `table` the folder of the runs")
    parser.add_argument("--model", help="the pretrained model: a folder, or smollm2")
    parser.add_argument("--folder", type=Path, default=Path("runs/smollm2"), help="where the runs are to be written")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="with `plan`: which seeds of RL")
    parser.add_argument("--name", help="which run")
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="with `run`: which runs, by name")
    parser.add_argument("--picture", type=Path, help="with `table`: draw the curves of RL into this file")
    parser.add_argument("overrides", nargs="*", help="key=value for every run")
    given = parser.parse_intermixed_args()
    if given.verb == "plan":
        plan(given.path, given.model or "smollm2", given.folder, given.seeds, given.overrides)
    elif given.verb == "run":
        run(given.path, given.at_once, given.only)
    elif given.verb == "one":
        one(given.path, given.name, given.model)
    else:
        table(given.path)
        if given.picture:
            draw(given.path, given.picture)


if __name__ == "__main__":
    main()
