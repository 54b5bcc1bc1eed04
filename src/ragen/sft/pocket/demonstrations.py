"""What `pocket` is taught from: conversations of a player of middling skill, exactly as a rollout makes them.

    for episode in demonstrations(tokenizer, TASKS["SimpleSokoban"], seeds=range(1000)):
        [sequence] = episode.sequences()              # ids, and which of them the player said

The player sees well and acts so-so. Its think block is always true; its actions follow, drawn for each turn, the
solver, a bad habit, or chance (`Manners`). The habits: in Sokoban it walks straight at
the box and pushes wherever that leads, on the lake it knows only Down and Right, and of two arms it likes the one
listed first. So `pocket` learns the form of a reply, to read a board, and good moves as the less likely choice: which
of its choices are worth keeping is left to reinforcement learning.

Levels are those of the split `sft`. No conversation shows a board from which a validation level starts.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random
from typing import Any

from ragen.agent.chat_template import ChatTemplate
from ragen.agent.prompt import STYLES
from ragen.agent.rules import AgentRules
from ragen.agent.window import View, full
from ragen.env.base import Action, Environment, State
from ragen.env.registry import catalogue, make
from ragen.env.solve import shortest_plan
from ragen.sft.demonstrate import Spoken, demonstrate
from ragen.sft.tokens import reply_ids
from ragen.types import Episode, EpisodeState, Turn

RULES = AgentRules(
    max_turn=5,
    max_actions_per_turn=2,
    action_sep="||",
    think=True,
    format_penalty=-0.1,
    context_window_mode="full",
    max_context_window=-1,
    prompt_style="terse",
)
REPLY_LIMIT = 100  # of a prompt that does not state it
VALIDATION_SEEDS = range(123, 635)


@dataclass(frozen=True)
class Manners:
    """How often a turn is played how; the rest of the turns is random."""

    skill: float
    habit: float

    def draw(self, random: Random) -> str:
        shares = (self.skill, self.habit, 1 - self.skill - self.habit)
        return random.choices(("skill", "habit", "random"), shares)[0]


# What is seen and intended, and what is done.
Player = Callable[[Environment, State, Random, Manners], tuple[str, list[Action]]]


@dataclass(frozen=True)
class Task:
    """A game, and how it is played in front of `pocket`."""

    tag: str
    player: Player
    manners: Manners
    share: float  # of all conversations
    env_config: tuple[tuple[str, Any], ...] = ()  # beside that of the tag

    def environment(self) -> Environment:
        tag = catalogue()[self.tag]
        return make(replace(tag, env_config={**(tag.env_config or {}), **dict(self.env_config)}))


def demonstrations(tokenizer: Any, task: Task, seeds: Iterable[int]) -> Iterator[Episode]:
    """One conversation for each seed, except those that show the start of a validation level."""
    env, tag = task.environment(), catalogue()[task.tag]
    chat = ChatTemplate(tokenizer)
    prompt = STYLES[RULES.prompt_style](env, tag, RULES, REPLY_LIMIT)
    view = View(chat, prompt, prompt.system_text(), RULES.num_turns_in_view, max_prompt_tokens=10**9)
    kept_back = validation_boards(task)
    for seed in seeds:
        random = Random(f"pocket/{task.tag}/{seed}")  # a text: the same stream in every process

        def play(standing: EpisodeState, random: Random = random) -> tuple[str, list[Action]]:
            return task.player(env, standing.state, random, task.manners)

        start = env.reset(seed, "sft")
        # The noise of a step is fixed: the points of a pull are not shown, and nothing else is left to chance.
        played = demonstrate(env, tag, RULES, prompt, start, play, lambda step: 0.5, kept_back.__contains__)
        if played.final.finished:
            turns = _with_tokens(view, played.turns)
            yield Episode(task.tag, seed, "sft", 0, 0, view.system_text, turns, played.final)


def _with_tokens(view: View, spoken: Sequence[Spoken]) -> tuple[Turn, ...]:
    """The turns as if a model had sampled them."""
    turns: list[Turn] = []
    for turn in spoken:
        given = full(view, turns, turn.turn_text)
        ids = reply_ids(view.chat, turn.reply_text.removeprefix(view.prompt.reply_prefix()))
        turns.append(
            Turn(
                given_ids=given.ids,
                continues=given.continues,
                reply_ids=tuple(ids),
                log_probs=(0.0,) * len(ids),
                stopped_by="end_of_turn",
                state_text=turn.state_text,
                turn_text=turn.turn_text,
                reply_text=turn.reply_text,
                result=turn.result,
            )
        )
    return tuple(turns)


@lru_cache
def validation_boards(task: Task) -> frozenset[str]:
    """How the validation levels look at their start; none for bandits, which have but a handful of levels at all."""
    if task.player is pull_an_arm:
        return frozenset()
    env = task.environment()
    return frozenset(env.render(env.reset(seed, "val")) for seed in VALIDATION_SEEDS)


# --- players ----------------------------------------------------------------------------------------------------------


def push_the_box(env: Environment, state: State, random: Random, manners: Manners) -> tuple[str, list[Action]]:
    """Sokoban with one box. Where it cannot be solved any more, that is said, and one more action ends the matter."""
    names, cols = env.action_names(state), state.board.num_cols
    target, box = _cell(state.board.targets), _cell(state.boxes)
    seen = f"player {_at(state.player, cols)} box {_at(box, cols)} target {_at(target, cols)}"
    plan, manner = shortest_plan(env, state), manners.draw(random)
    if plan is None:
        return f"{seen} stuck", [random.choice(list(names))]
    if manner == "skill":
        actions = list(plan)
    elif manner == "habit":
        actions = _straight_at_the_box(env, state)
    else:
        actions = _random_actions(names, random)
    intended = _first_push(env, state, actions) or actions[0]
    return f"{seen} push {names[intended]}", actions[: RULES.max_actions_per_turn]


def cross_the_lake(env: Environment, state: State, random: Random, manners: Manners) -> tuple[str, list[Action]]:
    """FrozenLake without slipping."""
    names, size = env.action_names(state), state.lake.size
    manner = manners.draw(random)
    if manner == "skill":
        plan = shortest_plan(env, state)
        assert plan is not None
        actions = list(plan)
    elif manner == "habit":
        by_name = {name: action for action, name in names.items()}
        same_row = state.player // size == state.lake.goal // size
        actions = [by_name["Right" if same_row else "Down"]] * RULES.max_actions_per_turn
    else:
        actions = _random_actions(names, random)
    dangers = [names[action] for action in names if _ends_in_a_hole(env, state, action)]
    seen = f"player {_at(state.player, size)} goal {_at(state.lake.goal, size)} hole {' '.join(dangers) or 'no'}"
    return f"{seen} go {names[actions[0]]}", actions[: RULES.max_actions_per_turn]


def pull_an_arm(env: Environment, state: State, random: Random, manners: Manners) -> tuple[str, list[Action]]:
    """Either bandit; the habit is the arm listed first. There is no skill: that would be knowing the answer."""
    names = env.action_names(state)
    first, second = names
    chosen = first if manners.draw(random) == "habit" else random.choice([first, second])
    return f"The arms are {names[first]} and {names[second]}, pull {names[chosen]}", [chosen]


def _random_actions(names: dict[Action, str], random: Random) -> list[Action]:
    return random.choices(list(names), k=RULES.max_actions_per_turn)


def _straight_at_the_box(env: Environment, state: State) -> list[Action]:
    """Rows first, then columns, through whatever is in the way."""
    moves = {name: action for action, name in env.action_names(state).items()}
    actions: list[Action] = []
    while len(actions) < RULES.max_actions_per_turn:
        row, col = divmod(state.player, state.board.num_cols)
        box_row, box_col = divmod(_cell(state.boxes), state.board.num_cols)
        if row != box_row:
            actions.append(moves["Down" if box_row > row else "Up"])
        else:
            actions.append(moves["Right" if box_col > col else "Left"])
        state = env.step(state, actions[-1]).state
    return actions


def _cell(cells: int) -> int:
    """The only cell of a set."""
    return cells.bit_length() - 1


def _at(cell: int, num_cols: int) -> str:
    row, col = divmod(cell, num_cols)
    return f"{row} {col}"


def _first_push(env: Environment, state: State, actions: list[Action]) -> Action | None:
    for action in actions:
        after = env.step(state, action).state
        if after.boxes != state.boxes:
            return action
        state = after
    return None


def _ends_in_a_hole(env: Environment, state: State, action: Action) -> bool:
    after = env.step(state, action)
    return after.done and not after.success


TASKS = {
    task.tag: task
    for task in (
        Task("SimpleSokoban", push_the_box, Manners(skill=0.3, habit=0.55), share=0.38),
        Task("FrozenLake", cross_the_lake, Manners(skill=0.4, habit=0.42), 0.22, env_config=(("success_rate", 1.0),)),
        Task("Bandit", pull_an_arm, Manners(skill=0.0, habit=0.2), share=0.3),
        Task("TwoArmedBandit", pull_an_arm, Manners(skill=0.0, habit=0.2), share=0.1),
    )
}
