"""Line and bar charts as SVG text. Colours are classes of the page's style sheet, so a chart follows light and dark.

    line_chart([Line("success", [(0, 0.33), (10, 0.41)])], Axis(percent=True), size=(360, 190))

Numbers that are not finite leave a gap in the line and a mark on the axis. All text from outside is escaped.
"""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from ragen.format import percent, short

MAX_POINTS = 300  # beyond it neighbours are drawn as their mean
MIN_TO_SMOOTH = 24

Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    label: str
    points: Sequence[Point]
    band: Sequence[tuple[float, float, float]] = ()  # (x, low, high)
    window: int = 0  # so many neighbours are averaged into a bold line over the thin one of single values
    dots: bool = False


@dataclass(frozen=True)
class Level:
    """A horizontal line: what random or optimal play reaches."""

    label: str
    value: float


@dataclass(frozen=True)
class Axis:
    percent: bool = False
    low: float | None = None  # shown in any case
    high: float | None = None
    unit: str = ""

    def text(self, value: float) -> str:
        if self.percent:
            return percent(value) if math.isfinite(value) else short(value)
        return f"{short(float(value))}{self.unit}"

    def tick(self, value: float) -> str:
        return f"{100 * value:.6g} %" if self.percent else f"{value:.6g}{self.unit}"


@dataclass(frozen=True)
class Bar:
    label: str
    value: float
    low: float
    high: float
    title: str


@dataclass(frozen=True)
class BarGroup:
    label: str
    note: str
    bars: Sequence[Bar] = field(default_factory=list)


def escape(text: object) -> str:
    """Text from outside, made harmless: markup escaped, control characters shown as symbols."""
    shown = "".join(chr(0x2400 + ord(c)) if ord(c) < 32 and c not in "\n\t" else c for c in str(text))
    return html.escape(shown.replace("\x7f", "\u2421"), quote=True)


# --- lines --------------------------------------------------------------------------------------------------------


def line_chart(
    lines: Sequence[Line],
    axis: Axis,
    size: tuple[int, int],
    levels: Sequence[Level] = (),
    end_labels: bool = False,
    name: str = "",
) -> str:
    """One chart over training steps. `end_labels` writes each line's name and last value at its right end."""
    width, height = size
    finite = [[point for point in line.points if math.isfinite(point[1])] for line in lines]
    values = [y for points in finite for _, y in points]
    values += [level.value for level in levels]
    values += [y for line in lines for _, *pair in line.band for y in pair if math.isfinite(y)]
    xs = [x for line in lines for x, _ in line.points]
    y_ticks = nice_ticks(*_limits(values, axis), max(2, height // 38))
    left = 14 + 6.2 * max(len(axis.tick(tick)) for tick in y_ticks)
    right = width - (_label_room(lines, levels, axis) if end_labels else 12)
    frame = _Frame(
        (min(xs, default=0), max(xs, default=1)), (y_ticks[0], y_ticks[-1]), (left, right), (10, height - 24)
    )
    parts = [_grid(frame, y_ticks, axis)]
    for level in levels:
        y = frame.y(level.value)
        parts.append(f'<line class="level" x1="{left:.1f}" x2="{right:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>')
    for index, line in enumerate(lines):
        parts.append(_draw_line(line, index, frame, axis, alone=len(lines) == 1))
    if end_labels:
        parts.append(_end_labels(lines, finite, levels, axis, frame))
    return _svg(size, parts, name)


def nice_ticks(low: float, high: float, num: int) -> list[float]:
    """About `num` round numbers (1, 2 or 5 times a power of ten) that enclose low and high."""
    span = high - low
    raw = span / max(1, num)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{index * step:.12g}") for index in range(first, max(last, first + 1) + 1)]


def moving_average(points: Sequence[Point], window: int) -> list[Point]:
    """The mean of `window` neighbours; at both ends, of those that there are."""
    reach = window // 2
    smooth = []
    for index, (x, _) in enumerate(points):
        near = [y for _, y in points[max(0, index - reach) : index + reach + 1]]
        smooth.append((x, sum(near) / len(near)))
    return smooth


def smoothing_window(num_points: int) -> int:
    return 2 * (num_points // 24) + 3


def thinned(points: Sequence[Point]) -> list[Point]:
    """At most MAX_POINTS points: neighbours become their mean."""
    size = math.ceil(len(points) / MAX_POINTS)
    if size <= 1:
        return list(points)
    chunks = [points[start : start + size] for start in range(0, len(points), size)]
    return [(sum(x for x, _ in chunk) / len(chunk), sum(y for _, y in chunk) / len(chunk)) for chunk in chunks]


class _Frame:
    """Data coordinates to picture coordinates."""

    def __init__(self, xs: Point, ys: Point, across: Point, down: Point):
        self.xs, self.ys, self.across, self.down = xs, ys, across, down

    def x(self, value: float) -> float:
        low, high = self.xs
        if high <= low:
            return (self.across[0] + self.across[1]) / 2
        return self.across[0] + (value - low) / (high - low) * (self.across[1] - self.across[0])

    def y(self, value: float) -> float:
        low, high = self.ys
        return self.down[1] - (value - low) / (high - low) * (self.down[1] - self.down[0])


def _limits(values: Sequence[float], axis: Axis) -> Point:
    shown = [*values, *(value for value in (axis.low, axis.high) if value is not None)]
    low, high = (min(shown), max(shown)) if shown else (0.0, 1.0)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        # A constant is drawn in the middle of a range that suits its size.
        margin = abs(low) / 2 or 1.0
        low, high = low - margin, high + margin
    return low, high


def _grid(frame: _Frame, y_ticks: Sequence[float], axis: Axis) -> str:
    left, right = frame.across
    bottom = frame.down[1]
    parts = []
    for tick in y_ticks:
        y = frame.y(tick)
        parts.append(f'<line class="grid" x1="{left:.1f}" x2="{right:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(
            f'<text class="tick" x="{left - 6:.1f}" y="{y + 3.5:.1f}" text-anchor="end">{axis.tick(tick)}</text>'
        )
    low, high = frame.xs
    steps = (
        [low]
        if high <= low
        else [tick for tick in nice_ticks(low, high, int((right - left) / 45)) if low <= tick <= high and tick % 1 == 0]
    )
    for tick in steps:
        x = frame.x(tick)
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom:.1f}" y2="{bottom + 3:.1f}"/>')
        parts.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 15:.1f}" text-anchor="middle">{tick:g}</text>')
    parts.append(f'<line class="axis" x1="{left:.1f}" x2="{right:.1f}" y1="{bottom:.1f}" y2="{bottom:.1f}"/>')
    return "".join(parts)


def _draw_line(line: Line, index: int, frame: _Frame, axis: Axis, alone: bool) -> str:
    parts = []
    for segment in _segments([(x, low, high) for x, low, high in line.band]):
        if len(segment) == 1:
            x, low, high = segment[0]
            parts.append(_path([(x, low), (x, high)], frame, f"line whisker-line s{index}"))
        upper = [f"{frame.x(x):.1f},{frame.y(high):.1f}" for x, _, high in segment]
        lower = [f"{frame.x(x):.1f},{frame.y(low):.1f}" for x, low, _ in reversed(segment)]
        parts.append(f'<polygon class="band s{index}" points="{" ".join(upper + lower)}"/>')
    segments = _segments(line.points)
    for segment in segments:
        shown = thinned(segment)
        parts.append(_path(shown, frame, f"line thin s{index}" if line.window else f"line s{index}"))
        if line.window:
            parts.append(_path(thinned(moving_average(segment, line.window)), frame, f"line s{index}"))
        if line.dots or len(shown) == 1:
            parts += [
                f'<circle class="dot s{index}" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="3"/>' for x, y in shown
            ]
    bounds = {x: (low, high) for x, low, high in line.band}
    prefix = "" if alone else f"{line.label}, "
    for x, y in thinned([point for segment in segments for point in segment]):
        text = f"{prefix}step {x:g}: {axis.text(y)}"
        if x in bounds:
            text += f" [{axis.text(bounds[x][0])}, {axis.text(bounds[x][1])}]"
        parts.append(
            f'<circle class="hover" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="7">'
            f"<title>{escape(text)}</title></circle>"
        )
    for x, y in line.points:
        if not math.isfinite(y):
            bottom = frame.down[1]
            parts.append(
                f'<path class="nonfinite" d="M{frame.x(x) - 3:.1f} {bottom - 6:.1f}l6 6m0 -6l-6 6">'
                f"<title>{escape(f'{prefix}step {x:g}: {short(y)}')}</title></path>"
            )
    return "".join(parts)


def _segments(points: Sequence[tuple[float, ...]]) -> list[list[tuple[float, ...]]]:
    """Runs of points without a non-finite number among them."""
    runs: list[list[tuple[float, ...]]] = [[]]
    for point in points:
        if all(math.isfinite(value) for value in point):
            runs[-1].append(point)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _path(points: Sequence[Point], frame: _Frame, classes: str) -> str:
    if len(points) < 2:
        return ""
    coordinates = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in points)
    return f'<polyline class="{classes}" points="{coordinates}"/>'


def _label_room(lines: Sequence[Line], levels: Sequence[Level], axis: Axis) -> float:
    texts = [f"{level.label} {axis.text(level.value)}" for level in levels]
    texts += [f"{line.label} {axis.text(line.points[-1][1])}" for line in lines if line.points]
    return 14 + 6.4 * max((len(text) for text in texts), default=0)


def _end_labels(
    lines: Sequence[Line],
    finite: Sequence[Sequence[Point]],
    levels: Sequence[Level],
    axis: Axis,
    frame: _Frame,
) -> str:
    wanted = [(frame.y(level.value), f"{level.label} {axis.text(level.value)}", "level") for level in levels]
    for index, (line, points) in enumerate(zip(lines, finite, strict=True)):
        if points:
            y = points[-1][1]
            wanted.append((frame.y(y), f"{line.label} {axis.text(y)}", f"s{index}"))
    wanted.sort()
    places = spread([y for y, _, _ in wanted], gap=14, low=frame.down[0], high=frame.down[1])
    return "".join(
        f'<text class="label {css}" x="{frame.across[1] + 8:.1f}" y="{place + 4:.1f}">{escape(text)}</text>'
        for place, (_, text, css) in zip(places, wanted, strict=True)
    )


def spread(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Sorted places moved apart to at least `gap`, within low and high where they fit."""
    moved = list(places)
    for index in range(1, len(moved)):
        moved[index] = max(moved[index], moved[index - 1] + gap)
    if moved and moved[-1] > high:
        moved[-1] = high
        for index in range(len(moved) - 2, -1, -1):
            moved[index] = min(moved[index], moved[index + 1] - gap)
    assert all(later - earlier >= gap - 1e-6 for earlier, later in pairwise(moved))
    return moved


# --- bars ---------------------------------------------------------------------------------------------------------


def bar_chart(groups: Sequence[BarGroup], axis: Axis, size: tuple[int, int], name: str = "") -> str:
    """Bars side by side with their intervals; the k-th bar of each group has the k-th colour."""
    width, height = size
    values = [value for group in groups for bar in group.bars for value in (bar.value, bar.high)]
    ticks = nice_ticks(*_limits(values, axis), max(2, height // 38))
    left = 14 + 6.2 * max(len(axis.tick(tick)) for tick in ticks)
    frame = _Frame((0, len(groups)), (ticks[0], ticks[-1]), (left, width - 8), (14, height - 38))
    parts = []
    for tick in ticks:
        y = frame.y(tick)
        parts.append(f'<line class="grid" x1="{left:.1f}" x2="{width - 8}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(
            f'<text class="tick" x="{left - 6:.1f}" y="{y + 3.5:.1f}" text-anchor="end">{axis.tick(tick)}</text>'
        )
    slot = frame.x(1) - frame.x(0)
    for index, group in enumerate(groups):
        middle = frame.x(index + 0.5)
        each = min(34.0, slot * 0.8 / max(1, len(group.bars)))
        for place, bar in enumerate(group.bars):
            x = middle + (place - len(group.bars) / 2) * each
            parts.append(_draw_bar(bar, place, x + 1, each - 2, frame))
        parts.append(
            f'<text class="tick strong" x="{middle:.1f}" y="{height - 22}" text-anchor="middle">'
            f"{escape(group.label)}</text>"
        )
        parts.append(
            f'<text class="tick" x="{middle:.1f}" y="{height - 8}" text-anchor="middle">{escape(group.note)}</text>'
        )
    bottom = frame.down[1]
    parts.append(f'<line class="axis" x1="{left:.1f}" x2="{width - 8}" y1="{bottom}" y2="{bottom}"/>')
    return _svg(size, parts, name)


def _draw_bar(bar: Bar, index: int, x: float, width: float, frame: _Frame) -> str:
    y, low, high, bottom = frame.y(bar.value), frame.y(bar.low), frame.y(bar.high), frame.down[1]
    middle = x + width / 2
    return (
        f"<g><title>{escape(bar.title)}</title>"
        f'<rect class="bar b{index}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{max(0.0, bottom - y):.1f}"/>'
        f'<path class="whisker" d="M{middle:.1f} {low:.1f}V{high:.1f}M{middle - 3:.1f} {high:.1f}h6'
        f'M{middle - 3:.1f} {low:.1f}h6"/></g>'
    )


def _svg(size: tuple[int, int], parts: Sequence[str], name: str) -> str:
    width, height = size
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(name)}">' + "".join(parts) + "</svg>"
