"""Tiny runs of the command line, watched: which keys of the config are read, by whom, and which metrics are written.

    recorded().readers["trainer.test_freq"]        # {"train/loop.py"}
    recorded().metrics                             # {"actor/entropy", …}

The classes of the schema are made to note every read of their fields while the runs are active. Printing, storing and
comparing a config reads all of it and uses none of it, and so does checking it: such reads do not count. The runs are
made once, also where several processes share the tests.
"""

import atexit
import contextlib
import functools
import io
import os
import pickle
import sys
import tempfile
import types
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import ragen
from ragen.cli import main
from ragen.config.schema import Config
from ragen.config.tree import schema_fields
from ragen.env.base import Tag
from ragen.store.lock import locked
from ragen.store.run_folder import RunFolder

SOURCE = Path(ragen.__file__).parent
TREE = "config/tree.py"
# Resolving decides what a key is, and checking whether it may be so: what it does is decided elsewhere.
LOOKS_ONLY = ("config/compose.py", "config/validate.py", "config/explain.py", "run/prepare.py")
WHERE = "_where"  # in the tree, as a prefix of its keys: written into each node


# --- who reads what -----------------------------------------------------------------------------------------------


def all_keys() -> list[str]:
    """Every key of the tree. What a tag holds is `custom_envs.<field>`, whatever its name."""
    keys = [key for key, _, _ in schema_fields(Config) if key != "custom_envs"]
    return keys + [f"custom_envs.{key}" for key, _, _ in schema_fields(Tag)]


def reasons_without_effect() -> dict[str, str]:
    """Key -> why it is marked to have no effect."""
    specs = {key: spec for key, spec, _ in schema_fields(Config)}
    specs |= {f"custom_envs.{key}": spec for key, spec, _ in schema_fields(Tag)}
    return {key: spec.metadata["no_effect"] for key, spec in specs.items() if "no_effect" in spec.metadata}


@contextlib.contextmanager
def watched_configs() -> Iterator[dict[str, set[str]]]:
    """Every `Config` that is made from here on notes who reads it."""
    readers: dict[str, set[str]] = defaultdict(set)
    make, classes = Config.__init__, {*_classes(Config), Tag}

    def make_watched(self: Config, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        _tell_where(self, "")

    Config.__init__ = make_watched
    for cls in classes:
        cls.__getattribute__ = _watch(cls, readers)
    try:
        yield readers
    finally:
        Config.__init__ = make
        for cls in classes:
            del cls.__getattribute__


def _classes(cls: type) -> list[type]:
    below = [hint for hint in get_type_hints(cls).values() if is_dataclass(hint)]
    return [cls, *(found for part in below for found in _classes(part))]


def _tell_where(node: Any, prefix: str) -> None:
    vars(node)[WHERE] = prefix
    for spec in fields(node):
        value = vars(node)[spec.name]
        if is_dataclass(value):
            _tell_where(value, f"{prefix}{spec.name}.")
        elif spec.name == "custom_envs":
            for tag in value.values():
                _tell_where(tag, "custom_envs.")


def _watch(cls: type, readers: dict[str, set[str]]) -> Any:
    names = {spec.name for spec in fields(cls)}

    def read(self: Any, name: str) -> Any:
        value = object.__getattribute__(self, name)
        if name in names:
            where = object.__getattribute__(self, "__dict__").get(WHERE)
            reader = _reader(sys._getframe(1))
            if where is not None and reader is not None:
                readers[where + name].add(reader)
        return value

    return read


def _reader(frame: Any) -> str | None:
    """The module that makes use of what it reads, if the reader does."""
    while _module(frame) == TREE and frame.f_code.co_name == "value_at":
        frame = frame.f_back
    reader = _module(frame)
    if reader in (None, TREE):
        return None
    while frame is not None:
        if _module(frame) in LOOKS_ONLY:
            return None
        frame = frame.f_back
    return reader


def _module(frame: Any) -> str | None:
    """A file of the package, below its folder; None for all others, and for the code that dataclasses write."""
    path = Path(frame.f_code.co_filename)
    return path.relative_to(SOURCE).as_posix() if path.is_relative_to(SOURCE) else None


# --- the runs -----------------------------------------------------------------------------------------------------

SMALL = (
    "model_path=pocket",
    "es_manager.train.env_groups=2",
    "es_manager.train.group_size=4",
    "es_manager.val.env_groups=2",
    "ppo_mini_batch_size=4",
    "trainer.total_training_steps=1",
)
FILTER = "actor_rollout_ref.rollout.rollout_filter_"


@dataclass(frozen=True)
class Recorded:
    readers: dict[str, set[str]]
    metrics: set[str]
    statuses: list[int]  # exit statuses of the runs


def commands(folder: Path) -> list[list[str]]:
    """One after the other; some resume where an earlier one ended."""
    resumed = [
        "sokoban", "algorithm.adv_estimator=gae", "agent_proxy.max_turn=2", "critic.model.lora_rank=2",
        "actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.kl_loss_coef=0.01",
        "algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef=0.01", "algorithm.kl_ctrl.type=adaptive",
        "trainer.save_freq=1", f"trainer.default_local_dir={folder}/gae",
    ]  # fmt: skip
    analysed = [
        "trainer.gradient_analysis_mode=True", "trainer.gradient_analysis_env_groups=4",
        "trainer.gradient_analysis_log_prefilter=True", "actor_rollout_ref.rollout.gradient_analysis_num_buckets=2",
        "trainer.gradient_analysis_only=True", "trainer.exit_after_gradient_analysis=True",
        "actor_rollout_ref.actor.entropy_coeff=0.001", f"{FILTER}value=1", f"{FILTER}include_zero=True",
        "trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder}/gae/global_step_2",
        "trainer.gradient_analysis_every=1", "trainer.total_training_steps=2",
        f"trainer.default_local_dir={folder}/probe",
    ]  # fmt: skip
    tuned = [
        "rl_or_sft=sft", "sft.training.base_model=pocket-blank", "agent_proxy.prompt_style=terse",
        "env.env_kwargs.cell_format=plain", "sft.data_generation.train_size=2", "sft.data_generation.test_size=1",
        "sft.training.epochs=1", "sft.training.lora_rank=2", "training.val_data_num=1", "training.n_rollout=1",
        "actor_rollout_ref.rollout.response_length=4",
    ]  # fmt: skip
    return [
        ["sokoban", *SMALL, "--dry-run"],
        ["sokoban", *tuned, f"sft.output_dir={folder}/sokoban"],
        ["frozenlake", *tuned, f"sft.output_dir={folder}/frozenlake"],
        [
            "two_armed_bandit", *SMALL, "algorithm.soft_advantage_reweight=True", "grpo_advantage_length_weight=True",
            "es_manager.val.group_size=2", "trainer.log_group_rv_table=True", "trainer.logger=[console,wandb]",
            f"trainer.rollout_data_dir={folder}/train", f"{FILTER}value=1", f"{FILTER}include_zero=True",
            f"trainer.default_local_dir={folder}/grpo",
        ],
        ["sokoban", *SMALL, *resumed[1:]],
        ["sokoban", *SMALL, *resumed[1:], "trainer.total_training_steps=2"],
        [
            "two_armed_bandit", *SMALL, "trainer.resume_mode=resume_path", "trainer.total_training_steps=2",
            f"trainer.resume_from_path={folder}/gae/global_step_2", f"trainer.default_local_dir={folder}/from_path",
        ],
        [
            "frozenlake", *SMALL, "agent_proxy.context_window_mode=limited_multi_turn", "agent_proxy.max_turn=2",
            "lora.rank=2", "es_manager.train.level_sampling=steered", f"{FILTER}resample=True",
            "actor_rollout_ref.actor.entropy_coeff=0.001", f"{FILTER}metric=entropy",
            f"trainer.default_local_dir={folder}/windowed",
        ],
        ["sokoban", *SMALL, *resumed[1:], *analysed],
        [
            "two_armed_bandit", *SMALL, f"{FILTER}metric=length", f"{FILTER}selection_eps=100000",
            f"{FILTER}empty_stop_steps=1", f"trainer.default_local_dir={folder}/empty",
        ],
        [
            "two_armed_bandit", *SMALL, "custom_envs.Line.env_type=faulty_line:FaultyLine", "trainer.test_freq=1",
            "custom_envs.Line.env_config={fault: raise, call: render, seeds: [123, 10000], splits: [train, val]}",
            "es_manager.train.env_configs.tags=[Line]", "es_manager.val.env_configs.tags=[Line]",
            f"trainer.default_local_dir={folder}/failing",
        ],
    ]  # fmt: skip


@functools.cache
def recorded() -> Recorded:
    tests = os.environ.get("PYTEST_XDIST_TESTRUNUID")  # the same for all processes of one run of the tests
    if tests is None:
        return record()
    path = Path(tempfile.gettempdir()) / f"ragen-tests-{tests}.pickle"
    with locked(path.with_suffix(".lock")):
        if not path.exists():
            path.write_bytes(pickle.dumps(record()))
            atexit.register(path.unlink)
        return pickle.loads(path.read_bytes())


def record() -> Recorded:
    metrics: set[str] = set()
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch, watched_configs() as readers:
        patch.setitem(sys.modules, "wandb", _fake_wandb())
        patch.setenv("WANDB_MODE", "offline")
        statuses = [_quietly(["train", *words]) for words in commands(Path(name))]
        _quietly(["eval", "pocket", "--env", "bandit", "--episodes=2", "--samples=1", f"--output={name}/eval"])
        for path in sorted(Path(name).rglob("metrics.jsonl")):
            metrics.update(RunFolder(path.parent).read_metrics().names())
    return Recorded(dict(readers), metrics, statuses)


def _quietly(arguments: list[str]) -> int:
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        status = main(arguments)
    assert status in (0, 3), output.getvalue()
    return status


def _fake_wandb() -> types.ModuleType:
    """Takes everything and keeps nothing."""
    run = types.SimpleNamespace(
        dir=os.path.join("wandb", "run", "files"),
        summary={},
        log=lambda *args, **kwargs: None,
        finish=lambda **end: None,
    )
    fake = types.ModuleType("wandb")
    fake.Settings = dict
    fake.setup = lambda settings: None
    fake.init = lambda **settings: run
    return fake
