"""Episodes with an engine that has no model: it answers what the test tells it to."""

import functools

import pytest
from faulty_line import FaultyLine
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ragen.agent.chat_template import ChatTemplate
from ragen.config.compose import resolve
from ragen.engine.base import Sampled, Sampling
from ragen.env.base import Tag
from ragen.env.failure import REASONS
from ragen.env.solve import best_actions, shortest_plan
from ragen.model.packing import pack, samples_of
from ragen.rollout.collect import GroupRequest, World, collect
from ragen.rollout.summary import score_of, summarize
from ragen.types import Group

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SAMPLING = Sampling(1.0, 1.0, -1, False, 400, True)


@pytest.fixture(scope="module")
def chat():
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator([], trainers.BpeTrainer(special_tokens=SPECIAL, initial_alphabet=alphabet))
    return ChatTemplate(
        PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|endoftext|>", chat_template=CHATML)
    )


class Puppet:
    """Replies with `answer(conversation)`: a text, closed by the end-of-turn token."""

    def __init__(self, chat, answer, close=True):
        self.chat, self.answer, self.close = chat, answer, close
        self.prompts = []

    def run(self, conversations, sampling, on_finished=lambda count: None):
        for conversation in conversations:
            while (prompt := conversation.prompt()) is not None:
                self.prompts.append(prompt)
                ids = self.chat.tokenizer.encode(self.answer(conversation), add_special_tokens=False)
                ids = [*ids, self.chat.end_of_turn_id] if self.close else ids
                log_probs = tuple(-0.1 * index for index in range(len(ids)))
                conversation.take(Sampled(tuple(ids), log_probs, "end_of_turn" if self.close else "answer"))
            on_finished(1)


def optimal(conversation):
    env, rules = conversation.world.env, conversation.world.rules
    episode = conversation.episode
    plan = shortest_plan(env, episode.state) or best_actions(env, episode.state, None)
    names = env.action_names(episode.state)
    words = [names[action] for action in plan[: rules.max_actions_per_turn]]
    return f"I see.</think><answer>{' || '.join(words)}</answer>"


def worlds(chat, *words, tags=("SimpleSokoban",)):
    config = resolve([*words, f"es_manager.train.env_configs.tags=[{tags[0]}]"], environ={}).config
    return {tag: World.make(config, tag, chat) for tag in tags}


def requests(tag="SimpleSokoban", num=3, size=2):
    return [GroupRequest(tag, 500 + group, "val", group, size) for group in range(num)]


@pytest.mark.parametrize("mode", ["full", "limited_multi_turn", "single_turn"])
@pytest.mark.parametrize("close", [True, False])
def test_optimal_replies_win_and_ids_pass_through(chat, mode, close):
    engine = Puppet(chat, optimal, close)
    made = worlds(chat, f"agent_proxy.context_window_mode={mode}", "actor_rollout_ref.rollout.max_model_len=20000")
    finished = []
    groups = collect(engine, made, requests(), SAMPLING, ("train", 0, 1), finished.append)
    episodes = [episode for group in groups for episode in group.episodes]
    assert sum(finished) == len(episodes) == 6
    for episode in episodes:
        state = made["SimpleSokoban"].env.reset(episode.seed, "val")
        plan = made["SimpleSokoban"].env.shortest_plan(state)
        assert episode.final.success and episode.final.num_actions == len(plan)
        assert score_of(episode) == pytest.approx(11 - 0.1 * len(plan))
        # What is trained is what was sampled: the ids of each sequence are given and reply ids, and nothing else.
        for sequence in episode.sequences():
            sampled = [id_ for id_, flag in zip(sequence.ids, sequence.sampled, strict=True) if flag]
            assert len(sequence.ids) == len(sequence.sampled) == len(sequence.log_probs)
            assert all(
                value == 0.0 for value, flag in zip(sequence.log_probs, sequence.sampled, strict=True) if not flag
            )
            if mode == "full":
                assert sampled == [id_ for turn in episode.turns for id_ in turn.reply_ids]
        trained = sum(sum(sequence.sampled) for sequence in episode.sequences())
        assert trained == sum(len(turn.reply_ids) for turn in episode.turns)


def test_members_of_a_group_share_level_and_prompt_but_not_draws(chat):
    engine = Puppet(chat, lambda conversation: "x</think><answer>Up</answer>")
    groups = collect(engine, worlds(chat), requests(num=2, size=3), SAMPLING, ("train", 0, 1))
    for group in groups:
        first = [episode.turns[0].given_ids for episode in group.episodes]
        assert len(set(first)) == 1
        assert {episode.seed for episode in group.episodes} == {group.seed}
    keys = [prompt.draw_key for prompt in engine.prompts]
    assert len(set(keys)) == len(keys)


def test_draws_depend_on_the_step_and_nothing_else_changes_them(chat):
    def keys(step, num):
        engine = Puppet(chat, lambda conversation: "x</think><answer>Up</answer>")
        collect(engine, worlds(chat), requests(num=num, size=1), SAMPLING, ("train", 0, step))
        return [prompt.draw_key for prompt in engine.prompts]

    assert keys(1, 2)[:5] == keys(1, 1)[:5]
    assert not set(keys(1, 2)) & set(keys(2, 2))


def test_malformed_and_cut_replies_cost_the_penalty_and_stay_as_they_are(chat):
    engine = Puppet(chat, lambda conversation: "no format at all")
    groups = collect(engine, worlds(chat), requests(num=1, size=1), SAMPLING, ("train", 0, 1))
    episode = groups[0].episodes[0]
    assert len(episode.turns) == 5 and episode.final.ended_by == "max_turn"
    assert episode.final.penalty == pytest.approx(-0.5) and episode.final.reward == 0
    assert all(turn.reply_text == "<think>no format at all" for turn in episode.turns)
    assert summarize(groups)["format_valid"] == 0


def test_an_episode_that_outgrows_the_context_ends(chat):
    made = worlds(chat, "actor_rollout_ref.rollout.max_model_len=2600", "actor_rollout_ref.rollout.response_length=400")
    engine = Puppet(chat, lambda conversation: "y" * 390 + "</think><answer>Up</answer>")
    groups = collect(engine, made, requests(num=1, size=1), SAMPLING, ("train", 0, 1))
    assert groups[0].episodes[0].final.ended_by == "max_length"
    assert groups[0].episodes[0].turns


def first_action(conversation):
    names = conversation.world.env.action_names(conversation.episode.state)
    return f"z</think><answer>{next(iter(names.values()))}</answer>"


def test_bandit_groups_share_their_prompt(chat):
    engine = Puppet(chat, first_action)
    made = worlds(chat, "agent_proxy.max_turn=1", tags=("Bandit",))
    groups = collect(engine, made, requests("Bandit", 4, 8), SAMPLING, ("train", 0, 1))
    assert all(len({episode.turns[0].given_ids for episode in group.episodes}) == 1 for group in groups)
    assert summarize(groups)["Bandit/num_actions"] == 1


def test_packing_points_at_the_tokens_before_the_sampled_ones(chat):
    engine = Puppet(chat, optimal)
    groups = collect(engine, worlds(chat), requests(num=2, size=1), SAMPLING, ("train", 0, 1))
    samples = samples_of(groups)
    packed = pack([sample.sequence for sample in samples], "cpu")
    sequences = [sample.sequence for sample in samples]
    flat = [entry for s in sequences for entry in zip(s.ids, s.sampled, s.log_probs, strict=True)]
    places = [place for place, (_, flag, _) in enumerate(flat) if flag]
    assert packed.ids.tolist() == [id_ for id_, _, _ in flat]
    assert packed.rows.tolist() == [place - 1 for place in places]
    assert packed.targets.tolist() == [flat[place][0] for place in places]
    assert packed.log_probs.tolist() == pytest.approx([flat[place][2] for place in places])
    first = samples[0].num_sampled
    assert packed.sequence.tolist() == [0] * first + [1] * samples[1].num_sampled


# --- environments that fail -----------------------------------------------------------------------------------------


class RoundRobin(Puppet):
    """All conversations at once, turn by turn, as the native engine has them."""

    def run(self, conversations, sampling, on_finished=lambda count: None):
        waiting = list(conversations)
        while waiting:
            prompts = [(conversation, conversation.prompt()) for conversation in waiting]
            waiting = [conversation for conversation, prompt in prompts if prompt is not None]
            for conversation, prompt in prompts:
                if prompt is not None:
                    word = ("Up", "Down", "Left", "Right")[prompt.draw_key % 4]
                    ids = self.chat.tokenizer.encode(f"x</think><answer>{word}</answer>", add_special_tokens=False)
                    conversation.take(Sampled(tuple(ids), (-0.5,) * len(ids), "answer"))
            on_finished(len(prompts) - len(waiting))


@functools.cache
def line_config():
    return resolve(["agent_proxy.max_turn=3", "agent_proxy.max_actions_per_turn=1"], environ={}).config


def play_line(chat, **settings):
    config = line_config()
    config.custom_envs["Line"] = Tag(env_type="faulty_line:FaultyLine", env_config=settings, max_actions_per_traj=4)
    finished, engine = [], RoundRobin(chat, None)
    made = {"Line": World.make(config, "Line", chat)}
    played = collect(engine, made, requests("Line", num=4, size=3), SAMPLING, ("train", 0, 1), finished.append)
    assert sum(finished) == 12, "every conversation is reported as ended"
    return played


@given(
    st.sampled_from(["raise", "exit", "panic", "recursion", "not a number", "infinite", "nothing", "tuple", "number"]),
    st.sampled_from(["reset", "step", "render", "names", "parse"]),
    st.sets(st.integers(500, 503)),
    st.integers(0, 2),
)
@settings(max_examples=12, deadline=None)
def test_groups_of_other_levels_are_those_of_a_run_without_faults(chat, fault, call, seeds, step_number):
    if fault in ("not a number", "infinite", "nothing", "tuple", "number"):
        call = "step"
    if call == "reset":
        step_number = 0
    whole = play_line(chat)
    assert all(isinstance(group, Group) for group in whole)
    where = {"seeds": sorted(seeds) or [-1], "splits": ["val"], "step_number": step_number}
    found = play_line(chat, fault=fault, call=call, **where)
    for before, after in zip(whole, found, strict=True):
        if isinstance(after, Group):
            assert after == before
            assert after.seed not in seeds or step_number > 0, "every level takes a step"
        else:
            assert after.request.seed == before.seed and before.seed in seeds
            assert after.failure.reason in REASONS and f"Line, val level {before.seed}" in str(after.failure)
            said = [turn.reply_text for turn in after.replies[after.member]]
            played = [turn.reply_text for turn in before.episodes[after.member].turns]
            assert said == played[: len(said)] and set(after.replies) == {0, 1, 2}


@pytest.mark.parametrize(("call", "turn"), [("reset", 0), ("render", 1), ("names", 1), ("parse", 1), ("step", 1)])
def test_the_first_member_that_fails_ends_its_group(chat, call, turn):
    failed = play_line(chat, fault="raise", call=call, seeds=[501], splits=["val"])[1]
    assert (failed.member, failed.turn, failed.failure.reason) == (0, turn, "raised")
    assert [len(replies) for replies in failed.replies.values()] == [int(call in ("names", "parse", "step"))] * 3


def test_the_text_after_the_last_action_is_kept(chat):
    episodes = [episode for group in play_line(chat) for episode in group.episodes]
    assert {episode.final_text for episode in episodes} <= {f"You stand at {number} of 3." for number in range(6)}
    env = FaultyLine()
    assert all(episode.final_text == env.render(episode.final.state) for episode in episodes)
