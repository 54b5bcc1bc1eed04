"""Play episodes: an agent plays levels, turn by turn, to the end.

    worlds = {tag: World.make(config, tag, chat) for tag in tags}
    groups = collect(engine, worlds, requests, sampling, draws=(seed, step))

An episode is a conversation that an engine runs to its end: state to text to tokens, reply to actions to the next
state. Ids, log-probs and the sampled mask are recorded here, once. Members of a group play the same level from the same
prompt; their samples and their noise differ.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ragen.agent.chat_template import ChatTemplate
from ragen.agent.episode import actions_left, noise_stream, take_turn
from ragen.agent.parse import parse_reply
from ragen.agent.prompt import STYLES
from ragen.agent.rules import AgentRules
from ragen.agent.window import WINDOWS, View
from ragen.config import derive
from ragen.config.schema import Config
from ragen.engine.base import Engine, Prompt, Sampled, Sampling
from ragen.env.base import Environment, Tag
from ragen.env.registry import make
from ragen.prng import Coordinate, bits
from ragen.types import Episode, EpisodeState, Group, Turn


@dataclass(frozen=True)
class World:
    """One tag, ready for a model to play."""

    name: str
    env: Environment
    tag: Tag
    rules: AgentRules
    view: View

    @classmethod
    def make(cls, config: Config, name: str, chat: ChatTemplate) -> "World":
        tag, rules, rollout = config.custom_envs[name], derive.rules(config), config.actor_rollout_ref.rollout
        env = make(tag)
        prompt = STYLES[rules.prompt_style](env, tag, rules, rollout.response_length)
        view = View(
            chat=chat,
            prompt=prompt,
            system_text=prompt.system_text(),
            num_turns_in_view=rules.num_turns_in_view,
            max_prompt_tokens=rollout.max_model_len - rollout.response_length,
        )
        return cls(name, env, tag, rules, view)


@dataclass(frozen=True)
class GroupRequest:
    """A level and the number of episodes to play. `group` is its index within the step."""

    tag: str
    seed: int
    split: str
    group: int
    size: int


def collect(
    engine: Engine,
    worlds: dict[str, World],
    requests: Sequence[GroupRequest],
    sampling: Sampling,
    draws: tuple[Coordinate, ...],
    on_finished: Callable[[int], None] = lambda count: None,
) -> list[Group]:
    """Play all groups. `draws` are coordinates, such as seed and step, that make these samples differ from others."""
    played = [
        [PlayedEpisode(worlds[request.tag], request, member, draws) for member in range(request.size)]
        for request in requests
    ]
    engine.run([episode for group in played for episode in group], sampling, on_finished)
    return [
        Group(request.tag, request.seed, request.split, request.group, tuple(episode.finished() for episode in group))
        for request, group in zip(requests, played, strict=True)
    ]


@dataclass
class PlayedEpisode:
    """A conversation (`engine.base.Conversation`) between a model and an environment."""

    world: World
    request: GroupRequest
    member: int
    draws: tuple[Coordinate, ...]
    turns: list[Turn] = field(default_factory=list)

    def __post_init__(self):
        self.episode = EpisodeState(self.world.env.reset(self.request.seed, self.request.split))
        self.noise = noise_stream(self.request.seed, self.request.group, self.member)

    def prompt(self) -> Prompt | None:
        if self.episode.finished:
            return None
        world, episode = self.world, self.episode
        self.turn_text = world.view.prompt.turn_text(
            len(self.turns) + 1, episode.state, actions_left(episode, world.tag), episode.warn_invalid
        )
        self.given = WINDOWS[world.rules.context_window_mode](world.view, self.turns, self.turn_text)
        if self.given.too_long:
            self.episode = replace(episode, ended_by="max_length")
            return None
        coordinates = (*self.draws, self.request.group, self.member, len(self.turns))
        return Prompt(self.given.ids, self.given.continues, bits("sample", *coordinates, num_bits=64))

    def take(self, reply: Sampled) -> None:
        world, chat = self.world, self.world.view.chat
        ended_itself = reply.stopped_by == "end_of_turn"
        decoded = chat.tokenizer.decode(reply.ids[:-1] if ended_itself else reply.ids, skip_special_tokens=False)
        text = world.view.prompt.reply_prefix() + decoded
        parsed = parse_reply(
            text, world.rules.think, world.rules.action_sep, world.rules.max_actions_per_turn, chat.special_tokens
        )
        well_formed = parsed.well_formed and reply.stopped_by != "length"
        before = self.episode
        self.episode, result = take_turn(
            world.env, world.tag, world.rules, before, parsed.actions, self.noise, well_formed
        )
        self.turns.append(
            Turn(
                given_ids=self.given.ids,
                continues=self.given.continues,
                reply_ids=reply.ids,
                log_probs=reply.log_probs,
                stopped_by=reply.stopped_by,
                state_text=world.env.render(before.state),
                turn_text=self.turn_text,
                reply_text=text,
                result=result,
            )
        )

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
        )
