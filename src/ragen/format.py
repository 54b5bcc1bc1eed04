"""Numbers as people read them. None is a dash."""

import math


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def short(value: float | None) -> str:
    """0.1234, 12.34, 1234, 1e-06: four digits, and no exponent where none is needed."""
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


def duration(seconds: float) -> str:
    """0:42, 3:07, 2:05:00, 3 d 4 h."""
    total = round(seconds)
    if total >= 86_400:
        return f"{total // 86_400} d {total % 86_400 // 3600} h"
    hours, minutes, rest = total // 3600, total % 3600 // 60, total % 60
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def size_text(count: float) -> str:
    """A number of bytes, as `1.2 GB`."""
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 1e3:.1f} kB"
