"""Numbers and texts formatted for people. None is a dash."""

import math
from collections.abc import Iterable, Sequence

from ragen.statistics import Difference

SPARKS = "▁▂▃▄▅▆▇█"
# What text must not do to a terminal or a page: control codes are shown as their symbols, those without one (C1, marks
# that change the direction of writing, halves of surrogate pairs) as a replacement character.
_DIRECTION = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_SYMBOLS = (
    {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
    | {0x7F: 0x2421}
    | dict.fromkeys((*range(0x80, 0xA0), *_DIRECTION, *range(0xD800, 0xE000)), 0xFFFD)
)


def harmless(text: str) -> str:
    """Text of an environment, a model, a file or a server, safe to show; every character stays one character."""
    return text.translate(_SYMBOLS)


def percent(value: float | None, interval: tuple[float, float] | None = None) -> str:
    """33.0 %, or 33.0 % [29.1, 37.2] with its interval."""
    bounds = "" if interval is None else f" [{100 * interval[0]:.1f}, {100 * interval[1]:.1f}]"
    return "–" if value is None else f"{100 * value:.1f} %{bounds}"


def in_points(change: Difference) -> str:
    """+15.2 [+10.3, +19.9]: a change of a success rate in percentage points, with its interval."""
    return f"{100 * change.mean:+.1f} [{100 * change.low:+.1f}, {100 * change.high:+.1f}]"


def short(value: float | None) -> str:
    """0.1234, 12.34, 1234, 1e-06: four digits, with an exponent only where needed."""
    if value is None:
        return "–"
    if isinstance(value, int):  # and bool
        return str(int(value))
    if 1000 <= abs(value) < 1e9:
        return f"{value:.0f}"
    return f"{value:.4g}"


def compact(value: float) -> str:
    """9512, 12.3k, 1.2M."""
    for limit, factor, unit in ((1e4, 1, ""), (1e6, 1e3, "k"), (math.inf, 1e6, "M")):
        if abs(value) < limit:
            return f"{value / factor:.0f}" if not unit else f"{value / factor:.1f}{unit}"
    return str(value)


def counted(number: int, noun: str) -> str:
    """1 action, 2 actions."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def sparkline(values: Sequence[float], low: float | None = None, high: float | None = None) -> str:
    """▁▅█: a curve of one line, between its lowest and its highest value unless other ends are given."""
    low, high = (min(values) if low is None else low), (max(values) if high is None else high)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((value - low) * scale)] for value in values)


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lines without a final line break. A `|` in a cell would end it and becomes `/`."""
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    lines += [f"| {' | '.join(text.replace('|', '/') for text in texts)} |" for texts in rows]
    return "\n".join(lines)


def duration(seconds: float) -> str:
    """0:42, 3:07, 2:05:00, 3 d 4 h."""
    total = round(seconds)
    if total >= 86_400:
        return f"{total // 86_400} d {total % 86_400 // 3600} h"
    hours, minutes, rest = total // 3600, total % 3600 // 60, total % 60
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def size_text(count: float) -> str:
    """A number of bytes: `1.2 GB`, `12 bytes`."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} bytes"
