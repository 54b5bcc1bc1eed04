"""A solver plays a level, with the texts of a rollout. No torch and no tokenizer in here.

    played = demonstrate(env, tag, rules, prompt, env.reset(7, "sft"), solver(env, tag, rules), noise_stream(7, 0, 0))
    played.turns[0].turn_text, played.turns[0].reply_text        # what a model reads, and what it should say
    played.final.success

Fine-tuning data and the conversations that `pocket` is made from both come from here; only their players differ. The
solver of fine-tuning plays perfectly: the shortest solution where nothing is left to chance, else the actions that win
most often with the turns that are left. Its think block is empty.
"""

from collections.abc import Callable
from dataclasses import dataclass

from ragen.agent.episode import NoiseOfStep, actions_left, take_turn
from ragen.agent.prompt import PromptStyle
from ragen.agent.rules import AgentRules
from ragen.env.base import Action, Environment, State, Tag
from ragen.env.solve import Budget, best_actions, optimal_success
from ragen.types import EpisodeState, TurnResult

Player = Callable[[EpisodeState], tuple[str, list[Action]]]  # thought and actions


@dataclass(frozen=True)
class Spoken:
    """One turn as text; names as in `ragen.types.Turn`."""

    state_text: str
    turn_text: str
    reply_text: str  # all of it, the opening tag included
    result: TurnResult


@dataclass(frozen=True)
class Played:
    """A level from its start to its end, or to where it was cut off."""

    turns: tuple[Spoken, ...]
    final: EpisodeState


def demonstrate(
    env: Environment,
    tag: Tag,
    rules: AgentRules,
    prompt: PromptStyle,
    start: State,
    player: Player,
    noise: NoiseOfStep,
    is_secret: Callable[[str], bool] = lambda state_text: False,
) -> Played:
    """Play a level. It is cut off before a secret state is shown."""
    turns: list[Spoken] = []
    standing = EpisodeState(start)
    while not standing.finished and not is_secret(shown := env.render(standing.state)):
        thought, actions = player(standing)
        names = [env.action_names(standing.state)[action] for action in actions]
        left = actions_left(standing, tag)
        turn_text = prompt.turn_text(len(turns) + 1, standing.state, left, standing.warn_invalid)
        standing, result = take_turn(env, tag, rules, standing, names, noise)
        turns.append(Spoken(shown, turn_text, reply(rules, thought, names), result))
    return Played(tuple(turns), standing)


def reply(rules: AgentRules, thought: str, names: list[str]) -> str:
    """A well-formed reply."""
    think = f"<think>{thought}</think>" if rules.think else ""
    return f"{think}<answer>{f' {rules.action_sep} '.join(names)}</answer>"


def solver(env: Environment, tag: Tag, rules: AgentRules, max_depth: int = 100) -> Player:
    """The perfect player. Where nothing can win within the limits, it plays as if there were more turns."""

    def play(standing: EpisodeState) -> tuple[str, list[Action]]:
        left = Budget(rules.max_turn - standing.num_turns, rules.max_actions_per_turn, actions_left(standing, tag))
        if optimal_success(env, standing.state, left) == 0:
            left = Budget(max_depth, rules.max_actions_per_turn, max_depth * rules.max_actions_per_turn)
        actions = best_actions(env, standing.state, left)
        return "", list(actions[: actions_left(standing, tag)])

    return play


def can_be_won(env: Environment, tag: Tag, rules: AgentRules, start: State, max_depth: int) -> bool:
    """Whether a perfect player ever wins from here, within the limits of an episode and `max_depth` actions."""
    actions = min(tag.max_actions_per_traj, max_depth)
    return optimal_success(env, start, Budget(rules.max_turn, rules.max_actions_per_turn, actions)) > 0
