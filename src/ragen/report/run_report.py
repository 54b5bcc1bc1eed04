"""The report of a run: one HTML file, from its folder alone.

    write_report(RunFolder("checkpoints/ragen/test"))      # -> checkpoints/ragen/test/report.html

Each section is a function of `RunData` that returns what `templates/run.html.jinja` shows; empty without its data.
"""

import fnmatch
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragen.config.tree import build, leaves
from ragen.diagnose.checks import CHECKS
from ragen.diagnose.collapse import FIRST_TURN, TRAJECTORY
from ragen.diagnose.health import HealthVerdict, HealthWarning
from ragen.diagnose.history import QUANTITIES, Limits, finite, series_of
from ragen.env.base import Tag
from ragen.env.registry import make
from ragen.format import compact, duration, percent, short
from ragen.report import charts, gradient_section, replay, stop_section
from ragen.report.charts import FREE, MIN_TO_SMOOTH, PERCENT, POSITIVE, SHARE, SMALL, Axis, Bar, BarGroup, Level, Line
from ragen.report.pages import Card, render
from ragen.report.settings import not_default, setting_text
from ragen.report.verdict import (
    PREFIX,
    baselines,
    first_and_last_episodes,
    validation_tags,
    validations,
    verdict,
)
from ragen.statistics import Rate, bin_order
from ragen.store.run_folder import Metrics, RunFolder


@dataclass(frozen=True)
class RunData:
    """Everything that a report is made from."""

    folder: RunFolder
    config: dict[str, Any]  # flat, dotted keys
    metrics: Metrics
    before: list[dict[str, Any]]  # episodes of the first validation
    after: list[dict[str, Any]]  # and of the last, if that is another one
    finished: Mapping[str, Any] | None  # how the run ended, if it has

    @property
    def name(self) -> str:
        project, name = (self.config.get(f"trainer.{key}_name") for key in ("project", "experiment"))
        return f"{project} / {name}" if project and name else self.folder.path.resolve().name


@dataclass(frozen=True)
class Curve:
    """A small chart: its lines by metric name, `*` standing for an environment."""

    title: str
    metrics: Mapping[str, str]  # metric -> label
    axis: Axis
    note: str = ""
    smooth: bool = True


INFORMATION, REASONING_ENTROPY = (
    {f"{FIRST_TURN}/{name}": "first turns", f"{TRAJECTORY}/{name}": "any turn"}
    for name in ("mi_seq_estimate", "conditional_entropy_est")
)
SECONDS = {
    "timing_s/gen": "rollout",
    "timing_s/update_actor": "update",
    "timing_s/update_critic": "critic",
    "timing_s/testing": "validation",
    "timing_s/save_checkpoint": "checkpoint",
}
CURVES = (
    Curve("Training success", {"train/*/success": ""}, PERCENT),
    Curve("Reward", {"train/reward": ""}, FREE, "mean of the training episodes"),
    Curve("Entropy", {"actor/entropy": ""}, POSITIVE, "nats a token; a cliff is a warning"),
    Curve("Information I(X;Z)", INFORMATION, POSITIVE, "nats; what a reasoning tells about its prompt", smooth=False),
    Curve("Entropy of the reasoning H(Z|X)", REASONING_ENTROPY, POSITIVE, "nats a token", smooth=False),
    Curve("Reward spread in a group", {"rollout/in_group_reward_std": ""}, POSITIVE, "no spread, no signal"),
    Curve("Groups kept by the filter", {"rollout/filter_kept_ratio": ""}, SHARE),
    Curve("Response length", {"train/response_length": ""}, POSITIVE, "tokens"),
    Curve("Gradient norm", {"actor/grad_norm": "actor", "critic/grad_norm": "critic"}, POSITIVE, "before clipping"),
    Curve("KL to the sampling policy", {"actor/ppo_kl": ""}, FREE),
    Curve("KL to the reference", {"actor/kl_loss": ""}, FREE, "the KL term of the loss, before its coefficient"),
    Curve("Clipped tokens", {"actor/pg_clipfrac": ""}, PERCENT),
    Curve("Policy loss", {"actor/pg_loss": ""}, FREE),
    Curve("Value loss", {"critic/vf_loss": ""}, POSITIVE, "critic"),
    Curve("Explained variance", {"critic/vf_explained_var": ""}, Axis(high=1.0), "of returns by the critic; 1 is all"),
    Curve("Values and returns", {"critic/values/mean": "values", "critic/returns/mean": "returns"}, FREE, "means"),
    Curve("Actions in an episode", {"train/*/num_actions": ""}, POSITIVE),
    Curve("Replies in the right format", {f"{PREFIX}*/format_valid": ""}, Axis(percent=True, high=1.0), "validation"),
    Curve("Seconds in a step", SECONDS, POSITIVE, smooth=False),
    Curve("Tokens a second", {"perf/tokens_per_s": ""}, POSITIVE),
)
# Metrics of a validation that its own charts show.
SHOWN_ABOVE = re.compile(f"{PREFIX}.*/((greedy_)?success(_low|_high)?|random|optimal|(success|num)_len_.*)")


def write_report(folder: RunFolder, finished: dict[str, Any] | None = None) -> Path:
    """Write `report.html` atomically and return its path. `finished`: how the run ended, if that is not stored yet."""
    metrics = folder.read_metrics()
    before, after = first_and_last_episodes(folder, metrics.notes)
    run = RunData(
        folder=folder,
        config=leaves(folder.read_config()),
        metrics=metrics,
        before=before,
        after=after,
        finished=folder.read_finished() if finished is None else finished,
    )
    found = verdict(run.metrics, run.before, run.after, run.finished)
    page = render(
        "run",
        name=run.name,
        folder=folder.path,
        facts=_facts(run),
        verdict=found,
        warnings=_warnings(run, found.health),
        stop=stop_section.section(metrics, run.config, run.finished),
        validation=_validation(run),
        curves=[card for card in (_curve(run, curve) for curve in CURVES) if card],
        smoothed=charts.smoothing_window(len(metrics.rows)) if len(metrics.rows) >= MIN_TO_SMOOTH else 0,
        gradients=gradient_section.section(run.name, metrics, folder.path),
        metrics=_other_metrics(run),
        settings=[(key, setting_text(value), default) for key, value, default in not_default(run.config)],
        **_episodes(run),
    )
    return folder.write_report(page)


def _facts(run: RunData) -> dict[str, Any]:
    get, last = run.config.get, run.metrics.last_step()
    planned = get("trainer.total_training_steps")
    seconds, speeds = _finite_values(run, "timing_s/step"), _finite_values(run, "perf/tokens_per_s")
    steps = "" if last is None else f"{last} of {planned}" if planned and planned != last else str(last)
    return {
        "model": get("model_path"),
        "environment": ", ".join(map(str, get("es_manager.val.env_configs.tags") or [])),
        **_method(run),
        "steps": steps,
        "time": duration(sum(seconds)) if seconds else "",
        "tokens/s": compact(sum(speeds) / len(speeds)) if speeds else "",
    }


def _method(run: RunData) -> dict[str, Any]:
    """How it learns: by an estimator, or from the answers of a solver."""
    get = run.config.get
    if get("rl_or_sft") != "sft":
        return {"estimator": get("algorithm.adv_estimator")}
    rank = get("sft.training.lora_rank")
    sizes = {name: get(f"sft.data_generation.{name}_size") for name in ("train", "test")}
    return {
        "method": f"supervised fine-tuning, {f'LoRA rank {rank}' if rank else 'full weights'}",
        "levels": ", ".join(f"{size} to {name}" for name, size in sizes.items() if size is not None),
    }


def _finite_values(run: RunData, metric: str) -> list[float]:
    return [value for _, value in run.metrics.series(metric) if math.isfinite(value)]


def _warnings(run: RunData, health: HealthVerdict) -> list[dict[str, Any]]:
    """Each check's gravest warning with its evidence and what usually helps: first those that hold, then the others."""
    gravest = {one.name: one for one in (*reversed(health.passed), *reversed(health.holding))}
    found = []
    for one in reversed(gravest.values()):
        holds = one in health.holding
        when = f"since step {one.first_step}" if holds else f"steps {one.first_step} to {one.step}, over"
        title, text = (words[0].upper() + words[1:] for words in (one.title, one.text))
        found.append({"title": title, "when": when, "text": text, "advice": one.advice, **_evidence(run, one)})
    return found


def _evidence(run: RunData, warning: HealthWarning) -> dict[str, Any]:
    name = CHECKS[warning.name].shown
    points = series_of(run.metrics.rows, name) if name else []
    if not points:
        return {"chart": ""}
    quantity, window = QUANTITIES[name], Limits().num_recent
    line = Line(name, points, window=window if len(points) > window else 0)
    axis = PERCENT if quantity.is_share else POSITIVE
    chart = charts.line_chart([line], axis, SMALL, [Level("threshold", warning.threshold)], name=quantity.label)
    bold = f"; bold: mean of {window} steps" if line.window else ""
    return {"chart": chart, "note": f"{quantity.label}; dashed: threshold{bold}"}


def _validation(run: RunData) -> list[dict[str, Any]]:
    """For each environment its success, and its success by the length of the optimal solution."""
    tags = validation_tags(run.metrics)
    titles = [f"Success on {tag}" if len(tags) > 1 else "Success on the validation levels" for tag in tags]
    cards = [(_success_card(run, *named), _by_length(run, named[0])) for named in zip(tags, titles, strict=True)]
    return [{"success": success, "by_length": by_length} for success, by_length in cards if success or by_length]


def _success_card(run: RunData, tag: str, title: str) -> Card | None:
    sampled = validations(run.metrics, tag)
    if not sampled:
        return None
    lines = []
    for label, values in (("sampled", sampled), ("greedy", validations(run.metrics, tag, "greedy_success"))):
        points = [(value.step, value.success) for value in values]
        band = [(value.step, *value.interval) for value in values if value.interval is not None]
        lines += [Line(label, points, band, dots=True)] if values else []
    levels = [Level(name, value) for name, value in baselines(sampled).items()]
    wide, narrow = (
        charts.line_chart(lines, SHARE, size, levels, end_labels=True, name=title)
        for size in (charts.WIDE, charts.NARROW)
    )
    note = "over training steps; shaded: 95 % interval; dashed: random and optimal play"
    return Card(title, wide, note=note, narrow=narrow)


def _by_length(run: RunData, tag: str) -> Card | None:
    """Bars before and after for each number of moves that a perfect player needs."""
    rows = [rates for rates in (_rates(row, tag) for row in run.metrics.rows) if rates[1]]
    if not rows:
        return None
    shown = [rows[0], rows[-1]] if len(rows) > 1 else rows
    groups = []
    for name in sorted(shown[-1][1], key=bin_order):
        bars = []
        for step, rates in shown:
            if rate := rates.get(name):
                outcome = f"{percent(rate.mean, rate.interval)}, {rate.num_successes} of {rate.num_trials}"
                bars.append(Bar(rate.mean, *rate.interval, f"step {step}, optimal length {name}: {outcome}"))
        groups.append(BarGroup(name, f"n = {shown[-1][1][name].num_trials}", bars))
    chart = charts.bar_chart(groups, SHARE, (360, 316), name=f"{tag} by optimal length")
    legend = charts.legend([f"step {step}" for step, _ in shown], key="bar")
    return Card("By optimal length", chart, legend=legend, note="moves of a perfect player; lines: 95 % intervals")


def _rates(row: dict[str, Any], tag: str) -> tuple[int, dict[str, Rate]]:
    prefix = f"{PREFIX}{tag}/success_len_"
    rates = {}
    for name in [key.removeprefix(prefix) for key in row if key.startswith(prefix)]:
        mean, num = finite(row, f"{prefix}{name}"), finite(row, f"{PREFIX}{tag}/num_len_{name}")
        if mean is not None and 0 <= mean <= 1 and num:
            rates[name] = Rate(round(mean * num), int(num))
    return row["step"], rates


def _curve(run: RunData, curve: Curve) -> Card | None:
    lines = []
    for metric, label in _expanded(run, curve):
        points = run.metrics.series(metric)
        is_smooth = curve.smooth and len(points) >= MIN_TO_SMOOTH
        window = charts.smoothing_window(len(run.metrics.rows)) if is_smooth else 0
        lines += [Line(label, points, window=window)] if points else []
    if not lines:
        return None
    lines = lines[: charts.MAX_COLOURS]
    chart = charts.line_chart(lines, curve.axis, SMALL, name=curve.title)
    if len(lines) > 1:
        return Card(curve.title, chart, legend=charts.legend([line.label for line in lines]), note=curve.note)
    last = next((value for _, value in reversed(lines[0].points) if math.isfinite(value)), math.nan)
    return Card(curve.title, chart, curve.axis.text(last), note=curve.note)


def _expanded(run: RunData, curve: Curve) -> Iterator[tuple[str, str]]:
    for pattern, label in curve.metrics.items():
        prefix, _, suffix = pattern.partition("*")
        for metric in fnmatch.filter(run.metrics.names(), pattern):
            yield metric, label or metric.removeprefix(prefix).removesuffix(suffix)


def _other_metrics(run: RunData) -> list[dict[str, Any]]:
    """Every other metric that was measured, so that nothing is hidden."""
    drawn = {metric for curve in CURVES for metric, _ in _expanded(run, curve)}
    found = []
    for name in run.metrics.names():
        values = _finite_values(run, name)
        if values and name not in drawn and not SHOWN_ABOVE.fullmatch(name):
            numbers = [short(value) for value in (values[0], values[-1], min(values), max(values))]
            found.append({"name": name, "numbers": numbers, "line": charts.sparkline(run.metrics.series(name))})
    return found


def _episodes(run: RunData) -> dict[str, Any]:
    exhibits = replay.choose(run.before, run.after)
    symbols = {tag: _symbols(run, tag) for tag in sorted({record["tag"] for record in (*run.before, *run.after)})}
    return {
        "exhibits": [replay.view(exhibit, symbols) for exhibit in exhibits],
        "are_paired": any(len(exhibit.episodes) > 1 for exhibit in exhibits),
        "symbol_keys": replay.symbol_keys(symbols),
    }


def _symbols(run: RunData, tag: str) -> Mapping[str, str]:
    """What the characters of a board stand for; nothing if the environment is not available."""
    tree = run.folder.read_config().get("custom_envs", {}).get(tag)
    if tree is None:
        return {}
    try:
        return make(build(Tag, tree)).symbols()
    except ValueError:
        return {}  # an environment of another version or another machine: its boards stay uncoloured
