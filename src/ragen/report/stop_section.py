"""The report's section on an early stop: which rule ended the run, its numbers, and what usually helps.

    section(metrics, config, folder.read_finished())      # for templates/run.html.jinja

A rule that is unknown here, of another version, is shown by its name.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ragen.diagnose.early_stop import EMPTY, REWARD_STD, SUCCESS, VARIANCE, StopRules
from ragen.format import percent, short
from ragen.report.charts import FREE, MAX_COLOURS, PERCENT, POSITIVE, SMALL, Axis, Level, Line, Point, line_chart
from ragen.report.pages import Card
from ragen.report.verdict import early_stop, validation_tags, validations
from ragen.store.run_folder import Metrics

Settings = Mapping[str, Any]  # flat, dotted keys
Evidence = tuple[list[Card], dict[str, str]]  # charts, and facts by name


@dataclass(frozen=True)
class RuleText:
    """A rule in words: what it means that it ended a run, and what usually helps."""

    title: str
    meaning: str
    helps: tuple[str, ...]
    evidence: Callable[[Metrics, Settings], Evidence]


def section(metrics: Metrics, config: Settings, finished: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What the page shows; None for a run that no rule has stopped."""
    stop = early_stop(metrics, finished)
    if stop is None:
        return None
    rule = RULES.get(stop.rule)
    cards, numbers = rule.evidence(metrics, config) if rule else ([], {})
    return {
        "title": rule.title if rule else stop.rule,
        "explanation": stop.explanation.rstrip("."),
        "rule": rule,
        "facts": {"rule": stop.rule, "step": "unknown" if stop.step is None else stop.step} | numbers,
        "cards": cards,
    }


def _variance_evidence(metrics: Metrics, config: Settings) -> Evidence:
    rules = StopRules()
    empty = {row["step"] for row in metrics.rows if row.get("rollout/empty_after_filter")}
    points = [point for point in metrics.series(REWARD_STD) if point[0] not in empty and math.isfinite(point[1])]
    if len(points) <= rules.num_baseline:
        return [], {}
    baseline = sum(value for _, value in points[: rules.num_baseline]) / rules.num_baseline
    threshold = rules.collapsed_share * baseline
    facts = {
        f"baseline, mean of the first {rules.num_baseline} steps": short(baseline),
        f"threshold, {100 * rules.collapsed_share:g} % of it": short(threshold),
        f"last {rules.num_collapsed} steps": _listed(points[-rules.num_collapsed :], FREE),
    }
    levels = (Level("baseline", baseline), Level("threshold", threshold))
    lines = [Line("spread", points)]
    return _cards("Reward spread in a group", lines, POSITIVE, levels, rules.num_collapsed), facts


def _success_evidence(metrics: Metrics, config: Settings) -> Evidence:
    rules = StopRules()
    lines = []
    for tag in validation_tags(metrics):
        points = [(value.step, value.success) for value in validations(metrics, tag)]
        lines += [Line(tag, points, dots=True)] if points else []
    lines = lines[:MAX_COLOURS]
    facts = {"threshold": percent(rules.least_success)}
    for line in lines:
        last = line.points[-rules.num_validations :]
        facts[f"last {rules.num_validations} validations of {line.label}"] = _listed(last, PERCENT)
    levels = (Level("threshold", rules.least_success),)
    return _cards("Validation success", lines, PERCENT, levels, rules.num_validations), facts


def _empty_evidence(metrics: Metrics, config: Settings) -> Evidence:
    limit: Any = config.get("actor_rollout_ref.rollout.rollout_filter_empty_stop_steps")
    points = metrics.series("rollout/consecutive_empty_after_filter_steps")
    lines = [Line("empty", points)] if points else []
    facts, levels = {}, []
    if isinstance(limit, int) and limit > 0:
        facts["limit, empty steps one after the other"] = str(limit)
        levels.append(Level("limit", limit))
    if kept := metrics.series("rollout/filter_kept_count"):
        facts["groups kept in the last 10 steps"] = _listed(kept[-10:], FREE)
    return _cards("Empty steps in a row", lines, POSITIVE, levels, 10), facts


def _cards(title: str, lines: Sequence[Line], axis: Axis, levels: Sequence[Level], window: int) -> list[Card]:
    """The whole run, and its end, in which the rule held."""
    shown = {"over the run": lines} if lines else {}
    if lines and len(lines[0].points) > 3 * window:
        shown["its end"] = [Line(line.label, line.points[-3 * window :], dots=True) for line in lines]
    return [
        Card(title, line_chart(some, axis, SMALL, levels, end_labels=True, name=f"{title}, {when}"), when)
        for when, some in shown.items()
    ]


def _listed(points: Sequence[Point], axis: Axis) -> str:
    return ", ".join(axis.text(value) for _, value in points)


RULES = {
    VARIANCE: RuleText(
        "All episodes of a group earn the same",
        "An update learns from how the rewards of a group differ. The spread has all but gone, so what is left to "
        "learn from is noise. Either every level is solved or lost in each try, or the agent has settled on one way "
        "of playing.",
        (
            "Where success is near 100 % this is the end of what these levels can teach: take harder ones.",
            "More exploration: a higher actor_rollout_ref.rollout.temperature, or an "
            "actor_rollout_ref.actor.entropy_coeff of 0.001 to 0.01.",
            "Smaller steps: a lower actor_rollout_ref.actor.optim.lr, or a KL term.",
            "Updates on groups with a spread only: actor_rollout_ref.rollout.rollout_filter_include_zero=False and a "
            "rollout_filter_value of 0.9.",
        ),
        _variance_evidence,
    ),
    SUCCESS: RuleText(
        "Validation success stays near zero",
        "Without a success now and then there is nothing to reinforce. The agent has lost what it could do, or it "
        "never could.",
        (
            "Look at the episodes below: are replies cut off or in the wrong format? Then raise "
            "actor_rollout_ref.rollout.response_length, or look at the prompt.",
            "If success was higher at the start, the updates have broken the model: lower "
            "actor_rollout_ref.actor.optim.lr, or add a KL term.",
            "If it never was, begin from a model that solves some levels (supervised fine-tuning first), or from "
            "easier levels.",
        ),
        _success_evidence,
    ),
    EMPTY: RuleText(
        "The filter keeps no group",
        "A step in which the filter keeps nothing makes no update. A long series of such steps will not end by itself.",
        (
            "A larger es_manager.train.group_size: of more tries at a level, some differ.",
            "A milder filter: a rollout_filter_value nearer to 1, or "
            "actor_rollout_ref.rollout.rollout_filter_include_zero=True, which also keeps groups without a spread.",
            "Levels of another difficulty: no spread means all of them are solved, or none is.",
            "Patience: actor_rollout_ref.rollout.rollout_filter_empty_stop_steps, 0 for ever.",
        ),
        _empty_evidence,
    ),
}
