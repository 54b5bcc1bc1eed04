"""The words: complete, true to the settings, and few where that was asked for."""

import pytest

from ragen.agent.prompt import STYLES
from ragen.env.base import Tag
from ragen.env.registry import catalogue, make
from ragen.types import Turn, TurnResult


@pytest.fixture
def prompt_of(corridor, rules_with):
    def make(style="full", env=corridor, tag=None, reply_limit=400, **changes):
        return STYLES[style](env, tag or Tag(), rules_with(**changes), reply_limit)

    return make


def past_turn(state_text, reply_text, reward):
    result = TurnResult(reward, 0.0, (), 0, 0, 0)
    return Turn((1,), False, (2,), (0.0,), "answer", state_text, "", reply_text, result)


def test_the_full_conversation_word_for_word(prompt_of, corridor):
    prompt = prompt_of()
    assert prompt.system_text() == (
        "You are an agent that solves a task by acting in it, turn by turn.\n"
        "\n"
        "Walk to the right end.\n"
        "\n"
        "P is you.\n"
        "\n"
        "Available actions: Left, Right\n"
        'You may take up to 2 actions per turn, separated by "||", and at most 10 actions in at most 5 turns.\n'
        "\n"
        "Every reply has this form:\n"
        "<think>your thoughts</think><answer>action || action</answer>"
    )
    assert prompt.turn_text(2, corridor.reset(0), actions_left=8, warn_invalid=True) == (
        "Turn 2 of 5\n"
        "State:\n"
        "__P__\n"
        "Your last reply named no valid action, so nothing was done.\n"
        "You have 8 actions left.\n"
        "Always use this form, with nothing after it: <think>your thoughts</think><answer>action || action</answer>\n"
        "Keep the reply within 100 tokens."
    )
    assert prompt.feedback_text(-0.2) == "Reward of your last turn: -0.2\n\n"


def test_the_terse_conversation_word_for_word(prompt_of, corridor):
    prompt = prompt_of("terse", think=False)
    assert prompt.system_text() == ("Corridor. Actions: Left, Right. Up to 2 a turn: <answer>action || action</answer>")
    assert prompt.turn_text(1, corridor.reset(0), actions_left=10, warn_invalid=False) == "turn 1/5\n__P__\n10 left"
    assert prompt.turn_text(2, corridor.reset(0), 8, True) == "turn 2/5\n__P__\nno valid action\n8 left"
    assert prompt.feedback_text(-0.2) == "reward -0.2\n"


@pytest.mark.parametrize("style", STYLES)
def test_the_instruction_of_the_tag_replaces_the_task(prompt_of, style):
    text = prompt_of(style, tag=Tag(env_instruction="Be quick.")).system_text()
    assert "Be quick." in text
    assert "right end" not in text
    assert "Corridor" not in text


@pytest.mark.parametrize("style", STYLES)
def test_actions_that_depend_on_the_level_are_shown_with_it(prompt_of, doors, style):
    prompt = prompt_of(style, env=doors)
    assert "Oak" not in prompt.system_text()
    assert "Oak, Iron" in prompt.turn_text(1, doors.reset(1), 1, False)
    assert "Iron, Oak" in prompt.turn_text(1, doors.reset(2), 1, False)


@pytest.mark.parametrize("style", STYLES)
def test_a_single_action_has_no_separator(prompt_of, corridor, style):
    for prompt in (prompt_of(style, max_actions_per_turn=1), prompt_of(style, tag=Tag(max_actions_per_traj=1))):
        words = prompt.system_text() + prompt.turn_text(1, corridor.reset(0), 1, False)
        assert "||" not in words
        assert "1 actions" not in words
        assert "<answer>action</answer>" in words


def test_the_separator_and_the_limits_are_those_of_the_run(prompt_of):
    text = prompt_of(action_sep=";", max_actions_per_turn=3, max_turn=7, tag=Tag(max_actions_per_traj=9)).system_text()
    assert 'up to 3 actions per turn, separated by ";", and at most 9 actions in at most 7 turns' in text
    assert "||" not in text


@pytest.mark.parametrize(
    ("max_actions_per_turn", "turn_number", "actions_left", "possible"),
    [(1, 1, 100, 5), (1, 4, 97, 2), (1, 5, 96, 1), (2, 1, 100, 10), (2, 3, 3, 3)],
)
def test_no_more_actions_are_promised_than_the_turns_allow(
    prompt_of, corridor, max_actions_per_turn, turn_number, actions_left, possible
):
    for style, words in (("full", f"You have {possible} action"), ("terse", f"\n{possible} left")):
        prompt = prompt_of(style, tag=Tag(max_actions_per_traj=100), max_actions_per_turn=max_actions_per_turn)
        assert words in prompt.turn_text(turn_number, corridor.reset(0), actions_left, False)


def test_the_total_is_what_turns_and_tag_allow_together(prompt_of):
    long = Tag(max_actions_per_traj=100)
    assert "at most 5 actions in at most 5 turns." in prompt_of(tag=long, max_actions_per_turn=1).system_text()
    assert "at most 4 actions in at most 2 turns." in prompt_of(max_turn=2).system_text()
    assert "a single action" in prompt_of(tag=long, max_turn=1, max_actions_per_turn=1).system_text()


def test_a_game_of_one_action_that_ends_on_nonsense_has_one_turn(prompt_of, corridor):
    once = Tag(max_actions_per_traj=1, end_on_invalid=True)
    assert "Turn 1 of 1\n" in prompt_of(tag=once).turn_text(1, corridor.reset(0), 1, False)
    patient = Tag(max_actions_per_traj=1)
    assert "Turn 1 of 5\n" in prompt_of(tag=patient).turn_text(1, corridor.reset(0), 1, False)


@pytest.mark.parametrize(("think", "prefix"), [(True, "<think>"), (False, "<answer>")])
@pytest.mark.parametrize("style", STYLES)
def test_the_form_begins_with_the_forced_opening(prompt_of, style, think, prefix):
    prompt = prompt_of(style, think=think)
    assert prompt.reply_prefix() == prefix
    assert ("<think>" in prompt.system_text()) == think


@pytest.mark.parametrize(("max_tokens", "limit", "shown"), [(100, 400, 100), (None, 400, 400), (500, 400, 400)])
def test_the_budget_is_one_that_the_reply_can_use(prompt_of, corridor, max_tokens, limit, shown):
    prompt = prompt_of(tag=Tag(max_tokens=max_tokens), reply_limit=limit)
    assert f"within {shown} tokens" in prompt.turn_text(1, corridor.reset(0), 10, False)


@pytest.mark.parametrize(
    ("reward", "text"), [(-0.1 - 0.1 - 0.1, "-0.3"), (10.8, "10.8"), (-0.0, "0"), (0.3 - 0.1 - 0.2, "0"), (1, "1")]
)
@pytest.mark.parametrize("style", STYLES)
def test_rewards_are_readable_numbers(prompt_of, style, reward, text):
    assert prompt_of(style).feedback_text(reward).split()[-1] == text


def test_the_summary_retells_the_last_turns(prompt_of):
    past = [past_turn("_P___", "<think>a</think><answer>Left</answer>", -0.25), past_turn("__P__", "hm", 0.0)]
    assert prompt_of().summary_text(past, num_past=3) == (
        "You have taken 3 turns. The last 2, oldest first:\n"
        "-----\n"
        "Turn 2\nState:\n_P___\nYour reply:\n<think>a</think><answer>Left</answer>\nReward: -0.25\n"
        "-----\n"
        "Turn 3\nState:\n__P__\nYour reply:\nhm\nReward: 0\n"
        "-----\n"
        "Now:\n\n"
    )
    assert prompt_of("terse").summary_text(past[1:], 3) == "__P__\nhm\nreward 0\n"
    assert prompt_of().summary_text([], 3) == prompt_of("terse").summary_text([], 3) == ""


def test_terse_is_a_fraction_of_full(prompt_of, corridor):
    def length(style):
        prompt = prompt_of(style)
        turns = [prompt.turn_text(turn, corridor.reset(0), 10, False) for turn in range(1, 6)]
        return len(prompt.system_text()) + sum(map(len, turns)) + 4 * len(prompt.feedback_text(-0.2))

    assert length("terse") < length("full") / 4


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", catalogue())
def test_every_tag_of_the_catalogue_shows_its_actions_and_states(prompt_of, name, style):
    tag = catalogue()[name]
    env = make(tag)
    prompt = prompt_of(style, env=env, tag=tag)
    for seed in range(3):
        state = env.reset(seed)
        turn = prompt.turn_text(1, state, tag.max_actions_per_traj, False)
        assert env.render(state) in turn
        assert ", ".join(env.action_names(state).values()) in prompt.system_text() + turn
        assert turn == turn.strip()
    assert prompt.system_text() == prompt.system_text().strip()


def test_a_terse_sokoban_episode_suits_a_tiny_model(prompt_of, tokenizer_with):
    """Five turns on 6x6, with all that ChatML adds, in a vocabulary of a few hundred: near 450 tokens."""
    tag = catalogue()["SimpleSokoban"]
    env = make(tag)
    prompt = prompt_of("terse", env=env, tag=tag, think=False)
    text = f"<|im_start|>system\n{prompt.system_text()}<|im_end|>\n"
    for turn in range(1, 6):
        user = (prompt.feedback_text(-0.2) if turn > 1 else "") + prompt.turn_text(turn, env.reset(turn), 10, False)
        text += f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n<answer>Up || Left</answer><|im_end|>\n"
    assert len(tokenizer_with("-").encode(text, add_special_tokens=False)) < 480


@pytest.mark.parametrize(
    "change", [{"max_turn": 0}, {"max_actions_per_turn": 0}, {"action_sep": " "}, {"max_context_window": 0}]
)
def test_rules_that_cannot_be_played_are_refused(rules_with, change):
    with pytest.raises(ValueError, match=next(iter(change))):
        rules_with(**change)
