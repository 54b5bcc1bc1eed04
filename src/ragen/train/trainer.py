"""Reinforcement learning, as a table of contents: a step is a few calls from named data to named data.

    run = train(config)             # -> Run: how it ended, and the folder with config, metrics, episodes and report

A step plays groups, keeps those worth an update, scores their tokens, estimates advantages, updates, and validates when
due. With several workers every one of them runs this file: they play and compute their shares, and hold the same
groups, decisions and weights. With `trainer.gradient_analysis_only` a `Probe` runs instead.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from statistics import fmean
from typing import Any

from ragen.algo.kl import KlController
from ragen.checkpoint.parts import Parts
from ragen.config import derive
from ragen.config.schema import Config
from ragen.diagnose.early_stop import EarlyStop, StopRules
from ragen.env.failure import TooManyFailures
from ragen.model.load import Source
from ragen.model.packing import Sample, samples_of
from ragen.run.clock import Clock
from ragen.run.memory_plan import MemoryPlan
from ragen.run.session import ENVIRONMENT_FAILED, Ending, Run, Session, joined, session
from ragen.store.manifest import Best, read_best
from ragen.train import analysis
from ragen.train.learner import Learner, find_models, plan_memory
from ragen.train.rollouts import Rollouts
from ragen.train.targets import Played, kept_scores
from ragen.train.update import Targets, Updated
from ragen.types import Group


def train(config: Config) -> Run:
    """Train to the end of the budget, to a rule that stops the run, or until interrupted."""
    with joined(config) as workers:
        sources = find_models(config)  # before the folder is claimed
        plan = plan_memory(config, sources, workers.device)
        with session(config, workers) as run:
            kind = Probe if config.trainer.gradient_analysis_only else Trainer
            job = run.load(lambda: kind(config, sources, run, plan))
            return run.finish(run.fit(job))


class Trainer:
    def __init__(self, config: Config, sources: Mapping[str, Source], session: Session, plan: MemoryPlan | None = None):
        self.config, self.session, self.log = config, session, session.log
        self.num_steps = config.trainer.total_training_steps
        if plan is not None:
            self.log.note(plan.line())
        self.learner = Learner(config, sources, session.workers, plan, self.log.note)
        self.rollouts = Rollouts(config, self.learner, session, plan)
        self.stop = EarlyStop(StopRules.of(config))
        self.is_over = False  # the step was analysed, and the run ends with that
        self.failures = ""  # why the run ends with this step: the environment failed too often in its analysis
        self.best: Best | None = None  # the step, if no earlier one has a higher validation success

    def fit(self) -> Ending:
        trainer = self.config.trainer
        if self.session.first_step == 1 and (trainer.val_before_train or trainer.val_only):
            clock = Clock()
            with self.session.droppable():
                metrics = self.rollouts.validate(0, clock)
            self.session.log_step(0, metrics, clock)
        return Ending("finished", 0) if trainer.val_only else self.session.steps(self)

    def step(self, step: int, clock: Clock) -> dict[str, float]:
        played, metrics = self.rollouts.play_step(step, clock)
        if not self.stop.after_rollout(metrics, len(played.selection.kept)):
            metrics |= self._learn(step, played, clock)
        self.session.commit()
        self.learner.advance()
        return metrics

    def validate(self, step: int, clock: Clock) -> dict[str, float]:
        """When it is due, and the metrics of the rules that stop a run."""
        metrics = self._validate_if_due(step, clock)
        self.best = self._new_best(step, metrics)
        self.stop.after_validation(metrics)
        return metrics | self.stop.metrics()

    def _new_best(self, step: int, metrics: Mapping[str, float]) -> Best | None:
        successes = [metrics[name] for tag in self.rollouts.worlds if (name := f"val-env/{tag}/success") in metrics]
        if not successes or not self.config.trainer.save_best:
            return None
        success, before = fmean(successes), self.session.workers.agree(read_best(self.session.folder.path))
        # A killed run may have come to this step before.
        is_best = before is None or success > before.success or step == before.step
        return Best(step, success) if is_best else None

    def _validate_if_due(self, step: int, clock: Clock) -> dict[str, float]:
        if not self._is_due(step, self.config.trainer.test_freq):
            return {}
        # A checkpoint does not hold that a rule has ended the run: such a step is finished now.
        with self.session.droppable() if self.ending(step) is None else nullcontext():
            return self.rollouts.validate(step, clock)

    def _learn(self, step: int, played: Played, clock: Clock) -> dict[str, float]:
        """Update critic and actor; where the step is analysed, between the two."""
        samples = samples_of(played.selection.kept)
        targets, metrics = self._make_targets(played, samples, self.learner.kl_control, clock)
        batch = analysis.training_batch(step, played, targets, self.learner, clock)  # before the critic changes
        if targets is not None:
            self.session.commit()
        if targets is not None and self.learner.critic is not None:
            with clock("update_critic"), self.log.phase("critic", total=len(samples)):
                updated = self.learner.update_critic(samples, targets, self.log.advance)
            self._log_nonfinite(step, "critic", samples, updated)
            metrics |= updated.metrics
        try:
            metrics |= analysis.analyse_step(step, batch, self.rollouts, clock)
        except TooManyFailures as failures:  # the critic may have changed: the step is completed
            self.failures = str(failures)
        self.is_over = analysis.exits_after(self.config, step)
        if targets is not None and step >= self.config.trainer.critic_warmup and not self.is_over:
            with clock("update_actor"), self.log.phase("update", total=len(samples)):
                updated = self.learner.update_actor(step, samples, targets, self.log.advance)
            self._log_nonfinite(step, "actor", samples, updated)
            metrics |= updated.metrics
        return metrics

    def _make_targets(
        self, played: Played, samples: Sequence[Sample], control: KlController, clock: Clock
    ) -> tuple[Targets | None, dict[str, float]]:
        """What the updates aim at; None where the filter kept nothing."""
        selection = played.selection
        if not selection.kept:
            return None, {}
        scores, token_scores = kept_scores(played, self.config), self.learner.score(samples, clock)
        return self.learner.make_targets(selection.kept, scores, token_scores, selection.kept_ratio, control, clock)

    def _log_nonfinite(self, step: int, who: str, samples: Sequence[Sample], updated: Updated) -> None:
        """Store the episodes of skipped optimizer steps, to be looked at."""
        if not updated.skipped:
            return
        episodes = {samples[index].episode_index: samples[index].episode for index in updated.skipped}
        groups = [Group(one.tag, one.seed, one.split, one.group, (one,)) for one in episodes.values()]
        self.log.episodes(step, f"nonfinite_{who}", groups)
        self.log.note(
            f"step {step}: the {who}'s loss or gradient was not finite: the update is skipped, and its {len(groups)} "
            f"episodes are stored as nonfinite_{who}"
        )

    def ending(self, step: int) -> Ending | None:
        if self.failures:
            return Ending(ENVIRONMENT_FAILED, step, explanation=self.failures)
        if self.is_over:
            return Ending("finished", step)
        if self.stop.rule is not None:
            return Ending("early_stopped", step, self.stop.rule, self.stop.explain())
        return None

    def save(self, step: int, now: bool) -> None:
        """Besides what `save_freq` asks for, the weights after an analysed step are kept, to be probed."""
        every, analysed = self.config.trainer.save_freq, derive.is_analysis_step(self.config, step)
        if self.is_over:
            return  # the actor was not updated
        if self._is_due(step, every, now=now or self.best is not None):
            self.session.save(step, self.parts(), keep=analysed, best=self.best)
        elif analysed and every > 0:
            self.session.save(step, self.parts(), contents=["model"])

    def _is_due(self, step: int, every: int, now: bool = False) -> bool:
        return every > 0 and (now or step % every == 0 or step == self.num_steps)

    def parts(self) -> Parts:
        return Parts(*self.learner.checkpoint_parts(), self.state())

    def state(self) -> dict[str, Any]:
        return {
            "early_stop": self.stop.state(),
            "kl_control": self.learner.kl_control.state(),
            "totals": self.session.totals.state(),
            "collapse": self.rollouts.collapse.state(),
            "levels": self.rollouts.levels.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        if state:
            self.stop.restore(state["early_stop"])
            self.learner.kl_control.restore(state["kl_control"])
            self.session.totals.restore(state["totals"])
            self.rollouts.collapse.restore(state.get("collapse", {}))  # older checkpoints have none
            self.rollouts.levels.restore(state.get("levels", {}))


class Probe(Trainer):
    """Plays, filters and analyses the gradient of a checkpoint without training it (`gradient_analysis_only`).

    The first step is that of the checkpoint itself. Nothing is updated, saved or stopped by a rule.
    """

    def fit(self) -> Ending:
        trainer, session = self.config.trainer, self.session
        if trainer.val_before_train or trainer.val_only:
            # With a checkpoint the first step is the checkpoint's own; without, the weights are those of step 0.
            start, clock = session.first_step if session.decision.checkpoint else session.first_step - 1, Clock()
            with session.droppable():
                metrics = self.rollouts.validate(start, clock)
            session.log_step(start, metrics, clock)
        return Ending("finished", 0) if trainer.val_only else session.steps(self)

    def step(self, step: int, clock: Clock) -> dict[str, float]:
        """A step as training would take it, without its updates."""
        learner, (played, metrics) = self.learner, self.rollouts.play_step(step, clock)
        control = replace(learner.kl_control)  # measuring must not change the controller
        targets, measured = self._make_targets(played, samples_of(played.selection.kept), control, clock)
        batch = analysis.training_batch(step, played, targets, learner, clock)
        metrics |= measured | analysis.analyse_step(step, batch, self.rollouts, clock)
        skipped = ["actor"] if learner.critic is None else ["actor", "critic"]
        metrics |= {f"{name}/skipped_for_gradient_analysis_only": 1.0 for name in skipped}
        metrics["trainer/gradient_analysis_only"] = 1.0
        return metrics

    def validate(self, step: int, clock: Clock) -> dict[str, float]:
        return self._validate_if_due(step, clock) | self.stop.metrics()

    def ending(self, step: int) -> Ending | None:
        return Ending("finished", step) if analysis.exits_after(self.config, step) else None

    def save(self, step: int, now: bool) -> None:
        """Nothing was learned."""
