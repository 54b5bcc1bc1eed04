"""`ragen play`: a person, or a solver, plays a level in the terminal.

    ragen play sokoban                       # arrow keys or w a s d
    ragen play CoordFrozenLake --agent optimal
    printf 'Up\\nLeft\\n' | ragen play sokoban  # without a terminal: one answer a line

A person acts one key at a time, with as many actions as the tag's agents have in all their turns; the prompt that `p`
shows is the one a model would get in the setting that the tag is trained in. The rules themselves are
`agent.episode.take_turn`, as everywhere.
"""

import dataclasses
import sys
import time
from collections.abc import Callable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ragen.agent.episode import EpisodeState, TurnResult, noise_stream, take_turn
from ragen.agent.prompt import STYLES
from ragen.agent.rules import AgentRules
from ragen.config import derive
from ragen.config.schema import Config
from ragen.config.starts import start_of
from ragen.counter import uniform
from ragen.env.base import Action, Environment, Tag, split_index
from ragen.env.registry import catalogue, make, tags_of
from ragen.env.solve import Budget, baselines, best_actions, optimal_success
from ragen.keyboard import ESCAPE, answers
from ragen.typed import nearest_of

# Short names for tags. `config.v1.ENVIRONMENTS` has names of its own: there they are starts of a training run in the
# older dialect, and `sokoban` is the older board; here they are games, and it is the board that the recipe trains on.
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


Path = list[tuple[EpisodeState, str, TurnResult | None]]  # a level as played: state, the word that led to it, its turn


class Screen(Console):
    """Plain text stays plain: what a player types is not markup. A reader that went away is the caller's business."""

    def __init__(self):
        super().__init__(highlight=False, markup=False, emoji=False)

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def play(environment: str, seed: int, split: str, agent: str, show_prompt: bool) -> int:
    """Play levels until the player stops. Returns the exit status."""
    split_index(split)  # refuses an unknown split
    if agent not in ("human", "random", "optimal"):
        raise ValueError(f"--agent {agent}: must be one of human, random, optimal")
    game = Game(*_find(environment))
    console = Screen()
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
    """`ragen envs`: what there is to play, and what random and perfect play reach in the setting it is trained in."""
    if num_levels < 1:
        raise ValueError(f"--levels {num_levels}: must be at least 1")
    table = Table(title=f"Success over {num_levels} validation levels", title_justify="left")
    table.add_column("tag", no_wrap=True)
    for heading in ("turns", "actions", "random", "optimal"):
        table.add_column(heading, justify="right")
    for name in catalogue():
        config = start_of(name)
        budget, seeds = derive.budget(config, name), range(config.seed.val, config.seed.val + num_levels)
        reached = baselines(make(config.custom_envs[name]), seeds, "val", budget)
        table.add_row(name, str(budget.turns), str(budget.total), f"{reached.random:.1%}", f"{reached.optimal:.1%}")
    Screen().print(table)
    return 0


def _find(environment: str) -> tuple[str, Tag, Config]:
    """The name of a tag, the tag, and the config that it is trained with."""
    name = ENVIRONMENTS.get(environment, environment)
    if ":" in name:
        tags = tags_of(name) or {name: Tag(env_type=name)}
        name, tag = next(iter(tags.items()))
        config = start_of(name)
        return name, tag, dataclasses.replace(config, custom_envs={**config.custom_envs, name: tag})
    tags = catalogue()
    if name not in tags:
        known = [*ENVIRONMENTS, *tags]
        raise ValueError(
            f"unknown environment {environment!r}{nearest_of(environment, known)}; your own is written module:Class"
        )
    config = start_of(name)
    return name, config.custom_envs[name], config


class Game:
    """A tag made ready for a person: its environment, a grid-only twin to draw, and one action per turn."""

    def __init__(self, name: str, tag: Tag, config: Config):
        self.name, self.model_tag, self.env = name, tag, make(tag)
        self.model_rules = derive.rules(config)
        self.reply_limit = config.actor_rollout_ref.rollout.response_length
        total = derive.budget(config, name).total
        self.tag = dataclasses.replace(tag, max_actions_per_traj=total)
        self.rules: AgentRules = dataclasses.replace(self.model_rules, max_turn=total, max_actions_per_turn=1)
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
    path: Path = [(EpisodeState(game.env.reset(seed, split)), "", None)]
    message = ""
    interactive = sys.stdin is not None and sys.stdin.isatty() and console.is_terminal
    with answers(interactive) as typed:
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
            answer = next(typed, "q")
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
                    next(typed, "")
            elif not episode.finished:
                if answer == "h":
                    message = _hint(game, episode)
                    continue
                word = _word_of(game, episode, answer)
                if word is None:
                    key = "this key" if answer.startswith(ESCAPE) else repr(answer)
                    message = f"{key} is no action here: {', '.join(game.env.action_names(episode.state).values())}"
                    continue
                after, turn = game.step(episode, word, seed)
                path.append((after, word, turn))


def _word_of(game: Game, episode: EpisodeState, answer: str) -> str | None:
    """The action that a key or a typed line means."""
    names = list(game.env.action_names(episode.state).values())
    word = ARROWS.get(answer) or LETTERS.get(answer.lower()) or answer
    if word in names or game.env.parse_action(episode.state, word) is not None:
        return word
    if answer.isdecimal() and 1 <= int(answer) <= len(names):
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


# --- a solver -----------------------------------------------------------------------------------------------------


def _watch(console: Console, game: Game, seed: int, split: str, agent: str) -> int:
    choose: Callable[[EpisodeState], Action] = {"random": _random_action, "optimal": _optimal_action}[agent](game, seed)
    episode = EpisodeState(game.env.reset(seed, split))
    path: Path = [(episode, "", None)]
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
    console.print(Text.assemble("\n", (game.name, "bold"), f" level {seed} of {split}"))
    console.print(_coloured(game.screen, episode))
    left, total = episode.actions_left(game.tag), game.tag.max_actions_per_traj
    console.print(f"reward {_points(episode.reward + episode.penalty)} · {left} of {_count(total)} left")
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
    """The messages that a model would get for this state, had it used up the actions of its turns."""
    rules = game.model_rules
    prompt = STYLES[rules.prompt_style](game.env, game.model_tag, rules, game.reply_limit)
    turn_number = min(episode.num_actions // rules.max_actions_per_turn + 1, rules.max_turn)
    turn = prompt.turn_text(turn_number, episode.state, episode.actions_left(game.model_tag), episode.warn_invalid)
    parts = (("system", prompt.system_text()), ("user", turn), ("assistant", prompt.reply_prefix()))
    return Text("\n\n").join(
        Text.assemble((f"── {role} ", "bold magenta"), ("─" * 40, "magenta"), f"\n{content}") for role, content in parts
    )


def _show_result(console: Console, game: Game, path: Path, seed: int, split: str) -> None:
    episode = path[-1][0]
    verdict = ("solved", "bold green") if episode.success else ("not solved", "bold red")
    why = "" if episode.success else f" ({_why(episode)})"
    console.print(Text.assemble("\n", verdict, f"{why} after {_count(episode.num_actions)}"))
    console.print(_result_table(path))
    console.print(_optimum(game, seed, split))


def _result_table(path: Path) -> Table:
    """What each action did; the format penalty has a column of its own where there was one."""
    turns = [(word, turn) for _, word, turn in path[1:]]
    scores = {"reward": [turn.reward for _, turn in turns]}
    if any(turn.penalty for _, turn in turns):
        scores["penalty"] = [turn.penalty for _, turn in turns]
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("#", "action", "effect", *scores):
        table.add_column(heading, justify="left" if heading in ("action", "effect") else "right")
    for index, (word, turn) in enumerate(turns):
        effect = "" if turn.num_effective else "nothing moved"
        table.add_row(str(index + 1), word, effect, *(_points(column[index]) for column in scores.values()))
    table.add_section()
    table.add_row("", "total", "", *(_points(sum(column)) for column in scores.values()))
    return table


def _points(reward: float) -> str:
    """One decimal, or two where the second says something."""
    rounded = round(reward, 2) + 0.0  # -0.0 is 0
    return f"{rounded:+.1f}" if rounded == round(rounded, 1) else f"{rounded:+.2f}"


def _count(num_actions: int) -> str:
    return "1 action" if num_actions == 1 else f"{num_actions} actions"


def _why(episode: EpisodeState) -> str:
    return {"max_actions": "out of actions", "lost": "lost", "invalid": "no valid action"}.get(episode.ended_by, "")


def _optimum(game: Game, seed: int, split: str) -> str:
    """The best plan from the start, or what the best play can hope for."""
    episode = EpisodeState(game.env.reset(seed, split))
    if not _is_certain(game.env, episode):
        chance = optimal_success(game.env, episode.state, game.budget(episode))
        best = best_actions(game.env, episode.state, game.budget(episode))
        return f"optimal play starts with {game.word(episode, best[0])} and succeeds in {chance:.0%} of the cases"
    words = []
    while not episode.finished:
        best = best_actions(game.env, episode.state, game.budget(episode))
        words.append(game.word(episode, best[0]))
        episode, _ = game.step(episode, words[-1], seed)
    return f"optimal: {', '.join(words)} ({_count(len(words))}, reward {_points(episode.reward)})"


def _is_certain(env: Environment, episode: EpisodeState) -> bool:
    """Whether every action has one outcome: only then does a plan say what will happen."""
    chances = [env.chances(episode.state, action) for action in env.action_names(episode.state)]
    return all(outcomes is not None and len(outcomes) == 1 for outcomes in chances)
