"""An override that is written is read back as the same value, by Hydra's grammar and through a shell."""

import shlex

from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import example, given
from hypothesis import strategies as st

from ragen.config.quoting import override

PARSER = OverridesParser.create()
TEXT = st.text(st.characters(exclude_categories=["Cs"])) | st.text("\\'\"${}[],:=~ \n\tab1.-", max_size=8)
NUMBERS = st.integers(-(10**12), 10**12) | st.floats(allow_nan=False)
SCALARS = st.none() | st.booleans() | NUMBERS | TEXT
NAMES = st.from_regex(r"[a-z_][a-z_0-9]*", fullmatch=True)  # the grammar takes no others in a dict
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=3))


@given(VALUES)
@example("null")
@example("True")
@example("1e3")
@example("\\")
@example("a\\'b\\\\")
def test_what_is_quoted_is_read_back(value):
    written = override("some.key", value)
    (pasted,) = shlex.split(shlex.join([written]))
    assert pasted == written
    assert PARSER.parse_override(written).value() == value


def test_names_stay_bare():
    assert override("tags", ["SimpleSokoban", "Bandit"]) == "tags=[SimpleSokoban,Bandit]"
    assert override("agent_proxy.action_sep", " | ") == "agent_proxy.action_sep=' | '"
