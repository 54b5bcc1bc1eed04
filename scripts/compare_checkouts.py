"""Prove that a refactoring changed nothing: record what two checkouts compute, and compare bit for bit.

    .venv/bin/python scripts/compare_checkouts.py record ../before /tmp/before.json.gz
    .venv/bin/python scripts/compare_checkouts.py record . /tmp/after.json.gz
    .venv/bin/python scripts/compare_checkouts.py compare /tmp/before.json.gz /tmp/after.json.gz

Only the command line of a checkout is used, so its modules may have any names. Four kinds of items are recorded:

    run/NAME     a tiny run of `pocket` on the CPU: metrics, weights, episodes, config, names of the files it wrote
    plan/NAME    the JSON plan that an experiment script prints with --dry-run
    config/NAME  the config that a training command resolves to
    status/NAME  the exit status of a wrong command

Prose (messages, logs, reports, YAML comments), wall-clock values and the paths of checkout and working directory do not
count. A command that fails is reported and not recorded. Make both recordings on one machine with one interpreter.
"""

import argparse
import gzip
import hashlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from safetensors import deserialize

ROOT = Path(__file__).resolve().parents[1]
SEEDS = ROOT / "tests/data/seeds"

# --- what is recorded ---------------------------------------------------------------------------------------------

ACTOR, FILTER = "actor_rollout_ref.actor", "actor_rollout_ref.rollout.rollout_filter_"
SIZES = (
    "es_manager.train.env_groups=2", "es_manager.train.group_size=4", "es_manager.val.env_groups=2",
    "ppo_mini_batch_size=4", "trainer.total_training_steps=2", "trainer.save_freq=2", "trainer.logger=[console]",
)  # fmt: skip
SMALL = ("model_path=pocket", *SIZES)
GAE = (*SMALL, "algorithm.adv_estimator=gae", "agent_proxy.max_turn=2", "critic.model.lora_rank=2")
KL_LOSS = (f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_coef=0.01")
KL_IN_REWARD = ("algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef=0.01", "algorithm.kl_ctrl.type=adaptive")
NO_FILTER = (f"{FILTER}value=1", f"{FILTER}include_zero=True")
FINE_TUNING = (
    "sft.data_generation.train_size=4", "sft.data_generation.test_size=2", "sft.training.epochs=2",
    "sft.training.train_batch_size=4", "sft.training.lora_rank=2", "sft.training.logger=[console]",
    "actor_rollout_ref.rollout.response_length=8", "agent_proxy.max_turn=3",
)  # fmt: skip
PROBE = (
    "trainer.gradient_analysis_mode=True", "trainer.gradient_analysis_only=True", "trainer.gradient_analysis_every=1",
    "trainer.exit_after_gradient_analysis=True", "trainer.gradient_analysis_env_groups=4",
    "trainer.gradient_analysis_log_prefilter=True", "actor_rollout_ref.rollout.gradient_analysis_num_buckets=2",
    f"{ACTOR}.entropy_coeff=0.001", "trainer.resume_mode=resume_path",
    "trainer.resume_from_path=ppo_kl_loss/global_step_2", "trainer.total_training_steps=3",
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """Commands of `ragen`, one after the other. All files go to the directory that has the name of the run."""

    commands: tuple[tuple[str, ...], ...]
    needs: str = ""  # another run, whose checkpoints it reads
    kill_at_step: int = 0  # the first command is killed once it has logged this step


def train(name: str, *overrides: str, **options: Any) -> tuple[str, Run]:
    return name, Run((("train", *overrides, f"trainer.default_local_dir={name}"),), **options)


KILLED = ("train", "two_armed_bandit", *SMALL, "trainer.total_training_steps=5", "trainer.save_freq=1", *NO_FILTER)
RUNS = dict(
    [
        train("grpo", "sokoban", *SMALL, "trainer.rollout_data_dir=grpo/rollouts"),
        train("ppo_kl_loss", "sokoban", *GAE, *KL_LOSS),
        train("recipe_kl_in_reward", "--config-name=_2_sokoban", *GAE, *KL_IN_REWARD, f"{ACTOR}.entropy_coeff=0.001"),
        train("gradient_probe", "sokoban", *GAE, *KL_LOSS, *NO_FILTER, *PROBE, needs="ppo_kl_loss"),
        train("single_turn", "frozenlake", *SMALL, "agent_proxy.context_window_mode=single_turn"),
        train(
            "limited_window_filter", "sokoban", *SMALL, "agent_proxy.context_window_mode=limited_multi_turn",
            "agent_proxy.max_turn=3", f"{FILTER}metric=entropy",
        ),
        train("brpo_v1_keys", "two_armed_bandit", "model.base_model=pocket", *SIZES, "optimization.adv_estimator=brpo"),
        train("two_workers", "sokoban", *GAE, *KL_LOSS, "trainer.n_gpus_per_node=2"),
        train(
            "sft_then_rl", "sokoban", "rl_or_sft=sft_then_rl", "model_path=pocket", *SIZES, *FINE_TUNING,
            "sft.output_dir=sft_then_rl/sft", *NO_FILTER,
        ),
    ],
    lora=Run(
        (
            ("train", "frozenlake", *SMALL, "lora.rank=2", "trainer.default_local_dir=lora"),
            ("merge", "lora/global_step_2", "--output", "lora/merged"),
        )
    ),
    sft=Run(
        (
            (
                "train", "sokoban", "rl_or_sft=sft", "sft.training.base_model=pocket-blank", *FINE_TUNING,
                "sft.output_dir=sft", "agent_proxy.prompt_style=terse", "env.env_kwargs.cell_format=plain",
                "training.val_data_num=2", "training.n_rollout=1",
            ),
        )
    ),
    killed_and_resumed=Run((*((*KILLED, "trainer.default_local_dir=killed_and_resumed"),) * 2,), kill_at_step=2),
    eval=Run(
        (
            ("eval", "pocket", "--env=sokoban", "--episodes=4", "--samples=2", "--token-ids", "--output=eval/sokoban"),
            ("eval", "pocket", "--env=bandit", "--episodes=8", "--samples=2", "--output=eval/bandit"),
            ("eval", "grpo/global_step_2", "--episodes=2", "--samples=1", "--output=eval/checkpoint"),
        ),
        needs="grpo",
    ),
)  # fmt: skip

WRONG = (
    "train nowhere", "train sokoban trainer.no_such_key=1", "train sokoban ppo_mini_batch_size=0 --dry-run",
    "train sokoban algorithm.adv_estimator=none --dry-run", "train sokoban model_path=./nowhere",
    "sft sokoban rl_or_sft=rl", "sweep no_such_experiment", "sweep kl_sweep --kl-values= --dry-run",
    "sweep kl_sweep --kl-valeus 0.1 --dry-run", "eval ./nowhere", "eval pocket --env no_such_tag", "merge nowhere",
    "report nowhere", "runs nowhere", "no_such_verb",
)  # fmt: skip


def published(pattern: str) -> list[str]:
    """Commands in the published documents, each in one line."""
    text = "\n".join(path.read_text() for path in sorted(SEEDS.glob("*.txt"))).replace("\\\n", " ")
    return [" ".join(line.split()) for line in re.findall(pattern, text, flags=re.MULTILINE)]


def plan_commands() -> list[str]:
    """Experiment commands of the published documents, and every script with its defaults."""
    scripts = [f"bash scripts/runs/{path.name}" for path in sorted((ROOT / "scripts/runs").glob("*.sh"))]
    ours = [
        "bash scripts/hyperparam_search.sh --env_name sokoban --search_group 1",
        "bash scripts/hyperparam_search.sh --env_name frozenlake --search_group 4",
        "bash run_all_kl_entropy_exps.sh",
        "bash scripts/runs/run_kl_sweep.sh --model pocket --gpus cpu,cpu --steps 40 --seeds 3",
        "bash scripts/runs/run_kl_sweep.sh --kl-values 0,0.01 --save-freq 50 --evaluate-turns 5 --gpus 0,1",
        "bash scripts/runs/run_model_scaling.sh --models Qwen/Qwen2.5-0.5B-Instruct,pocket --gpus 0,1",
    ]
    return list(dict.fromkeys([*published(r"^bash (?:scripts/|run_all).*$"), *scripts, *ours]))


def config_commands() -> list[str]:
    """Training commands of the published documents, and the defaults of every environment and recipe."""
    starts = ["sokoban", "frozenlake", "two_armed_bandit"]
    starts += [f"--config-name {name}" for name in ("base", "_1_bandit", "_2_sokoban", "_3_frozen_lake")]
    ours = [*starts, *(f"{start} model_path=pocket" for start in starts)]
    ours += ["sokoban model_path=pocket rl_or_sft=sft_then_rl", "frozenlake system.n_gpus=4 lora.rank=8"]
    return list(dict.fromkeys([*published(r"^bash train\.sh (.*?)(?:\d?>.*)?$"), *ours]))


# --- recording ----------------------------------------------------------------------------------------------------


class CommandFailed(Exception):
    pass


@dataclass(frozen=True)
class Checkout:
    root: Path
    python: str
    work: Path  # where runs write

    def start(self, words: list[str], cwd: Path, **options: Any) -> subprocess.Popen:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("RAGEN_", "WANDB_", "PYTHON"))}
        fixed = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
        ours = {"PYTHONPATH": str(self.root / "src"), "RAGEN_PYTHON": self.python}
        return subprocess.Popen(words, cwd=cwd, env=kept | fixed | ours, stdin=subprocess.DEVNULL, text=True, **options)

    def output(self, words: list[str], cwd: Path) -> str:
        process = self.start(words, cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        out, errors = process.communicate()
        if process.returncode:
            raise CommandFailed(f"exit status {process.returncode}: {shlex.join(words)}\n{(out + errors)[-3000:]}")
        return self.without_paths(out)

    def without_paths(self, text: str) -> str:
        return text.replace(str(self.work), "<work>").replace(str(self.root), "<checkout>")

    def record_plan(self, name: str) -> Any:
        return self.output([*shlex.split(name), "--dry-run"], self.root).splitlines()

    def record_config(self, name: str) -> Any:
        words = [self.python, "-m", "ragen", "train", *shlex.split(name), "--dry-run"]
        return yaml.safe_load(self.output(words, self.work))

    def record_status(self, name: str) -> Any:
        words = [self.python, "-m", "ragen", *shlex.split(name)]
        return self.start(words, self.work, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).wait()

    def record_run(self, name: str) -> Any:
        commands = [[self.python, "-m", "ragen", *words] for words in RUNS[name].commands]
        if RUNS[name].kill_at_step:
            self.kill_at_step(commands.pop(0), self.work / name / "metrics.jsonl", RUNS[name].kill_at_step)
        for words in commands:
            self.output(words, self.work)
        found = {}
        for path in sorted(path for path in (self.work / name).rglob("*") if path.is_file()):
            if not path.name.startswith(".") and not path.name.endswith(".lock"):
                where = re.sub(r"\d{8}_\d{6}", "<time>", path.relative_to(self.work / name).as_posix())
                found[where] = self.content(path)
        return found

    def kill_at_step(self, words: list[str], metrics: Path, step: int) -> None:
        with tempfile.TemporaryFile("w+") as log:
            process = self.start(words, self.work, stdout=log, stderr=log, start_new_session=True)
            while not (metrics.exists() and f'"step": {step},' in metrics.read_text()):
                if process.poll() is not None:
                    log.seek(0)
                    raise CommandFailed(f"ended before step {step}: {shlex.join(words)}\n{log.read()[-3000:]}")
                time.sleep(0.05)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def content(self, path: Path) -> Any:
        """What counts of a file, by its name. The text of reports, logs and tables does not: they may be reworded."""
        if path.name == "metrics.jsonl":
            return [untimed(json.loads(line)) for line in path.read_text().splitlines()]
        if path.suffix == ".safetensors":
            return tensor_digests(path)
        if path.name == "config.yaml":
            return yaml.safe_load(self.without_paths(path.read_text()))
        if path.name == "finished.json":
            return {key: value for key, value in json.loads(path.read_text()).items() if key != "explanation"}
        if path.name == "trainer_state.json":
            return {key: value for key, value in json.loads(path.read_text()).items() if key != "totals"}  # seconds
        if path.name.endswith((".jsonl", ".jsonl.gz")):
            raw = path.read_bytes()
            text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
            records = [json.loads(self.without_paths(line)) for line in text.splitlines()]
            return [digest(json.dumps(record, sort_keys=True).encode()) for record in records]  # keys in any order
        # A manifest has checksums of seconds.
        if path.suffix in (".json", ".jinja", ".txt") and path.name != "manifest.json":
            return digest(self.without_paths(path.read_text()).encode())
        if path.suffix == ".parquet":
            return digest(path.read_bytes())
        return "exists"


def untimed(metrics: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in metrics.items() if not key.startswith(("timing_", "perf/"))}


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def tensor_digests(path: Path) -> dict[str, str]:
    """Name -> type, shape and SHA-256. The order of tensors in the file and its metadata do not matter."""
    return {
        name: f"{tensor['dtype']} {tensor['shape']} {digest(tensor['data'])}"
        for name, tensor in sorted(deserialize(path.read_bytes()))
    }


def chosen(names: Iterable[str], only: list[str] | None) -> list[str]:
    return [name for name in names if not only or any(name.startswith(start) for start in only)]


def all_items() -> dict[str, Callable[[Checkout], Any]]:
    """Name -> how to record it."""
    kinds = {
        "run": (Checkout.record_run, RUNS),
        "plan": (Checkout.record_plan, plan_commands()),
        "config": (Checkout.record_config, config_commands()),
        "status": (Checkout.record_status, WRONG),
    }
    return {f"{kind}/{name}": partial(do, name=name) for kind, (do, names) in kinds.items() for name in names}


def record(root: Path, output: Path, only: list[str] | None, python: str) -> int:
    items = all_items()
    names = chosen(items, only)
    names += [f"run/{run.needs}" for name, run in RUNS.items() if run.needs and f"run/{name}" in names]
    recorded, num_failed, began = {}, 0, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="compare_checkouts.") as work:
        checkout = Checkout(root, python, Path(work).resolve())
        for name in (name for name in items if name in names):
            start = time.monotonic()
            try:
                recorded[name] = items[name](checkout)
                print(f"{time.monotonic() - start:6.1f} s  {name}", flush=True)
            except CommandFailed as failure:
                num_failed += 1
                print(f"FAILED    {name}\n{failure}", file=sys.stderr, flush=True)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_bytes(gzip.compress(json.dumps(recorded, sort_keys=True).encode(), mtime=0))
    print(f"{len(recorded)} items recorded, {num_failed} failed, in {time.monotonic() - began:.0f} s: {output}")
    return 1 if num_failed or not recorded else 0


# --- comparing ----------------------------------------------------------------------------------------------------


def leaves(value: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """Every value with its position, as text: 1 differs from 1.0, and nan equals nan."""
    if not isinstance(value, dict | list) or not value:
        yield where, repr(value)
        return
    for key, part in value.items() if isinstance(value, dict) else enumerate(value):
        yield from leaves(part, f"{where} > {key}" if where else str(key))


def first_difference(before: Any, after: Any) -> str | None:
    old, new = dict(leaves(before)), dict(leaves(after))
    different = [where for where in old | new if old.get(where) != new.get(where)]
    if not different:
        return None
    where = min(different, key=lambda where: "metrics.jsonl" not in where)  # a metric says more than a digest
    left, right = old.get(where, "missing"), new.get(where, "missing")
    start = next((index for index, (one, other) in enumerate(zip(left, right, strict=False)) if one != other), 0)
    start = max(0, start - 40)
    shown = " != ".join(("…" if start else "") + text[start : start + 120] for text in (left, right))
    others = f" (and {len(different) - 1} more)" if len(different) > 1 else ""
    return f"{where or 'value'}: {shown}{others}"


def compare(before: Path, after: Path, only: list[str] | None) -> int:
    old, new = (json.loads(gzip.decompress(path.read_bytes())) for path in (before, after))
    names, num_different = chosen(old | new, only), 0
    for name in names:
        difference = first_difference(old[name], new[name]) if name in old and name in new else None
        if name not in old or name not in new:
            difference = f"only in {before if name in old else after}"
        num_different += difference is not None
        print(f"equal      {name}" if difference is None else f"DIFFERENT  {name}\n    {difference}")
    print(f"{len(names) - num_different} of {len(names)} items are equal")
    return 1 if num_different or not names else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    only = {"nargs": "+", "metavar": "NAME", "help": "only items whose names start so: run/grpo, plan"}
    recorder = verbs.add_parser("record", help="run every item in a checkout and store the results (minutes)")
    recorder.add_argument("checkout", type=Path, help="a clone of the project; no file of it is changed")
    recorder.add_argument("output", type=Path, help="file to write: compressed JSON")
    recorder.add_argument("--only", **only)
    recorder.add_argument("--python", help="interpreter (default: .venv of the checkout, else RAGEN_PYTHON)")
    comparer = verbs.add_parser("compare", help="compare two recordings: exit status 1 if anything differs")
    comparer.add_argument("before", type=Path)
    comparer.add_argument("after", type=Path)
    comparer.add_argument("--only", **only)
    arguments = parser.parse_args()
    if arguments.verb == "compare":
        return compare(arguments.before, arguments.after, arguments.only)
    root = arguments.checkout.resolve()
    own = root / ".venv/bin/python"
    python = arguments.python or (str(own) if own.exists() else os.environ.get("RAGEN_PYTHON"))
    if not (root / "src/ragen").is_dir():
        parser.error(f"{root} is not a checkout (no src/ragen)")
    if not python:
        parser.error("no .venv in the checkout and no RAGEN_PYTHON: use --python")
    return record(root, arguments.output, arguments.only, python)


if __name__ == "__main__":
    sys.exit(main())
