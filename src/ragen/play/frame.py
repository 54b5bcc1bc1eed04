"""What a player sees: the board, the score, the prompt of a model, and at the end the result.

screen.show(frame(level, message="hint: Up"))
screen.print(prompt_text(level.game, level.episode, screen.width))
"""

import functools

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ragen.agent.episode import actions_left
from ragen.agent.prompt import STYLES
from ragen.board import coloured
from ragen.env.base import Environment
from ragen.format import counted, harmless
from ragen.play.game import Game, PlayedLevel
from ragen.terminal import in_lines
from ragen.types import EpisodeState

ENDINGS = {  # how an episode without success ended -> the text
    "lost": "not won",
    "max_actions": "not solved (out of actions)",
    "max_turn": "not solved (out of turns)",
    "invalid": "not solved (no valid action)",
}
LONGEST_RULE = 50


def frame(level: PlayedLevel, message: str = "", compact_width: int | None = None) -> list[RenderableType]:
    """The level as it stands; with `compact_width` in as few lines as possible."""
    game, episode, compact = level.game, level.episode, compact_width is not None
    shown: list[RenderableType] = [
        Text.assemble((game.name, "bold"), f" level {level.seed} of {level.split}"),
        board(game.drawn_env, episode),
    ]
    if not (compact and episode.finished):
        left = f"{actions_left(episode, game.tag)} of {counted(game.tag.max_actions_per_traj, 'action')} left"
        shown.append(f"reward {points(episode.reward + episode.penalty)} · {left}")
    if message:
        shown.append(Text(message, "yellow"))
    if episode.finished:
        result = Text.assemble(ending(episode), f" after {counted(episode.num_actions, 'action')}")
        moves = _move_lines(level, compact_width) if compact_width is not None else move_table(level)
        shown += [*([] if compact else [""]), result, moves, optimum(game, level.seed, level.split)]
    return shown


def board(env: Environment, episode: EpisodeState) -> Text:
    """The observation; lines that consist of symbols are coloured."""
    return coloured(harmless(env.render(episode.state)), env.symbols())


def ending(episode: EpisodeState) -> Text:
    if episode.success:
        return Text("solved", "bold green")
    return Text(ENDINGS.get(episode.ended_by, "not solved (context full)"), "bold red")


def prompt_text(game: Game, episode: EpisodeState, width: int = LONGEST_RULE) -> Text:
    """The messages that a model would get for this state, assuming that it used all actions of its turns."""
    rules = game.model_rules
    prompt = STYLES[rules.prompt_style](game.env, game.model_tag, rules, game.reply_limit)
    turn_number = min(episode.num_actions // rules.max_actions_per_turn + 1, rules.max_turn)
    turn = prompt.turn_text(turn_number, episode.state, actions_left(episode, game.model_tag), episode.warn_invalid)
    parts = {"system": prompt.system_text(), "user": turn, "assistant": prompt.reply_prefix()}
    return Text("\n\n").join(
        Text.assemble((f"── {role} ".ljust(min(width, LONGEST_RULE), "─"), "magenta"), f"\n{harmless(content)}")
        for role, content in parts.items()
    )


def move_table(level: PlayedLevel) -> Table:
    """What each action did; the format penalty has a column only where there was one."""
    scores = {"reward": [move.turn.reward for move in level.moves]}
    if any(move.turn.penalty for move in level.moves):
        scores["penalty"] = [move.turn.penalty for move in level.moves]
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("#", "action", "effect", *scores):
        table.add_column(heading, justify="left" if heading in ("action", "effect") else "right")
    for index, move in enumerate(level.moves):
        effect = "" if move.turn.num_effective else "nothing moved"
        table.add_row(str(index + 1), move.word, effect, *(points(column[index]) for column in scores.values()))
    table.add_section()
    table.add_row("", "total", "", *(points(sum(column)) for column in scores.values()))
    return table


def _move_lines(level: PlayedLevel, width: int) -> str:
    """The content of `move_table` in a line or two."""
    scores = [(move.word, move.turn.reward + move.turn.penalty) for move in level.moves]
    scores.append(("total", sum(score for _, score in scores)))
    return in_lines([f"{word} {points(score)}" for word, score in scores], width)


@functools.cache  # a finished level may be drawn twice
def optimum(game: Game, seed: int, split: str) -> str:
    """The best plan from the start; where actions have several outcomes, the best first action and its chance."""
    if game.unknown_optimum:
        return f"optimal play: unknown ({game.unknown_optimum})"
    level = PlayedLevel(game, seed, split)
    chances = [game.env.chances(level.episode.state, action) for action in level.actions]
    if not all(outcomes is not None and len(outcomes) == 1 for outcomes in chances):
        first, chance = game.best_actions(level.episode)[0], game.optimal_success(level.episode)
        return f"optimal play starts with {first} and succeeds in {chance:.0%} of the cases"
    while not level.episode.finished:
        level.act(game.best_actions(level.episode)[0])
    words = ", ".join(move.word for move in level.moves)
    return f"optimal: {words} ({counted(len(level.moves), 'action')}, reward {points(level.episode.reward)})"


def points(reward: float) -> str:
    """One decimal, or two where the second is not 0."""
    rounded = round(reward, 2) + 0.0  # -0.0 is 0
    return f"{rounded:+.1f}" if rounded == round(rounded, 1) else f"{rounded:+.2f}"
