"""Training, as a table of contents. Each stage is a call from named data to named data.

run = train(config)             # -> Run: the folder with config, metrics, episodes and report
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ragen.agent.template import ChatTemplate
from ragen.algo.advantage import ESTIMATORS, AdvantageSettings
from ragen.algo.filter import FilterRule, filter_metrics, group_score, select
from ragen.config.schema import Config
from ragen.engine.base import Engine, Sampling
from ragen.engine.native.engine import NativeEngine
from ragen.model.load import LoadedModel, find_model, load_model
from ragen.report.console import make_console
from ragen.report.folder import RunFolder
from ragen.report.html import write_report
from ragen.rollout.batch import samples_of
from ragen.rollout.collect import World, collect
from ragen.rollout.summary import score_of, summarize
from ragen.train import supported
from ragen.train.clock import Clock
from ragen.train.levels import levels
from ragen.train.optimizer import MasterAdamW
from ragen.train.update import update_actor
from ragen.train.validation import Validator
from ragen.types import Group


@dataclass(frozen=True)
class Run:
    """A finished run."""

    folder: Path
    report: Path
    num_steps: int


def train(config: Config) -> Run:
    """Train to the end of the budget."""
    supported.check(config)
    source = find_model(config.model_path)  # before anything else is built
    folder = free_folder(config.trainer.default_local_dir)
    with folder.owned():
        folder.write_config(config)
        title = f"{config.trainer.experiment_name} · {config.model_path}"
        total = config.trainer.total_training_steps
        with make_console(total, config.trainer.logger, folder.path, title=title) as console:
            if str(folder) != config.trainer.default_local_dir:
                console.note(f"{config.trainer.default_local_dir} holds another run, which stays as it is")
            with console.phase("loading"):
                trainer = Trainer(config, load_model(source), folder, console)
            trainer.fit()
            report = write_report(folder)
            console.note(f"the report again, at any time: ./ragen report {folder}")
            console.close(report=report)
    return Run(folder.path, report, total)


class Trainer:
    """What a run holds while it trains."""

    def __init__(self, config: Config, loaded: LoadedModel, folder: RunFolder, console: Any):
        self.config, self.folder, self.console = config, folder, console
        self.model = loaded.model
        self.model.gradient_checkpointing = (
            config.actor_rollout_ref.model.enable_gradient_checkpointing and loaded.is_large
        )
        chat = ChatTemplate(loaded.tokenizer)
        self.engine: Engine = NativeEngine(self.model, loaded.tokenizer, chat.end_of_turn_id)
        tags = dict.fromkeys([*config.es_manager.train.env_configs.tags, *config.es_manager.val.env_configs.tags])
        self.worlds = {tag: World.make(config, tag, chat) for tag in tags}
        self.validator = Validator(config, self.worlds)
        self.optimizer = MasterAdamW(
            self.model.parameters(), config.actor_rollout_ref.actor.optim, config.trainer.total_training_steps
        )

    def fit(self) -> None:
        trainer = self.config.trainer
        if trainer.val_before_train:
            clock = Clock()
            self._record(0, self._validate(0, clock) | clock.metrics())
        for step in range(1, trainer.total_training_steps + 1):
            clock = Clock()
            with clock("step"):
                metrics = self._step(step, clock)
                if self._is_due(step, trainer.test_freq):
                    metrics |= self._validate(step, clock)
            self.optimizer.advance()
            self._record(step, metrics | clock.metrics())

    def _step(self, step: int, clock: Clock) -> dict[str, float]:
        requests = levels(self.config, step)
        with clock("gen"):
            groups = self._play(requests, step)
        with clock("filter"):
            kept, metrics = keep_groups(groups, self.config)
        samples = samples_of(kept)
        advantages = estimate(kept, self.config)
        if samples:
            with clock("update_actor"), self.console.phase("update", total=len(samples)):
                metrics |= update_actor(
                    self.model, self.optimizer, samples, advantages, self.config, self.console.advance
                )
        metrics |= {f"train/{name}": value for name, value in summarize(groups).items()}
        metrics["train/batch_size"] = len(samples)
        metrics["rollout/empty_after_filter"] = float(not samples)
        num_tokens = sum(len(turn.reply_ids) for group in groups for e in group.episodes for turn in e.turns)
        metrics["perf/tokens_per_s"] = num_tokens / clock.seconds["gen"]
        self.folder.write_episodes(step, "train", groups, self._render)
        return metrics

    def _play(self, requests: Sequence[Any], step: int) -> list[Group]:
        num_episodes = sum(request.size for request in requests)
        with self.console.phase("rollout", total=num_episodes):
            draws = ("train", self.config.seed.train, step)
            return collect(self.engine, self.worlds, requests, train_sampling(self.config), draws, self.console.advance)

    def _validate(self, step: int, clock: Clock) -> dict[str, float]:
        with clock("testing"), self.console.phase("validation", total=self.validator.num_episodes):
            metrics, groups = self.validator.run(self.engine, self.console.advance)
        self.folder.write_episodes(step, "val", groups, self._render)
        self.console.validation(step, metrics)
        return metrics

    def _render(self, tag: str, state: Any) -> str:
        return self.worlds[tag].env.render(state)

    def _is_due(self, step: int, every: int) -> bool:
        return every > 0 and (step % every == 0 or step == self.config.trainer.total_training_steps)

    def _record(self, step: int, metrics: dict[str, float]) -> None:
        self.folder.append_metrics(step, metrics)
        self.console.step(step, metrics)


# --- from groups to advantages ------------------------------------------------------------------------------------


def keep_groups(groups: Sequence[Group], config: Config) -> tuple[list[Group], dict[str, float]]:
    """The groups worth an update, whole, and what the filter did."""
    rollout = config.actor_rollout_ref.rollout
    rule = FilterRule(
        strategy=rollout.rollout_filter_strategy,
        value=rollout.rollout_filter_value,
        largest=rollout.rollout_filter_type == "largest",
        include_zero=rollout.rollout_filter_include_zero,
        prob_mode=rollout.rollout_filter_top_p_prob_mode,
        selection_eps=rollout.rollout_filter_selection_eps,
    )
    rewards = [[score_of(episode) for episode in group.episodes] for group in groups]
    scores = [group_score(rollout.rollout_filter_metric, values) for values in rewards]
    verdicts = select(scores, rule)
    kept = [group for group, verdict in zip(groups, verdicts, strict=True) if verdict.keep]
    return kept, filter_metrics(rollout.rollout_filter_metric, rewards, scores, verdicts)


def estimate(groups: Sequence[Group], config: Config) -> list[float]:
    """One advantage per episode, in the order of `samples_of`'s `episode_index`."""
    episodes = [(group.group, score_of(episode)) for group in groups for episode in group.episodes]
    if not episodes:
        return []
    ids, returns = zip(*episodes, strict=True)
    settings = AdvantageSettings(norm_by_std=config.algorithm.norm_adv_by_std_in_grpo)
    estimator = ESTIMATORS[config.algorithm.adv_estimator]
    return estimator(torch.tensor(returns, dtype=torch.float64), torch.tensor(ids), settings).tolist()


def train_sampling(config: Config) -> Sampling:
    rollout = config.actor_rollout_ref.rollout
    return Sampling(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        greedy=False,
        max_tokens=rollout.response_length,
        stop_at_answer=rollout.stop_at_answer,
    )


def free_folder(path: str) -> RunFolder:
    """The run's folder; a numbered sibling where a run already wrote there."""
    candidate, number = RunFolder(path), 1
    while candidate.metrics_path.exists():
        number += 1
        candidate = RunFolder(f"{path}-{number}")
    return candidate
