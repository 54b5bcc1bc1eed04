"""Our environments as Gymnasium environments, for tools that use that interface.

    env = as_gym(Sokoban(Sokoban.Config(num_boxes=1)), max_actions=10)
    observation, info = env.reset(seed=123)              # level 123; without a seed: a random level
    observation, reward, terminated, truncated, info = env.step(0)

Observations are text. `terminated` means that the game was won or lost; `truncated` that steps ran out: the game's, or
the `max_actions` given here.
"""

import string
from typing import Any

from ragen.env.base import Environment
from ragen.extras import require

require("gym")
import gymnasium  # noqa: E402
from gymnasium.spaces import Discrete, Text  # noqa: E402

NUM_SAMPLE_LEVELS = 8  # levels whose text shows the characters in use
METADATA: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 1}


def as_gym(
    env: Environment,
    split: str = "train",
    max_actions: int | None = None,
    max_length: int = 4096,
    render_mode: str | None = None,
) -> gymnasium.Env:
    """Wrap an environment; `max_length` bounds the observation text."""
    return GymEnvironment(env, split, max_actions, max_length, render_mode)


class GymEnvironment(gymnasium.Env):
    """Holds what a pure environment does not: the current state, and the noise of its steps."""

    metadata = METADATA

    def __init__(self, env: Environment, split: str, max_actions: int | None, max_length: int, render_mode: str | None):
        if render_mode not in (None, "ansi"):
            raise ValueError(f"render_mode={render_mode!r}: choose 'ansi' or None")
        samples = [env.reset(seed, split) for seed in range(NUM_SAMPLE_LEVELS)]
        actions = list(env.action_names(samples[0]))
        if not actions:
            raise ValueError(f"{type(env).__name__} accepts any text as an action; only listed actions can be numbered")
        characters = set(string.printable + env.legend() + "".join(map(env.render, samples)))
        self.env = env
        self.split = split
        self.max_actions = max_actions
        self.render_mode = render_mode
        self.actions = actions
        self.action_space = Discrete(len(actions))
        self.observation_space = Text(max_length, charset="".join(sorted(characters)))
        self._state: Any = None
        self._num_actions = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Start level `seed`, or a random one."""
        super().reset(seed=seed)
        level = int(self.np_random.integers(2**31)) if seed is None else seed
        self._state = self.env.reset(level, self.split)
        self._num_actions = 0
        return self.env.render(self._state), {"level": level}

    def step(self, action: int) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Take the action with this number, in the order of `action_names`."""
        if self._state is None:
            raise gymnasium.error.ResetNeeded("call reset before step")
        if not self.action_space.contains(action):
            raise ValueError(f"action {action!r}: choose 0 to {len(self.actions) - 1}")
        transition = self.env.step(self._state, self.actions[int(action)], float(self.np_random.random()))
        self._state = transition.state
        self._num_actions += 1
        terminated = transition.done and not transition.out_of_steps
        truncated = transition.out_of_steps or (not terminated and self._num_actions == self.max_actions)
        info = {"success": transition.success, "effective": transition.effective}
        return self.env.render(self._state), transition.reward, terminated, truncated, info

    def render(self) -> str | None:
        """The observation again, in render mode `ansi`."""
        return self.env.render(self._state) if self.render_mode == "ansi" else None
