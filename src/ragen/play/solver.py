"""`ragen play ENV --agent optimal`: watch a solver, or random play.

play(find_game("sokoban"), seed=0, split="val", agent="optimal", show_prompt=False)
"""

import time

from ragen.errors import ConfigError
from ragen.play.frame import frame, prompt_text
from ragen.play.game import Game, PlayedLevel
from ragen.prng import uniform
from ragen.terminal import Screen

SECONDS_BETWEEN_FRAMES = 0.4


def play(game: Game, seed: int, split: str, agent: str, show_prompt: bool) -> int:
    """Show one level. Returns the exit status."""
    screen, level = Screen(), PlayedLevel(game, seed, split)
    if agent == "optimal" and game.unknown_optimum:
        raise ConfigError(f"--agent optimal: the best play of {game.name} is unknown: {game.unknown_optimum}")
    if not level.actions:
        raise ConfigError(f"--agent {agent}: any text is an action in {game.name}; play it yourself, or name a model")
    if show_prompt:
        screen.print(prompt_text(game, level.episode, screen.width), soft_wrap=not screen.is_terminal)
    with screen.taken_over():
        screen.show(frame(level))
        while not level.episode.finished:
            if agent == "random":
                words = list(level.actions.values())
                word = words[int(uniform("play", seed, level.episode.num_actions) * len(words))]
            else:
                word = game.best_actions(level.episode)[0]
            level.act(word)
            if screen.is_terminal:
                time.sleep(SECONDS_BETWEEN_FRAMES)
            screen.show(frame(level, f"{agent} plays {word}"))
    return 0
