"""Play episodes: an agent plays levels, turn by turn, to the end.

    worlds = {tag: World.make(config, tag, chat) for tag in tags}
    played = collect(engine, worlds, requests, sampling, draws=(seed, step))       # a Group or a FailedGroup each

An episode is a conversation that an engine runs to its end: state to text to tokens, reply to actions to the next
state. Ids, log-probs and the sampled mask are recorded here, once. Members of a group play the same level from the same
prompt; their samples and their noise differ.

An environment that fails ends its group: an episode is worth something only next to its peers. All other conversations
run on, with the same tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from ragen.agent.chat_template import ChatTemplate
from ragen.agent.episode import actions_left, noise_stream, take_turn
from ragen.agent.parse import parse_reply
from ragen.agent.prompt import STYLES
from ragen.agent.rules import AgentRules
from ragen.agent.window import WINDOWS, View
from ragen.config import derive
from ragen.config.schema import Config
from ragen.engine.base import Engine, Prompt, Sampled, Sampling
from ragen.env.base import Environment, State, Tag
from ragen.env.failure import EnvironmentFailed, call, checked_text, level
from ragen.env.registry import make
from ragen.prng import Coordinate, bits
from ragen.types import Episode, EpisodeState, Group, Turn, TurnResult

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """One tag, ready for a model to play."""

    name: str
    env: Environment
    tag: Tag
    rules: AgentRules
    view: View
    time_limit: float | None = None  # seconds for what the environment does in one turn

    @classmethod
    def make(cls, config: Config, name: str, chat: ChatTemplate) -> "World":
        tag, rules, rollout = config.custom_envs[name], derive.rules(config), config.actor_rollout_ref.rollout
        env = make(tag)
        prompt = STYLES[rules.prompt_style](env, tag, rules, rollout.response_length)
        view = View(
            chat=chat,
            prompt=prompt,
            system_text=call(prompt.system_text, name),
            num_turns_in_view=rules.num_turns_in_view,
            max_prompt_tokens=rollout.max_model_len - rollout.response_length,
        )
        return cls(name, env, tag, rules, view, config.es_manager.env_timeout)


@dataclass(frozen=True)
class GroupRequest:
    """A level and the number of episodes to play. `group` is its index within the step."""

    tag: str
    seed: int
    split: str
    group: int
    size: int


@dataclass(frozen=True)
class UnfinishedTurn:
    """A reply whose turn the environment did not complete."""

    turn_text: str
    reply_text: str


@dataclass(frozen=True)
class FailedGroup:
    """A group that its environment did not let finish, with what was said until then."""

    request: GroupRequest
    failure: EnvironmentFailed
    member: int  # whose environment failed
    turn: int  # its turn, from 1; 0: before the first one
    system_text: str
    replies: dict[int, tuple[Turn | UnfinishedTurn, ...]]  # by member

    @classmethod
    def of(cls, failed: "PlayedEpisode", episodes: Sequence["PlayedEpisode"]) -> "FailedGroup":
        """`failed` is the first of the episodes in which the environment failed."""
        assert failed.failure is not None
        replies = {episode.member: episode.said() for episode in episodes}
        where = (failed.member, failed.turn_number)
        return cls(failed.request, failed.failure, *where, failed.world.view.system_text, replies)


def collect(
    engine: Engine,
    worlds: dict[str, World],
    requests: Sequence[GroupRequest],
    sampling: Sampling,
    draws: tuple[Coordinate, ...],
    on_finished: Callable[[int], None] = lambda count: None,
) -> list[Group | FailedGroup]:
    """Play all groups. `draws` are coordinates, such as seed and step, that make these samples differ from others."""
    played = [PlayedGroup(worlds[request.tag], request, draws) for request in requests]
    engine.run([episode for group in played for episode in group.episodes], sampling, on_finished)
    return [group.finished() for group in played]


class PlayedGroup:
    """The episodes of one level, played to their end, or until the environment fails in one of them."""

    def __init__(self, world: World, request: GroupRequest, draws: tuple[Coordinate, ...]):
        self.request = request
        self.failed: list[PlayedEpisode] = []  # the first one decides
        self.episodes = [PlayedEpisode(world, request, member, draws, self.failed) for member in range(request.size)]

    def finished(self) -> Group | FailedGroup:
        if self.failed:
            return FailedGroup.of(self.failed[0], self.episodes)
        request, episodes = self.request, tuple(episode.finished() for episode in self.episodes)
        return Group(request.tag, request.seed, request.split, request.group, episodes)


@dataclass
class PlayedEpisode:
    """A conversation (`engine.base.Conversation`) between a model and an environment.

    It is over when the episode is, or when the environment fails in it or in one of its peers: `failed` lists them, and
    a group shares the list.
    """

    world: World
    request: GroupRequest
    member: int
    draws: tuple[Coordinate, ...]
    failed: list["PlayedEpisode"] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    failure: EnvironmentFailed | None = None

    def __post_init__(self):
        request, self.turn_number, self.reply_text, self.final_text = self.request, 0, "", ""
        self.noise = noise_stream(request.seed, request.group, self.member)
        self.episode = EpisodeState(None)
        if not self.failed:
            try:
                state = self._environment(lambda: self.world.env.reset(request.seed, request.split))
            except EnvironmentFailed:
                return
            self.episode = EpisodeState(state)

    def prompt(self) -> Prompt | None:
        if self.failed or self.episode.finished:
            return None
        self.turn_number += 1
        try:
            self.state_text, self.turn_text = self._environment(self._observe)
        except EnvironmentFailed:
            return None
        world = self.world
        self.given = WINDOWS[world.rules.context_window_mode](world.view, self.turns, self.turn_text)
        if self.given.too_long:
            self.episode, self.final_text = replace(self.episode, ended_by="max_length"), self.state_text
            return None
        coordinates = (*self.draws, self.request.group, self.member, len(self.turns))
        return Prompt(self.given.ids, self.given.continues, bits("sample", *coordinates, num_bits=64))

    def take(self, reply: Sampled) -> None:
        world, chat = self.world, self.world.view.chat
        ended_itself = reply.stopped_by == "end_of_turn"
        decoded = chat.tokenizer.decode(reply.ids[:-1] if ended_itself else reply.ids, skip_special_tokens=False)
        self.reply_text = world.view.prompt.reply_prefix() + decoded
        if self.failed:  # one of its peers
            return
        parsed = parse_reply(
            self.reply_text,
            world.rules.think,
            world.rules.action_sep,
            world.rules.max_actions_per_turn,
            chat.special_tokens,
        )
        well_formed = parsed.well_formed and reply.stopped_by != "length"
        try:
            self.episode, result, self.final_text = self._environment(lambda: self._act(parsed.actions, well_formed))
        except EnvironmentFailed:
            return
        self.turns.append(
            Turn(
                given_ids=self.given.ids,
                continues=self.given.continues,
                reply_ids=reply.ids,
                log_probs=reply.log_probs,
                stopped_by=reply.stopped_by,
                state_text=self.state_text,
                turn_text=self.turn_text,
                reply_text=self.reply_text,
                result=result,
            )
        )
        self.reply_text = ""

    def finished(self) -> Episode:
        request = self.request
        return Episode(
            tag=request.tag,
            seed=request.seed,
            split=request.split,
            group=request.group,
            member=self.member,
            system_text=self.world.view.system_text,
            turns=tuple(self.turns),
            final=self.episode,
            final_text=self.final_text,
        )

    def said(self) -> tuple[Turn | UnfinishedTurn, ...]:
        """All replies, also the one in which the environment failed."""
        unfinished = [UnfinishedTurn(self.turn_text, self.reply_text)] if self.reply_text else []
        return (*self.turns, *unfinished)

    # --- the environment's code -----------------------------------------------------------------------------------

    def _environment(self, code: Callable[[], T]) -> T:
        """Run it. A failure is noted, and ends the group."""
        request, turn = self.request, f", turn {self.turn_number}" if self.turn_number else ""
        try:
            return call(code, level(request.tag, request.seed, request.split) + turn, self.world.time_limit)
        except EnvironmentFailed as failure:
            self.failure = failure.with_traceback(None)  # its frames would keep states alive
            self.failure.__cause__ = None
            self.failed.append(self)
            raise

    def _observe(self) -> tuple[str, str]:
        """What the agent reads: the state alone, and within the text of the turn."""
        world, episode = self.world, self.episode
        state_text = self._text_of(episode.state)
        turn_text = world.view.prompt.turn_text(
            len(self.turns) + 1, episode.state, actions_left(episode, world.tag), episode.warn_invalid
        )
        return state_text, turn_text

    def _act(self, actions: Sequence[str], well_formed: bool) -> tuple[EpisodeState, TurnResult, str]:
        """A turn, and at the end of the episode the last observation."""
        world = self.world
        after, result = take_turn(world.env, world.tag, world.rules, self.episode, actions, self.noise, well_formed)
        return after, result, self._text_of(after.state) if after.finished else ""

    def _text_of(self, state: State) -> str:
        return checked_text(self.world.env.render(state))
