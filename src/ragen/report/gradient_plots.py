"""Pictures of a gradient analysis: eight files a step, and one figure over all steps and runs.

    plot([from_folder("model_saving/…")], wanted=[51], output=None)     # paths of all files written

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

import io
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ragen.format import short
from ragen.report.gradient_data import AFTER, BEFORE, LOSSES, NAMES, Analysis, Bucket, Source, analyses
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
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "hatch.linewidth": 0.6,
    "svg.hashsalt": "ragen",  # equal data, equal files
}


def plot(sources: Sequence[Source], wanted: Sequence[int] = (), output: Path | None = None) -> list[Path]:
    """Draw all steps, or the wanted ones. Several runs get a folder each below `output`, and share the grid."""
    found = analyses(sources, wanted)
    is_single = len(sources) == 1
    root = output or (FOLDER / sources[0].name if is_single else FOLDER)
    paths = []
    with drawing():
        for source, name in zip(sources, _folder_names(sources), strict=True):
            for analysis in found:
                if analysis.row is source.rows.get(analysis.step):
                    paths += _plot_step(analysis, root if is_single else root / name)
        grid = grid_figure(found)
        paths += [_save(grid, root / f"gradient_analysis_grid{suffix}", GRID_DPI) for suffix in (".png", ".svg")]
    return paths


def _folder_names(sources: Sequence[Source]) -> list[str]:
    """Runs with the same name are numbered."""
    names = [source.name for source in sources]
    earlier = [names[:index].count(name) for index, name in enumerate(names)]
    return [f"{name}-{same + 1}" if same else name for name, same in zip(names, earlier, strict=True)]


@contextmanager
def drawing() -> Iterator[None]:
    import matplotlib

    with matplotlib.rc_context(STYLE):
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
    numbers = {"metrics": (".json", _metrics_json(analysis)), "bucket_rv_table": (".csv", _groups_csv(analysis))}
    for name, (suffix, text) in numbers.items():
        paths.append(folder / f"gradient_analysis_{name}_step_{analysis.step}{suffix}")
        write_whole(paths[-1], text.encode())
    return paths


def _metrics_json(analysis: Analysis) -> str:
    """JSON has no NaN: those become text."""
    row = {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in analysis.row.items()}
    return json.dumps(row, indent=1, allow_nan=False, default=str)


def _groups_csv(analysis: Analysis) -> str:
    """A row for each group; the means of the buckets where the groups are not known."""
    lines = ["bucket,reward_std"]
    for bucket in analysis.buckets():
        means = [] if bucket.reward_std is None else [bucket.reward_std]
        lines += [f"{bucket.name},{value}" for value in bucket.reward_stds or means]
    return "\n".join(lines) + "\n"


def _save(figure: "Figure", path: Path, dpi: int) -> Path:
    buffer = io.BytesIO()
    metadata = {"Date": None} if path.suffix == ".svg" else None
    figure.savefig(buffer, format=path.suffix[1:], dpi=dpi, metadata=metadata)
    write_whole(path, buffer.getvalue())
    return path


class Panel(NamedTuple):
    """Bars of the buckets, with the value above each and its reward std or number of groups below."""

    title: str
    y_label: str
    kind: str  # of COLOURS and HATCHES
    buckets: Sequence[Bucket]
    values: Sequence[float | None]
    counts_groups: bool = False


def norms_figure(analysis: Analysis) -> "Figure":
    """The three terms after the filter; below them those of all groups."""
    rows: list[list[Panel]] = []
    for prefix in analysis.prefixes():
        rows.append([])
        buckets = analysis.with_whole(prefix)
        for term in ("kl", "entropy", "task"):
            title, y_label = f"{NAMES[term]}, {GROUPS[prefix]}", NORM if term == "task" else WEIGHED
            rows[-1].append(Panel(title, y_label, term, buckets, [bucket.get(term) for bucket in buckets]))
    return _bar_figure(analysis, rows)


def losses_figure(analysis: Analysis) -> "Figure":
    buckets = analysis.with_whole()
    panels = []
    for loss in LOSSES:
        values = [bucket.get(f"loss/{loss}") for bucket in buckets]
        y_label = "loss, nats a token" if loss in ("entropy", "kl") else "loss"
        panels.append(Panel({"kl": "KL"}.get(loss, loss), y_label, "loss", buckets, values))
    return _bar_figure(analysis, [panels[:2], panels[2:]])


def reward_std_figure(analysis: Analysis) -> "Figure | None":
    panels = []
    for prefix in analysis.prefixes():
        buckets = analysis.buckets(prefix)
        stds = [bucket.reward_std for bucket in buckets]
        panels.append(Panel(GROUPS[prefix], f"mean {STD}", "std", buckets, stds, counts_groups=True))
    return _bar_figure(analysis, [panels]) if any(any(panel.values) for panel in panels) else None


def normed_figure(analysis: Analysis) -> "Figure":
    """Norms divided by the number of samples, and by the number of tokens."""
    buckets = analysis.with_whole()
    rows: list[list[Panel]] = []
    for unit in ("sample", "token"):
        rows.append([])
        for term in analysis.terms() or ["task"]:
            values = [bucket.get(f"per_{unit}/{term}") for bucket in buckets]
            y_label = f"{NORM}\ndivided by the {unit}s"
            rows[-1].append(Panel(f"{NAMES[term]}, by {unit}", y_label, term, buckets, values))
    return _bar_figure(analysis, rows)


def _bar_figure(analysis: Analysis, rows: Sequence[Sequence[Panel]]) -> "Figure":
    figure, axes = _figure(analysis, len(rows), len(rows[0]))
    for ax, panel in zip(axes.flat, chain(*rows), strict=True):
        _bars(ax, panel)
    return figure


def _figure(analysis: Analysis, num_rows: int, num_columns: int) -> tuple["Figure", Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * num_columns, 3.3 * num_rows + 0.5), layout="constrained")
    figure.suptitle(f"{_shortened(analysis.run, 30 * num_columns)}, step {analysis.step}", fontsize=9)
    return figure, figure.subplots(num_rows, num_columns, squeeze=False)


def _bars(ax: "Axes", panel: Panel, num_digits: int = 3) -> None:
    known = {index: value for index, value in enumerate(panel.values) if value is not None}
    look: dict[str, Any] = {"color": COLOURS[panel.kind], "hatch": HATCHES[panel.kind], "edgecolor": "black"}
    drawn = ax.bar(list(known), list(known.values()), width=0.7, linewidth=0.6, **look)
    ax.bar_label(drawn, [f"{value:.{num_digits}g}" for value in known.values()], padding=2, fontsize=7, bbox=LABEL)
    ax.set_xticks(range(len(panel.buckets)), [_under(bucket, panel) for bucket in panel.buckets], fontsize=7.5)
    ax.set_xlim(-0.6, len(panel.buckets) - 0.4)
    ax.set_xlabel("bucket, and its number of groups" if panel.counts_groups else "bucket, and its mean reward std")
    ax.margins(y=0.14)
    ax.grid(axis="y", alpha=0.3)
    ax.set_axisbelow(True)
    if not any(known.values()):
        ax.set_ylim(0, 1)
        _say(ax, "0 in every bucket" if known else "not measured")
    elif min(known.values()) < 0:
        ax.axhline(0, color="black", linewidth=0.8)
    ax.set_title(panel.title)
    ax.set_ylabel(panel.y_label)


def _under(bucket: Bucket, panel: Panel) -> str:
    below = bucket.get("group_rv_count") if panel.counts_groups else bucket.reward_std
    if below is None:
        return bucket.number
    return f"{bucket.number}\n{below:g}" if panel.counts_groups else f"{bucket.number}\n{short(round(below, 3))}"


def snr_figure(analysis: Analysis) -> "Figure | None":
    """Signal to noise of each bucket, and the cosines between their task gradients."""
    rows = []
    for prefix in analysis.prefixes():
        buckets = analysis.buckets(prefix)
        cosines = [[analysis.cosine(one.name, other.name, prefix) for other in buckets] for one in buckets]
        others = [value for y, row in enumerate(cosines) for x, value in enumerate(row) if x != y]
        snrs = [bucket.snr for bucket in buckets]
        if any(value is not None for value in (*snrs, *others)):
            title = f"signal to noise of the task gradient,\n{GROUPS[prefix]}"
            y_label = "squared norm / its noise\n(dotted: nothing but noise)"
            rows.append((Panel(title, y_label, "task", buckets, snrs), cosines, prefix))
    if not rows:
        return None
    figure, axes = _figure(analysis, len(rows), 2)
    for (left, right), (panel, cosines, prefix) in zip(axes, rows, strict=True):
        _bars(left, panel, num_digits=2)
        if any(value is not None and value > 0 for value in panel.values):
            left.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
        _matrix(right, cosines, [bucket.number for bucket in panel.buckets])
        right.set_title(f"cosine of task gradients,\n{GROUPS[prefix]}")
    return figure


def _matrix(ax: "Axes", values: Sequence[Sequence[float | None]], names: Sequence[str]) -> None:
    """Cosines from -1 (black) to 1 (white), each written in its cell."""
    shades = [[math.nan if value is None else value for value in row] for row in values]
    ax.imshow(shades, cmap="gray", vmin=-1.6, vmax=1.0)
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            colour = "white" if value is not None and value < -0.3 else "black"
            text = "–" if value is None else f"{round(value, 2) + 0.0:.2f}"
            ax.text(x, y, text, ha="center", va="center", color=colour, fontsize=8)
    ax.set_xticks(range(len(names)), names)
    ax.set_yticks(range(len(names)), names)
    ax.set_xlabel("bucket, by growing reward std")
    ax.set_ylabel("bucket")


def grid_figure(found: Sequence[Analysis], is_log: bool = True) -> "Figure":
    """A row for each step and run: reward std by bucket, task norm against it, KL and entropy norm against it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.3 * len(found) + 0.4), layout="constrained")
    several = len({analysis.run for analysis in found}) > 1
    for row, analysis in zip(figure.subplots(len(found), 3, squeeze=False), found, strict=True):
        _stds(row[0], analysis, is_log)
        _against_std(row[1], analysis, ["task"], is_log)
        _against_std(row[2], analysis, ["entropy", "kl"], is_log)
        title = f"{_shortened(analysis.run)}\nstep {analysis.step}" if several else f"step {analysis.step}"
        row[0].set_title(title, loc="left", fontweight="bold", fontsize=8 if several else 10)
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
    draw = _boxes if buckets and all(bucket.reward_stds for bucket in buckets) else _ranges
    values = draw(ax, buckets)
    _scale(ax, "y", values, is_log)
    if not any(values):
        _say(ax, "0 in every group" if values else "not measured")
    ax.set_xticks(range(1, len(buckets) + 1), [bucket.number for bucket in buckets])
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
    known = {}
    for number, bucket in enumerate(buckets, start=1):
        mean, low, high = (bucket.get(f"reward_std_{name}") for name in ("mean", "min", "max"))
        if mean is not None:
            known[number] = (mean, mean if low is None else low, mean if high is None else high)
    below = [max(0.0, mean - low) for mean, low, _ in known.values()]
    above = [max(0.0, high - mean) for mean, _, high in known.values()]
    means = [mean for mean, _, _ in known.values()]
    ax.errorbar(list(known), means, [below, above], fmt="D", color="black", capsize=3, markersize=4)
    return [*chain(*known.values())]


def _against_std(ax: "Axes", analysis: Analysis, terms: Sequence[str], is_log: bool) -> None:
    """Norms over the mean reward std of the buckets; all groups, where measured, in grey with open marks."""
    drawn = []
    for prefix, term in product(analysis.prefixes(), terms):
        if pairs := analysis.norms_by_std(term, prefix):
            drawn += pairs
            ax.plot(*zip(*pairs, strict=True), **_line_style(term, prefix))
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


def _say(ax: "Axes", text: str) -> None:
    """In the middle of an empty picture."""
    ax.text(0.5, 0.5, text, ha="center", va="center", transform=ax.transAxes, color="#666666")


def _line_style(term: str, prefix: str) -> dict[str, Any]:
    style = {"marker": MARKERS[term], "linestyle": DASHES[term], "markersize": 5}
    if prefix == AFTER:
        return style | {"color": COLOURS[term], "linewidth": 1.5, "label": NAMES[term]}
    label = f"{NAMES[term]}, before the filter"
    return style | {"color": "#777777", "markerfacecolor": "white", "linewidth": 0.9, "label": label}


def _scale(ax: "Axes", axis: str, values: Sequence[float], is_log: bool) -> None:
    """Logarithmic if asked, with a linear end where there are zeros, since 0 has no logarithm."""
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
    """Round numbers between two ends: powers of ten, and more where few of them are inside."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1,), (1, 3), (1, 2, 5), range(1, 10)):
        ticks = [float(f"{factor}e{power}") for power in powers for factor in factors]
        inside = [tick for tick in ticks if low <= tick <= high]
        if len(inside) >= 3:
            return inside
    return [float(f"{value:.2g}") for value in (low, high)]
