"""`ragen play`: a person, or a solver, plays a level in the terminal.

    ragen play sokoban                       # arrow keys or w a s d
    ragen play CoordFrozenLake --agent optimal
    printf 'Up\\nLeft\\n' | ragen play sokoban  # without a terminal: one answer a line

A person acts one key at a time within the level's action limit; the prompt that `p` shows is the one a model would get
under the tree's default rules. The rules themselves are `agent.episode.take_turn`, as everywhere.
"""

import contextlib
import dataclasses
import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ragen.agent.episode import EpisodeState, TurnResult, noise_stream, take_turn
from ragen.agent.prompt import STYLES
from ragen.agent.rules import AgentRules
from ragen.config import derive
from ragen.config.schema import Config
from ragen.counter import uniform
from ragen.env.base import Action, Environment, Tag, split_index
from ragen.env.registry import catalogue, make
from ragen.env.solve import Budget, baselines, best_actions, optimal_success

# Short names for the tags that the recipes train on.
ENVIRONMENTS = {
    "sokoban": "CoordSokoban",
    "frozenlake": "CoordFrozenLake",
    "frozen_lake": "CoordFrozenLake",
    "bandit": "Bandit",
    "two_armed_bandit": "TwoArmedBandit",
}

# Words of a legend -> how its symbol looks.
STYLES_OF_WORDS = {
    "wall": "bright_black",
    "empty": "bright_black",
    "target": "bold yellow",
    "goal": "bold yellow",
    "box": "bold red",
    "hole": "bold red",
    "box on target": "bold green",
    "player on goal": "bold green",
    "player": "bold cyan",
    "player on target": "bold cyan",
    "player in hole": "bold red reverse",
}

ARROWS = {"\x1b[A": "Up", "\x1b[B": "Down", "\x1b[D": "Left", "\x1b[C": "Right"}
LETTERS = {"w": "Up", "s": "Down", "a": "Left", "d": "Right"}
HELP = "u undo · h hint · p prompt · r restart · n next level · q quit"
SECONDS_BETWEEN_FRAMES = 0.4


def play(environment: str, seed: int, split: str, agent: str, show_prompt: bool) -> int:
    """Play levels until the player stops. Returns the exit status."""
    split_index(split)  # refuses an unknown split
    if agent not in ("human", "random", "optimal"):
        raise ValueError(f"--agent {agent}: must be one of human, random, optimal")
    name, tag = _find(environment)
    game = Game(name, tag)
    console = Console(highlight=False)
    while True:
        if show_prompt:
            console.print(_prompt_panel(game, EpisodeState(game.env.reset(seed, split))), soft_wrap=True)
        if agent != "human":
            return _watch(console, game, seed, split, agent)
        wish = _play_level(console, game, seed, split)
        if wish != "next":
            return 0
        seed += 1


def list_environments(num_levels: int) -> int:
    """`ragen envs`: what there is to play, and what random and perfect play reach."""
    if num_levels < 1:
        raise ValueError(f"--levels {num_levels}: must be at least 1")
    config = Config()
    table = Table(title=f"Success over {num_levels} validation levels", title_justify="left")
    table.add_column("tag", no_wrap=True)
    for heading in ("actions", "random", "optimal"):
        table.add_column(heading, justify="right")
    for name, tag in config.custom_envs.items():
        budget = derive.budget(config, name)
        reached = baselines(make(tag), range(config.seed.val, config.seed.val + num_levels), "val", budget)
        table.add_row(name, str(budget.total), f"{reached.random:.1%}", f"{reached.optimal:.1%}")
    Console().print(table)
    return 0


def _find(environment: str) -> tuple[str, Tag]:
    tags = catalogue()
    name = ENVIRONMENTS.get(environment, environment)
    if name not in tags:
        known = [*ENVIRONMENTS, *tags]
        raise ValueError(f"unknown environment {environment!r}{nearest(environment, known)} Known: {', '.join(known)}")
    return name, tags[name]


class Game:
    """A tag made ready for a person: its environment, a grid-only twin to draw, and one action per turn."""

    def __init__(self, name: str, tag: Tag):
        self.name, self.tag, self.env = name, tag, make(tag)
        self.model_rules = derive.rules(Config())
        self.rules: AgentRules = dataclasses.replace(
            self.model_rules, max_turn=tag.max_actions_per_traj, max_actions_per_turn=1
        )
        self.screen = self.env
        if hasattr(self.env.config, "observation_format"):
            self.screen = type(self.env)(dataclasses.replace(self.env.config, observation_format="grid"))

    def step(self, episode: EpisodeState, word: str, seed: int) -> tuple[EpisodeState, TurnResult]:
        noise = noise_stream(seed, group=0, member=0)
        return take_turn(self.env, self.tag, self.rules, episode, (word,), noise)

    def budget(self, episode: EpisodeState) -> Budget:
        left = episode.actions_left(self.tag)
        return Budget(turns=left, actions_per_turn=1, actions=left)

    def word(self, episode: EpisodeState, action: Action) -> str:
        return self.env.action_names(episode.state)[action]


# --- a person -----------------------------------------------------------------------------------------------------


def _play_level(console: Console, game: Game, seed: int, split: str) -> str:
    """One level. Returns "next" or "quit"."""
    path: list[tuple[EpisodeState, str, TurnResult | None]] = [(EpisodeState(game.env.reset(seed, split)), "", None)]
    message = ""
    interactive = sys.stdin.isatty() and console.is_terminal
    with _keys() if interactive else _lines() as answers:
        while True:
            episode = path[-1][0]
            _draw(console, game, episode, seed, split, message, clear=interactive)
            if episode.finished:
                _show_result(console, game, path, seed, split)
                if not interactive:
                    return "quit"
                console.print("n next level · r again · u undo · q quit", style="dim")
            else:
                console.print(f"{_keys_help(game, episode)} · {HELP}", style="dim")
            answer = next(answers, "q")
            message = ""
            if answer == "q":
                return "quit"
            if answer == "n":
                return "next"
            if answer == "r":
                del path[1:]
            elif answer == "u":
                del path[max(1, len(path) - 1) :]
            elif answer == "p":
                console.print(_prompt_panel(game, episode), soft_wrap=True)
                if interactive:
                    console.print("any key goes on", style="dim")
                    next(answers, "")
            elif not episode.finished:
                if answer == "h":
                    message = _hint(game, episode)
                    continue
                word = _word_of(game, episode, answer)
                if word is None:
                    message = (
                        f"{answer!r} is no action here: {', '.join(game.env.action_names(episode.state).values())}"
                    )
                    continue
                after, turn = game.step(episode, word, seed)
                path.append((after, word, turn))


def _word_of(game: Game, episode: EpisodeState, answer: str) -> str | None:
    """The action that a key or a typed line means."""
    names = list(game.env.action_names(episode.state).values())
    word = ARROWS.get(answer) or LETTERS.get(answer.lower()) or answer
    if word in names or game.env.parse_action(episode.state, word) is not None:
        return word
    if answer.isdigit() and 1 <= int(answer) <= len(names):
        return names[int(answer) - 1]
    return None


def _keys_help(game: Game, episode: EpisodeState) -> str:
    names = game.env.action_names(episode.state).values()
    if set(names) <= set(LETTERS.values()):
        return "arrows or w a s d"
    return " · ".join(f"{index} {name}" for index, name in enumerate(names, start=1))


def _hint(game: Game, episode: EpisodeState) -> str:
    if optimal_success(game.env, episode.state, game.budget(episode)) == 0:
        return "hint: this cannot be won any more; u takes a move back"
    best = best_actions(game.env, episode.state, game.budget(episode))
    return f"hint: {game.word(episode, best[0])}"


@contextlib.contextmanager
def _keys() -> Iterator[Iterator[str]]:
    """Single keys from the terminal, arrow keys as their escape sequences."""
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def read() -> Iterator[str]:
        while True:
            key = os.read(descriptor, 1).decode(errors="replace")
            if key == "\x1b" and select.select([descriptor], [], [], 0.05)[0]:
                key += os.read(descriptor, 2).decode(errors="replace").replace("O", "[")
            if key in ("", "\x04"):
                return
            yield key

    try:
        tty.setcbreak(descriptor)
        yield read()
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _lines() -> Iterator[Iterator[str]]:
    yield (line.strip() for line in sys.stdin if line.strip())


# --- a solver -----------------------------------------------------------------------------------------------------


def _watch(console: Console, game: Game, seed: int, split: str, agent: str) -> int:
    choose: Callable[[EpisodeState], Action] = {"random": _random_action, "optimal": _optimal_action}[agent](game, seed)
    episode = EpisodeState(game.env.reset(seed, split))
    path: list[tuple[EpisodeState, str, TurnResult | None]] = [(episode, "", None)]
    _draw(console, game, episode, seed, split, "", clear=False)
    while not episode.finished:
        word = game.word(episode, choose(episode))
        episode, turn = game.step(episode, word, seed)
        path.append((episode, word, turn))
        if console.is_terminal:
            time.sleep(SECONDS_BETWEEN_FRAMES)
        _draw(console, game, episode, seed, split, f"{agent} plays {word}", clear=False)
    _show_result(console, game, path, seed, split)
    return 0


def _random_action(game: Game, seed: int) -> Callable[[EpisodeState], Action]:
    def choose(episode: EpisodeState) -> Action:
        actions = list(game.env.action_names(episode.state))
        return actions[int(uniform("play", seed, episode.num_actions) * len(actions))]

    return choose


def _optimal_action(game: Game, seed: int) -> Callable[[EpisodeState], Action]:
    return lambda episode: best_actions(game.env, episode.state, game.budget(episode))[0]


# --- what is shown ------------------------------------------------------------------------------------------------


def _draw(
    console: Console, game: Game, episode: EpisodeState, seed: int, split: str, message: str, clear: bool
) -> None:
    if clear:
        console.clear()
    console.print(f"\n[bold]{game.name}[/bold] level {seed} of {split}")
    console.print(_coloured(game.screen, episode))
    left, total = episode.actions_left(game.tag), game.tag.max_actions_per_traj
    console.print(f"reward {episode.reward + episode.penalty:+.1f} · {left} of {total} actions left")
    if message:
        console.print(message, style="yellow")


def _coloured(env: Environment, episode: EpisodeState) -> Text:
    text = Text(env.render(episode.state))
    symbols = env.symbols()
    for index, character in enumerate(text.plain):
        if character in symbols:
            text.stylize(STYLES_OF_WORDS.get(symbols[character], ""), index, index + 1)
    return text


def _prompt_panel(game: Game, episode: EpisodeState) -> Text:
    """The messages that a model would get for this state."""
    prompt = STYLES[game.model_rules.prompt_style](
        game.env, game.tag, game.model_rules, reply_limit=Config().actor_rollout_ref.rollout.response_length
    )
    turn = prompt.turn_text(1, episode.state, episode.actions_left(game.tag), episode.warn_invalid)
    parts = (("system", prompt.system_text()), ("user", turn), ("assistant", prompt.reply_prefix()))
    return Text("\n\n").join(
        Text.assemble((f"── {role} ", "bold magenta"), ("─" * 40, "magenta"), f"\n{content}") for role, content in parts
    )


def _show_result(
    console: Console, game: Game, path: list[tuple[EpisodeState, str, Any]], seed: int, split: str
) -> None:
    episode = path[-1][0]
    verdict = (
        "[bold green]solved[/bold green]" if episode.success else f"[bold red]not solved[/bold red] ({_why(episode)})"
    )
    console.print(f"\n{verdict} after {episode.num_actions} actions")
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("#", "action", "effect", "reward"):
        table.add_column(heading, justify="right" if heading in "#reward" else "left")
    for number, (_, word, turn) in enumerate(path[1:], start=1):
        effect = "" if turn.num_effective else "nothing moved"
        table.add_row(str(number), word, effect, f"{turn.reward + turn.penalty:+.1f}")
    table.add_section()
    table.add_row("", "total", "", f"{episode.reward + episode.penalty:+.1f}")
    console.print(table)
    console.print(_optimum(game, seed, split))


def _why(episode: EpisodeState) -> str:
    return {"max_actions": "out of actions", "lost": "lost", "invalid": "no valid action"}.get(episode.ended_by, "")


def _optimum(game: Game, seed: int, split: str) -> str:
    """The best plan from the start, or what the best play can hope for."""
    episode = EpisodeState(game.env.reset(seed, split))
    chance = optimal_success(game.env, episode.state, game.budget(episode))
    words, reward = [], 0.0
    certain = game.env.chances(episode.state, next(iter(game.env.action_names(episode.state))))
    if certain is None or len(certain) > 1:
        best = best_actions(game.env, episode.state, game.budget(episode))
        return f"optimal play starts with {game.word(episode, best[0])} and succeeds in {chance:.0%} of the cases"
    while not episode.finished:
        best = best_actions(game.env, episode.state, game.budget(episode))
        word = game.word(episode, best[0])
        episode, turn = game.step(episode, word, seed)
        words.append(word)
        reward += turn.reward
    return f"optimal: {', '.join(words)} ({len(words)} actions, reward {reward:+.1f})"
