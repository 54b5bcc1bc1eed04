"""Forced reply lengths: nothing but the length ends a reply, and ragged lengths have the mean that was asked for."""

from dataclasses import replace
from statistics import fmean

import pytest
from test_native import END, SAMPLING, Letters, Scripted, models

from ragen.engine.forced_length import ForcedLength, read_forced_length
from ragen.engine.native.engine import NativeEngine

__all__ = ["models"]  # a fixture


@pytest.mark.parametrize(
    ("text", "wanted"), [("", None), ("100", ForcedLength(100, False)), ("lognormal:80", ForcedLength(80, True))]
)
def test_the_key_is_read(text, wanted):
    assert read_forced_length(text) == wanted


def test_ragged_lengths_have_the_mean_and_depend_on_the_reply_alone():
    forced = ForcedLength(100, True)
    lengths = [forced.tokens(key, at_most=10_000) for key in range(4000)]
    assert fmean(lengths) == pytest.approx(100, rel=0.05)
    assert min(lengths) < 40 and max(lengths) > 300
    assert lengths[:9] == [forced.tokens(key, at_most=10_000) for key in range(9)]
    assert max(forced.tokens(key, at_most=120) for key in range(4000)) == 120


@pytest.mark.parametrize("forced", [ForcedLength(11, False), ForcedLength(11, True)])
def test_nothing_else_ends_a_reply(models, forced):
    sampling = replace(SAMPLING, forced_length=forced, max_tokens=400)
    conversations = [Scripted([(2, 3, 4), (5,)], True, key) for key in range(12)]
    NativeEngine(models[0], Letters(), END).run(conversations, sampling)
    replies = [reply for conversation in conversations for reply in conversation.replies]
    wanted = [forced.tokens((key * 977 + turn) % 2**64, at_most=400) for key in range(12) for turn in range(2)]
    assert [len(reply.ids) for reply in replies] == wanted
    assert any(END in reply.ids[:-1] for reply in replies)
    assert all((reply.stopped_by == "end_of_turn") == (reply.ids[-1] == END) for reply in replies)


def test_files_name_a_forced_length_only_where_there_is_one():
    """The record of a sampling is part of what an evaluation resumes by."""
    assert "forced_length" not in SAMPLING.recorded()
    assert replace(SAMPLING, forced_length=ForcedLength(5, False)).recorded()["forced_length"] == (5, False)
