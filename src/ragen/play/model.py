"""`ragen play ENV --agent MODEL`: a model plays a level, and its reply is shown token by token.

    play("sokoban", seed=0, split="val", agent="pocket", show_prompt=False, temperature=0.5)

The level is played as in an evaluation: the same prompts, rules and limits (`evaluate.setting`).
"""

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.text import Text

from ragen.config.pocket_defaults import PACKAGED
from ragen.engine.base import Prompt, Sampled
from ragen.env.base import Action
from ragen.errors import ConfigError, nearest_of
from ragen.evaluate.models import local_model
from ragen.evaluate.setting import Wanted, settings
from ragen.format import counted, harmless
from ragen.play.frame import board, ending
from ragen.play.game import PLAYERS
from ragen.rollout.collect import GroupRequest, PlayedEpisode, World
from ragen.terminal import Screen
from ragen.types import Turn

THOUGHT, ANSWER, PROMPT = "dim", "bold", "magenta"


def play(environment: str, seed: int, split: str, agent: str, show_prompt: bool, temperature: float) -> int:
    """Show one level. Returns the exit status."""
    if not (temperature >= 0 and math.isfinite(temperature)):
        raise ConfigError(f"--temperature {temperature}: must be 0 (greedy) or more")
    model = local_model(agent)
    if model.name == agent and "/" not in agent and agent not in PACKAGED and not Path(agent).is_dir():
        known = [*PLAYERS, *PACKAGED]
        raise ConfigError(
            f"--agent {agent}: no player, run, model or directory with this name{nearest_of(agent, known)}"
        )
    wanted = Wanted([model], environments=[environment], episodes=1, samples=1, temperature=temperature)
    setting = settings(wanted)[0]
    config, tag = setting.config, setting.config.es_manager.val.env_configs.tags[0]
    for note in setting.notes:
        print(harmless(f"note: {note}"), file=sys.stderr)

    # Heavy: only after every argument was checked.
    from ragen.engine.native.engine import NativeEngine
    from ragen.evaluate.run import local_player, worlds_of
    from ragen.serve.engine import StreamingEngine
    from ragen.train.validation import validation_sampling

    screen = Screen()
    player = local_player(model, lambda text: screen.print(text, style="dim"))
    native = player.engine(config)
    assert isinstance(native, NativeEngine)
    engine = StreamingEngine(native.model, native.tokenizer, native.end_of_turn_id, burst=1)
    world, request = worlds_of(player, config)[tag], GroupRequest(tag, seed, split, 0, 1)
    sampling = validation_sampling(config)
    shown = ShownEpisode(world, request, screen, model.label, sampling.max_tokens, show_prompt)
    engine.run([shown], sampling)
    if shown.failure is not None:
        raise shown.failure
    shown.print_end()
    return 0


class ShownEpisode(PlayedEpisode):
    """An episode that is printed while it is played."""

    def __init__(
        self, world: World, request: GroupRequest, screen: Screen, label: str, max_tokens: int, show_prompt: bool
    ):
        super().__init__(world, request, member=0, draws=("play", request.seed))
        self.screen, self.label, self.max_tokens, self.show_prompt = screen, label, max_tokens, show_prompt

    def prompt(self) -> Prompt | None:
        prompt = super().prompt()
        self.ids: list[int] = []
        self.text = ""
        if prompt is not None:
            self._print_turn()
        return prompt

    def heard(self, id_: int, log_prob: float) -> None:
        chat = self.world.view.chat
        self.ids += [] if id_ == chat.end_of_turn_id else [id_]
        text = chat.tokenizer.decode(self.ids, skip_special_tokens=False).rstrip("\ufffd")
        if text.startswith(self.text):
            style = ANSWER if "<answer" in text else THOUGHT
            self.screen.print(Text(harmless(text[len(self.text) :]), style), end="", soft_wrap=True)
            self.screen.file.flush()
            self.text = text

    def ends_at(self, ids: Sequence[int]) -> str:
        return "length" if len(ids) >= self.max_tokens else ""

    def take(self, reply: Sampled) -> None:
        before = self.episode.state
        super().take(reply)
        self.screen.print()
        if self.failure is not None:
            return
        names = self.world.env.action_names(before)
        self.screen.print(outcome_text(self.turns[-1], names), style="yellow", soft_wrap=True)

    def _print_turn(self) -> None:
        if not self.turns:
            title = f" level {self.request.seed} of {self.request.split}, played by {self.label}"
            self.screen.print(Text.assemble((self.world.name, "bold"), title))
            if self.show_prompt:
                self.screen.print(Text(self.world.view.system_text, PROMPT), soft_wrap=True)
        self.screen.print()
        self.screen.print(Text(f"turn {len(self.turns) + 1} of {self.world.rules.max_turn}", "bold"))
        self.screen.print(board(self.world.env, self.episode))
        if self.show_prompt:
            self.screen.print(Text(self.turn_text, PROMPT), soft_wrap=True)
        self.screen.print(Text(self.world.view.prompt.reply_prefix(), THOUGHT), end="")

    def print_end(self) -> None:
        end = self.episode
        played = f"{counted(end.num_actions, 'action')} in {counted(end.num_turns, 'turn')}"
        numbers = f" after {played}, reward {end.reward + end.penalty:+.1f}"
        self.screen.print()
        self.screen.print(board(self.world.env, end))
        self.screen.print(Text.assemble(ending(end), numbers))


def outcome_text(turn: Turn, names: Mapping[Action, str]) -> str:
    """What a reply did."""
    result = turn.result
    words = ", ".join(str(names.get(action, action)) for action in result.actions) or "no valid action"
    penalty = f", penalty {result.penalty:+.1f}" if result.penalty else ""
    cut = ", reply cut off" if turn.stopped_by == "length" else ""
    return f"→ {words}: reward {result.reward:+.1f}{penalty}{cut}"
