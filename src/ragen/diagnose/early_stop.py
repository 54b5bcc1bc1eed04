"""When to stop a failed run: three rules over its metrics.

    stop = EarlyStop(StopRules.of(config))
    rule = stop.after_rollout(metrics, num_kept=len(kept))      # once a step, after the filter, before the update
    rule = stop.after_validation(metrics) or rule               # at each periodic validation, not the one at step 0
    metrics |= stop.metrics()
    if rule:
        print(stop.explain())                                   # why it stops, with numbers

    reward_variance_collapse    ten steps with rollout/in_group_reward_std below a tenth of its mean over the first ten
    low_validation_success      five validations with the same val-env/<tag>/success below 1 %
    empty_filtered_steps        rollout_filter_empty_stop_steps steps in which the filter kept nothing

All steps and validations are consecutive. Steps without a kept group do not count for the first rule, neither in its
baseline nor in its ten steps. If the baseline is 0 there was no variance to lose, and the rule never holds.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from ragen.config.schema import Config

VARIANCE = "reward_variance_collapse"
SUCCESS = "low_validation_success"
EMPTY = "empty_filtered_steps"
RULES = (VARIANCE, SUCCESS, EMPTY)
REWARD_STD = "rollout/in_group_reward_std"
_SUCCESS_KEY = re.compile("val-env/.+/success")


@dataclass(frozen=True)
class StopRules:
    """The thresholds of the documented comparisons."""

    empty_steps: int = 5  # 0 or less: off
    num_baseline: int = 10
    num_collapsed: int = 10
    collapsed_share: float = 0.1
    num_validations: int = 5
    least_success: float = 0.01

    @classmethod
    def of(cls, config: Config) -> "StopRules":
        return cls(empty_steps=config.actor_rollout_ref.rollout.rollout_filter_empty_stop_steps)


class EarlyStop:
    def __init__(self, rules: StopRules):
        self.rules = rules
        self.num_empty = 0  # consecutive steps
        self.first_stds: list[float] = []
        self.last_stds: list[float] = []
        self.num_low: dict[str, int] = {}  # consecutive validations, by metric
        self.rule: str | None = None
        self._explanation = ""

    def after_rollout(self, metrics: Mapping[str, float], num_kept: int) -> str | None:
        """The rule that holds now, if any. `num_kept` is the number of groups that the filter kept."""
        if REWARD_STD not in metrics:
            raise ValueError(f"the metrics of a step must include {REWARD_STD}, whatever the filter's metric")
        if num_kept == 0:
            self.num_empty += 1
            if 0 < self.rules.empty_steps <= self.num_empty:
                return self._stop(EMPTY, f"the filter kept no group in {self.num_empty} consecutive steps")
            return None
        self.num_empty = 0
        return self._variance(float(metrics[REWARD_STD]))

    def after_validation(self, metrics: Mapping[str, float]) -> str | None:
        """The rule that holds now, if any. Each tag counts separately."""
        successes = {key: float(value) for key, value in metrics.items() if _SUCCESS_KEY.fullmatch(key)}
        for key, value in successes.items():
            self.num_low[key] = self.num_low.get(key, 0) + 1 if value < self.rules.least_success else 0
        for key, value in successes.items():
            if self.num_low[key] >= self.rules.num_validations:
                return self._stop(
                    SUCCESS,
                    f"{key} was below {self.rules.least_success:.0%} in {self.num_low[key]} consecutive "
                    f"validations, {value:.2%} in the last",
                )
        return None

    def metrics(self) -> dict[str, float]:
        counted = {"rollout/consecutive_empty_after_filter_steps": float(self.num_empty)}
        return counted if self.rule is None else counted | {f"early_stopped/{self.rule}": 1.0}

    def explain(self) -> str:
        """Why the run stops, with numbers; empty if it does not."""
        return self._explanation

    def state(self) -> dict[str, Any]:
        """For a checkpoint, as JSON. It omits `rule`: a resumed run is not stopped."""
        return {
            "num_empty": self.num_empty,
            "first_stds": list(self.first_stds),
            "last_stds": list(self.last_stds),
            "num_low": dict(self.num_low),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from a stored state."""
        known = self.state().keys()
        if state.keys() != known:
            raise ValueError(
                f"the checkpoint's early-stop state has {', '.join(map(str, state)) or 'nothing'}, not "
                f"{', '.join(known)}: another version wrote it"
            )
        self.num_empty = int(state["num_empty"])
        self.first_stds, self.last_stds = list(state["first_stds"]), list(state["last_stds"])
        self.num_low = dict(state["num_low"])

    def _variance(self, std: float) -> str | None:
        rules = self.rules
        if len(self.first_stds) < rules.num_baseline:
            self.first_stds.append(std)
            return None
        self.last_stds = [*self.last_stds, std][-rules.num_collapsed :]
        baseline = fmean(self.first_stds)
        threshold = rules.collapsed_share * baseline
        if len(self.last_stds) < rules.num_collapsed or not all(value < threshold for value in self.last_stds):
            return None
        return self._stop(
            VARIANCE,
            f"{REWARD_STD} was below {threshold:.4g} in {rules.num_collapsed} consecutive steps, "
            f"{std:.4g} in the last; that is {rules.collapsed_share:.0%} of {baseline:.4g}, its mean over the first "
            f"{rules.num_baseline} steps",
        )

    def _stop(self, rule: str, explanation: str) -> str:
        if self.rule is None:
            self.rule, self._explanation = rule, explanation
        return rule
