"""The report of a run: one HTML file, from the run folder alone.

    write_report(RunFolder("checkpoints/ragen/test"))      # -> checkpoints/ragen/test/report.html

It needs no network, no script and no other file. A section is a function of `Run` that returns HTML, or nothing where
its data are missing; the page is the list SECTIONS.
"""

import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ragen import __version__
from ragen.config.schema import Config
from ragen.config.tree import build, leaves, schema_fields
from ragen.diagnose.checks import CHECKS
from ragen.diagnose.collapse import FIRST_TURN, TRAJECTORY
from ragen.diagnose.early_stop import EMPTY, REWARD_STD, SUCCESS, VARIANCE, StopRules
from ragen.diagnose.health import Health, HealthWarning
from ragen.diagnose.history import QUANTITIES, Limits, series_of
from ragen.env.base import Tag
from ragen.env.registry import make
from ragen.format import compact, duration, percent, short
from ragen.report import gradients
from ragen.report.charts import (
    MIN_TO_SMOOTH,
    Axis,
    Bar,
    BarGroup,
    Level,
    Line,
    bar_chart,
    escape,
    line_chart,
    smoothing_window,
    thinned,
)
from ragen.report.replay import choose, draw, symbol_key
from ragen.report.style import CSS
from ragen.report.verdict import (
    PREFIX,
    RULES,
    Validated,
    early_stop,
    finite,
    validation_tags,
    validations,
    verdict,
)
from ragen.statistics import Rate, bin_order
from ragen.store.episodes import read_episodes
from ragen.store.run_folder import Metrics, RunFolder

SMALL = (360, 180)
WIDE = (700, 300)
NARROW = (360, 250)
# Nothing may be loaded and nothing may run, whatever a reply contains.
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


@dataclass(frozen=True)
class Run:
    """All that a report is made of."""

    folder: RunFolder
    config: dict[str, Any]  # flat, dotted keys
    metrics: Metrics
    before: list[dict[str, Any]]  # episodes of the first validation
    after: list[dict[str, Any]]  # and of the last, where there is another one
    finished: Mapping[str, Any] | None = None  # how the run ended, once it has

    def setting(self, key: str) -> Any:
        return self.config.get(key)


@dataclass(frozen=True)
class Curve:
    """A small chart: its lines by metric name, `*` standing for an environment."""

    title: str
    metrics: Mapping[str, str]  # metric -> label
    axis: Axis
    note: str = ""
    smooth: bool = True


CURVES = (
    Curve("Training success", {"train/*/success": ""}, Axis(percent=True, low=0.0)),
    Curve("Reward", {"train/reward": ""}, Axis(), "mean of the training episodes"),
    Curve("Entropy", {"actor/entropy": ""}, Axis(low=0.0), "nats a token; a cliff is a warning"),
    Curve(
        "Information I(X;Z)",
        {f"{FIRST_TURN}/mi_seq_estimate": "first turns", f"{TRAJECTORY}/mi_seq_estimate": "any turn"},
        Axis(low=0.0),
        "nats; what a reasoning tells about its prompt",
        smooth=False,
    ),
    Curve(
        "Entropy of the reasoning H(Z|X)",
        {f"{FIRST_TURN}/conditional_entropy_est": "first turns", f"{TRAJECTORY}/conditional_entropy_est": "any turn"},
        Axis(low=0.0),
        "nats a token",
        smooth=False,
    ),
    Curve("Reward spread in a group", {"rollout/in_group_reward_std": ""}, Axis(low=0.0), "no spread, no signal"),
    Curve("Groups kept by the filter", {"rollout/filter_kept_ratio": ""}, Axis(percent=True, low=0.0, high=1.0)),
    Curve("Response length", {"train/response_length": ""}, Axis(low=0.0), "tokens"),
    Curve(
        "Gradient norm", {"actor/grad_norm": "actor", "critic/grad_norm": "critic"}, Axis(low=0.0), "before clipping"
    ),
    Curve("KL to the sampling policy", {"actor/ppo_kl": ""}, Axis()),
    Curve("KL to the reference", {"actor/kl_loss": ""}, Axis(), "the KL term of the loss, before its coefficient"),
    Curve("Clipped tokens", {"actor/pg_clipfrac": ""}, Axis(percent=True, low=0.0)),
    Curve("Policy loss", {"actor/pg_loss": ""}, Axis()),
    Curve("Value loss", {"critic/vf_loss": ""}, Axis(low=0.0), "critic"),
    Curve("Explained variance", {"critic/vf_explained_var": ""}, Axis(high=1.0), "of returns by the critic; 1 is all"),
    Curve("Values and returns", {"critic/values/mean": "values", "critic/returns/mean": "returns"}, Axis(), "means"),
    Curve("Actions in an episode", {"train/*/num_actions": ""}, Axis(low=0.0)),
    Curve("Replies in the right format", {f"{PREFIX}*/format_valid": ""}, Axis(percent=True, high=1.0), "validation"),
    Curve(
        "Seconds in a step",
        {
            "timing_s/gen": "rollout",
            "timing_s/update_actor": "update",
            "timing_s/update_critic": "critic",
            "timing_s/testing": "validation",
            "timing_s/save_checkpoint": "checkpoint",
        },
        Axis(low=0.0),
        smooth=False,
    ),
    Curve("Tokens a second", {"perf/tokens_per_s": ""}, Axis(low=0.0)),
)


def write_report(folder: RunFolder, finished: dict[str, Any] | None = None) -> Path:
    """Write `report.html`, whole, and return its path. `finished`: how the run ended, if that is not stored yet."""
    run = read_run(folder)
    return folder.write_report(render(run if finished is None else replace(run, finished=finished)))


def read_run(folder: RunFolder) -> Run:
    metrics = folder.read_metrics()
    files = folder.episode_files("val")
    return Run(
        folder=folder,
        config=leaves(folder.read_config()),
        metrics=metrics,
        before=_read_episodes(files[0].path, metrics.notes) if files else [],
        after=_read_episodes(files[-1].path, metrics.notes) if len(files) > 1 else [],
        finished=folder.read_finished(),
    )


def _read_episodes(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    try:
        return read_episodes(path)
    except (OSError, EOFError, zlib.error, ValueError, KeyError) as error:
        notes.append(f"{path.name} cannot be read ({error}): its episodes are not shown")
        return []


def render(run: Run) -> str:
    body = "".join(filter(None, (section(run) for section in SECTIONS)))
    return page(f"{_name(run)} · ragen", body)


def page(title: str, body: str, more_css: str = "") -> str:
    """A whole HTML file that needs nothing else."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{escape(title)}</title><style>{CSS}{more_css}</style></head><body>{body}</body></html>\n"
    )


# --- heading and verdict ------------------------------------------------------------------------------------------


def _heading(run: Run) -> str:
    facts = {
        "model": run.setting("model_path"),
        "environment": ", ".join(map(str, run.setting("es_manager.val.env_configs.tags") or [])),
        **_method(run),
        "steps": _steps(run),
        "time": _time(run),
        "tokens/s": _tokens_per_second(run),
    }
    items = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts.items() if value
    )
    return f"<header><h1>{escape(_name(run))}</h1><dl>{items}</dl></header>"


def _method(run: Run) -> dict[str, Any]:
    """How it learns: an estimator, or answers of a solver."""
    if run.setting("rl_or_sft") != "sft":
        return {"estimator": run.setting("algorithm.adv_estimator")}
    rank = run.setting("sft.training.lora_rank")
    sizes = {name: run.setting(f"sft.data_generation.{name}_size") for name in ("train", "test")}
    return {
        "method": f"supervised fine-tuning, {f'LoRA rank {rank}' if rank else 'full weights'}",
        "levels": ", ".join(f"{size} to {name}" for name, size in sizes.items() if size is not None),
    }


def _name(run: Run) -> str:
    project, name = run.setting("trainer.project_name"), run.setting("trainer.experiment_name")
    return f"{project} / {name}" if project and name else run.folder.path.resolve().name


def _steps(run: Run) -> str:
    last, planned = run.metrics.last_step(), run.setting("trainer.total_training_steps")
    if last is None:
        return ""
    return f"{last} of {planned}" if planned and planned != last else str(last)


def _time(run: Run) -> str:
    seconds = [value for _, value in run.metrics.series("timing_s/step") if math.isfinite(value)]
    return duration(sum(seconds)) if seconds else ""


def _tokens_per_second(run: Run) -> str:
    values = [value for _, value in run.metrics.series("perf/tokens_per_s") if math.isfinite(value)]
    return compact(sum(values) / len(values)) if values else ""


def _verdict(run: Run) -> str:
    found = verdict(run.metrics, run.before, run.after, run.finished)
    sentences = "".join(f"<p>{_unbroken(escape(sentence))}</p>" for sentence in found.sentences)
    headline = f'<p class="headline">{escape(found.headline)}</p>'
    health = f'<p class="health">{_unbroken(escape(found.health.headline))}</p>'
    warned = " warned" if found.health.holding else ""
    return f'<section class="card verdict {found.tone}{warned}">{health}{headline}{sentences}</section>'


def _unbroken(text: str) -> str:
    """No line may begin with a percent sign."""
    return text.replace(" %", "\u00a0%")


# --- health -------------------------------------------------------------------------------------------------------


def _health(run: Run) -> str:
    """Every warning with its evidence and what usually helps: those that hold, the gravest first, then the others."""
    found = Health.of(run.metrics.rows).verdict()
    warnings = {one.name: one for one in (*reversed(found.passed), *reversed(found.holding))}  # a check once, the worst
    if not warnings:
        return ""
    cards = "".join(_warning(run, one, one in found.holding) for one in reversed(warnings.values()))
    return f'<section><h2>Warnings</h2><div class="charts">{cards}</div></section>'


def _warning(run: Run, warning: HealthWarning, holds: bool) -> str:
    when = f"since step {warning.first_step}" if holds else f"steps {warning.first_step} to {warning.step}, over"
    title = warning.title[0].upper() + warning.title[1:]
    caption = f'<figcaption><span>{escape(title)}</span><span class="value">{when}</span></figcaption>'
    items = "".join(f"<li>{escape(text)}</li>" for text in warning.advice)
    text = warning.text[0].upper() + warning.text[1:]
    words = _unbroken(f'<p class="small">{escape(text)}.</p><ul class="small">{items}</ul>')
    return f'<figure class="card">{caption}{_evidence(run, warning)}{words}</figure>'


def _evidence(run: Run, warning: HealthWarning) -> str:
    name = CHECKS[warning.name].shown
    points = series_of(run.metrics.rows, name) if name else []
    if not points:
        return ""
    quantity, window = QUANTITIES[name], Limits().num_recent
    lines = [Line(name, points, window=window if len(points) > window else 0)]
    axis = Axis(percent=quantity.is_share, low=0.0)
    chart = line_chart(lines, axis, SMALL, [Level("threshold", warning.threshold)], name=quantity.label)
    bold = f"; bold: mean of {window} steps" if lines[0].window else ""
    return f'{chart}<p class="note">{escape(quantity.label)}; dashed: threshold{bold}</p>'


# --- an early stop ------------------------------------------------------------------------------------------------


def _stopped(run: Run) -> str:
    stop = early_stop(run.metrics, run.finished)
    if stop is None:
        return ""
    words = RULES.get(stop.rule)
    figures, numbers = _STOP_FIGURES[stop.rule](run) if stop.rule in _STOP_FIGURES else ("", {})
    facts = {"rule": stop.rule, "step": "unknown" if stop.step is None else str(stop.step)} | numbers
    rows = "".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in facts.items())
    parts = [f"<h3>{escape(words.title if words else stop.rule)}</h3>"]
    if stop.explanation:
        parts.append(f"<p>{escape(stop.explanation.rstrip('.'))}.</p>")
    if words:
        parts.append(f"<p>{escape(words.meaning)}</p>")
    parts.append(f"<table><tbody>{rows}</tbody></table>")
    if words:
        items = "".join(f"<li>{escape(text)}</li>" for text in words.helps)
        parts.append(f"<h3>What usually helps</h3><ul>{items}</ul>")
    charts = f'<div class="charts">{figures}</div>' if figures else ""
    return f'<section><h2>Stopped early</h2><div class="card">{_unbroken("".join(parts))}</div>{charts}</section>'


def _variance_stop(run: Run) -> tuple[str, dict[str, str]]:
    rules = StopRules()
    empty = {row["step"] for row in run.metrics.rows if row.get("rollout/empty_after_filter")}
    points = [point for point in run.metrics.series(REWARD_STD) if point[0] not in empty and math.isfinite(point[1])]
    if len(points) <= rules.num_baseline:
        return "", {}
    baseline = sum(value for _, value in points[: rules.num_baseline]) / rules.num_baseline
    threshold = rules.collapsed_share * baseline
    levels = (Level("baseline", baseline), Level("threshold", threshold))
    facts = {
        f"baseline, mean of the first {rules.num_baseline} steps": short(baseline),
        f"threshold, {100 * rules.collapsed_share:g} % of it": short(threshold),
        f"last {rules.num_collapsed} steps": _listed(points[-rules.num_collapsed :], Axis()),
    }
    lines = [Line("spread", points)]
    return _stop_charts("Reward spread in a group", lines, Axis(low=0.0), levels, rules.num_collapsed), facts


def _success_stop(run: Run) -> tuple[str, dict[str, str]]:
    rules, axis = StopRules(), Axis(percent=True, low=0.0)
    lines = [
        Line(tag, [(value.step, value.success) for value in validations(run.metrics, tag)], dots=True)
        for tag in validation_tags(run.metrics)
    ]
    lines = [line for line in lines if line.points][:5]
    facts = {"threshold": percent(rules.least_success)}
    for line in lines:
        facts[f"last {rules.num_validations} validations of {line.label}"] = _listed(
            line.points[-rules.num_validations :], axis
        )
    if not lines:
        return "", facts
    levels = (Level("threshold", rules.least_success),)
    return _stop_charts("Validation success", lines, axis, levels, rules.num_validations), facts


def _empty_stop(run: Run) -> tuple[str, dict[str, str]]:
    limit = run.setting("actor_rollout_ref.rollout.rollout_filter_empty_stop_steps")
    points = run.metrics.series("rollout/consecutive_empty_after_filter_steps")
    kept = run.metrics.series("rollout/filter_kept_count")
    limited = isinstance(limit, int) and limit > 0
    facts = {"limit, empty steps one after the other": str(limit)} if limited else {}
    if kept:
        facts["groups kept in the last 10 steps"] = _listed(kept[-10:], Axis())
    if not points:
        return "", facts
    levels = (Level("limit", limit),) if limited else ()
    return _stop_charts("Empty steps in a row", [Line("empty", points)], Axis(low=0.0), levels, 10), facts


def _stop_charts(title: str, lines: Sequence[Line], axis: Axis, levels: Sequence[Level], window: int) -> str:
    """The whole run, and its end, in which the rule held."""
    ends = [Line(line.label, line.points[-3 * window :], dots=True) for line in lines]
    charts = [("over the run", lines)] + ([("its end", ends)] if len(lines[0].points) > 3 * window else [])
    return "".join(
        f'<figure class="card"><figcaption><span>{escape(title)}</span><span class="value">{when}</span></figcaption>'
        f"{line_chart(shown, axis, SMALL, levels, end_labels=True, name=f'{title}, {when}')}</figure>"
        for when, shown in charts
    )


def _listed(points: Sequence[tuple[int, float]], axis: Axis) -> str:
    return ", ".join(axis.text(value) for _, value in points)


_STOP_FIGURES: dict[str, Callable[[Run], tuple[str, dict[str, str]]]] = {
    VARIANCE: _variance_stop,
    SUCCESS: _success_stop,
    EMPTY: _empty_stop,
}


# --- validation ---------------------------------------------------------------------------------------------------


def _validation(run: Run) -> str:
    tags = validation_tags(run.metrics)
    rows = []
    for tag in tags:
        figures = _validation_chart(run, tag, named=len(tags) > 1), _length_chart(run, tag)
        rows.append(f'<div class="validation">{"".join(figures)}</div>' if any(figures) else "")
    return f"<section><h2>Validation</h2>{''.join(rows)}</section>" if any(rows) else ""


def _validation_chart(run: Run, tag: str, named: bool) -> str:
    sampled, greedy = validations(run.metrics, tag), validations(run.metrics, tag, "greedy_success")
    if not sampled:
        return ""
    lines = [_success_line("sampled", sampled)] + ([_success_line("greedy", greedy)] if greedy else [])
    levels = []
    for name in ("random", "optimal"):
        known = [getattr(value, name) for value in sampled if getattr(value, name) is not None]
        levels += [Level(name, known[-1])] if known else []
    title = f"Success on {tag}" if named else "Success on the validation levels"
    charts = [
        line_chart(lines, Axis(percent=True, low=0.0, high=1.0), size, levels, end_labels=True, name=title)
        for size in (WIDE, NARROW)
    ]
    return (
        f'<figure class="card"><figcaption><span>{escape(title)}</span></figcaption>'
        f'<div class="wide">{charts[0]}</div><div class="narrow">{charts[1]}</div>'
        '<p class="note">over training steps; shaded: 95 % interval; dashed: random and optimal play</p></figure>'
    )


def _success_line(label: str, values: Sequence[Validated]) -> Line:
    return Line(
        label,
        [(value.step, value.success) for value in values],
        [(value.step, *value.interval) for value in values if value.interval is not None],
        dots=True,
    )


def _length_chart(run: Run, tag: str) -> str:
    """Bars before and after for each number of moves that a perfect player needs."""
    rows = [rates for rates in (_rates(row, tag) for row in run.metrics.rows) if rates[1]]
    if not rows:
        return ""
    shown = [rows[0], rows[-1]] if len(rows) > 1 else rows
    groups = []
    for name in sorted(shown[-1][1], key=bin_order):
        bars = [
            Bar(name, rate.mean, *rate.interval, f"step {step}, optimal length {name}: {_rate_text(rate)}")
            for step, rates in shown
            if (rate := rates.get(name))
        ]
        groups.append(BarGroup(name, f"n = {shown[-1][1][name].num_trials}", bars))
    legend = "".join(
        f'<span><span class="swatch b{index}"></span>step {step}</span>' for index, (step, _) in enumerate(shown)
    )
    chart = bar_chart(groups, Axis(percent=True, low=0.0, high=1.0), (360, 316), name=f"{tag} by optimal length")
    caption = f'<figcaption><span>By optimal length</span><span class="legend">{legend}</span></figcaption>'
    note = '<p class="note">moves of a perfect player; lines: 95 % intervals</p>'
    return f'<figure class="card">{caption}{chart}{note}</figure>'


def _rates(row: dict[str, Any], tag: str) -> tuple[int, dict[str, Rate]]:
    prefix = f"{PREFIX}{tag}/success_len_"
    rates = {}
    for name in [key.removeprefix(prefix) for key in row if key.startswith(prefix)]:
        mean, num = finite(row, f"{prefix}{name}"), finite(row, f"{PREFIX}{tag}/num_len_{name}")
        if mean is not None and 0 <= mean <= 1 and num:
            rates[name] = Rate(round(mean * num), int(num))
    return row["step"], rates


def _rate_text(rate: Rate) -> str:
    low, high = rate.interval
    return f"{percent(rate.mean)} [{100 * low:.1f}, {100 * high:.1f}], {rate.num_successes} of {rate.num_trials}"


# --- curves -------------------------------------------------------------------------------------------------------


def _curves(run: Run) -> str:
    figures = "".join(filter(None, (_curve(run, curve) for curve in CURVES)))
    num_steps = len(run.metrics.rows)
    words = f"Thin: each step. Bold: mean of {smoothing_window(num_steps)} steps." if num_steps >= MIN_TO_SMOOTH else ""
    note = f'<p class="soft small">{words}</p>' if words else ""
    return f'<section><h2>Training</h2>{note}<div class="charts">{figures}</div></section>' if figures else ""


def _curve(run: Run, curve: Curve) -> str:
    lines = []
    for metric, label in _expanded(run, curve):
        points = run.metrics.series(metric)
        if points:
            window = smoothing_window(len(run.metrics.rows)) if curve.smooth and len(points) >= MIN_TO_SMOOTH else 0
            lines.append(Line(label, points, window=window))
    if not lines:
        return ""
    lines = lines[:5]  # as many as there are colours
    single = lines[0] if len(lines) == 1 else None
    value = "" if single is None else curve.axis.text(_last_finite(single.points))
    chart = line_chart(lines, curve.axis, SMALL, name=curve.title)
    caption = f'<span>{escape(curve.title)}</span><span class="value">{escape(value)}</span>'
    note = f'<p class="note">{escape(curve.note)}</p>' if curve.note else ""
    legend = "" if single else _legend(lines)
    return f'<figure class="card"><figcaption>{caption}</figcaption>{legend}{chart}{note}</figure>'


def _expanded(run: Run, curve: Curve) -> Iterator[tuple[str, str]]:
    for pattern, label in curve.metrics.items():
        if "*" not in pattern:
            yield pattern, label
            continue
        prefix, _, suffix = pattern.partition("*")
        for metric in run.metrics.names():
            if metric.startswith(prefix) and metric.endswith(suffix) and len(metric) > len(prefix + suffix):
                yield metric, metric[len(prefix) : -len(suffix)]


def _legend(lines: Sequence[Line]) -> str:
    keys = "".join(
        f'<span><svg viewBox="0 0 20 8"><path class="key s{index}" d="M0 4h20" stroke-width="2"/></svg>'
        f"{escape(line.label)}</span>"
        for index, line in enumerate(lines)
    )
    return f'<div class="legend">{keys}</div>'


def _last_finite(points: Sequence[tuple[float, float]]) -> float:
    return next((value for _, value in reversed(points) if math.isfinite(value)), math.nan)


SHOWN_ABOVE = re.compile(f"{PREFIX}.*/((greedy_)?success(_low|_high)?|random|optimal|(success|num)_len_.*)")
METRIC_COLUMNS = {"first": " wide-cell", "last": "", "least": " wide-cell", "most": " wide-cell"}


def _other_metrics(run: Run) -> str:
    """Whatever else was measured, so that nothing is hidden: a row each."""
    drawn = {metric for curve in CURVES for metric, _ in _expanded(run, curve)}
    rows = "".join(
        _metric_row(name, run.metrics.series(name))
        for name in run.metrics.names()
        if name not in drawn and not SHOWN_ABOVE.fullmatch(name)
    )
    if not rows:
        return ""
    heads = "".join(f'<th class="number{extra}">{head}</th>' for head, extra in METRIC_COLUMNS.items())
    return (
        '<section><details class="card"><summary>Other metrics</summary>'
        f'<table><thead><tr><th>metric</th>{heads}<th class="wide-cell"></th></tr></thead>'
        f"<tbody>{rows}</tbody></table></details></section>"
    )


def _metric_row(name: str, points: Sequence[tuple[int, float]]) -> str:
    values = [value for _, value in points if math.isfinite(value)]
    if not values:
        return ""
    shown = zip((values[0], values[-1], min(values), max(values)), METRIC_COLUMNS.values(), strict=True)
    cells = "".join(f'<td class="number{extra}">{escape(short(value))}</td>' for value, extra in shown)
    return f'<tr><td><code>{escape(name)}</code></td>{cells}<td class="wide-cell">{_spark(points)}</td></tr>'


def _spark(points: Sequence[tuple[int, float]]) -> str:
    shown = thinned([point for point in points if math.isfinite(point[1])])
    low, high = min(y for _, y in shown), max(y for _, y in shown)
    first, last = shown[0][0], shown[-1][0]
    if len(shown) < 2:
        return ""
    span = (high - low) or 1.0
    line = " ".join(f"{2 + 106 * (x - first) / (last - first):.1f},{20 - 18 * (y - low) / span:.1f}" for x, y in shown)
    return f'<svg viewBox="0 0 110 22"><polyline class="line s0" points="{line}"/></svg>'


# --- settings -----------------------------------------------------------------------------------------------------


def _settings(run: Run) -> str:
    rows = "".join(
        f"<tr><td><code>{escape(key)}</code></td><td><code>{escape(_shown(value))}</code></td>"
        f'<td class="wide-cell soft"><code>{escape(default)}</code></td></tr>'
        for key, value, default in not_default(run.config)
    )
    if not rows:
        return ""
    return (
        '<section><h2>Settings that are not the default</h2><div class="card"><table>'
        '<thead><tr><th>key</th><th>value</th><th class="wide-cell">default</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div></section>"
    )


def not_default(config: Mapping[str, Any]) -> list[tuple[str, Any, str]]:
    """(key, value, default) of every setting that has an effect on this run and differs.

    What only follows another key does not differ, and other environments than those of the run have no effect.
    """
    default = leaves(Config())
    without_effect = {key for key, spec, _ in schema_fields(Config) if "no_effect" in spec.metadata}
    used = {tag for split in ("train", "val") for tag in config.get(f"es_manager.{split}.env_configs.tags") or []}
    found = []
    for key, value in config.items():
        if key in without_effect or (key.startswith("custom_envs.") and key.split(".")[1] not in used):
            continue
        if key not in default:
            found.append((key, value, "–"))
        elif (usual := _followed(default[key], config)) != value:
            found.append((key, value, _shown(usual)))
    return found


def _followed(default: Any, config: Mapping[str, Any]) -> Any:
    """A default with `${other.key}` replaced by what that key is in this run."""
    if isinstance(default, list):
        return [_followed(item, config) for item in default]
    if not isinstance(default, str) or "${" not in default:
        return default
    whole = re.fullmatch(r"\$\{([^}]+)\}", default)
    if whole:
        return config.get(whole[1])
    return re.sub(r"\$\{([^}]+)\}", lambda match: str(config.get(match[1])), default)


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    return short(value) if isinstance(value, float) and abs(value) < 1e-3 else str(value)


# --- episodes -----------------------------------------------------------------------------------------------------


def _episodes(run: Run) -> str:
    exhibits = choose(run.before, run.after)
    if not exhibits:
        return ""
    symbols = {tag: _symbols(run, tag) for tag in {item["tag"] for item in (*run.before, *run.after)}}
    drawn = "".join(draw(exhibit, symbols) for exhibit in exhibits)
    both = "the same levels at the first and the last validation, side by side"
    words = both if any(len(exhibit.episodes) > 1 for exhibit in exhibits) else "from validation"
    keys = {symbol_key(known) for known in symbols.values() if known}
    notes = "".join(f'<p class="soft small">{note}</p>' for note in (words, *sorted(keys)))
    return f"<section><h2>Episodes</h2>{notes}{drawn}</section>"


def _symbols(run: Run, tag: str) -> Mapping[str, str]:
    """What the characters of a board stand for; nothing where the environment is not at hand."""
    tree = run.folder.read_config().get("custom_envs", {}).get(tag)
    if tree is None:
        return {}
    try:
        return make(build(Tag, tree)).symbols()
    except ValueError:
        return {}  # an environment of another version or another machine: its boards stay uncoloured


def _footer(run: Run) -> str:
    return f"<footer>{escape(run.folder.path)} · ragen {escape(__version__)}</footer>"


SECTIONS: tuple[Callable[[Run], str], ...] = (
    _heading,
    _verdict,
    _health,
    _stopped,
    _validation,
    _curves,
    lambda run: gradients.section(_name(run), run.metrics, run.folder.path),
    _other_metrics,
    _settings,
    _episodes,
    _footer,
)
