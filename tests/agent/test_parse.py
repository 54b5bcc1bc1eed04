"""Reading replies: worked cases, and no text at all that upsets it."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragen.agent.parse import Reply, parse_reply

MALFORMED = Reply(well_formed=False, think_text="", answer_text="", actions=(), num_dropped=0)


@pytest.mark.parametrize(
    ("text", "actions", "num_dropped"),
    [
        ("<think>a</think><answer>Up</answer>", ("Up",), 0),
        ("<think>a</think>\n\n <answer> Up || Down </answer>", ("Up", "Down"), 0),
        ("<think>a</think><answer>Up||Down||Left||Up</answer>", ("Up", "Down"), 2),
        ("<think>a</think><answer>|| Up || || ||</answer> and more", ("Up",), 0),
        ("<think>a</think><answer></answer>", (), 0),
        ("<think>a\nb</think><answer>\nUp\n</answer>", ("Up",), 0),
        ("so <think></think><answer>Up</answer><think>b</think><answer>Down</answer>", ("Up",), 0),
        ("<think><think>a</think><answer>Up</answer>", ("Up",), 0),
        ("<think>a</think> no <think>b</think><answer><answer>Up</answer>", ("Up",), 0),
        ("<think>a</think><answer>Up<|im_end|></answer>", ("Up",), 0),
        ("<think>a</think><answer>Up | Down</answer>", ("Up | Down",), 0),
    ],
)
def test_well_formed_replies(text, actions, num_dropped):
    reply = parse_reply(text, think=True, action_sep="||", max_actions=2, special_tokens=("<|im_end|>",))
    assert reply.well_formed
    assert (reply.actions, reply.num_dropped) == (actions, num_dropped)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Up",
        "<think>a",
        "<think>a</think>",
        "<answer>Up</answer>",
        "<think>a</think>hm<answer>Up</answer>",
        "<think>a</think><answer>Up",
        "<answer>Up</answer><think>a</think>",
        "<THINK>a</THINK><ANSWER>Up</ANSWER>",
    ],
)
def test_malformed_replies_name_no_action(text):
    assert parse_reply(text, think=True, action_sep="||", max_actions=2) == MALFORMED


def test_without_thinking_the_answer_block_is_enough():
    reply = parse_reply("<answer>Up</answer>", think=False, action_sep="||", max_actions=2)
    assert reply == Reply(True, "", "Up", ("Up",), 0)
    # A think block in front of it is no part of the answer.
    text = "<answer><think>a</think><answer>Up</answer>"
    assert parse_reply(text, think=False, action_sep="||", max_actions=2).answer_text == "aUp"
    assert parse_reply("<answer>Up", think=False, action_sep="||", max_actions=2) == MALFORMED


def test_the_parts_are_kept_without_tags():
    text = "<think> see <answer> here\n</think> <answer> Up </answer>"
    reply = parse_reply(text, think=True, action_sep="||", max_actions=1)
    assert (reply.think_text, reply.answer_text) == ("see  here", "Up")


def test_special_tokens_are_those_that_are_passed():
    text = "<think>a</think><answer>Up<s>x</answer>"
    assert parse_reply(text, True, "||", 2, special_tokens=("<s>", "<s>x")).actions == ("Up",)
    assert parse_reply(text, True, "||", 2).actions == ("Up<s>x",)


FRAGMENTS = ["<think>", "</think>", "<answer>", "</answer>", "||", "Up", " ", "\n", "<|im_end|>", "|", "<", "é"]


@given(
    st.one_of(st.text(), st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join)),
    st.booleans(),
    st.sampled_from(["||", ",", ".*", "("]),
    st.integers(1, 3),
)
def test_any_text_is_read_as_one_regular_expression_reads_it(text, think, action_sep, max_actions):
    reply = parse_reply(text, think, action_sep, max_actions, special_tokens=("<|im_end|>",))
    pattern = r"<think>(.*?)</think>\s*<answer>(.*?)</answer>" if think else r"()<answer>(.*?)</answer>"
    match = re.search(pattern, text, re.DOTALL)
    assert reply.well_formed == (match is not None)
    if match is None:
        assert reply == MALFORMED
        return
    parts = [re.sub(r"</?(?:think|answer)>|<\|im_end\|>", "", part).strip() for part in match.groups()]
    named = [part.strip() for part in parts[1].split(action_sep) if part.strip()]
    assert [reply.think_text, reply.answer_text] == parts
    assert reply.actions == tuple(named[:max_actions])
    assert len(reply.actions) + reply.num_dropped == len(named)


def test_a_collapsed_reply_takes_no_time():
    # Three million opening tags: an hour for the obvious regular expression, whose time grows with the square.
    assert not parse_reply("<think>" * 3_000_000, True, "||", 2).well_formed
    assert not parse_reply("<think></think>" * 3_000_000 + "<answer>", True, "||", 2).well_formed
