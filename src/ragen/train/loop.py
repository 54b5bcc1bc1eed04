"""Training, as a table of contents. Each stage is a call from named data to named data.

    run = train(config)             # -> Run: how it ended, and the folder with config, metrics, episodes and report

A step plays groups, keeps those worth an update, scores their tokens, estimates advantages, updates, validates when due
and records. With several workers every one of them runs this file: they play and compute their shares, and hold the
same groups, decisions and weights.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from ragen.agent.template import ChatTemplate
from ragen.algo.kl import KlController, kl_of_tokens, pay_kl
from ragen.checkpoint.parts import Parts, part_of
from ragen.checkpoint.restore import restore
from ragen.checkpoint.save import CheckpointStore
from ragen.config import derive, devices
from ragen.config.schema import Config
from ragen.diagnose.collapse import CollapseWatch
from ragen.diagnose.early_stop import EarlyStop, StopRules
from ragen.distributed.workers import Workers
from ragen.engine.base import Engine, Sampling
from ragen.engine.native.engine import NativeEngine
from ragen.model.critic import Critic
from ragen.model.load import LoadedModel, Source, find_model, load_model
from ragen.model.lora import BaseModel, add_adapters
from ragen.model.packing import Sample, samples_of
from ragen.model.scoring import Scorer, by_sample
from ragen.prng import Coordinate
from ragen.rollout.collect import GroupRequest, World, collect
from ragen.rollout.summary import num_sampled, summarize
from ragen.run import memory
from ragen.run.clock import Clock, Totals
from ragen.run.interrupt import Interrupt
from ragen.run.run_logger import Silent, recording
from ragen.store.resume import claimed
from ragen.train import analysis
from ragen.train.analysis import Batch, Seen
from ragen.train.levels import levels, with_turns
from ragen.train.optimizer import MasterAdamW
from ragen.train.targets import Scores, Selection, estimate, experience_of, keep_groups, normalized, scores_of
from ragen.train.update import Targets, Updated, update_actor, update_critic
from ragen.train.validation import Validator
from ragen.types import Group

EXITED = "trainer/exited_after_gradient_analysis"


@dataclass(frozen=True)
class Run:
    """How a run ended: `finished`, `early_stopped` by a rule, or `interrupted`."""

    folder: Path
    report: Path | None
    num_steps: int
    status: str
    rule: str | None = None


def train(config: Config) -> Run:
    """Train to the end of the budget, to a rule that stops the run, or until interrupted."""
    with ExitStack() as stack:
        stack.enter_context(devices.visible(config.system.CUDA_VISIBLE_DEVICES))
        workers = Workers.join()
        stack.enter_context(workers.together())
        sources = find_models(config)  # before anything else is built
        decision = workers.agree(stack.enter_context(claimed(config)) if workers.is_first else None)
        stack.enter_context(memory.explained(config, workers.device, decision.folder.path))
        record = stack.enter_context(recording(config, decision)) if workers.is_first else Silent()
        with record.phase("loading"):
            trainer = Trainer(config, sources, workers, record, decision.folder.path)
            if decision.checkpoint is not None:
                trainer.restore(decision.checkpoint, decision.first_step)
        if decision.reason:
            record.note(decision.reason)
        with Interrupt(record.note) as interrupt:
            status, step = trainer.fit(decision.first_step, lambda: workers.agree(interrupt.is_set))
        stop = trainer.stop
        report = record.ended(status, step, stop.rule, stop.explain())
        if status == "interrupted":
            record.note(trainer.how_to_go_on(step))
    return Run(decision.folder.path, report, step, status, stop.rule)


def find_models(config: Config) -> dict[str, Source]:
    """Where the files of each model that the run needs are."""
    actor = config.actor_rollout_ref.model.path
    names = {"actor": actor}
    if derive.reference_model(config).needed and not derive.reference_is_actor(config):
        names["reference"] = actor
    if derive.critic_model(config).needed:
        names["critic"] = config.critic.model.path
    return {role: find_model(name) for role, name in names.items()}


class Trainer:
    """What a run holds while it trains."""

    def __init__(self, config: Config, sources: dict[str, Source], workers: Workers, record: Silent, folder: Path):
        self.config, self.workers, self.record = config, workers, record
        self.only_analyses = config.trainer.gradient_analysis_only
        total, rollout = config.trainer.total_training_steps, config.actor_rollout_ref.rollout
        self.actor = self._load(sources["actor"], config.actor_rollout_ref.model)
        self.model = self.actor.model
        self.actor_optimizer = MasterAdamW(self.model.parameters(), config.actor_rollout_ref.actor.optim, total)
        self.reference = None
        if "reference" in sources:
            self.reference = self._load(sources["reference"]).model.requires_grad_(False)
        elif derive.reference_model(config).needed:
            self.reference = BaseModel(self.model)
        self.critic = self.critic_optimizer = None
        if "critic" in sources:
            self.critic_loaded = self._load(sources["critic"], config.critic.model)
            self.critic = Critic(self.critic_loaded.model)
            self.critic_optimizer = MasterAdamW(self.critic.parameters(), config.critic.optim, total)
        chat = ChatTemplate(self.actor.tokenizer)
        self.engine: Engine = NativeEngine(self.model, self.actor.tokenizer, chat.end_of_turn_id)
        tags = dict.fromkeys([*config.es_manager.train.env_configs.tags, *config.es_manager.val.env_configs.tags])
        self.worlds = {tag: World.make(config, tag, chat) for tag in tags}
        self.validator = Validator(config, self.worlds, workers)
        self.scorer = Scorer(workers, rollout.temperature, rollout.log_prob_micro_batch_size_per_gpu)
        micro_batch_size = config.actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu
        self.reference_scorer = Scorer(workers, rollout.temperature, micro_batch_size)
        control = config.algorithm.kl_ctrl
        self.kl_control = KlController(control.type, control.kl_coef, control.target_kl, control.horizon)
        self.stop = EarlyStop(StopRules.of(config))
        self.collapse = CollapseWatch(config, self.actor.tokenizer, workers, record.note)
        self.totals = Totals()
        self.store = CheckpointStore.of(config, folder, record.note)
        self.saved: Path | None = None
        self.restored = False

    def _load(self, source: Source, settings: Any = None) -> LoadedModel:
        loaded = load_model(source, self.workers.device)
        if settings is not None:
            loaded.model.gradient_checkpointing = settings.enable_gradient_checkpointing and loaded.is_large
            if settings.lora_rank > 0:
                rank, alpha, seed = settings.lora_rank, settings.lora_alpha, self.config.seed.train
                add_adapters(loaded.model, rank, alpha, settings.target_modules, seed)
        return loaded

    # --- the run ------------------------------------------------------------------------------------------------

    def fit(self, first_step: int, is_interrupted: Callable[[], bool] = lambda: False) -> tuple[str, int]:
        """All steps from `first_step` on; returns how it ended and the last step."""
        trainer = self.config.trainer
        # A probe stands at the step of its checkpoint; others have that one behind them.
        before = first_step if self.only_analyses and self.restored else first_step - 1
        if (before == 0 or self.only_analyses) and (trainer.val_before_train or trainer.val_only):
            clock = Clock()
            self._record(before, self._validate(before, clock), clock)
        if trainer.val_only:
            return "finished", 0
        for step in range(first_step, trainer.total_training_steps + 1):
            clock = Clock()
            with clock("step"):
                metrics = self._step(step, clock)
                if self._is_due(step, trainer.test_freq):
                    metrics |= self._validate(step, clock)
                    if not self.only_analyses:
                        self.stop.after_validation(metrics)
            if not self.only_analyses:
                self._advance()
            self._record(step, metrics | self.stop.metrics(), clock)
            if EXITED in metrics:
                return "finished", step
            interrupted = is_interrupted()
            self._save_if_due(step, now=interrupted or self.stop.rule is not None)
            if self.stop.rule is not None:
                return "early_stopped", step
            if interrupted and step < trainer.total_training_steps:
                return "interrupted", step
        return "finished", trainer.total_training_steps

    def _step(self, step: int, clock: Clock) -> dict[str, float]:
        config = self.config
        with clock("gen"):
            groups = self._play(levels(config, step), ("train", config.seed.train, step), "rollout")
        collapse = self._collapse(step, groups, clock)
        scores = scores_of(groups)
        with clock("filter"):
            selection = keep_groups(groups, scores, config, lambda: self.scorer.mean_entropies(self.model, groups))
        metrics = self._describe(step, groups, scores, selection, clock) | collapse
        if not self.only_analyses and self.stop.after_rollout(metrics, len(selection.kept)):
            return metrics
        samples = samples_of(selection.kept)
        targets, measured = self._targets(samples, groups, scores, selection, clock)
        metrics |= measured
        batch = self._batch_to_analyse(step, groups, scores, selection, targets, clock)  # before the critic changes
        if not self.only_analyses:
            metrics |= self._update_critic(step, samples, targets, clock)
        metrics |= self._analyse(step, batch, clock)
        if self.only_analyses:
            metrics |= self._skipped()
        elif EXITED not in metrics:
            metrics |= self._update_actor(step, samples, targets, clock)
        return metrics

    def _update_critic(
        self, step: int, samples: Sequence[Sample], targets: Targets | None, clock: Clock
    ) -> dict[str, float]:
        if self.critic is None or targets is None:
            return {}
        with clock("update_critic"), self.record.phase("critic", total=len(samples)):
            updated = update_critic(
                self.critic, self.critic_optimizer, samples, targets, self.config, self.workers, self.record.advance
            )
        return self._kept(step, "critic", samples, updated)

    def _update_actor(
        self, step: int, samples: Sequence[Sample], targets: Targets | None, clock: Clock
    ) -> dict[str, float]:
        if step < self.config.trainer.critic_warmup or targets is None:
            return {}
        with clock("update_actor"), self.record.phase("update", total=len(samples)):
            updated = update_actor(
                self.model, self.actor_optimizer, samples, targets, self.config, self.workers,
                self.reference, step, self.record.advance,
            )  # fmt: skip
        return self._kept(step, "actor", samples, updated)

    def _play(self, requests: Sequence[GroupRequest], draws: tuple[Coordinate, ...], phase: str) -> list[Group]:
        """Groups of episodes. Each worker plays its share, and all get all of them."""
        mine = self.workers.mine(requests)
        with self.record.phase(phase, total=sum(request.size for request in mine)):
            sampling = train_sampling(self.config)
            played = collect(self.engine, self.worlds, mine, sampling, draws, self.record.advance)
        return self.workers.gather(with_turns(played, self.config))

    def _collapse(self, step: int, groups: Sequence[Group], clock: Clock) -> dict[str, float]:
        """Whether reasonings still depend on their prompts, over all groups, at the steps that are looked at."""
        with self.record.phase("collapse"):
            return self.collapse.measure(step, groups, self.model, clock)

    def _targets(
        self, samples: Sequence[Sample], groups: Sequence[Group], scores: Scores, selection: Selection, clock: Clock
    ) -> tuple[Targets | None, dict[str, float]]:
        """What the updates aim at; nothing where nothing was kept."""
        if not selection.kept:
            return None, {}
        worth = normalized(scores, groups, self.config)
        kept_worth = [worth[place] for place in selection.places]
        control = replace(self.kl_control) if self.only_analyses else self.kl_control
        return self._aim(selection.kept, kept_worth, self._see(samples, clock), selection.kept_ratio, control, clock)

    def _see(self, samples: Sequence[Sample], clock: Clock) -> Seen:
        """Log-probs and values, as far as a term needs them."""
        with clock("old_log_prob"):
            old = self._old_log_probs(samples)
        reference = values = None
        if self.reference is not None:
            with clock("ref"):
                reference = self.reference_scorer.log_probs(self.reference, samples)
        if self.critic is not None:
            with clock("values"):
                values = self.scorer.values(self.critic, samples)
        return Seen(old, reference, values)

    def _aim(
        self,
        groups: Sequence[Group],
        scores: Scores,
        seen: Seen,
        kept_ratio: float,
        control: KlController,
        clock: Clock,
    ) -> tuple[Targets, dict[str, float]]:
        """Advantages, and what they were made of. The control is told of the KL."""
        config, samples, (old, reference, values) = self.config, samples_of(groups), seen
        metrics: dict[str, float] = {}
        if reference is not None:
            metrics["rollout/ref_log_prob"] = float(torch.cat(list(reference)).mean())
        with clock("adv"):
            experience = experience_of(groups, scores, config, values)
            if config.algorithm.use_kl_in_reward and reference is not None:
                kl_T = kl_of_tokens(config.algorithm.kl_penalty, torch.cat(list(old)), torch.cat(list(reference)))
                experience, measured = pay_kl(experience, kl_T, control)
                metrics |= measured
            advantages_T, returns_T, measured = estimate(experience, config, kept_ratio)
        returns = None if returns_T is None else by_sample(returns_T, samples)
        return Targets(by_sample(advantages_T, samples), old, reference, values, returns), metrics | measured

    def _old_log_probs(self, samples: Sequence[Sample]) -> list[Tensor]:
        """The sampler's own in float32, where it and the learner agree to rounding; else those of a learner's pass."""
        if next(self.model.parameters()).dtype != torch.float32:
            return self.scorer.log_probs(self.model, samples)
        return [torch.tensor(sample.log_probs) for sample in samples]

    def _validate(self, step: int, clock: Clock) -> dict[str, float]:
        with clock("testing"), self.record.phase("validation", total=self.validator.num_episodes):
            metrics, groups = self.validator.run(self.engine, self.record.advance)
        self.record.episodes(step, "val", groups, self._render)
        self.record.validation(step, metrics)
        return metrics

    # --- gradient analysis --------------------------------------------------------------------------------------

    def _batch_to_analyse(
        self,
        step: int,
        groups: Sequence[Group],
        scores: Scores,
        selection: Selection,
        targets: Targets | None,
        clock: Clock,
    ) -> Batch | None:
        """The training step's own batch, if it is the one to be analysed now."""
        if not derive.is_analysis_step(self.config, step) or derive.has_analysis_batch(self.config):
            return None
        with clock("gradient_analysis"):
            return self._batch(groups, scores, selection, targets)

    def _batch(
        self, groups: Sequence[Group], scores: Scores, selection: Selection, targets: Targets | None = None
    ) -> Batch:
        clock = Clock()  # the step's own counts all of it as analysis
        control = replace(self.kl_control)  # training's must not be told of this KL

        def aim(groups: Sequence[Group], scores: Scores, seen: Seen, kept_ratio: float) -> Targets:
            return self._aim(groups, scores, seen, kept_ratio, control, clock)[0]

        def see(samples: Sequence[Sample]) -> Seen:
            return self._see(samples, clock)

        return analysis.make_batch(groups, scores, selection, self.config, see, aim, targets)

    def _analyse(self, step: int, batch: Batch | None, clock: Clock) -> dict[str, float]:
        """Where the gradient comes from, at the steps that are analysed. Nothing that trains is changed."""
        config = self.config
        if not derive.is_analysis_step(config, step):
            return {}
        with clock("gradient_analysis"):
            if batch is None:
                requests, draws = analysis.requests(config, step), analysis.draws(config, step)
                groups = self._play(requests, draws, "analysis rollout")
                scores = scores_of(groups)
                entropies = partial(self.scorer.mean_entropies, self.model, groups)
                batch = self._batch(groups, scores, keep_groups(groups, scores, config, entropies))
            num_samples = analysis.num_samples(batch, self.workers)
            with self.record.phase("gradient analysis", total=num_samples):
                metrics, rows = analysis.analyse(
                    batch, config, self.model, self.workers, self.reference, self.record.advance
                )
        self.record.gradient_table(step, rows)
        return metrics | ({EXITED: 1.0} if config.trainer.exit_after_gradient_analysis else {})

    def _skipped(self) -> dict[str, float]:
        """What a run that only analyses says about the updates that it leaves out."""
        names = ["actor"] if self.critic is None else ["actor", "critic"]
        return {f"{name}/skipped_for_gradient_analysis_only": 1.0 for name in names} | {
            "trainer/gradient_analysis_only": 1.0
        }

    # --- what is recorded ---------------------------------------------------------------------------------------

    def _describe(
        self, step: int, groups: Sequence[Group], scores: Scores, selection: Selection, clock: Clock
    ) -> dict[str, float]:
        """Everything that is known before an update."""
        self.record.episodes(step, "train", groups, self._render)
        if self.config.trainer.log_group_rv_table:
            self.record.group_table(step, selection.table)
        metrics = selection.metrics | {f"train/{name}": value for name, value in summarize(groups).items()}
        metrics["train/batch_size"] = float(len(samples_of(selection.kept)))
        metrics["train/rollout_attempts"] = 1.0
        metrics["rollout/empty_after_filter"] = float(not selection.kept)
        for name, reduce in (("mean", fmean), ("max", max), ("min", min)):
            metrics[f"critic/score/{name}"] = reduce(chain(*scores))
        episodes = [episode for group in groups for episode in group.episodes]
        metrics["perf/tokens_per_s"] = sum(map(num_sampled, episodes)) / clock.seconds["gen"]
        return metrics

    def _kept(self, step: int, who: str, samples: Sequence[Sample], updated: Updated) -> dict[str, float]:
        """The metrics of an update. Episodes that spoilt one are stored, to be looked at."""
        if updated.spoilt:
            episodes = {samples[index].episode_index: samples[index].episode for index in updated.spoilt}
            groups = [Group(one.tag, one.seed, one.split, one.group, (one,)) for one in episodes.values()]
            self.record.episodes(step, f"nonfinite_{who}", groups, self._render)
            self.record.note(
                f"step {step}: the {who}'s loss or gradient was not finite, so its weights stay as they are; the "
                f"{len(groups)} episodes are kept as nonfinite_{who}"
            )
        return updated.metrics

    def _record(self, step: int, metrics: dict[str, float], clock: Clock) -> None:
        self.record.step(step, metrics | clock.metrics() | self.totals.add(clock))

    def _render(self, tag: str, state: Any) -> str:
        return self.worlds[tag].env.render(state)

    def _is_due(self, step: int, every: int, now: bool = False) -> bool:
        return every > 0 and (now or step % every == 0 or step == self.config.trainer.total_training_steps)

    # --- checkpoints --------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Learning rates follow training steps."""
        for optimizer in (self.actor_optimizer, self.critic_optimizer):
            if optimizer is not None:
                optimizer.advance()

    def _parts(self) -> Parts:
        critic = None
        if self.critic is not None:
            critic = replace(part_of(self.critic_loaded, self.critic_optimizer), model=self.critic)
        state = {
            "early_stop": self.stop.state(),
            "kl_control": self.kl_control.state(),
            "totals": self.totals.state(),
            "collapse": self.collapse.state(),
        }
        return Parts(part_of(self.actor, self.actor_optimizer), critic, state)

    def _save_if_due(self, step: int, now: bool) -> None:
        """Besides what `save_freq` asks for, the weights after a step that was analysed are kept, to be probed."""
        trainer = self.config.trainer
        if self.only_analyses:
            return  # nothing was learnt
        analysed = derive.is_analysis_step(self.config, step)
        if self._is_due(step, trainer.save_freq, now=now):
            self._save(step, keep=analysed)
        elif analysed and trainer.save_freq > 0:
            self._save(step, contents=["model"])

    def _save(self, step: int, contents: Sequence[str] | None = None, keep: bool = False) -> None:
        if self.workers.is_first:
            with self.record.phase("checkpoint"):
                saved = self.store.save(step, self._parts(), contents, keep)
            if contents is None:
                self.saved = saved
        self.workers.agree(None)  # nobody goes on before it is written

    def restore(self, checkpoint: Path, first_step: int) -> None:
        state = restore(checkpoint, self._parts())
        self.restored = True
        if state:
            self.stop.restore(state["early_stop"])
            self.kl_control.restore(state["kl_control"])
            self.totals.restore(state["totals"])
            self.collapse.restore(state.get("collapse", {}))  # older checkpoints have none

    def how_to_go_on(self, step: int) -> str:
        told = f"interrupted after step {step}; "
        if self.saved is None:
            every = self.config.trainer.save_freq
            return f"{told}nothing was saved, since trainer.save_freq={every}: the same command begins again"
        if not self.store.is_resumable(self.saved):
            return f"{told}saved in {self.saved}, without the optimizer: the same command begins again, beside it"
        return f"{told}saved in {self.saved}: the same command goes on from there"


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
