"""The solver's games: perfect, and in the words and tokens of a rollout."""

from functools import lru_cache

import pytest
from small import config_of

from ragen.agent.chat_template import ChatTemplate
from ragen.agent.episode import noise_stream
from ragen.agent.prompt import STYLES
from ragen.config import derive
from ragen.engine.base import Sampled
from ragen.env.registry import make
from ragen.model.pocket.tokenizer import make_tokenizer
from ragen.rollout.collect import GroupRequest, PlayedEpisode, World
from ragen.sft.data import Lesson, solve_levels
from ragen.sft.demonstrate import can_be_won, demonstrate, reply, solver
from ragen.sft.tokens import answers_of
from ragen.types import EpisodeState

SEEDS = range(100_000, 100_040)


class Table:
    """A game, ready for a solver."""

    def __init__(self, *words: str, environment: str = "sokoban"):
        config = config_of(*words, environment=environment)
        self.tag, self.rules = derive.sft_tag(config)[1], derive.rules(config)
        self.env = make(self.tag)
        self.prompt = STYLES[self.rules.prompt_style](self.env, self.tag, self.rules, 12)
        self.player = solver(self.env, self.tag, self.rules)

    def play(self, start, seed=0):
        return demonstrate(self.env, self.tag, self.rules, self.prompt, start, self.player, noise_stream(seed, 0, 0))


def fewest_moves(env, start) -> int | None:
    """Breadth first, and nothing else."""
    frontier, seen, num_moves = [start], {start}, 0
    while frontier:
        num_moves += 1
        following = []
        for state in frontier:
            for action in (1, 2, 3, 4):
                after = env.step(state, action)
                if after.success:
                    return num_moves
                key = after.state._replace(num_steps=0)
                if not after.done and key not in seen:
                    seen.add(key)
                    following.append(after.state)
        frontier = following
    return None


def test_sokoban_is_solved_in_the_fewest_moves():
    table = Table()
    lengths = {}
    for seed in SEEDS:
        start = table.env.reset(seed, "sft")
        fewest = fewest_moves(table.env, start)
        assert can_be_won(table.env, table.tag, table.rules, start, 100) == (fewest <= 5)  # five turns, one action
        assert can_be_won(table.env, table.tag, table.rules, start, fewest - 1 or 1) == (fewest == 1)
        if fewest <= 5:
            played = table.play(start)
            assert played.final.success
            assert played.final.num_actions == len(played.turns) == fewest
            lengths[fewest] = lengths.get(fewest, 0) + 1
    assert set(lengths) == {1, 2, 3, 4, 5}


def test_several_moves_a_turn():
    table = Table("agent_proxy.max_actions_per_turn=3")
    for seed in SEEDS[:10]:
        start = table.env.reset(seed, "sft")
        fewest = fewest_moves(table.env, start)
        played = table.play(start)
        assert played.final.num_actions == fewest
        assert len(played.turns) == -(-fewest // 3)
        assert played.turns[0].reply_text.count(" || ") == min(fewest, 3) - 1


@pytest.mark.parametrize("seed", SEEDS[:6])
def test_on_slippery_ice_nobody_wins_more_often(seed):
    """The exact success of the solver's answers, over all that chance can do, is the best that there is."""
    table = Table(environment="frozenlake")
    env = table.env

    def branches(state, action):
        return [(chance, env.step(state, action, noise)) for chance, noise in env.chances(state, action)]

    @lru_cache(None)
    def best(state, turns):
        if turns == 0:
            return 0.0
        return max(expected(state, action, turns, best) for action in (1, 2, 3, 4))

    @lru_cache(None)
    def reached(state, turns):
        if turns == 0:
            return 0.0
        _, [action] = table.player(EpisodeState(state, num_turns=5 - turns, num_actions=5 - turns))
        return expected(state, action, turns, reached)

    def expected(state, action, turns, value):
        return sum(
            chance * (1.0 if after.success else 0.0 if after.done else value(after.state, turns - 1))
            for chance, after in branches(state, action)
        )

    start = env.reset(seed, "sft")
    assert reached(start, 5) == pytest.approx(best(start, 5), abs=1e-12)


def test_luck_is_that_of_the_level():
    """Replayed with the same luck the game is the same; over many levels it wins about as often as it should."""
    table = Table(environment="frozenlake")
    [first], [again] = ([table.play(table.env.reset(7, "sft"), 7)] for _ in range(2))
    assert first == again
    levels = [level for level in solve_levels(Lesson.of(config_of(environment="frozenlake")), range(60)) if level.rows]
    won = sum(level.success for level in levels)
    assert 0 < won < len(levels)


def test_where_nothing_can_win_any_more_the_way_still_leads_to_the_goal():
    table = Table("sft.frozenlake.size=7", "sft.frozenlake.is_slippery=False", environment="frozenlake")
    start = table.env.parse_grid("P______\n" + "_______\n" * 5 + "______G")
    played = table.play(start)
    assert not played.final.success
    names = {"Right", "Down"}
    assert len(played.turns) == 5
    assert all(
        turn.reply_text in {f"<think></think><answer>{name}</answer>" for name in names} for turn in played.turns
    )


def test_the_bandit_is_pulled_once():
    table = Table(environment="two_armed_bandit")
    played = table.play(table.env.reset(3, "sft"))
    assert [turn.reply_text for turn in played.turns] == ["<think></think><answer>dragon</answer>"]
    assert played.final.success


def test_replies_with_and_without_thinking():
    assert reply(Table().rules, "a wall", ["Up"]) == "<think>a wall</think><answer>Up</answer>"
    no_think = Table("training.no_think_rl=True").rules
    assert reply(no_think, "", ["Up", "Left"]) == "<answer>Up || Left</answer>"


def test_a_secret_is_not_shown():
    table = Table()
    start = table.env.reset(SEEDS[1], "sft")
    whole = table.play(start)
    secret = whole.turns[-1].state_text
    env, tag, rules, noise = table.env, table.tag, table.rules, noise_stream(0, 0, 0)
    broken = demonstrate(env, tag, rules, table.prompt, start, table.player, noise, {secret}.__contains__)
    assert broken.turns == whole.turns[:-1]
    assert not broken.final.finished


# --- the same as a rollout ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("environment", ["sokoban", "frozenlake", "two_armed_bandit"])
@pytest.mark.parametrize(
    "words",
    [
        [],
        ["agent_proxy.prompt_style=full"],
        ["training.no_think_rl=True"],
        ["agent_proxy.context_window_mode=limited_multi_turn", "agent_proxy.max_context_window=2"],
        ["agent_proxy.context_window_mode=single_turn", "agent_proxy.max_context_window=3"],
    ],
    ids=["think", "full prompt", "no think", "limited", "single"],
)
def test_tokens_are_those_of_a_rollout_in_which_a_model_says_the_same(environment, words):
    config = config_of(*words, environment=environment)
    chat, rules = ChatTemplate(make_tokenizer()), derive.rules(config)
    name = config.es_manager.val.env_configs.tags[0]
    world = World.make(config, name, chat)
    levels = [level for level in solve_levels(Lesson.of(config), SEEDS[:8]) if level.rows]
    assert levels
    for level in levels:
        rows = [row | {"extra_info": row["extra_info"] | {"split": "train"}} for row in level.rows]
        episode = PlayedEpisode(world, GroupRequest(name, level.seed, "sft", 0, 1), 0, ())
        for row in rows:
            assert episode.prompt() is not None
            said = row["response"].removeprefix(world.view.prompt.reply_prefix())
            ids = (*chat.tokenizer.encode(said, add_special_tokens=False), chat.end_of_turn_id)
            episode.take(Sampled(ids, (0.0,) * len(ids), "end_of_turn"))
        assert episode.prompt() is None
        played = episode.finished()
        assert played.final.success == level.success
        assert [answers.sequence for answers in answers_of(rows, chat, rules, 4096)] == played.sequences()
