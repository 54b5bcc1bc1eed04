"""Templates: what is printed is escaped, what is missing is an error, and only our own charts are markup."""

import re
from pathlib import Path
from xml.etree import ElementTree

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragen.report import charts, pages
from ragen.report.charts import Bar, BarGroup, Line, element
from ragen.report.pages import escape

TEMPLATES = Path(pages.__file__).parent / "templates"


def rendered(template, **data):
    return pages.environment().from_string(template).render(data)


@given(st.text(max_size=60))
def test_what_is_printed_is_escaped_once(text):
    shown = rendered('<p title="{{ text }}">{{ text }}</p>', text=text)
    assert shown == f'<p title="{escape(text)}">{escape(text)}</p>'
    assert rendered("{{ text }}", text=escape(text)) == escape(text), "markup stays as it is"
    assert not re.search(r"[<>\"'\x00-\x08\x0b-\x1f\x7f]", escape(text))


def test_control_characters_are_shown_as_symbols():
    assert escape("a\x00\x1b\r\x7f\n\tb") == "a␀␛␍␡\n\tb"


def test_a_name_that_no_data_has_is_an_error():
    with pytest.raises(jinja2.UndefinedError, match="missing"):
        rendered("{{ missing }}")


def test_no_template_turns_escaping_off():
    names = sorted(path.name for path in TEMPLATES.iterdir())
    assert {"base.html.jinja", "run.html.jinja", "sweep.html.jinja", "evaluation.html.jinja", "style.css"} <= set(names)
    for name in names:
        text = (TEMPLATES / name).read_text(encoding="utf-8")
        assert not re.search(r"\bsafe\b|autoescape|<script|https?:|@import|url\(", text), name
        pages.environment().get_template(name)


@given(st.text("<>&\"'\x00 ab", max_size=12), st.sampled_from(["line", "mark", "bar"]))
def test_every_chart_is_well_formed_whatever_its_labels(label, key):
    lines = [Line(label, [(0, 1.0), (3, 2.0)], [(0, 0.5, 1.5)]), Line(label, [(1, 4.0)])]
    groups = [BarGroup(label, label, [Bar(0.5, 0.25, 0.75, label)])]
    drawn = [
        charts.line_chart(lines, charts.Axis(), charts.SMALL, end_labels=True, name=label),
        charts.xy_chart(lines, label, label, charts.SMALL, label),
        *charts.bar_charts(groups * 9, label),
        charts.legend([label, label], key),
        charts.sparkline(lines[0].points),
    ]
    assert len(drawn) == 6, "nine groups are two charts"
    for svg in drawn:
        ElementTree.fromstring(svg)


def test_elements_by_hand():
    assert element("circle", cx=1.25, r=7, class_="dot s0") == '<circle cx="1.2" r="7" class="dot s0"/>'
    assert element("text", "a<b", text_anchor="end") == '<text text-anchor="end">a&lt;b</text>'
    assert element("svg", element("g"), "&") == "<svg><g/>&amp;</svg>"
    assert charts.sparkline([(0, 1.0)]) == charts.sparkline([]) == ""


def test_a_line_can_keep_the_colour_of_its_setting():
    svg = charts.line_chart([Line("third", [(0, 1.0), (1, 2.0)], colour=2)], charts.Axis(), charts.SMALL)
    assert 'class="line s2"' in svg and "s0" not in svg
