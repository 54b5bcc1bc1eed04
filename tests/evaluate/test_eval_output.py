"""JSON lines: what they hold, what is left out on request, and the same episodes back."""

import json
import math
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from ragen.agent.chat_template import ChatTemplate
from ragen.config.compose import resolve
from ragen.config.schema import Output
from ragen.engine.native.engine import NativeEngine
from ragen.errors import ConfigError
from ragen.evaluate.metrics import outcome_of
from ragen.evaluate.output import (
    BATCH_KEYS,
    check_keys,
    claimed,
    episode_of,
    kept,
    notes_on,
    output_path,
    read_lines,
    record_of,
)
from ragen.rollout.collect import GroupRequest, World, collect
from ragen.store import json_lines
from ragen.train.validation import validation_sampling

WORDS = ["model_path=pocket", "actor_rollout_ref.rollout.val_kwargs.temperature=1.0", "agent_proxy.max_turn=3"]


def played(pocket, tag, *words):
    """Four episodes and their world."""
    name = f"es_manager.val.env_configs.tags=[{tag}]"
    config = resolve([*WORDS, name, *words], config_name="eval", environ={}).config
    chat = ChatTemplate(pocket.tokenizer)
    world = World.make(config, tag, chat)
    engine = NativeEngine(pocket.model, pocket.tokenizer, chat.end_of_turn_id)
    groups = collect(engine, {tag: world}, [GroupRequest(tag, 123, "val", 0, 4)], validation_sampling(config), ("t",))
    return list(groups[0].episodes), world


@pytest.mark.parametrize(
    ("tag", "words"),
    [
        ("SimpleSokoban", ()),
        ("FrozenLake", ("custom_envs.FrozenLake.env_config.success_rate=0.5",)),
        ("SimpleSokoban", ("agent_proxy.context_window_mode=limited_multi_turn",)),
        ("BanditTest", ()),
    ],
)
def test_lines_read_back_are_the_same_episodes(pocket, tmp_path, tag, words):
    episodes, world = played(pocket, tag, *words)
    json_lines.write(
        tmp_path / "lines.jsonl", [record_of(episode, world, f"traj_{i}") for i, episode in enumerate(episodes)]
    )
    assert [episode_of(line, world) for line in read_lines(tmp_path / "lines.jsonl")] == episodes


def test_a_missing_or_damaged_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="file not found"):
        read_lines(tmp_path / "lines.jsonl")
    (tmp_path / "lines.jsonl").write_text('{"custom_id": "traj_0"}\n{"custom_id"')
    with pytest.raises(ConfigError, match=r"last line of lines\.jsonl is torn"):
        read_lines(tmp_path / "lines.jsonl")


def test_an_endless_reward_is_text_in_a_line_and_a_number_again_when_read(pocket):
    (episode, *_), world = played(pocket, "SimpleSokoban")
    first = replace(episode.turns[0], result=replace(episode.turns[0].result, reward=-math.inf))
    final = replace(episode.final, reward=-math.inf)
    endless = replace(episode, turns=(first, *episode.turns[1:]), final=final)
    record = json.loads(json.dumps(record_of(endless, world), allow_nan=False))
    assert record["rewards"][0] == record["turns"][0]["reward"] == record["metadata"]["total_reward"] == "-inf"
    assert outcome_of(record).score == -math.inf
    assert episode_of(record, world) == endless


def test_the_reward_stands_at_its_own_turn(pocket):
    episodes, world = played(pocket, "SimpleSokoban")
    for episode in episodes:
        record = record_of(episode, world)
        assert record["rewards"] == [turn.result.reward for turn in episode.turns]
        assert sum(record["rewards"]) == pytest.approx(record["metadata"]["total_reward"])
        assert record["success"] is record["metadata"]["success"] is episode.final.success
        roles = [message["role"] for message in record["messages"]]
        assert roles == ["system", *(["user", "assistant"] * len(episode.turns))]
        # The model reads in the next message what its last reply was worth.
        for number, turn in enumerate(episode.turns[:-1]):
            told = record["messages"][3 + 2 * number]["content"]
            assert told.startswith(f"reward {round(turn.result.reward, 6) + 0.0:g}\n")


def test_the_messages_are_what_the_model_read(pocket):
    """Rendered by the tokenizer's own template, they are the tokens of the episode."""
    episodes, world = played(pocket, "SimpleSokoban")
    for episode in episodes:
        messages = record_of(episode, world)["messages"]
        text = pocket.tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
        ids = [id_ for turn in episode.turns for id_ in (*turn.given_ids, *turn.reply_ids)]
        ids = ids[: len(ids) - len(episode.turns[-1].reply_ids)]
        assert pocket.tokenizer.decode(ids) == text + "<think>"


def test_what_is_kept(pocket):
    episodes, world = played(pocket, "SimpleSokoban")
    record = record_of(episodes[0], world, "traj_0", {"model": "pocket"})
    everything = kept(record, Output(), has_ids=True)
    assert set(everything) == {"custom_id", "messages", "rewards", "success", "metadata", "turns", "meta_info"}
    little = kept(record, Output(keep_non_tensor_keys=["success"], keep_meta_info=False), has_ids=True)
    assert little == {"custom_id": "traj_0", "success": record["success"]}
    tokens = kept(record, Output(keep_batch_keys=["input_ids"]), has_ids=True)["sequences"]
    assert tokens == [{"ids": list(sequence.ids)} for sequence in episodes[0].sequences()]
    assert "sequences" not in kept(record, Output(keep_batch_keys=list(BATCH_KEYS)), has_ids=False)
    with pytest.raises(ConfigError, match="lacks sequences; lines are complete with --token-ids"):
        episode_of(everything, world)


def test_names_of_files():
    now = datetime(2026, 1, 2, 3, 4, 5)
    assert output_path(Output(), now) == Path("results/eval/val_rollouts_20260102_030405.jsonl")
    assert output_path(Output(filename="mine.jsonl", append_timestamp=False), now) == Path("results/eval/mine.jsonl")
    assert output_path(Output(dir="x", filename="a.b", append_timestamp=False), now) == Path("x/a.b.jsonl")
    with pytest.raises(ConfigError, match=r"its directory is output.dir"):
        output_path(Output(filename="x/mine.pkl"), now)


def test_no_other_evaluation_is_overwritten(tmp_path):
    path = tmp_path / "new" / "mine.v1.jsonl"
    assert claimed(path, "one") == claimed(path, "one") == path
    assert claimed(path, "two") == path.with_name("mine.v1_2.jsonl")
    (tmp_path / "new" / "mine.v1_3.md").write_text("somebody's")
    assert claimed(path, "three") == path.with_name("mine.v1_4.jsonl")
    assert claimed(path, "two") == path.with_name("mine.v1_2.jsonl")


def test_a_name_can_be_taken_over(tmp_path):
    path = tmp_path / "mine.jsonl"
    assert claimed(path, "one") == claimed(path, "two", replaces=True) == claimed(path, "two") == path
    assert claimed(path, "one") == path.with_name("mine_2.jsonl")


def test_pickle_is_said_once_and_never_written():
    assert [note.partition(":")[0] for note in notes_on(Output())] == ["output.format=pkl"]
    assert notes_on(Output(format="jsonl")) == []
    assert len(notes_on(Output(save_pkl_backup=True, save_jsonl_backup=True))) == 3


@pytest.mark.parametrize(
    "output", [Output(keep_batch_keys=["input_idz"]), Output(keep_non_tensor_keys=["message"])], ids=["batch", "other"]
)
def test_unknown_keys_are_refused(output):
    with pytest.raises(ConfigError, match=r"did you mean (input_ids|messages)"):
        check_keys(output)


def test_text_of_any_kind_survives(tmp_path):
    line = {"custom_id": "x", "messages": [{"role": "user", "content": "√ \x00 \u2028 \n 汉字 😀"}]}
    json_lines.write(tmp_path / "a.jsonl", [line, line])
    assert read_lines(tmp_path / "a.jsonl") == [line, line]
    assert [json.loads(one) for one in (tmp_path / "a.jsonl").read_text().split("\n")[:-1]] == [line, line]
