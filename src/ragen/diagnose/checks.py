"""The checks of a run's health: one small function each, in a table with a title, a chart and advice.

    CHECKS["rewards_alike"].look(history)       # Finding(value, threshold, text, excess), or None

Most compare the mean of the last steps with the mean of the first ones, so that they need no knowledge of the game or
the model. Falling spread, entropy, variety and length are also what success looks like: while training success has
risen (`History.has_learned`), they are no warning.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, median

from ragen.diagnose.collapse import regime
from ragen.diagnose.history import QUANTITIES, History, finite
from ragen.format import short


@dataclass(frozen=True)
class Finding:
    """What a check has against a step."""

    value: float
    threshold: float
    text: str
    excess: float  # how far beyond the threshold; below 0 where a warning is only not over yet


def fell(history: History, name: str, share: float, num_start: int, num: int) -> Finding | None:
    """The present is below a share of the start."""
    pair = history.compared(name, num_start, num)
    return None if pair is None else _moved(history, name, *pair, share * pair[0], "fell to")


def rose(history: History, name: str, share: float, rise: float, num: int) -> Finding | None:
    """The present is above so many times the first step, and so much more."""
    pair = history.compared(name, 1, num)
    return None if pair is None else _moved(history, name, *pair, share * pair[0] + rise, "rose to")


def _moved(history: History, name: str, start: float, value: float, threshold: float, verb: str) -> Finding | None:
    end = threshold + history.easing * (start - threshold)
    beyond = value < end if verb == "fell to" else value > end
    return _found(name, value, threshold, verb, start) if beyond else None


def above(history: History, name: str, limit: float, num: int) -> Finding | None:
    """The present is above a fixed limit."""
    if len(history.values[name]) < num or not history.now(name, num) > limit * (1 - history.easing):
        return None
    return _found(name, history.now(name, num), limit, "is")


def _found(name: str, value: float, threshold: float, verb: str, start: float | None = None) -> Finding:
    quantity = QUANTITIES[name]
    began = "" if start is None else f", start {quantity.text(start)}"
    text = f"{quantity.label} {verb} {quantity.text(value)} (threshold {quantity.text(threshold)}{began})"
    return Finding(value, threshold, text, threshold - value if verb == "fell to" else value - threshold)


def _drifted(history: History, name: str, share: float) -> Finding | None:
    """For quantities that vary from step to step."""
    return fell(history, name, share, history.limits.num_start, history.limits.num_recent)


def _collapsed(history: History, name: str) -> Finding | None:
    """The last measured step shows this regime clearly. What was not there at the first cannot be lost."""
    measured, thresholds = history.measured, history.limits.regimes
    if not measured or regime(measured[0], None, thresholds).name not in ("diverse", "compressed"):
        return None
    found = regime(measured[-1], measured[0], thresholds)
    if found is None or found.name != name or not found.is_clear:
        return None
    start = QUANTITIES["information"].read(measured[0])
    return _found("information", found.information, found.information_threshold, "fell to", start)


def template_collapse(history: History) -> Finding | None:
    """Thoughts are still varied, and no longer about the prompt."""
    return _collapsed(history, "template collapse")


def low_entropy_collapse(history: History) -> Finding | None:
    """One thought for every prompt."""
    return _collapsed(history, "low-entropy collapse")


def thinking_lost(history: History) -> Finding | None:
    return fell(history, "thinking", history.limits.thinking_share, 1, 1)


def not_finite(history: History) -> Finding | None:
    left_out = [key for key in ("actor/nonfinite_samples", "critic/nonfinite_samples") if finite(history.row, key)]
    if left_out:
        num = sum(finite(history.row, key) or 0.0 for key in left_out)
        text = f"an update of {num:.0f} samples was left out, since its loss or gradient was not finite"
        return Finding(num, 0.0, text, num)
    bad = [key for key, value in history.row.items() if isinstance(value, float) and not math.isfinite(value)]
    if not bad:
        return None
    num = float(len(bad))
    return Finding(num, 0.0, f"{bad[0]} is {short(history.row[bad[0]])}", num)


def success_falls(history: History) -> Finding | None:
    return _drifted(history, "success", history.limits.success_share)


def rewards_alike(history: History) -> Finding | None:
    return None if history.has_learned() else _drifted(history, "spread", history.limits.spread_share)


def noise_blown_up(history: History) -> Finding | None:
    """Groups that differ by a trifle are divided by their own std, and count like any other."""
    return above(history, "blown up", history.limits.blown_up, history.limits.num_blown_up)


def empty_filter(history: History) -> Finding | None:
    return above(history, "empty", history.limits.empty_share, history.limits.num_recent)


def entropy_cliff(history: History) -> Finding | None:
    return None if history.has_learned() else _drifted(history, "entropy", history.limits.entropy_low_share)


def entropy_explosion(history: History) -> Finding | None:
    limits = history.limits
    return rose(history, "entropy", limits.entropy_high_share, limits.entropy_rise, limits.num_calm)


def replies_alike(history: History) -> Finding | None:
    limits = history.limits
    pair = history.compared("distinct", limits.num_start, limits.num_recent)
    if pair is None or pair[0] < limits.least_distinct or history.has_learned():
        return None
    return _drifted(history, "distinct", limits.distinct_share)


def replies_repeat_themselves(history: History) -> Finding | None:
    return rose(history, "repeats", 1.0, history.limits.repeats_rise, history.limits.num_calm)


def format_lost(history: History) -> Finding | None:
    return rose(history, "format failures", 1.0, history.limits.format_rise, history.limits.num_calm)


def replies_cut(history: History) -> Finding | None:
    return rose(history, "cut replies", 1.0, history.limits.cut_rise, history.limits.num_calm)


def replies_shorter(history: History) -> Finding | None:
    if history.has_learned():
        return None
    return fell(history, "length", history.limits.length_low_share, 1, history.limits.num_calm)


def replies_longer(history: History) -> Finding | None:
    if history.has_learned():
        return None
    return rose(history, "length", history.limits.length_high_share, 0.0, history.limits.num_calm)


def many_clipped(history: History) -> Finding | None:
    return above(history, "clipped", history.limits.clip_fraction, num=1)


def policy_jumps(history: History) -> Finding | None:
    return above(history, "policy KL", history.limits.policy_kl, num=1)


def sampler_differs(history: History) -> Finding | None:
    return above(history, "sampler KL", history.limits.sampler_kl, num=1)


def gradient_spike(history: History) -> Finding | None:
    limits, norms = history.limits, history.values["gradient"]
    before = norms[:-1][-limits.num_usual :]
    if len(before) < limits.num_start:
        return None
    usual = max(median(before), fmean(norms[: limits.num_start]))
    if not norms[-1] > limits.spike * usual:
        return None
    return _found("gradient", norms[-1], limits.spike * usual, "is")


LOWER_RATE = "a lower actor_rollout_ref.actor.optim.lr"
KEEP_SPREAD = (
    "Updates on groups with a spread only: actor_rollout_ref.rollout.rollout_filter_value=0.9 and "
    "rollout_filter_include_zero=False."
)
LOOK = "Look at the episodes below: what do the replies say?"


@dataclass(frozen=True)
class Check:
    title: str
    look: Callable[[History], Finding | None]
    shown: str  # the quantity of its chart; none where there is nothing to draw
    advice: tuple[str, ...]


# The gravest first: the first that holds is the headline.
CHECKS: dict[str, Check] = {
    "template_collapse": Check(
        "template collapse",
        template_collapse,
        "information",
        (
            "The thoughts still differ, and do not depend on the prompt any more. " + KEEP_SPREAD,
            "A weaker KL or entropy term: where advantages are small, these two decide where the policy goes.",
        ),
    ),
    "low_entropy_collapse": Check(
        "low-entropy collapse",
        low_entropy_collapse,
        "thought entropy",
        (
            "One thought is left for every prompt. Smaller steps: " + LOWER_RATE + ", or larger groups.",
            "An actor_rollout_ref.actor.entropy_coeff of 0.001 to 0.01, or a KL term, from an earlier checkpoint on.",
        ),
    ),
    "not_finite": Check(
        "a number is not finite",
        not_finite,
        "",
        (
            "The update is left out and its episodes are stored as nonfinite_*: look at them.",
            f"If it comes back: {LOWER_RATE}, a lower grad_clip, or float32.",
        ),
    ),
    "thinking_lost": Check(
        "no thinking any more",
        thinking_lost,
        "thinking",
        ("Replies come without a thought. " + LOOK, "A format penalty, or a KL term that holds the start."),
    ),
    "format_lost": Check(
        "format is being lost",
        format_lost,
        "format failures",
        (f"Smaller steps ({LOWER_RATE}), a KL term, or a larger format penalty.", LOOK),
    ),
    "entropy_explosion": Check(
        "entropy explodes",
        entropy_explosion,
        "entropy",
        (
            f"The model is coming apart, or is paid for noise: {LOWER_RATE}, a smaller or no entropy_coeff.",
            LOOK,
        ),
    ),
    "entropy_cliff": Check(
        "entropy fell off a cliff",
        entropy_cliff,
        "entropy",
        (
            f"The policy settles before it has learned. Smaller steps: {LOWER_RATE}.",
            "An actor_rollout_ref.actor.entropy_coeff of 0.001 to 0.01.",
        ),
    ),
    "success_falls": Check(
        "training success falls",
        success_falls,
        "success",
        (
            f"The updates take away what the model could do: {LOWER_RATE}, or a KL term.",
            KEEP_SPREAD,
        ),
    ),
    "rewards_alike": Check(
        "rewards alike",
        rewards_alike,
        "spread",
        (
            "With less spread in a group, more of the update is noise. " + KEEP_SPREAD,
            "More tries at a level (es_manager.train.group_size), or levels of another difficulty.",
            "More exploration: actor_rollout_ref.rollout.temperature, or an entropy_coeff of 0.001 to 0.01.",
        ),
    ),
    "noise_blown_up": Check(
        "noise is blown up",
        noise_blown_up,
        "blown up",
        (
            "Groups whose rewards differ by a trifle get advantages of full size. " + KEEP_SPREAD,
            "Or advantages that keep the size of the spread: algorithm.norm_adv_by_std_in_grpo=False, or "
            "algorithm.soft_advantage_reweight=True.",
        ),
    ),
    "empty_filter": Check(
        "the filter keeps nothing",
        empty_filter,
        "empty",
        (
            "Steps without an update. A larger es_manager.train.group_size, or levels of another difficulty.",
            "A milder filter: rollout_filter_value nearer to 1.",
        ),
    ),
    "replies_alike": Check(
        "replies alike",
        replies_alike,
        "distinct",
        (
            "The same replies to more and more states. " + KEEP_SPREAD,
            f"More exploration (temperature, entropy_coeff), or {LOWER_RATE}.",
        ),
    ),
    "replies_repeat_themselves": Check(
        "replies repeat themselves",
        replies_repeat_themselves,
        "repeats",
        (f"Loops in the text: {LOWER_RATE}, or a KL term. " + LOOK,),
    ),
    "replies_cut": Check(
        "replies are cut off",
        replies_cut,
        "cut replies",
        ("A larger actor_rollout_ref.rollout.response_length, if the replies are sensible; if not, smaller steps.",),
    ),
    "replies_longer": Check(
        "replies grow",
        replies_longer,
        "length",
        ("Longer replies without more success: look for padding and loops in the episodes below.",),
    ),
    "replies_shorter": Check(
        "replies shrink",
        replies_shorter,
        "length",
        ("Shorter replies without more success: is there still any thinking? A KL term holds the start.",),
    ),
    "policy_jumps": Check(
        "an update goes too far",
        policy_jumps,
        "policy KL",
        (f"Smaller steps: {LOWER_RATE}, fewer mini-batches (a larger ppo_mini_batch_size) or ppo_epochs=1.",),
    ),
    "many_clipped": Check(
        "many tokens are clipped",
        many_clipped,
        "clipped",
        (f"The policy moves too far within a step: {LOWER_RATE}, or fewer mini-batches.",),
    ),
    "sampler_differs": Check(
        "sampler and learner differ",
        sampler_differs,
        "sampler KL",
        ("They should differ by rounding only. Training with top_p below 1 or top_k? Else please report it.",),
    ),
    "gradient_spike": Check(
        "a spike of the gradient",
        gradient_spike,
        "gradient",
        ("One is harmless where grad_clip holds it. If they return: " + LOWER_RATE + ", or larger batches.",),
    ),
}
