"""The agent and its environment, one turn at a time, without any text model.

    episode = EpisodeState(env.reset(seed=123, split="val"))
    noise = noise_stream(seed=123, group=0, member=3)
    while not episode.finished:
        episode, turn = take_turn(env, tag, rules, episode, ("Up", "Left"), noise)

Rollouts, play and baselines all use `take_turn`. It is pure: an episode can be copied, replayed or forked at any turn.
The environment's reward and the format penalty stay separate.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from ragen.agent.rules import AgentRules
from ragen.env.base import Action, Environment, Tag
from ragen.env.failure import checked_reward
from ragen.prng import uniform
from ragen.types import EpisodeState, TurnResult

NoiseOfStep = Callable[[int], float]


def take_turn(
    env: Environment,
    tag: Tag,
    rules: AgentRules,
    episode: EpisodeState,
    action_texts: Sequence[str],
    noise_of_step: NoiseOfStep,
    well_formed: bool = True,
) -> tuple[EpisodeState, TurnResult]:
    """Execute the actions that a reply names.

    `well_formed` is False for a reply that broke the format or was cut off: it costs the format penalty, whatever its
    actions. Raises `env.failure.WrongValue` where a step returns anything but a transition with a finite reward.
    """
    assert not episode.finished, f"the episode ended by {episode.ended_by}"
    assert len(action_texts) <= rules.max_actions_per_turn, "parse_reply keeps at most max_actions_per_turn"

    # Parse names in the state that the agent saw.
    read = [env.parse_action(episode.state, text) for text in action_texts]
    valid = [action for action in read if action is not None]

    state, reward, num_effective, ending = episode.state, 0.0, 0, ""
    executed: list[Action] = []
    for action in valid[: actions_left(episode, tag)]:
        transition = env.step(state, action, noise_of_step(episode.num_actions + len(executed)))
        reward += checked_reward(transition)
        state = transition.state
        executed.append(action)
        num_effective += bool(transition.effective)
        if transition.done:
            ending = "won" if transition.success else "lost"
            break

    offends = not well_formed or not valid or len(valid) < len(read)
    turn = TurnResult(
        reward=reward,
        penalty=rules.format_penalty if offends else 0.0,
        actions=tuple(executed),
        num_listed=len(read),
        num_valid=len(valid),
        num_effective=num_effective,
    )
    after = replace(
        episode,
        state=state,
        num_turns=episode.num_turns + 1,
        num_actions=episode.num_actions + len(executed),
        reward=episode.reward + turn.reward,
        penalty=episode.penalty + turn.penalty,
        warn_invalid=not valid,
    )
    return replace(after, ended_by=ending or _limit_reached(tag, rules, after)), turn


def _limit_reached(tag: Tag, rules: AgentRules, episode: EpisodeState) -> str:
    if actions_left(episode, tag) <= 0:
        return "max_actions"
    if episode.warn_invalid and tag.end_on_invalid:
        return "invalid"
    if episode.num_turns >= rules.max_turn:
        return "max_turn"
    return ""


def noise_stream(seed: int, group: int, member: int) -> NoiseOfStep:
    """The noise of one episode: members of a group share the level, but not the noise."""
    return lambda step: uniform("noise", seed, group, member, step)


def actions_left(episode: EpisodeState, tag: Tag) -> int:
    return tag.max_actions_per_traj - episode.num_actions
