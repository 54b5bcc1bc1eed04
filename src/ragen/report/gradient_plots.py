"""Pictures of a gradient analysis: seven files a step, and one figure over all steps and runs.

    plot([from_folder("model_saving/…")], wanted=[51], output=None)     # paths of all that was written

    gradient_analysis_plots_step_<N>.png             norms of the KL, entropy and task gradient in each bucket
    gradient_analysis_loss_plots_step_<N>.png        the losses
    gradient_analysis_reward_std_step_<N>.png        the reward std of the buckets; not where all are 0
    gradient_analysis_normed_grads_step_<N>.png      norms by sample and by token
    gradient_analysis_summary_step_<N>.png           reward std, and norms against it
    gradient_analysis_snr_cosine_step_<N>.png        signal to noise, and how the buckets' task gradients agree
    gradient_analysis_metrics_step_<N>.json          every metric of the step
    gradient_analysis_bucket_rv_table_step_<N>.csv   bucket and reward std of every group
    gradient_analysis_grid.png, .svg                 a row for each step and run

Series differ in marker, dash or hatch, not in colour alone. matplotlib is imported when something is drawn, and used
without its global state.
"""

import csv
import io
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragen.format import short
from ragen.report.gradient_data import (
    AFTER,
    BEFORE,
    LOSSES,
    NAMES,
    TABLE,
    Analysis,
    Bucket,
    Source,
    analyses,
)
from ragen.store.fsync import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FOLDER = Path("gradient_analysis_outputs")
DPI = 300
GRID_DPI = 200
# Okabe and Ito's colours, which also differ in grey.
COLOURS = {"task": "#0072B2", "entropy": "#E69F00", "kl": "#009E73", "loss": "#8C8C8C", "std": "#56B4E9"}
MARKERS = {"task": "o", "entropy": "s", "kl": "^"}
DASHES = {"task": "-", "entropy": "--", "kl": "-."}
HATCHES = {"task": "", "entropy": "//", "kl": "..", "loss": "", "std": "\\\\"}
GROUPS = {AFTER: "after the filter", BEFORE: "all groups, before the filter"}
STD = "reward std within a group (reward)"
NORM = "L2 norm of the gradient"
LABEL = {"facecolor": "white", "edgecolor": "none", "pad": 0.4, "alpha": 0.8}
WEIGHED = f"{NORM}\n(times its coefficient)"


def plot(sources: Sequence[Source], wanted: Sequence[int] = (), output: Path | None = None) -> list[Path]:
    """Draw all steps, or the wanted ones. Several runs get a folder each below `output`, and share the grid."""
    found = analyses(sources, wanted)
    root = output or (FOLDER / sources[0].name if len(sources) == 1 else FOLDER)
    names = _folder_names(sources)
    paths = []
    with _drawing():
        for source, name in zip(sources, names, strict=True):
            folder = root if len(sources) == 1 else root / name
            for analysis in found:
                if analysis.row is source.rows.get(analysis.step):
                    paths += _plot_step(analysis, folder)
        paths += _save_grid(found, root)
    return paths


def _folder_names(sources: Sequence[Source]) -> list[str]:
    """Runs of one name lie side by side."""
    names: list[str] = []
    for source in sources:
        same = sum(other.name == source.name for other in sources[: len(names)])
        names.append(f"{source.name}-{same + 1}" if same else source.name)
    return names


@contextmanager
def _drawing() -> Iterator[None]:
    import matplotlib

    settings = {
        "font.size": 9,
        "axes.titlesize": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "hatch.linewidth": 0.6,
        "svg.hashsalt": "ragen",  # equal data, equal files
    }
    with matplotlib.rc_context(settings):
        yield


def _plot_step(analysis: Analysis, folder: Path) -> list[Path]:
    pictures = {
        "plots": norms_figure(analysis),
        "loss_plots": losses_figure(analysis),
        "reward_std": reward_std_figure(analysis),
        "normed_grads": normed_figure(analysis),
        "summary": grid_figure([analysis], is_log=False),
        "snr_cosine": snr_figure(analysis),
    }
    paths = [
        _save(figure, folder / f"gradient_analysis_{name}_step_{analysis.step}.png", DPI)
        for name, figure in pictures.items()
        if figure is not None
    ]
    return [*paths, _write_metrics(analysis, folder), _write_table(analysis, folder)]


# --- files of numbers ---------------------------------------------------------------------------------------------


def _write_metrics(analysis: Analysis, folder: Path) -> Path:
    path = folder / f"gradient_analysis_metrics_step_{analysis.step}.json"
    row = {key: _storable(value) for key, value in analysis.row.items()}
    write_whole(path, json.dumps(row, indent=1, allow_nan=False, default=str).encode())
    return path


def _storable(value: Any) -> Any:
    """JSON has no NaN."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _write_table(analysis: Analysis, folder: Path) -> Path:
    """A row for each group; where only the buckets' own numbers are known, their means."""
    path = folder / f"gradient_analysis_bucket_rv_table_step_{analysis.step}.csv"
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["bucket", "reward_std"])
    for bucket in analysis.buckets():
        mean = [] if bucket.reward_std is None else [bucket.reward_std]
        writer.writerows((bucket.name, value) for value in bucket.reward_stds or mean)
    write_whole(path, text.getvalue().encode())
    return path


def _save(figure: "Figure", path: Path, dpi: int) -> Path:
    buffer = io.BytesIO()
    metadata = {"Date": None} if path.suffix == ".svg" else None
    figure.savefig(buffer, format=path.suffix[1:], dpi=dpi, metadata=metadata)
    write_whole(path, buffer.getvalue())
    return path


def _save_grid(found: Sequence[Analysis], root: Path) -> list[Path]:
    figure = grid_figure(found)
    return [_save(figure, root / f"gradient_analysis_grid{suffix}", GRID_DPI) for suffix in (".png", ".svg")]


# --- pictures of a step -------------------------------------------------------------------------------------------


def norms_figure(analysis: Analysis) -> "Figure":
    """Bars of the three terms; below them those of all groups."""
    prefixes = _prefixes(analysis)
    figure, axes = _figure(analysis, len(prefixes), 3)
    for row, prefix in zip(axes, prefixes, strict=True):
        for ax, term in zip(row, ("kl", "entropy", "task"), strict=True):
            buckets = [*analysis.buckets(prefix), analysis.whole(prefix)]
            _bars(ax, buckets, [bucket.norm(term) for bucket in buckets], term)
            ax.set_title(f"{NAMES[term]}, {GROUPS[prefix]}")
            ax.set_ylabel(NORM if term == "task" else WEIGHED)
    return figure


def losses_figure(analysis: Analysis) -> "Figure":
    figure, axes = _figure(analysis, 2, 2)
    buckets = [*analysis.buckets(), analysis.whole()]
    for ax, loss in zip(axes.flat, LOSSES, strict=True):
        _bars(ax, buckets, [bucket.get(f"loss/{loss}") for bucket in buckets], "loss")
        ax.set_title({"kl": "KL"}.get(loss, loss))
        ax.set_ylabel("loss, nats a token" if loss in ("entropy", "kl") else "loss")
    return figure


def reward_std_figure(analysis: Analysis) -> "Figure | None":
    prefixes = _prefixes(analysis)
    if not any(bucket.reward_std for prefix in prefixes for bucket in analysis.buckets(prefix)):
        return None
    figure, axes = _figure(analysis, 1, len(prefixes))
    for ax, prefix in zip(axes.flat, prefixes, strict=True):
        buckets = analysis.buckets(prefix)
        _bars(ax, buckets, [bucket.reward_std for bucket in buckets], "std", under="groups")
        ax.set_title(GROUPS[prefix])
        ax.set_ylabel(f"mean {STD}")
    return figure


def normed_figure(analysis: Analysis) -> "Figure":
    """Norms divided by the number of samples, and by that of tokens."""
    terms = analysis.terms() or ["task"]
    figure, axes = _figure(analysis, 2, len(terms))
    buckets = [*analysis.buckets(), analysis.whole()]
    for row, unit in zip(axes, ("sample", "token"), strict=True):
        for ax, term in zip(row, terms, strict=True):
            _bars(ax, buckets, [bucket.get(f"per_{unit}/{term}") for bucket in buckets], term)
            ax.set_title(f"{NAMES[term]}, by {unit}")
            ax.set_ylabel(f"{NORM}\ndivided by the {unit}s")
    return figure


def snr_figure(analysis: Analysis) -> "Figure | None":
    """Signal to noise of each bucket, and the cosines between their task gradients."""
    prefixes = [prefix for prefix in _prefixes(analysis) if _has_snr_or_cosine(analysis, prefix)]
    if not prefixes:
        return None
    figure, axes = _figure(analysis, len(prefixes), 2)
    for row, prefix in zip(axes, prefixes, strict=True):
        buckets = analysis.buckets(prefix)
        _bars(row[0], buckets, [bucket.snr for bucket in buckets], "task", ndigits=2)
        row[0].set_title(f"signal to noise of the task gradient,\n{GROUPS[prefix]}")
        row[0].set_ylabel("squared norm / its noise\n(dotted: nothing but noise)")
        if any(bucket.snr is not None and bucket.snr > 0 for bucket in buckets):
            row[0].axhline(1.0, color="black", linewidth=0.8, linestyle=":")
        _matrix(row[1], analysis, prefix)
    return figure


def _has_snr_or_cosine(analysis: Analysis, prefix: str) -> bool:
    buckets = analysis.buckets(prefix)
    pairs = [(one.name, other.name) for one in buckets for other in buckets if one is not other]
    return any(bucket.snr is not None for bucket in buckets) or any(
        analysis.cosine(*pair, prefix) is not None for pair in pairs
    )


def _matrix(ax: "Axes", analysis: Analysis, prefix: str) -> None:
    """Cosines from -1 (black) to 1 (white), each written in its cell."""
    buckets = analysis.buckets(prefix)
    names = [bucket.name for bucket in buckets]
    values = [[analysis.cosine(one, other, prefix) for other in names] for one in names]
    shades = [[math.nan if value is None else value for value in row] for row in values]
    ax.imshow(shades, cmap="gray", vmin=-1.6, vmax=1.0)
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            colour = "white" if value is not None and value < -0.3 else "black"
            ax.text(
                x,
                y,
                "–" if value is None else f"{round(value, 2) + 0.0:.2f}",
                ha="center",
                va="center",
                color=colour,
                fontsize=8,
            )
    ax.set_xticks(range(len(names)), [_number(name) for name in names])
    ax.set_yticks(range(len(names)), [_number(name) for name in names])
    ax.set_xlabel("bucket, by growing reward std")
    ax.set_ylabel("bucket")
    ax.set_title(f"cosine of task gradients,\n{GROUPS[prefix]}")


def _number(bucket: str) -> str:
    return bucket.removeprefix("bucket_")


# --- the grid -----------------------------------------------------------------------------------------------------


def grid_figure(found: Sequence[Analysis], is_log: bool = True) -> "Figure":
    """A row for each step and run: reward std by bucket, task norm against it, KL and entropy norm against it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.3 * len(found) + 0.4), layout="constrained")
    axes = figure.subplots(len(found), 3, squeeze=False)
    several = len({analysis.run for analysis in found}) > 1
    for row, analysis in zip(axes, found, strict=True):
        _stds(row[0], analysis, is_log)
        _against_std(row[1], analysis, ["task"], is_log)
        _against_std(row[2], analysis, ["entropy", "kl"], is_log)
        words = f"{_shortened(analysis.run)}\nstep {analysis.step}" if several else f"step {analysis.step}"
        row[0].set_title(words, loc="left", fontweight="bold", fontsize=8 if several else 10)
        row[1].set_title("task gradient")
        row[2].set_title("entropy and KL gradient")
    if not several:
        figure.suptitle(_shortened(found[0].run, 110), fontsize=9)
    return figure


def _shortened(text: str, most: int = 52) -> str:
    """A long name keeps its two ends."""
    half = (most - 1) // 2
    return text if len(text) <= most else f"{text[:half]}…{text[-half:]}"


def _stds(ax: "Axes", analysis: Analysis, is_log: bool) -> None:
    """Boxes over the groups of each bucket, or mean, least and most where the groups are not known."""
    buckets = analysis.buckets()
    places = list(range(1, len(buckets) + 1))
    draw = _boxes if buckets and all(bucket.reward_stds for bucket in buckets) else _ranges
    values = draw(ax, buckets)
    _scale(ax, "y", values, is_log)
    if not any(values):
        _say(ax, "0 in every group" if values else "not measured")
    ax.set_xticks(places, [_number(bucket.name) for bucket in buckets])
    ax.set_xlabel("bucket, by growing reward std")
    ax.set_ylabel("reward std within\na group (reward)")
    ax.grid(axis="y", alpha=0.3)


def _boxes(ax: "Axes", buckets: Sequence[Bucket]) -> list[float]:
    ax.boxplot(
        [list(bucket.reward_stds) for bucket in buckets],
        widths=0.6,
        patch_artist=True,
        boxprops={"facecolor": "#DDDDDD"},
        medianprops={"color": "black"},
        flierprops={"markersize": 3},
    )
    return [value for bucket in buckets for value in bucket.reward_stds]


def _ranges(ax: "Axes", buckets: Sequence[Bucket]) -> list[float]:
    known = [(place, bucket) for place, bucket in enumerate(buckets, start=1) if bucket.reward_std is not None]
    means = [bucket.reward_std for _, bucket in known]
    least, most = (
        [_or(bucket.get(f"reward_std_{end}"), bucket.reward_std) for _, bucket in known] for end in ("min", "max")
    )
    below = [max(0.0, mean - low) for mean, low in zip(means, least, strict=True)]
    above = [max(0.0, high - mean) for mean, high in zip(means, most, strict=True)]
    places = [place for place, _ in known]
    ax.errorbar(places, means, [below, above], fmt="D", color="black", capsize=3, markersize=4)
    return [*means, *least, *most]


def _or(value: float | None, other: float) -> float:
    return other if value is None else value


def _against_std(ax: "Axes", analysis: Analysis, terms: Sequence[str], is_log: bool) -> None:
    """Norms over the mean reward std of the buckets; all groups, where measured, in grey with open marks."""
    drawn = []
    for prefix in _prefixes(analysis):
        for term in terms:
            pairs = [
                (bucket.reward_std, norm)
                for bucket in analysis.buckets(prefix)
                if bucket.reward_std is not None and (norm := bucket.norm(term)) is not None
            ]
            if pairs:
                drawn += pairs
                ax.plot(*zip(*pairs, strict=True), **_line(term, prefix))
    _scale(ax, "x", [x for x, _ in drawn], is_log)
    room = 1.35 if len(terms) == 1 else 1.45  # for the legend
    ax.set_ylim(0, room * max((y for _, y in drawn), default=0.0) or 1.0)
    ax.set_xlabel(f"mean {STD}")
    ax.set_ylabel(NORM if "task" in terms else WEIGHED)
    ax.grid(alpha=0.3)
    if drawn:
        ax.legend(frameon=False, fontsize=8, loc="upper left", ncols=len(terms))
    else:
        _say(ax, "not measured")


def _say(ax: "Axes", words: str) -> None:
    """In the middle of an empty picture."""
    ax.text(0.5, 0.5, words, ha="center", va="center", transform=ax.transAxes, color="#666666")


def _line(term: str, prefix: str) -> dict[str, Any]:
    is_after = prefix == AFTER
    colour = COLOURS[term] if is_after else "#777777"
    return {
        "color": colour,
        "marker": MARKERS[term],
        "linestyle": DASHES[term],
        "linewidth": 1.5 if is_after else 0.9,
        "markersize": 5,
        "markerfacecolor": colour if is_after else "white",
        "label": NAMES[term] if is_after else f"{NAMES[term]}, before the filter",
    }


def _scale(ax: "Axes", axis: str, values: Sequence[float], is_log: bool) -> None:
    """Logarithmic where asked, with a linear end where there are zeros, since 0 has no logarithm."""
    positive = [value for value in values if value > 0]
    if is_log and positive and max(positive) > min(positive):
        from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

        has_zeros = len(positive) < len(values)
        settings = {"linthresh": min(positive), "linscale": 0.5} if has_zeros else {}
        getattr(ax, f"set_{axis}scale")("symlog" if has_zeros else "log", **settings)
        side = getattr(ax, f"{axis}axis")
        side.set_major_locator(FixedLocator([*([0.0] if has_zeros else []), *log_ticks(min(positive), max(positive))]))
        side.set_minor_locator(NullLocator())
        side.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    elif axis == "y":
        ax.set_ylim(bottom=min([0.0, *values]))


def log_ticks(low: float, high: float) -> list[float]:
    """Round numbers between two ends: powers of ten, and more where few of them lie there."""
    places = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1,), (1, 3), (1, 2, 5), range(1, 10)):
        ticks = [float(f"{factor}e{place}") for place in places for factor in factors]
        inside = [tick for tick in ticks if low <= tick <= high]
        if len(inside) >= 3:
            return inside
    return [float(f"{value:.2g}") for value in (low, high)]


# --- parts --------------------------------------------------------------------------------------------------------


def _prefixes(analysis: Analysis) -> list[str]:
    return [AFTER, *([BEFORE] if analysis.has(BEFORE) else [])]


def _figure(analysis: Analysis, num_rows: int, num_columns: int) -> tuple["Figure", Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * num_columns, 3.3 * num_rows + 0.5), layout="constrained")
    figure.suptitle(f"{_shortened(analysis.run, 30 * num_columns)}, step {analysis.step}", fontsize=9)
    return figure, figure.subplots(num_rows, num_columns, squeeze=False)


def _bars(
    ax: "Axes", buckets: Sequence[Bucket], values: Sequence[float | None], kind: str, under: str = "", ndigits: int = 3
) -> None:
    """A bar for each bucket, its value above it and its reward std below."""
    known = [(place, value) for place, value in enumerate(values) if value is not None]
    drawn = ax.bar(
        [place for place, _ in known],
        [value for _, value in known],
        width=0.7,
        color=COLOURS[kind],
        hatch=HATCHES[kind],
        edgecolor="black",
        linewidth=0.6,
    )
    ax.bar_label(drawn, [f"{value:.{ndigits}g}" for _, value in known], padding=2, fontsize=7, bbox=LABEL)
    ax.set_xticks(range(len(buckets)), [_under(bucket, under) for bucket in buckets], fontsize=7.5)
    ax.set_xlim(-0.6, len(buckets) - 0.4)
    ax.set_xlabel("bucket, and its mean reward std" if not under else "bucket, and its number of groups")
    ax.margins(y=0.14)
    ax.grid(axis="y", alpha=0.3)
    ax.set_axisbelow(True)
    numbers = [value for _, value in known]
    if not any(numbers):
        ax.set_ylim(0, 1)
        _say(ax, "0 in every bucket" if numbers else "not measured")
    elif min(numbers) < 0:
        ax.axhline(0, color="black", linewidth=0.8)


def _under(bucket: Bucket, under: str) -> str:
    name = _number(bucket.name)
    if under == "groups":
        count = bucket.get("group_rv_count")
        return name if count is None else f"{name}\n{count:g}"
    return name if bucket.reward_std is None else f"{name}\n{short(round(bucket.reward_std, 3))}"


def note_without_table(source: Source) -> str:
    """What a reader of the CSV has to know."""
    return "" if source.table else f"{source.name} has no {TABLE}: its CSV holds the means of the buckets"
