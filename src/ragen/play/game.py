"""`ragen play`: a person, or a solver, plays a level in the terminal. A model does in `watch`.

    ragen play sokoban                       # arrow keys or w a s d
    ragen play CoordFrozenLake --agent optimal
    printf 'Up\\nLeft\\n' | ragen play sokoban  # without a terminal: one answer a line

A person acts one key at a time, with as many actions as the tag's agents have in all their turns; the prompt that `p`
shows is the one a model would get in the setting that the tag is trained in. The rules themselves are
`agent.episode.take_turn`, as everywhere.
"""

import contextlib
import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ragen.agent.episode import actions_left, noise_stream, take_turn
from ragen.agent.prompt import STYLES
from ragen.agent.rules import AgentRules
from ragen.config import derive
from ragen.config.schema import Config
from ragen.config.tag_defaults import training_config as start_of
from ragen.env.base import Action, Environment, Tag, split_index
from ragen.env.registry import ENVIRONMENTS as REGISTERED
from ragen.env.registry import catalogue, make, tags_of
from ragen.env.solve import Budget, baselines, best_actions, optimal_success
from ragen.errors import nearest_of
from ragen.play.keyboard import answers, key_name
from ragen.prng import uniform
from ragen.terminal import Screen, in_lines
from ragen.types import EpisodeState, TurnResult

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
KEYS = ("u undo", "h hint", "p prompt", "r restart", "n next", "q quit")
KEYS_AT_THE_END = ("n next level", "r again", "u undo", "q quit")
ONE_ANSWER_PER_LINE = "no terminal to read keys from: one answer per line, an action or one of u h p r n q"
SECONDS_BETWEEN_FRAMES = 0.4
PLAYERS = ("human", "random", "optimal")  # every other agent is a model
LONGEST_RULE = 50
VERDICTS = {  # how an episode that was not won ended -> what is said
    "lost": "not won",
    "max_actions": "not solved (out of actions)",
    "max_turn": "not solved (out of turns)",
    "invalid": "not solved (no valid action)",
}


Path = list[tuple[EpisodeState, str, TurnResult | None]]  # a level as played: state, the word that led to it, its turn


def play(environment: str, seed: int, split: str, agent: str, show_prompt: bool, temperature: float = 0.0) -> int:
    """Play levels until the player stops. Returns the exit status."""
    split_index(split)  # refuses an unknown split
    if seed < 0:
        raise ValueError(f"--seed {seed}: must not be negative")
    if agent not in PLAYERS:
        from ragen.play.watch import watch

        return watch(environment, seed, split, agent, show_prompt, temperature)
    game = Game(*_find(environment))
    screen = Screen()
    if agent != "human":
        if show_prompt:
            start = EpisodeState(game.env.reset(seed, split))
            screen.print(_prompt_panel(game, start, screen.width), soft_wrap=not screen.is_terminal)
        _watch(screen, game, seed, split, agent)
        return 0
    interactive = sys.stdin is not None and sys.stdin.isatty() and screen.is_terminal
    if not interactive and sys.stdin is not None:
        print(ONE_ANSWER_PER_LINE, file=sys.stderr)
    with answers(interactive) as typed, screen.taken_over() if interactive else contextlib.nullcontext():
        player = Player(screen, typed, interactive)
        while player.plays(game, seed, split, show_prompt):
            seed += 1
    return 0


def list_environments(num_levels: int) -> int:
    """`ragen envs`: what there is to play, and what random and perfect play reach in the setting it is trained in."""
    if num_levels < 1:
        raise ValueError(f"--levels {num_levels}: must be at least 1")
    rows, names, progress = [], list(catalogue()), Screen(stderr=True)
    with progress.status("") if progress.is_terminal else contextlib.nullcontext() as status:
        for number, name in enumerate(names, start=1):
            if status is not None:
                status.update(f"{name}, {number} of {len(names)} tags, {num_levels} levels")
            config = start_of(name)
            budget, seeds = derive.budget(config, name), range(config.seed.val, config.seed.val + num_levels)
            reached = baselines(make(config.custom_envs[name]), seeds, "val", budget)
            values = (str(budget.turns), str(budget.total), f"{reached.random:.1%}", f"{reached.optimal:.1%}")
            rows.append({"tag": name, **dict(zip(("turns", "actions", "random", "optimal"), values, strict=True))})
    screen = Screen()
    screen.print(f"Success over {'1 level' if num_levels == 1 else f'{num_levels} levels'} of validation", style="bold")
    for index, line in enumerate(_columns(rows, screen.width)):
        screen.print(line, style="dim" if index == 0 else None, soft_wrap=True)
    return 0


def _columns(rows: list[dict[str, str]], width: int) -> list[str]:
    """A heading and a line per row. In a narrow window turns and actions go first, then the ends of tags."""
    headings = list(rows[0])
    widths = {heading: max(len(heading), *(len(row[heading]) for row in rows)) for heading in headings}
    for heading in ("turns", "actions"):
        if sum(widths[name] + 2 for name in headings) - 2 > width:
            headings.remove(heading)
    rest = sum(widths[name] + 2 for name in headings[1:])
    room = min(widths["tag"], max(width - rest, 4))
    lines = []
    for row in ({heading: heading for heading in headings}, *rows):
        tag = row["tag"] if len(row["tag"]) <= room else f"{row['tag'][: room - 1]}…"
        lines.append("  ".join([tag.ljust(room), *(row[name].rjust(widths[name]) for name in headings[1:])]))
    return lines


def _find(environment: str) -> tuple[str, Tag, Config]:
    """The name of a tag, the tag, and the config that it is trained with."""
    name, tags = ENVIRONMENTS.get(environment, environment), catalogue()
    if ":" in name or (name in REGISTERED and name not in tags):
        brought = tags_of(name) or {name: Tag(env_type=name)}
        if name in REGISTERED and len(brought) > 1:
            raise ValueError(f"environment {name!r} brings several tags, play one of them: {', '.join(brought)}")
        name, tag = next(iter(brought.items()))
        config = start_of(name)
        return name, tag, dataclasses.replace(config, custom_envs={**config.custom_envs, name: tag})
    if name not in tags:
        known = [*ENVIRONMENTS, *tags]
        in_other_case = [word for word in known if word.casefold() == environment.casefold()]
        if in_other_case:
            raise ValueError(f"unknown environment {environment!r}; did you mean {in_other_case[0]}?")
        near = nearest_of(environment, known)
        raise ValueError(f"unknown environment {environment!r}{near}; your own is written module:Class")
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
        left = actions_left(episode, self.tag)
        return Budget(turns=left, actions_per_turn=1, actions=left)

    def word(self, episode: EpisodeState, action: Action) -> str:
        return self.env.action_names(episode.state)[action]


# --- a person -----------------------------------------------------------------------------------------------------


class Player:
    """A person at the keyboard, or whoever writes the lines."""

    def __init__(self, screen: Screen, typed: Iterator[str], interactive: bool):
        self.screen, self.typed, self.interactive = screen, typed, interactive

    def plays(self, game: Game, seed: int, split: str, show_prompt: bool) -> bool:
        """One level. Returns whether the player wants the next one."""
        path: Path = [(EpisodeState(game.env.reset(seed, split)), "", None)]
        message = ""
        if show_prompt:
            self.read_prompt(game, path[0][0])
        while True:
            episode = path[-1][0]
            self.look(game, path, seed, split, message)
            if episode.finished and not self.interactive:
                return False
            message = ""
            answer = next(self.typed, None)
            if answer is None and not self.interactive:
                self.screen.print("input ended: the game stops here", style="yellow")
            if answer in (None, "q"):
                return False
            if answer == "n":
                return True
            if answer == "r":
                del path[1:]
            elif answer == "u":
                message = "" if path[1:] else "nothing to undo"
                del path[max(1, len(path) - 1) :]
            elif answer == "p":
                self.read_prompt(game, episode)
            elif not episode.finished:
                if answer == "h":
                    message = _hint(game, episode)
                    continue
                word = _word_of(game, episode, answer)
                if word is None:
                    names = ", ".join(game.env.action_names(episode.state).values())
                    message = f"{key_name(answer)} is no action here: {names}"
                    continue
                after, turn = game.step(episode, word, seed)
                path.append((after, word, turn))

    def look(self, game: Game, path: Path, seed: int, split: str, message: str) -> None:
        """The level as it stands; in a terminal as short as it must be for the board to stay in view."""
        episode = path[-1][0]
        items = KEYS_AT_THE_END if episode.finished else (*_action_keys(game, episode), *KEYS)
        footer = in_lines(items, self.screen.width) if self.interactive or not episode.finished else ""
        frame = _frame(game, path, seed, split, message)
        if self.interactive and not self.screen.fits(frame, footer):
            frame = _frame(game, path, seed, split, message, compact_width=self.screen.width)
        self.screen.show(frame, footer)

    def read_prompt(self, game: Game, episode: EpisodeState) -> None:
        text = _prompt_panel(game, episode, self.screen.width)
        if self.interactive:
            self.screen.page(text, self.typed)
        else:
            self.screen.print(text, soft_wrap=True)


def _word_of(game: Game, episode: EpisodeState, answer: str) -> str | None:
    """The action that a key or a typed line means."""
    names = list(game.env.action_names(episode.state).values())
    word = ARROWS.get(answer) or LETTERS.get(answer.lower()) or answer
    if word in names or game.env.parse_action(episode.state, word) is not None:
        return word
    if answer.isdecimal() and 1 <= int(answer) <= len(names):
        return names[int(answer) - 1]
    return None


def _action_keys(game: Game, episode: EpisodeState) -> list[str]:
    names = game.env.action_names(episode.state).values()
    if set(names) <= set(LETTERS.values()):
        return ["arrows or wasd"]
    return [f"{index} {name}" for index, name in enumerate(names, start=1)]


def _hint(game: Game, episode: EpisodeState) -> str:
    if optimal_success(game.env, episode.state, game.budget(episode)) == 0:
        return "hint: this cannot be won any more; u takes a move back"
    best = best_actions(game.env, episode.state, game.budget(episode))
    return f"hint: {game.word(episode, best[0])}"


# --- a solver -----------------------------------------------------------------------------------------------------


def _watch(screen: Screen, game: Game, seed: int, split: str, agent: str) -> None:
    choose: Callable[[EpisodeState], Action] = {"random": _random_action, "optimal": _optimal_action}[agent](game, seed)
    path: Path = [(EpisodeState(game.env.reset(seed, split)), "", None)]
    with screen.taken_over():
        screen.show(_frame(game, path, seed, split))
        while not path[-1][0].finished:
            episode = path[-1][0]
            word = game.word(episode, choose(episode))
            after, turn = game.step(episode, word, seed)
            path.append((after, word, turn))
            if screen.is_terminal:
                time.sleep(SECONDS_BETWEEN_FRAMES)
            screen.show(_frame(game, path, seed, split, f"{agent} plays {word}"))


def _random_action(game: Game, seed: int) -> Callable[[EpisodeState], Action]:
    def choose(episode: EpisodeState) -> Action:
        actions = list(game.env.action_names(episode.state))
        return actions[int(uniform("play", seed, episode.num_actions) * len(actions))]

    return choose


def _optimal_action(game: Game, seed: int) -> Callable[[EpisodeState], Action]:
    return lambda episode: best_actions(game.env, episode.state, game.budget(episode))[0]


# --- what is shown ------------------------------------------------------------------------------------------------


def _frame(
    game: Game, path: Path, seed: int, split: str, message: str = "", compact_width: int | None = None
) -> list[RenderableType]:
    """The level, the board, the score, and at the end the result; with a `compact_width` in as few lines as it can."""
    episode = path[-1][0]
    left, total = actions_left(episode, game.tag), game.tag.max_actions_per_traj
    frame: list[RenderableType] = [
        Text.assemble((game.name, "bold"), f" level {seed} of {split}"),
        _coloured(game.screen, episode),
    ]
    if compact_width is None or not episode.finished:
        frame.append(f"reward {_points(episode.reward + episode.penalty)} · {left} of {_count(total)} left")
    if message:
        frame.append(Text(message, "yellow"))
    if not episode.finished:
        return frame
    if compact_width is None:
        return [*frame, "", _verdict(episode), _result_table(path), _optimum(game, seed, split)]
    return [*frame, _verdict(episode), _result_lines(path, compact_width), _optimum(game, seed, split)]


def _coloured(env: Environment, episode: EpisodeState) -> Text:
    text = Text(env.render(episode.state))
    symbols = env.symbols()
    for index, character in enumerate(text.plain):
        if character in symbols:
            text.stylize(STYLES_OF_WORDS.get(symbols[character], ""), index, index + 1)
    return text


def _prompt_panel(game: Game, episode: EpisodeState, width: int = LONGEST_RULE) -> Text:
    """The messages that a model would get for this state, had it used up the actions of its turns."""
    rules = game.model_rules
    prompt = STYLES[rules.prompt_style](game.env, game.model_tag, rules, game.reply_limit)
    turn_number = min(episode.num_actions // rules.max_actions_per_turn + 1, rules.max_turn)
    turn = prompt.turn_text(turn_number, episode.state, actions_left(episode, game.model_tag), episode.warn_invalid)
    parts = (("system", prompt.system_text()), ("user", turn), ("assistant", prompt.reply_prefix()))
    return Text("\n\n").join(
        Text.assemble((f"── {role} ".ljust(min(width, LONGEST_RULE), "─"), "magenta"), f"\n{content}")
        for role, content in parts
    )


def _verdict(episode: EpisodeState) -> Text:
    verdict, style = ("solved", "bold green") if episode.success else (VERDICTS[episode.ended_by], "bold red")
    return Text.assemble((verdict, style), f" after {_count(episode.num_actions)}")


def _result_lines(path: Path, width: int) -> str:
    """What `_result_table` says, in a line or two."""
    scores = [(word, turn.reward + turn.penalty) for _, word, turn in path[1:]]
    total = ("total", sum(score for _, score in scores))
    return in_lines([f"{word} {_points(score)}" for word, score in [*scores, total]], width)


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


@functools.cache  # a finished level is drawn more than once
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
