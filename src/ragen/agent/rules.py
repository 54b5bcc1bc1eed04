"""The rules of the conversation: number of turns, actions per reply, format, and how much history the agent sees.

They belong to a run, not to an environment; what depends on the environment (`max_actions_per_traj`, `max_tokens`,
`end_on_invalid`, `env_instruction`) is in its `Tag`. The defaults are in the config schema.

    rules = AgentRules(max_turn=5, max_actions_per_turn=2, action_sep="||", think=True, format_penalty=-0.1,
                       context_window_mode="full", max_context_window=-1, prompt_style="full")
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class AgentRules:
    """The rules of one run."""

    max_turn: int  # replies in one episode
    max_actions_per_turn: int  # actions taken from one reply; the rest are ignored
    action_sep: str  # separates the actions of one reply
    think: bool  # replies are think block + answer block, instead of the answer block alone
    format_penalty: float  # added once per offending turn, separate from the environment's reward
    context_window_mode: str  # a key of `window.WINDOWS`
    max_context_window: int | None  # turns in view, including the current one; negative or None: all
    prompt_style: str  # a key of `prompt.STYLES`

    def __post_init__(self):
        for name in ("max_turn", "max_actions_per_turn"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: an episode needs at least 1")
        if not self.action_sep.strip():
            raise ValueError(f"action_sep={self.action_sep!r}: separates actions, so it must not be blank")
        if self.max_context_window == 0:
            raise ValueError("max_context_window=0: the current turn is always in view; 1 is no history, -1 is all")

    @property
    def num_turns_in_view(self) -> int:
        """The most turns that the agent sees, including the current one."""
        limit = self.max_context_window
        return self.max_turn if limit is None or limit < 0 else limit
