"""HTML pages from the templates beside this file: single files that load nothing and run nothing.

    render("run", name="ragen / test", …)            # templates/run.html.jinja as text
    Card("Entropy", line_chart(…), note="nats")      # what the macro `card` draws

Python computes plain data, a template lays it out. Everything that is printed is escaped; only markup that `charts`
has made stays as it is.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import markupsafe
from markupsafe import Markup

from ragen import __version__
from ragen.format import harmless, short


@dataclass(frozen=True)
class Card:
    """A chart with its caption."""

    title: str
    chart: Markup
    value: str = ""  # at the right of the title
    legend: Markup | str = ""
    note: str = ""
    narrow: Markup | str = ""  # the chart for a small screen, where that is another one


def render(template: str, **data: Any) -> str:
    """A whole page. Undefined names in a template are errors."""
    return environment().get_template(f"{template}.html.jinja").render(data, version=__version__)


@cache
def environment() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        finalize=escape,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["short"] = short
    made.filters["whole"] = lambda number: short(None if number is None else int(number))
    made.filters["unbroken"] = lambda text: text.replace(" %", "\u00a0%")  # no line begins with a percent sign
    return made


def escape(value: object) -> Markup:
    """Text made harmless; what is markup already stays."""
    if isinstance(value, Markup):
        return value
    return markupsafe.escape(harmless(str(value)))
