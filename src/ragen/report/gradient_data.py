"""The numbers of a gradient analysis, from a run folder or W&B, in the shape that tables and pictures need.

    source = from_folder("model_saving/gradient_analysis/sokoban/PPO/filter/…")
    steps(source)                                   # [1, 51, 101]
    analysis = at(source, 51)
    analysis.buckets()                              # bucket_1, bucket_2, … by growing reward variance, after the filter
    analysis.buckets(BEFORE)                        # the same of all groups; empty if not measured
    analysis.buckets()[0].get("task")                # the norm of the task gradient
    answer(analysis).sentence                       # does the task gradient grow with the reward variance?

A number that was not measured, and one that is not finite, is None.
"""

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragen.diagnose.history import finite
from ragen.errors import ConfigError
from ragen.extras import require
from ragen.format import short
from ragen.store import json_lines
from ragen.store.run_folder import RunFolder

TABLE = "grad_group_rv_table.jsonl"
AFTER, BEFORE = "grad_norm", "grad_norm_prefilter"
WHICH = {AFTER: "after the filter", BEFORE: "among all groups"}
TERMS = ("task", "entropy", "kl")
NAMES = {"task": "task", "entropy": "entropy", "kl": "KL"}
LOSSES = ("policy", "entropy", "kl", "total")
KEY = "trainer.gradient_analysis_mode=True"
GROWS = 1.5  # top bucket to bottom bucket: beyond it a term grows with the reward variance, below 1/1.5 it falls
MOSTLY_NOISE = 2.0  # signal to noise below which more than half of a squared norm is noise
AGREES = 0.6  # rank correlation that a trend needs

_BUCKET = re.compile(r"bucket_(\d+)")


@dataclass(frozen=True)
class Source:
    """A run: its name, one row of metrics a step, and the reward std of every group that was analysed."""

    name: str
    rows: Mapping[int, Mapping[str, Any]]
    table: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class Bucket:
    name: str
    values: Mapping[str, float]  # by the part of the metric's name after the bucket
    reward_stds: tuple[float, ...] = ()  # of its groups
    snr: float | None = None

    def get(self, key: str) -> float | None:
        return finite(self.values, key)

    @property
    def number(self) -> str:
        return self.name.removeprefix("bucket_")

    @property
    def reward_std(self) -> float | None:
        """The mean over its groups."""
        return self.get("reward_std_mean")


@dataclass(frozen=True)
class Analysis:
    """One step of one run."""

    run: str
    step: int
    row: Mapping[str, Any]
    table: Sequence[Mapping[str, Any]] = ()

    def buckets(self, prefix: str = AFTER) -> list[Bucket]:
        """By growing reward variance; without `all`, and without those that hold nothing."""
        names = {key.split("/")[1] for key in self.row if key.startswith(f"{prefix}/")}
        numbered = sorted((int(match[1]), name) for name in names if (match := _BUCKET.fullmatch(name)))
        found = [self._bucket(prefix, name) for _, name in numbered]
        return [bucket for bucket in found if any(bucket.get(term) is not None for term in TERMS)]

    def with_whole(self, prefix: str = AFTER) -> list[Bucket]:
        """The buckets, and one of all groups."""
        return [*self.buckets(prefix), self._bucket(prefix, "all")]

    def terms(self, prefix: str = AFTER) -> list[str]:
        """The terms that were differentiated."""
        return [term for term in TERMS if any(bucket.get(term) is not None for bucket in self.with_whole(prefix))]

    def prefixes(self) -> list[str]:
        """Which groups were measured: those that the filter kept, and all of them."""
        return [AFTER, BEFORE] if self.buckets(BEFORE) else [AFTER]

    def norms_by_std(self, term: str, prefix: str = AFTER) -> list[tuple[float, float]]:
        """(mean reward std, norm) of the buckets in which both are known."""
        pairs = [(bucket.reward_std, bucket.get(term)) for bucket in self.buckets(prefix)]
        return [(std, norm) for std, norm in pairs if std is not None and norm is not None]

    def cosine(self, one: str, other: str, prefix: str = AFTER) -> float | None:
        """Between the task gradients of two buckets."""
        if one == other:
            return 1.0
        start = _beside("grad_cos", prefix)
        found = [finite(self.row, f"{start}/task/{pair}") for pair in (f"{one}/{other}", f"{other}/{one}")]
        return found[1] if found[0] is None else found[0]

    def _bucket(self, prefix: str, name: str) -> Bucket:
        start = f"{prefix}/{name}/"
        values = {key.removeprefix(start): value for key, value in self.row.items() if key.startswith(start)}
        stds = [
            value
            for row in self.table
            if row.get("prefix", AFTER) == prefix and row.get("bucket") == name
            if (value := finite(row, "reward_std")) is not None
        ]
        snr = finite(self.row, f"{_beside('grad_snr', prefix)}/{name}/task")
        return Bucket(name, values, tuple(stds), snr)


def _beside(family: str, prefix: str) -> str:
    return f"{family}{prefix.removeprefix(AFTER)}"


def from_folder(path: str | Path) -> Source:
    folder = RunFolder(path)
    if not folder.metrics_path.exists():
        raise ConfigError(f"{folder}: not a run directory (no {folder.metrics_path.name})")
    rows = {row["step"]: row for row in folder.read_metrics().rows}
    return Source(folder.path.resolve().name, rows, json_lines.read(folder.path / TABLE).records)


def from_wandb(path: str) -> Source:
    """The history of a W&B run, `entity/project/run`; its summary where the history holds no analysis."""
    if len([part for part in path.split("/") if part]) != 3:
        raise ConfigError(f"--wandb-path {path}: takes entity/project/run")
    require("wandb")
    import wandb

    try:
        run = wandb.Api().run(path)
        name = re.sub(r"[^\w.+-]+", "_", f"{run.name}_{run.id}").strip("_.") or "run"
        source = Source(name, _history(run.scan_history()))
        return source if steps(source) else Source(name, _history([dict(run.summary)]))
    except (wandb.Error, OSError, ValueError) as error:
        raise ConfigError(f"--wandb-path {path}: {' '.join(str(error).split())}") from error


def _history(rows: Iterable[Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
    """By step; lines of one step are one row."""
    found: dict[int, dict[str, Any]] = {}
    for row in rows:
        if (step := finite(row, "_step")) is not None:
            found.setdefault(int(step), {}).update({key: value for key, value in row.items() if value is not None})
    return found


def steps(source: Source) -> list[int]:
    """Where a bucket has a number that is not 0."""
    start = f"{AFTER}/bucket_"
    return sorted(
        step for step, row in source.rows.items() if any(key.startswith(start) and finite(row, key) for key in row)
    )


def at(source: Source, step: int) -> Analysis:
    table = [row for row in source.table if row.get("step") == step]
    return Analysis(source.name, step, source.rows[step], table)


def analyses(sources: Sequence[Source], wanted: Sequence[int] = ()) -> list[Analysis]:
    """All analyses of these runs, or those of some steps; each step must be in one of the runs."""
    known = {source.name: steps(source) for source in sources}
    for source in sources:
        if not known[source.name]:
            raise ConfigError(_why_none(source))
    missing = [step for step in wanted if not any(step in found for found in known.values())]
    if missing:
        there = "; ".join(f"{name}: {', '.join(map(str, found))}" for name, found in known.items())
        raise ConfigError(f"--step {missing[0]}: no gradient analysis at that step. There are: {there}")
    return [at(source, step) for source in sources for step in known[source.name] if not wanted or step in wanted]


def _why_none(source: Source) -> str:
    empty = [step for step, row in source.rows.items() if finite(row, "grad_analysis/empty_after_filter")]
    if not empty:
        return f"{source.name} holds no gradient analysis: train with {KEY}"
    listed = ", ".join(map(str, empty))
    return f"{source.name}: the filter kept no group at step {listed}, so there is nothing to show; probe another step"


@dataclass(frozen=True)
class Trend:
    """How the norm of a term changes from the bucket of the lowest to that of the highest reward variance."""

    term: str
    bottom: float
    top: float
    correlation: float | None  # of ranks, over the buckets; None where either is constant

    @property
    def ratio(self) -> float:
        return self.top / self.bottom if self.bottom else math.inf if self.top else 1.0

    @property
    def word(self) -> str:
        rank = self.correlation or 0.0
        if not self.bottom and not self.top:
            return "is 0"
        if rank >= AGREES and self.ratio >= GROWS:
            return "grows"
        if rank <= -AGREES and self.ratio <= 1 / GROWS:
            return "falls"
        return "stays flat" if 1 / GROWS < self.ratio < GROWS else "has no clear trend"

    @property
    def numbers(self) -> str:
        if not self.bottom and not self.top:
            return ""
        times = "from 0" if math.isinf(self.ratio) else f"{self.ratio:.3g} times"
        rank = "" if self.correlation is None else f", rank correlation {self.correlation:.2f}"
        return f": its norm goes from {short(self.bottom)} to {short(self.top)} ({times}{rank})"


@dataclass(frozen=True)
class Answer:
    trends: tuple[Trend, ...]
    sentence: str


def answer(analysis: Analysis, prefix: str = AFTER) -> Answer:
    """Does the task gradient grow with the reward variance while KL and entropy stay flat?"""
    known = [bucket for bucket in analysis.buckets(prefix) if bucket.reward_std is not None]
    start = f"At step {analysis.step}, {WHICH[prefix]},"
    if len(known) < 2:
        return Answer((), f"{start} there are fewer than two buckets: nothing to compare.")
    trends = []
    for term in TERMS:
        pairs = analysis.norms_by_std(term, prefix)
        if len(pairs) > 1:
            trends.append(Trend(term, pairs[0][1], pairs[-1][1], rank_correlation(*zip(*pairs, strict=True))))
    first, last = known[0], known[-1]
    across = f"from {first.name} (reward std {short(first.reward_std)}) to {last.name} ({short(last.reward_std)})"
    told = "; ".join(f"the {NAMES[trend.term]} gradient {trend.word}{trend.numbers}" for trend in trends)
    return Answer(tuple(trends), f"{start} {across}, {told}.{_conclusion(trends)}{_caution(known)}")


def _conclusion(trends: Sequence[Trend]) -> str:
    words = {trend.term: trend.word for trend in trends}
    others = [word for term, word in words.items() if term != "task"]
    if "task" not in words or not others:
        return ""
    if words["task"] == "grows" and all(word in ("stays flat", "is 0") for word in others):
        return " So the task gradient grows with the reward variance while the regularisers stay flat."
    return " So it is not the case that only the task gradient grows with the reward variance."


def _caution(buckets: Sequence[Bucket]) -> str:
    """Noise has a norm too."""
    known = {bucket.name: bucket.snr for bucket in buckets if bucket.snr is not None}
    noisy = [name for name, snr in known.items() if snr < MOSTLY_NOISE]
    if not noisy:
        return ""
    if len(noisy) < len(known):
        listed = ", ".join(noisy)
        return f" Of these norms, those of {listed} are mostly noise (signal to noise below {MOSTLY_NOISE:g})."
    return (
        f" But these norms are mostly noise, since signal to noise is {short(max(known.values()))} at best: a larger "
        "trainer.gradient_analysis_env_groups tells more."
    )


def rank_correlation(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """Spearman's, equal values sharing the mean of their ranks; None where either side is constant."""
    if len(set(xs)) == 1 or len(set(ys)) == 1:
        return None
    return statistics.correlation(_ranks(xs), _ranks(ys))


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(values)
    return [order.index(value) + (order.count(value) + 1) / 2 for value in values]
