"""All charts of all pages, as SVG. Colours are classes of the style sheet, so a chart follows light and dark.

    line_chart([Line("success", [(0, 0.33), (10, 0.41)])], Axis(percent=True), size=(360, 190))
    xy_chart(lines, "reward std", "norm", size)      bar_chart(groups, axis, size)
    sparkline(points)                                legend(["step 1", "step 51"], key="mark")

Numbers that are not finite leave a gap in the line and a mark on the axis. All text is escaped.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, pairwise
from typing import TypeVar

from markupsafe import Markup

from ragen.format import percent, short
from ragen.report.pages import escape

SMALL = (360, 180)
WIDE = (700, 300)
NARROW = (360, 250)
MAX_POINTS = 300  # beyond it neighbours are drawn as their mean
MIN_TO_SMOOTH = 24
MAX_COLOURS = 5  # of the style sheet
MAX_GROUPS = 8  # of bars in a chart

Point = tuple[float, float]
Size = tuple[int, int]
Numbers = TypeVar("Numbers", bound=tuple[float, ...])


@dataclass(frozen=True)
class Line:
    label: str
    points: Sequence[Point]
    band: Sequence[tuple[float, float, float]] = ()  # (x, low, high)
    window: int = 0  # number of neighbours averaged into a bold line over the thin one of single values
    dots: bool = False
    colour: int | None = None  # its position among the lines, unless given


@dataclass(frozen=True)
class Level:
    """A horizontal line: what random or optimal play reaches."""

    label: str
    value: float


@dataclass(frozen=True)
class Axis:
    percent: bool = False
    low: float | None = None  # always shown
    high: float | None = None

    def text(self, value: float) -> str:
        return percent(value) if self.percent and math.isfinite(value) else short(float(value))

    def tick(self, value: float) -> str:
        return f"{100 * value:.6g} %" if self.percent else f"{value:.6g}"


FREE, POSITIVE = Axis(), Axis(low=0.0)
PERCENT, SHARE = Axis(percent=True, low=0.0), Axis(percent=True, low=0.0, high=1.0)


@dataclass(frozen=True)
class Bar:
    value: float
    low: float | None  # the interval
    high: float | None
    title: str


@dataclass(frozen=True)
class BarGroup:
    label: str
    note: str
    bars: Sequence[Bar]


# --- charts -------------------------------------------------------------------------------------------------------


def line_chart(
    lines: Sequence[Line],
    axis: Axis,
    size: Size,
    levels: Sequence[Level] = (),
    end_labels: bool = False,
    name: str = "",
) -> Markup:
    """One chart over training steps. `end_labels` writes each line's name and last value at its right end."""
    width, height = size
    xs, ys = ([point[side] for line in lines for point in line.points] for side in (0, 1))
    values = [*ys, *(level.value for level in levels), *chain(*(ends for line in lines for _, *ends in line.band))]
    labels = [(level.value, f"{level.label} {axis.text(level.value)}", "level") for level in levels]
    for index, line in enumerate(lines):
        last = next((y for _, y in reversed(line.points) if math.isfinite(y)), None)
        if last is not None:
            labels.append((last, f"{line.label} {axis.text(last)}", _colour(line, index)))
    room = 14 + 6.4 * max((len(text) for _, text, _ in labels), default=0) if end_labels else 12
    ticks = _ticks(list(filter(math.isfinite, values)), axis, height)
    frame = _Frame((min(xs, default=0), max(xs, default=1)), ticks, axis, width - room, (10, height - 24))
    parts = [*frame.grid(), *_steps(frame), frame.bottom_line()]
    parts += [frame.across_line(level.value, "level") for level in levels]
    for index, line in enumerate(lines):
        parts += _draw_line(line, _colour(line, index), frame, prefix=f"{line.label}, " if len(lines) > 1 else "")
    if end_labels:
        wanted = sorted((frame.y(value), text, css) for value, text, css in labels)
        heights = spread([y for y, _, _ in wanted], gap=14, low=frame.top, high=frame.bottom)
        for y, (_, text, css) in zip(heights, wanted, strict=True):
            parts.append(_text(text, frame.right + 8, y + 4, f"label {css}"))
    return _svg(size, parts, name)


def xy_chart(lines: Sequence[Line], x_name: str, y_name: str, size: Size, name: str) -> Markup:
    """Lines over a quantity other than steps, told apart by their marks as well. Both axes include 0."""
    width, height = size
    x_ticks = nice_ticks(*_with_zero([x for line in lines for x, _ in line.points]), 5)
    y_ticks = nice_ticks(*_with_zero([y for line in lines for _, y in line.points]), 4)
    frame = _Frame((x_ticks[0], x_ticks[-1]), y_ticks, FREE, width - 12, (22, height - 38))
    parts = list(frame.grid())
    parts += [_text(FREE.tick(tick), frame.x(tick), frame.bottom + 15, anchor="middle") for tick in x_ticks]
    parts += [frame.bottom_line(), _text(y_name, frame.left, 10), _text(x_name, frame.right, height - 6, anchor="end")]
    for index, line in enumerate(lines):
        css = _colour(line, index)
        parts.append(_path(line.points, frame, f"line {css}"))
        for x, y in line.points:
            title = element("title", f"{line.label}: {short(y)} at {short(x)}")
            parts.append(element("path", title, class_=f"dot {css}", d=MARKS[index](frame.x(x), frame.y(y))))
    return _svg(size, parts, name)


def bar_chart(groups: Sequence[BarGroup], axis: Axis, size: Size, name: str = "") -> Markup:
    """Bars side by side with their intervals; the k-th bar of each group has the k-th colour."""
    width, height = size
    values = [value for group in groups for bar in group.bars for value in (bar.value, bar.high)]
    ticks = _ticks([value for value in values if value is not None], axis, height)
    frame = _Frame((0, len(groups)), ticks, axis, width - 8, (14, height - 38))
    parts = list(frame.grid())
    for index, group in enumerate(groups):
        middle = frame.x(index + 0.5)
        each = min(34.0, (frame.x(1) - frame.x(0)) * 0.8 / max(1, len(group.bars)))
        for number, bar in enumerate(group.bars):
            x = middle + (number - len(group.bars) / 2) * each
            parts.append(_draw_bar(bar, f"bar b{number}", x + 1, each - 2, frame))
        parts.append(_text(group.label, middle, height - 22, "tick strong", "middle"))
        parts.append(_text(group.note, middle, height - 8, anchor="middle"))
    return _svg(size, [*parts, frame.bottom_line()], name)


def bar_charts(groups: Sequence[BarGroup], name: str) -> list[Markup]:
    """Shares of any number of groups, MAX_GROUPS in a chart."""
    starts = range(0, len(groups), MAX_GROUPS)
    return [bar_chart(groups[start : start + MAX_GROUPS], SHARE, WIDE, name) for start in starts]


def sparkline(points: Sequence[Point]) -> Markup:
    """A small line without axes; nothing where there are fewer than two finite points."""
    shown = thinned([point for point in points if math.isfinite(point[1])])
    if len(shown) < 2:
        return Markup()
    low, high = min(y for _, y in shown), max(y for _, y in shown)
    first, last = shown[0][0], shown[-1][0]
    line = " ".join(
        f"{2 + 106 * (x - first) / (last - first):.1f},{20 - 18 * (y - low) / ((high - low) or 1.0):.1f}"
        for x, y in shown
    )
    return element("svg", element("polyline", class_="line s0", points=line), viewBox="0 0 110 22")


def legend(labels: Sequence[str], key: str = "line") -> Markup:
    """What the colours mean. `key`: a `line`, a line with its `mark`, or the swatch of a `bar`."""
    items = []
    for index, label in enumerate(labels):
        if key == "bar":
            sample = element("span", "", class_=f"swatch b{index}")
        else:
            parts = [element("path", class_=f"line key s{index}", d="M0 4h20")]
            if key == "mark":
                parts.append(element("path", class_=f"dot s{index}", d=MARKS[index](10, 4)))
            sample = element("svg", *parts, viewBox="0 0 20 8")
        items.append(element("span", sample, label))
    return element("div", *items, class_="legend")


# --- numbers ------------------------------------------------------------------------------------------------------


def nice_ticks(low: float, high: float, num: int) -> list[float]:
    """About `num` round numbers (1, 2 or 5 times a power of ten) that enclose low and high."""
    raw = (high - low) / max(1, num)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{index * step:.12g}") for index in range(first, max(last, first + 1) + 1)]


def moving_average(points: Sequence[Point], window: int) -> list[Point]:
    """The mean of `window` neighbours; at both ends, of those that there are."""
    reach = window // 2
    near = [[y for _, y in points[max(0, index - reach) : index + reach + 1]] for index in range(len(points))]
    return [(x, sum(ys) / len(ys)) for (x, _), ys in zip(points, near, strict=True)]


def smoothing_window(num_points: int) -> int:
    return 2 * (num_points // 24) + 3


def thinned(points: Sequence[Point]) -> list[Point]:
    """At most MAX_POINTS points: neighbours become their mean."""
    size = math.ceil(len(points) / MAX_POINTS)
    if size <= 1:
        return list(points)
    chunks = [points[start : start + size] for start in range(0, len(points), size)]
    return [(sum(x for x, _ in chunk) / len(chunk), sum(y for _, y in chunk) / len(chunk)) for chunk in chunks]


def spread(positions: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Sorted positions moved apart to at least `gap`, within low and high where they fit."""
    moved = list(positions)
    for index in range(1, len(moved)):
        moved[index] = max(moved[index], moved[index - 1] + gap)
    if moved and moved[-1] > high:
        moved[-1] = high
        for index in range(len(moved) - 2, -1, -1):
            moved[index] = min(moved[index], moved[index + 1] - gap)
    assert all(later - earlier >= gap - 1e-6 for earlier, later in pairwise(moved))
    return moved


def _ticks(values: Sequence[float], axis: Axis, height: int) -> list[float]:
    shown = [*values, *(value for value in (axis.low, axis.high) if value is not None)]
    low, high = (min(shown), max(shown)) if shown else (0.0, 1.0)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        # A constant is drawn in the middle of a range that suits its size.
        margin = abs(low) / 2 or 1.0
        low, high = low - margin, high + margin
    return nice_ticks(low, high, max(2, height // 38))


def _with_zero(values: Sequence[float]) -> Point:
    low, high = min(0.0, *values), max(0.0, *values)
    return (low, high) if high > low else (0.0, 1.0)


def _segments(points: Sequence[Numbers]) -> list[list[Numbers]]:
    """Runs of points without a non-finite number among them."""
    runs = groupby(points, key=lambda point: all(map(math.isfinite, point)))
    return [list(run) for is_finite, run in runs if is_finite]


# --- parts --------------------------------------------------------------------------------------------------------

MARKS: tuple[Callable[[float, float], str], ...] = (
    lambda x, y: f"M{x - 3:.1f} {y - 3:.1f}h6v6h-6z",
    lambda x, y: f"M{x:.1f} {y - 4:.1f}l4 7h-8z",
    lambda x, y: f"M{x:.1f} {y - 4:.1f}l4 4l-4 4l-4 -4z",
    lambda x, y: f"M{x:.1f} {y + 4:.1f}l4 -7h-8z",
    lambda x, y: f"M{x - 1:.1f} {y - 4:.1f}h2v8h-2zM{x - 4:.1f} {y - 1:.1f}h8v2h-8z",
)


def element(name: str, *children: object, **attributes: object) -> Markup:
    """An element with escaped text and attributes: `class_` is `class`, `text_anchor` is `text-anchor`."""
    shown = ""
    for key, value in attributes.items():
        text = escape(f"{value:.1f}" if isinstance(value, float) else value)
        shown += f' {key.rstrip("_").replace("_", "-")}="{text}"'
    content = "".join(map(escape, children))
    return Markup(f"<{name}{shown}>{content}</{name}>" if children else f"<{name}{shown}/>")


class _Frame:
    """Data coordinates to picture coordinates, and the lines that both axes are made of."""

    def __init__(self, xs: Point, y_ticks: Sequence[float], axis: Axis, right: float, down: Point):
        self.xs, self.y_ticks, self.axis = xs, y_ticks, axis
        self.left = 14 + 6.2 * max(len(axis.tick(tick)) for tick in y_ticks)
        self.right = float(right)
        self.top, self.bottom = map(float, down)

    def x(self, value: float) -> float:
        low, high = self.xs
        if high <= low:
            return (self.left + self.right) / 2
        return self.left + (value - low) / (high - low) * (self.right - self.left)

    def y(self, value: float) -> float:
        low, high = self.y_ticks[0], self.y_ticks[-1]
        return self.bottom - (value - low) / (high - low) * (self.bottom - self.top)

    def across_line(self, value: float, css: str) -> Markup:
        return element("line", class_=css, x1=self.left, x2=self.right, y1=self.y(value), y2=self.y(value))

    def bottom_line(self) -> Markup:
        return self.across_line(self.y_ticks[0], "axis")

    def grid(self) -> Iterator[Markup]:
        for tick in self.y_ticks:
            yield self.across_line(tick, "grid")
            yield _text(self.axis.tick(tick), self.left - 6, self.y(tick) + 3.5, anchor="end")


def _steps(frame: _Frame) -> Iterator[Markup]:
    """Ticks at whole steps."""
    low, high = frame.xs
    ticks = [low] if high <= low else nice_ticks(low, high, int((frame.right - frame.left) / 45))
    for tick in ticks:
        if low <= tick <= high and tick % 1 == 0:
            x = frame.x(tick)
            yield element("line", class_="axis", x1=x, x2=x, y1=frame.bottom, y2=frame.bottom + 3)
            yield _text(f"{tick:g}", x, frame.bottom + 15, anchor="middle")


def _draw_line(line: Line, css: str, frame: _Frame, prefix: str) -> Iterator[Markup]:
    for piece in _segments(line.band):
        if len(piece) == 1:
            x, low, high = piece[0]
            yield _path([(x, low), (x, high)], frame, f"line whisker-line {css}")
        outline = [(x, high) for x, _, high in piece] + [(x, low) for x, low, _ in reversed(piece)]
        yield element("polygon", class_=f"band {css}", points=_coordinates(outline, frame))
    segments = _segments(line.points)
    for segment in segments:
        shown = thinned(segment)
        yield _path(shown, frame, f"line thin {css}" if line.window else f"line {css}")
        if line.window:
            yield _path(thinned(moving_average(segment, line.window)), frame, f"line {css}")
        if line.dots or len(shown) == 1:
            for x, y in shown:
                yield element("circle", class_=f"dot {css}", cx=frame.x(x), cy=frame.y(y), r=3)
    bounds = {x: (low, high) for x, low, high in line.band}
    axis = frame.axis
    for x, y in thinned([point for segment in segments for point in segment]):
        interval = f" [{axis.text(bounds[x][0])}, {axis.text(bounds[x][1])}]" if x in bounds else ""
        title = element("title", f"{prefix}step {x:g}: {axis.text(y)}{interval}")
        yield element("circle", title, class_="hover", cx=frame.x(x), cy=frame.y(y), r=7)
    for x, y in line.points:
        if not math.isfinite(y):
            title = element("title", f"{prefix}step {x:g}: {short(y)}")
            cross = f"M{frame.x(x) - 3:.1f} {frame.bottom - 6:.1f}l6 6m0 -6l-6 6"
            yield element("path", title, class_="nonfinite", d=cross)


def _draw_bar(bar: Bar, css: str, x: float, width: float, frame: _Frame) -> Markup:
    y, middle = frame.y(bar.value), x + width / 2
    low, high = (frame.y(bar.value if end is None else end) for end in (bar.low, bar.high))
    whisker = f"M{middle:.1f} {low:.1f}V{high:.1f}M{middle - 3:.1f} {high:.1f}h6M{middle - 3:.1f} {low:.1f}h6"
    return element(
        "g",
        element("title", bar.title),
        element("rect", class_=css, x=x, y=y, width=width, height=max(0.0, frame.bottom - y)),
        element("path", class_="whisker", d=whisker),
    )


def _path(points: Sequence[Point], frame: _Frame, css: str) -> Markup:
    return element("polyline", class_=css, points=_coordinates(points, frame)) if len(points) > 1 else Markup()


def _coordinates(points: Sequence[Point], frame: _Frame) -> str:
    return " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in points)


def _text(text: str, x: float, y: float, css: str = "tick", anchor: str = "start") -> Markup:
    return element("text", text, class_=css, x=x, y=y, text_anchor=anchor)


def _colour(line: Line, index: int) -> str:
    return f"s{index if line.colour is None else line.colour}"


def _svg(size: Size, parts: Sequence[Markup], name: str) -> Markup:
    return element("svg", *parts, viewBox=f"0 0 {size[0]} {size[1]}", role="img", aria_label=name)
