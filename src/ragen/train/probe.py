"""A probe: play, filter and analyse the gradient of a checkpoint without training it (`gradient_analysis_only`).

The first step is that of the checkpoint itself. Nothing is updated, saved or stopped by a rule.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ragen.checkpoint.parts import Parts
from ragen.config.schema import Config
from ragen.diagnose.early_stop import EarlyStop, StopRules
from ragen.model.load import Source
from ragen.model.packing import samples_of
from ragen.run.clock import Clock
from ragen.run.session import Ending, Session
from ragen.train import analysis
from ragen.train.learner import Learner
from ragen.train.player import Player
from ragen.train.targets import kept_scores


class Probe:
    def __init__(self, config: Config, sources: Mapping[str, Source], session: Session):
        self.config, self.session = config, session
        self.learner = Learner(config, sources, session.workers)
        self.player = Player(config, self.learner, session)
        self.stop = EarlyStop(StopRules.of(config))  # its count at the checkpoint is logged

    def fit(self) -> Ending:
        trainer, session = self.config.trainer, self.session
        if trainer.val_before_train or trainer.val_only:
            # With a checkpoint the first step is the checkpoint's own; without, the weights are those of step 0.
            start, clock = session.first_step if session.decision.checkpoint else session.first_step - 1, Clock()
            session.log_step(start, self.player.validate(start, clock), clock)
        if trainer.val_only:
            return Ending("finished", 0)
        for step in range(session.first_step, trainer.total_training_steps + 1):
            clock = Clock()
            with clock("step"):
                metrics = self._analyse(step, clock)
            session.log_step(step, metrics, clock)
            if analysis.exits_after(self.config, step):
                return Ending("finished", step)
            if session.is_interrupted() and step < trainer.total_training_steps:
                return Ending("interrupted", step)
        return Ending("finished", trainer.total_training_steps)

    def _analyse(self, step: int, clock: Clock) -> dict[str, float]:
        """A step as training would take it, without its updates."""
        config, learner, trainer = self.config, self.learner, self.config.trainer
        played, metrics = self.player.play_step(step, clock)
        selection, targets = played.selection, None
        if selection.kept:
            scores, token_scores = kept_scores(played, config), learner.score(samples_of(selection.kept), clock)
            control = replace(learner.kl_control)  # measuring must not change the controller
            targets, measured = learner.make_targets(
                selection.kept, scores, token_scores, selection.kept_ratio, control, clock
            )
            metrics |= measured
        batch = analysis.training_batch(step, played, targets, learner, clock)
        metrics |= analysis.analyse_step(step, batch, self.player, clock)
        skipped = ["actor"] if learner.critic is None else ["actor", "critic"]
        metrics |= {f"{name}/skipped_for_gradient_analysis_only": 1.0 for name in skipped}
        metrics["trainer/gradient_analysis_only"] = 1.0
        every = trainer.test_freq
        if every > 0 and (step % every == 0 or step == trainer.total_training_steps):
            metrics |= self.player.validate(step, clock)
        return metrics | self.stop.metrics()

    def parts(self) -> Parts:
        return Parts(*self.learner.checkpoint_parts())

    def restore(self, state: Mapping[str, Any]) -> None:
        if state:
            self.stop.restore(state["early_stop"])
            self.learner.kl_control.restore(state["kl_control"])
            self.session.totals.restore(state["totals"])
            self.player.collapse.restore(state.get("collapse", {}))
