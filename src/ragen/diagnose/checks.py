"""The health checks: a table with a title, a test, a chart and advice for each.

    CHECKS["rewards_alike"].look(history)       # Finding(value, threshold, text, excess), or None

Most compare the mean of the last steps with the mean of the first ones, so they need no knowledge of the game or the
model. Falling spread, entropy, variety and length also accompany success: they do not warn while training success has
risen (`History.has_learned`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, median

from ragen.diagnose.collapse import regime
from ragen.diagnose.history import QUANTITIES, History, finite
from ragen.format import counted, short


@dataclass(frozen=True)
class Finding:
    """Why a check warns at a step."""

    value: float
    threshold: float
    text: str
    excess: float  # distance beyond the threshold; below 0 while a warning has not ended yet


def fell(
    history: History,
    name: str,
    share: float,
    num_start: int | None = None,
    num: int | None = None,
    unless_learned: bool = False,
    least_start: float = -math.inf,
) -> Finding | None:
    """The present is below a share of the start. `num_start` and `num` steps make the two."""
    limits = history.limits
    pair = history.compared(name, num_start or limits.num_start, num or limits.num_recent)
    if pair is None or pair[0] < least_start or (unless_learned and history.has_learned()):
        return None
    start, value = pair
    threshold = share * start
    return _found(name, value, threshold, "fell to", start) if value < _end(history, start, threshold) else None


def rose(history: History, name: str, rise: float, share: float = 1.0, unless_learned: bool = False) -> Finding | None:
    """The present is above `share` times the first step plus `rise`."""
    pair = history.compared(name, 1, history.limits.num_calm)
    if pair is None or (unless_learned and history.has_learned()):
        return None
    start, value = pair
    threshold = share * start + rise
    return _found(name, value, threshold, "rose to", start) if value > _end(history, start, threshold) else None


def _end(history: History, start: float, threshold: float) -> float:
    """A warning ends only when its quantity has moved back from the threshold, part of the way to the start."""
    return threshold + history.easing * (start - threshold)


def above(history: History, name: str, limit: float, num: int = 1) -> Finding | None:
    """The present is above a fixed limit."""
    if len(history.values[name]) < num or not history.now(name, num) > limit * (1 - history.easing):
        return None
    return _found(name, history.now(name, num), limit, "is")


def _found(name: str, value: float, threshold: float, verb: str, start: float | None = None) -> Finding:
    quantity = QUANTITIES[name]
    began = "" if start is None else f", start {quantity.text(start)}"
    text = f"{quantity.label} {verb} {quantity.text(value)} (threshold {quantity.text(threshold)}{began})"
    return Finding(value, threshold, text, threshold - value if verb == "fell to" else value - threshold)


def collapsed(history: History, name: str) -> Finding | None:
    """The last measured step is clearly in this regime, and the first was not collapsed."""
    measured, thresholds = history.measured, history.limits.regimes
    first = regime(measured[0], None, thresholds) if measured else None
    if first is None or first.name not in ("diverse", "compressed"):
        return None
    last = regime(measured[-1], measured[0], thresholds)
    if last is None or last.name != name or not last.is_clear:
        return None
    start = QUANTITIES["information"].read(measured[0])
    return _found("information", last.information, last.information_threshold, "fell to", start)


def not_finite(history: History) -> Finding | None:
    num = sum(finite(history.row, f"{who}/nonfinite_samples") or 0.0 for who in ("actor", "critic"))
    if num:
        text = f"an update of {num:.0f} samples was skipped, since its loss or gradient was not finite"
        return Finding(num, 0.0, text, num)
    bad = [key for key, value in history.row.items() if isinstance(value, float) and not math.isfinite(value)]
    if not bad:
        return None
    return Finding(float(len(bad)), 0.0, f"{bad[0]} is {short(history.row[bad[0]])}", float(len(bad)))


def no_valid_reply(history: History) -> Finding | None:
    """Not one reply of the last steps names an action of the game; so nothing that the agent does counts."""
    valid = history.values["valid replies"]
    if not valid or max(valid[-history.limits.num_recent :]) > 0:
        return None
    steps = counted(len(valid), "step")
    text = f"no reply was ever valid in {steps}" if not max(valid) else "not one reply of the last steps was valid"
    return Finding(0.0, 0.0, f"{text}, so no action counted", float(len(valid)))


def empty_filter(history: History) -> Finding | None:
    """Steps without an update: many of the last ones, or all that there are."""
    limits, empty = history.limits, history.values["empty"]
    if empty and min(empty) > 0:
        text = f"the filter dropped every group in all of {counted(len(empty), 'step')}, so nothing was learned"
        return Finding(1.0, limits.empty_share, text, float(len(empty)))
    return above(history, "empty", limits.empty_share, limits.num_recent)


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
    "Update only on groups with a spread: actor_rollout_ref.rollout.rollout_filter_value=0.9 and "
    "rollout_filter_include_zero=False."
)
LOOK = "Look at the episodes below: what do the replies say?"


@dataclass(frozen=True)
class Check:
    title: str
    look: Callable[[History], Finding | None]
    shown: str  # the quantity of its chart; empty if there is nothing to draw
    advice: tuple[str, ...]


# The most serious first: the first that holds is the headline.
CHECKS: dict[str, Check] = {
    "no_valid_reply": Check(
        "no valid reply",
        no_valid_reply,
        "valid replies",
        (
            "The model does not know the format of an answer: fine-tune it first (ragen sft), or start from a model "
            "that follows instructions.",
            LOOK,
        ),
    ),
    "template_collapse": Check(
        "template collapse",
        lambda run: collapsed(run, "template collapse"),
        "information",
        (
            "Thoughts still vary, but no longer depend on the prompt. " + KEEP_SPREAD,
            "A weaker KL or entropy term: where advantages are small, these two decide where the policy goes.",
        ),
    ),
    "low_entropy_collapse": Check(
        "low-entropy collapse",
        lambda run: collapsed(run, "low-entropy collapse"),
        "thought entropy",
        (
            "The same thought for every prompt. Smaller steps: " + LOWER_RATE + ", or larger groups.",
            "An actor_rollout_ref.actor.entropy_coeff of 0.001 to 0.01, or a KL term, from an earlier checkpoint.",
        ),
    ),
    "not_finite": Check(
        "a number is not finite",
        not_finite,
        "",
        (
            "The update is skipped and its episodes are stored as nonfinite_*: look at them.",
            f"If it happens again: {LOWER_RATE}, a lower grad_clip, or float32.",
        ),
    ),
    "thinking_lost": Check(
        "no thinking any more",
        lambda run: fell(run, "thinking", run.limits.thinking_share, 1, 1),
        "thinking",
        ("Replies no longer contain a thought. " + LOOK, "A format penalty, or a KL term to stay near the start."),
    ),
    "format_lost": Check(
        "format is being lost",
        lambda run: rose(run, "format failures", run.limits.format_rise),
        "format failures",
        (f"Smaller steps ({LOWER_RATE}), a KL term, or a larger format penalty.", LOOK),
    ),
    "entropy_explosion": Check(
        "entropy explodes",
        lambda run: rose(run, "entropy", run.limits.entropy_rise, run.limits.entropy_high_share),
        "entropy",
        (f"The model breaks down, or is rewarded for noise: {LOWER_RATE}, a smaller or no entropy_coeff.", LOOK),
    ),
    "entropy_cliff": Check(
        "entropy fell off a cliff",
        lambda run: fell(run, "entropy", run.limits.entropy_low_share, unless_learned=True),
        "entropy",
        (
            f"The policy converges before it has learned. Smaller steps: {LOWER_RATE}.",
            "An actor_rollout_ref.actor.entropy_coeff of 0.001 to 0.01.",
        ),
    ),
    "success_falls": Check(
        "training success falls",
        lambda run: fell(run, "success", run.limits.success_share),
        "success",
        (f"The updates destroy what the model could do: {LOWER_RATE}, or a KL term.", KEEP_SPREAD),
    ),
    "rewards_alike": Check(
        "rewards alike",
        lambda run: fell(run, "spread", run.limits.spread_share, unless_learned=True),
        "spread",
        (
            "With less spread in a group, more of the update is noise. " + KEEP_SPREAD,
            "More episodes per level (es_manager.train.group_size), or levels of another difficulty.",
            "More exploration: actor_rollout_ref.rollout.temperature, or an entropy_coeff of 0.001 to 0.01.",
        ),
    ),
    # Groups that hardly differ are divided by their std, and count like any other.
    "noise_blown_up": Check(
        "noise is blown up",
        lambda run: above(run, "blown up", run.limits.blown_up, run.limits.num_blown_up),
        "blown up",
        (
            "Groups whose rewards hardly differ get advantages of full size. " + KEEP_SPREAD,
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
            "A milder filter: rollout_filter_value closer to 1.",
        ),
    ),
    "replies_alike": Check(
        "replies alike",
        lambda run: fell(
            run, "distinct", run.limits.distinct_share, unless_learned=True, least_start=run.limits.least_distinct
        ),
        "distinct",
        (
            "The same replies to more and more states. " + KEEP_SPREAD,
            f"More exploration (temperature, entropy_coeff), or {LOWER_RATE}.",
        ),
    ),
    "replies_repeat_themselves": Check(
        "replies repeat themselves",
        lambda run: rose(run, "repeats", run.limits.repeats_rise),
        "repeats",
        (f"Loops in the text: {LOWER_RATE}, or a KL term. " + LOOK,),
    ),
    "replies_cut": Check(
        "replies are cut off",
        lambda run: rose(run, "cut replies", run.limits.cut_rise),
        "cut replies",
        ("A larger actor_rollout_ref.rollout.response_length if the replies make sense; if not, smaller steps.",),
    ),
    "replies_longer": Check(
        "replies grow",
        lambda run: rose(run, "length", 0.0, run.limits.length_high_share, unless_learned=True),
        "length",
        ("Longer replies without more success: look for padding and loops in the episodes below.",),
    ),
    "replies_shorter": Check(
        "replies shrink",
        lambda run: fell(run, "length", run.limits.length_low_share, 1, run.limits.num_calm, unless_learned=True),
        "length",
        ("Shorter replies without more success: is there any thinking left? A KL term keeps it near the start.",),
    ),
    "policy_jumps": Check(
        "an update goes too far",
        lambda run: above(run, "policy KL", run.limits.policy_kl),
        "policy KL",
        (f"Smaller steps: {LOWER_RATE}, fewer mini-batches (a larger ppo_mini_batch_size) or ppo_epochs=1.",),
    ),
    "many_clipped": Check(
        "many tokens are clipped",
        lambda run: above(run, "clipped", run.limits.clip_fraction),
        "clipped",
        (f"The policy moves too far within a step: {LOWER_RATE}, or fewer mini-batches.",),
    ),
    "sampler_differs": Check(
        "sampler and learner differ",
        lambda run: above(run, "sampler KL", run.limits.sampler_kl),
        "sampler KL",
        ("They should differ only by rounding. Do you train with top_p below 1 or top_k? If not, please report it.",),
    ),
    "gradient_spike": Check(
        "a spike of the gradient",
        gradient_spike,
        "gradient",
        ("One is harmless if grad_clip limits it. If they recur: " + LOWER_RATE + ", or larger batches.",),
    ),
}
