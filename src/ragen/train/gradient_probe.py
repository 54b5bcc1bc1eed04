"""A probe: play, filter and analyse the gradient of a checkpoint without training it (`gradient_analysis_only`).

The first step is that of the checkpoint itself. Nothing is updated, saved or stopped by a rule.
"""

from dataclasses import replace

from ragen.model.packing import samples_of
from ragen.run.clock import Clock
from ragen.run.session import Ending
from ragen.train import analysis
from ragen.train.trainer import Trainer


class Probe(Trainer):
    def fit(self) -> Ending:
        trainer, session = self.config.trainer, self.session
        if trainer.val_before_train or trainer.val_only:
            # With a checkpoint the first step is the checkpoint's own; without, the weights are those of step 0.
            start, clock = session.first_step if session.decision.checkpoint else session.first_step - 1, Clock()
            session.log_step(start, self.rollouts.validate(start, clock), clock)
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
        if self._is_due(step, self.config.trainer.test_freq):
            metrics |= self.rollouts.validate(step, clock)
        return metrics | self.stop.metrics()

    def ending(self, step: int) -> Ending | None:
        return Ending("finished", step) if analysis.exits_after(self.config, step) else None

    def save(self, step: int, now: bool) -> None:
        """Nothing was learned."""
