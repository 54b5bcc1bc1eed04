"""The three windows, against conversations put together here by hand; and the mask of what they give."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragen.agent.chat_template import ChatTemplate
from ragen.agent.prompt import STYLES
from ragen.agent.window import WINDOWS, View
from ragen.env.base import Tag
from ragen.types import Episode, EpisodeState, Turn, TurnResult

OPEN = "<|im_start|>assistant\n<think>"
REPLIES = [" One.</think><answer>Left</answer>", " Two, and then the", " Three.</think><answer>Right</answer>"]
STOPPED_BY = ["end_of_turn", "length", "answer"]
REWARDS = [-0.25, 0.0, -0.5]


@pytest.fixture(scope="module")
def view_with(corridor, rules_with, tokenizer_with, template_text):
    chat = ChatTemplate(tokenizer_with(template_text("smollm2")))

    def make(num_turns_in_view=5, max_prompt_tokens=10_000, style="full"):
        prompt = STYLES[style](corridor, Tag(), rules_with(), 400)
        return View(chat, prompt, prompt.system_text(), num_turns_in_view, max_prompt_tokens)

    return make


def turn_text(view, number):
    return view.prompt.turn_text(number, view.prompt.env.reset(0), 10, False)


def play(view, mode, num_turns=3):
    """Turns with fixed replies: the first ended by itself, the second cut, the third stopped at its answer."""
    turns = []
    for index in range(num_turns):
        given = WINDOWS[mode](view, turns, turn_text(view, index + 1))
        ids = view.chat.tokenizer.encode(REPLIES[index], add_special_tokens=False)
        ids += view.chat.closing_ids() if STOPPED_BY[index] == "end_of_turn" else []
        turns.append(
            Turn(
                given_ids=given.ids,
                continues=given.continues,
                reply_ids=tuple(ids),
                log_probs=tuple(-0.5 for _ in ids),
                stopped_by=STOPPED_BY[index],
                state_text="__P__",
                turn_text=turn_text(view, index + 1),
                reply_text="<think>" + REPLIES[index],
                result=TurnResult(REWARDS[index], 0.0, (), 0, 0, 0),
            )
        )
    return turns


def chat_text(system, *rest):
    """The ChatML of user, reply, user, …, written out."""
    text = f"<|im_start|>system\n{system}<|im_end|>\n"
    for index, content in enumerate(rest):
        text += f"<|im_start|>user\n{content}<|im_end|>\n{OPEN}" if index % 2 == 0 else f"{content}<|im_end|>\n"
    return text


def feedback(reward):
    return f"Reward of your last turn: {reward:g}\n\n"


def whole_chat(view, first=1):
    """Turns `first` to 4 as one conversation."""
    parts = [turn_text(view, first)]
    for number in range(first, 4):
        parts += [REPLIES[number - 1], feedback(REWARDS[number - 1]) + turn_text(view, number + 1)]
    return chat_text(view.system_text, *parts)


def decode(view, ids):
    return view.chat.tokenizer.decode(ids)


def encode(view, text):
    return tuple(view.chat.tokenizer.encode(text, add_special_tokens=False))


def test_full_gives_only_what_is_new_and_adds_up_to_the_conversation(view_with):
    view = view_with()
    turns = play(view, "full")
    given = WINDOWS["full"](view, turns, turn_text(view, 4))
    ids = [id_ for turn in turns for id_ in (*turn.given_ids, *turn.reply_ids)] + list(given.ids)
    assert tuple(ids) == encode(view, whole_chat(view))
    assert [turn.continues for turn in turns] == [False, True, True]
    assert given.continues and not given.too_long
    # A reply that did not end itself is closed in front of the next message, one that did is not.
    end = view.chat.end_of_turn_id
    assert [turn.given_ids[0] == end for turn in turns[1:]] + [given.ids[0] == end] == [False, True, True]


@pytest.mark.parametrize(("num_in_view", "first"), [(5, 1), (4, 1), (3, 2), (2, 3), (1, 4)])
def test_limited_shows_the_last_turns_as_chat(view_with, num_in_view, first):
    view = view_with(num_in_view)
    given = WINDOWS["limited_multi_turn"](view, play(view, "limited_multi_turn"), turn_text(view, 4))
    assert given.ids == encode(view, whole_chat(view, first))
    assert (given.num_past_shown, given.continues) == (4 - first, False)


@pytest.mark.parametrize(("num_in_view", "first"), [(5, 1), (3, 2), (1, 4)])
@pytest.mark.parametrize("style", STYLES)
def test_single_turn_retells_the_last_turns(view_with, style, num_in_view, first):
    view = view_with(num_in_view, style=style)
    turns = play(view, "single_turn")
    given = WINDOWS["single_turn"](view, turns, turn_text(view, 4))
    summary = view.prompt.summary_text(turns[first - 1 :], 3)
    assert given.ids == encode(view, chat_text(view.system_text, summary + turn_text(view, 4)))
    assert [reply in summary for reply in REPLIES] == [index >= first - 1 for index in range(3)]


def test_without_history_both_windows_agree(view_with):
    view = view_with(1)
    turns = play(view, "full")
    limited, single = (WINDOWS[mode](view, turns, turn_text(view, 4)) for mode in ("limited_multi_turn", "single_turn"))
    assert limited == single


@pytest.mark.parametrize("mode", ["limited_multi_turn", "single_turn"])
def test_the_oldest_turns_go_first_where_it_gets_too_long(view_with, mode):
    turns = play(view_with(), mode)
    lengths = [
        len(WINDOWS[mode](view_with(num_in_view), turns, turn_text(view_with(), 4)).ids) for num_in_view in (1, 2, 3, 4)
    ]
    assert lengths == sorted(lengths)
    for num_shown, length in enumerate(lengths):
        given = WINDOWS[mode](view_with(5, max_prompt_tokens=length), turns, turn_text(view_with(), 4))
        assert (given.num_past_shown, len(given.ids), given.too_long) == (num_shown, length, False)
    # Not even the current turn fits: flagged, and whole.
    given = WINDOWS[mode](view_with(5, max_prompt_tokens=lengths[0] - 1), turns, turn_text(view_with(), 4))
    assert (given.num_past_shown, len(given.ids), given.too_long) == (0, lengths[0], True)


def test_full_flags_a_sequence_that_gets_too_long(view_with):
    turns = play(view_with(), "full")
    length = len(encode(view_with(), whole_chat(view_with())))
    for limit, too_long in [(length, False), (length - 1, True)]:
        given = WINDOWS["full"](view_with(5, max_prompt_tokens=limit), turns, turn_text(view_with(), 4))
        assert given.too_long == too_long
    first = WINDOWS["full"](view_with(5, max_prompt_tokens=10), [], turn_text(view_with(), 1))
    assert first.too_long and not first.continues


@pytest.mark.parametrize("mode", WINDOWS)
def test_replies_enter_training_as_they_were_sampled(view_with, mode):
    view = view_with()
    turns = play(view, mode)
    episode = Episode("Corridor", 0, "train", 0, 0, view.system_text, tuple(turns), EpisodeState(None))
    sequences = episode.sequences()
    assert len(sequences) == (1 if mode == "full" else 3)
    assert [sequence.first_turn for sequence in sequences] == list(range(len(sequences)))
    trained = [id_ for s in sequences for id_, sampled in zip(s.ids, s.sampled, strict=True) if sampled]
    assert trained == [id_ for turn in turns for id_ in turn.reply_ids]
    for sequence in sequences:
        assert len(sequence.ids) == len(sequence.sampled) == len(sequence.log_probs)
        assert [log_prob != 0.0 for log_prob in sequence.log_probs] == list(sequence.sampled)
        assert sum(stop - start for start, stop in sequence.reply_spans) == sum(sequence.sampled)
    spans = [s.ids[start:stop] for s in sequences for start, stop in s.reply_spans]
    assert spans == [turn.reply_ids for turn in turns]


def test_the_mask_worked_by_hand(view_with):
    view = view_with(style="terse")
    turns = play(view, "full", num_turns=2)
    (sequence,) = Episode("Corridor", 0, "train", 0, 0, "", tuple(turns), EpisodeState(None)).sequences()
    text = "".join(
        f"[{decode(view, [id_])}]" if sampled else decode(view, [id_])
        for id_, sampled in zip(sequence.ids, sequence.sampled, strict=True)
    ).replace("][", "")
    assert (
        text
        == chat_text(
            view.system_text,
            "turn 1/5\n__P__\n10 left",
            "[ One.</think><answer>Left</answer><|im_end|>]",
            "reward -0.25\nturn 2/5\n__P__\n8 left",
        ).replace("]<|im_end|>", "]")
        + "[ Two, and then the]"
    )


@given(st.lists(st.integers(10, 300), min_size=1, max_size=20))
def test_no_reply_is_ever_tokenised_again(view_with, ids):
    """Ids that no tokenizer would give for their text stay what they are."""
    view = view_with()
    turn = Turn(
        (1,), False, tuple(ids), tuple(-1.0 for _ in ids), "length", "s", "u", "r", TurnResult(0.0, 0.0, (), 0, 0, 0)
    )
    given_ids = WINDOWS["limited_multi_turn"](view, [turn], "next").ids
    opening = encode(view, chat_text(view.system_text, "u"))
    assert given_ids[: len(opening) + len(ids)] == (*opening, *ids)
    assert given_ids[len(opening) + len(ids)] == view.chat.end_of_turn_id
