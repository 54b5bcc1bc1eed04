"""A tag as a game: its rules for someone who acts one step at a time, and a level as it is played.

    level = PlayedLevel(find_game("sokoban"), seed=0, split="val")
    level.act("Up")
    level.episode.finished, level.game.env.render(level.episode.state)

A player has as many actions as the tag's agents have in all their turns. The rules are those of
`agent.episode.take_turn`, as everywhere.
"""

import dataclasses
import functools
from typing import NamedTuple

from ragen.agent.episode import actions_left, noise_stream, take_turn
from ragen.config import derive
from ragen.config.compose import training_config
from ragen.config.schema import Config
from ragen.env.base import Action, Tag
from ragen.env.failure import call, level
from ragen.env.registry import ENVIRONMENTS, SHORT_NAMES, catalogue, make, tags_of
from ragen.env.solve import Budget, best_actions, hidden_information, optimal_success
from ragen.errors import ConfigError, nearest_of
from ragen.types import EpisodeState, TurnResult

NUM_COMPARED = 16  # levels of a split in which hidden information is looked for
PLAYERS = ("human", "random", "optimal")  # every other agent is a model


def find_game(environment: str) -> "Game":
    """The game of a short name, a tag, or `module:Class`, with the config that it is trained with."""
    name, tags = SHORT_NAMES.get(environment, environment), catalogue()
    if ":" in name or (name in ENVIRONMENTS and name not in tags):
        brought = tags_of(name) or {name: Tag(env_type=name)}
        if name in ENVIRONMENTS and len(brought) > 1:
            raise ConfigError(f"environment {name!r} has several tags; name one of them: {', '.join(brought)}")
        name, tag = next(iter(brought.items()))
        return Game(name, tag, training_config(name))
    if name not in tags:
        known = [*SHORT_NAMES, *tags]
        same = [other for other in known if other.casefold() == environment.casefold()]
        near = f"{nearest_of(environment, known)}; your own is written module:Class"
        raise ConfigError(f"unknown environment {environment!r}{f'; did you mean {same[0]}?' if same else near}")
    config = training_config(name)
    return Game(name, config.custom_envs[name], config)


class Game:
    """A tag for a player: its environment, a twin that draws a grid, and one action per turn."""

    def __init__(self, name: str, tag: Tag, config: Config):
        config = dataclasses.replace(config, custom_envs={**config.custom_envs, name: tag})
        self.name, self.model_tag, self.env = name, tag, make(tag)
        self.model_rules = derive.rules(config)
        self.reply_limit = config.actor_rollout_ref.rollout.response_length
        total = derive.budget(config, name).total
        self.tag = dataclasses.replace(tag, max_actions_per_traj=total)
        self.rules = dataclasses.replace(self.model_rules, max_turn=total, max_actions_per_turn=1)
        self.drawn_env = self.env
        if hasattr(self.env.config, "observation_format"):
            self.drawn_env = type(self.env)(dataclasses.replace(self.env.config, observation_format="grid"))

    @functools.cached_property
    def unknown_optimum(self) -> str:
        """Why nobody can say how to play best, or empty."""
        states = [self.env.reset(seed, split) for split in ("val", "train") for seed in range(NUM_COMPARED)]
        if not self.env.action_names(states[0]) and self.env.shortest_plan(states[0]) is NotImplemented:
            return "any text is an action"
        return hidden_information(self.env, states)

    def best_actions(self, episode: EpisodeState) -> list[str]:
        names = self.env.action_names(episode.state)
        return [names[action] for action in best_actions(self.env, episode.state, self._budget(episode))]

    def optimal_success(self, episode: EpisodeState) -> float:
        return optimal_success(self.env, episode.state, self._budget(episode))

    def _budget(self, episode: EpisodeState) -> Budget:
        left = actions_left(episode, self.tag)
        return Budget(turns=left, actions_per_turn=1, actions=left)


class Move(NamedTuple):
    """An action, what it did, and the state that it led to."""

    word: str
    turn: TurnResult
    episode: EpisodeState


class PlayedLevel:
    """A level and the moves that were made in it."""

    def __init__(self, game: Game, seed: int, split: str):
        self.game, self.seed, self.split = game, seed, split
        self.start = EpisodeState(call(lambda: game.env.reset(seed, split), self._where))
        self.moves: list[Move] = []

    @property
    def _where(self) -> str:
        return level(self.game.name, self.seed, self.split)

    @property
    def episode(self) -> EpisodeState:
        return self.moves[-1].episode if self.moves else self.start

    @property
    def actions(self) -> dict[Action, str]:
        """The actions at hand, and their names."""
        return dict(self.game.env.action_names(self.episode.state))

    def act(self, word: str) -> None:
        noise = noise_stream(self.seed, group=0, member=0)
        game, before = self.game, self.episode
        after, turn = call(lambda: take_turn(game.env, game.tag, game.rules, before, (word,), noise), self._where)
        self.moves.append(Move(word, turn, after))
