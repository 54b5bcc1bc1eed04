"""The rows: how many, of which levels, always the same, and readable by others."""

from dataclasses import replace
from itertools import pairwise

import pyarrow.parquet as parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small import config_of

from ragen.agent.chat_template import ChatTemplate
from ragen.config import derive
from ragen.config.compose import resolve
from ragen.env.bandit import NAME_PAIRS
from ragen.env.registry import make
from ragen.errors import ConfigError
from ragen.format import percent
from ragen.model.pocket.tokenizer import make_tokenizer
from ragen.sft import data as data_module
from ragen.sft.data import Lesson, make_data, read_rows, solve_levels, write_data
from ragen.sft.run import describe
from ragen.sft.tokens import answers_of, num_answers
from ragen.sft.train import plan_batches

CONFIG = config_of()


def lesson(*words: str, environment: str = "sokoban", **changes) -> Lesson:
    return replace(Lesson.of(config_of(*words, environment=environment)), **changes)


def levels(rows) -> list[int]:
    return list(dict.fromkeys(row["extra_info"]["index"] for row in rows))


def test_sizes_count_levels_and_every_answer_is_a_row():
    data = make_data(lesson(train_size=30, test_size=7))
    assert (len(levels(data.train)), len(levels(data.test))) == (30, 7)
    assert len(data.train) > 60
    assert levels(data.train) == sorted(levels(data.train)) and levels(data.train)[0] >= 100_000
    assert max(levels(data.train)) < min(levels(data.test))
    assert data.success == 1.0
    for row in data.train:
        place = row["extra_info"]
        assert [message["role"] for message in row["prompt"]] == ["system", *["user", "assistant"] * 5][
            : 2 * place["turn"]
        ]
        assert place["split"] == "train" and row["ability"] == "bfs" and row["data_source"] == "ragen/SokobanV1"
        assert 1 <= place["turn"] <= place["num_turns"] <= 5


def test_the_last_row_of_a_level_holds_the_others():
    data = make_data(lesson(train_size=10, test_size=1))
    by_level = {}
    for row in data.train:
        by_level.setdefault(row["extra_info"]["index"], []).append(row)
    for rows in by_level.values():
        assert [row["extra_info"]["turn"] for row in rows] == list(range(1, len(rows) + 1))
        for before, after in pairwise(rows):
            said = {"role": "assistant", "content": before["response"]}
            assert after["prompt"][:-1] == [*before["prompt"], said]


def test_no_level_is_in_two_sets(monkeypatch):
    monkeypatch.setattr(data_module, "PATIENCE", 50)
    asked = lesson(environment="frozenlake", train_size=60, test_size=1, validation_seeds=range(1))
    asked = replace(asked, tag=replace(asked.tag, env_config=asked.tag.env_config | {"size": 2, "p": 1.0}))
    asked = replace(asked, validation_tags=(replace(asked.tag, env_config=asked.tag.env_config | {"size": 5}),))
    with pytest.raises(ConfigError, match="60 of 61 were found"):
        make_data(asked)  # a lake of four cells without holes has twelve levels, and training has seen them
    asked = lesson(environment="frozenlake", train_size=40, test_size=10, validation_seeds=range(123, 635))
    data, env = make_data(asked), make(asked.tag)
    train, test = ({env.reset(seed, "sft") for seed in levels(rows)} for rows in (data.train, data.test))
    validation = {env.reset(seed, "val") for seed in asked.validation_seeds}
    assert not train & test and not (train | test) & validation


def test_no_level_of_any_evaluation_is_shown():
    """On boards of nine cells, where equal levels come from many seeds; against a search by hand."""
    board = ["env.env_kwargs.size=3", "training.val_data_num=5"]
    asked = lesson(*board, environment="frozenlake", train_size=60, test_size=15)
    env = make(asked.tag)
    played = {env.reset(seed, split) for split in ("val", "test") for seed in range(123, 635)}
    train, test, num_left_out = [], [], 0
    for seed in range(100_000, 200_000):
        [level] = solve_levels(asked, [seed])
        seen = {env.reset(other, "sft") for other in train} if len(train) == 60 else set()
        if not level.rows or level.start in played or level.start in seen:
            num_left_out += 1
        else:
            (train if len(train) < 60 else test).append(seed)
        if len(test) == 15:
            break
    data = make_data(asked)
    assert (levels(data.train), levels(data.test), data.num_skipped) == (train, test, num_left_out)
    assert data.shared == 0 and num_left_out > 50, "nearly half of the levels are played"
    others = lesson(*board, "training.val_data_num=600", environment="frozenlake").validation_seeds
    assert others == range(123, 723), "of more validation levels all are left out"


def test_a_board_with_too_few_levels_keeps_back_only_those_of_its_own_validation(monkeypatch, tmp_path):
    """A lake of four cells without holes has twelve levels, and evaluations play all of them."""
    monkeypatch.setattr(data_module, "PATIENCE", 50)
    asked = lesson(environment="frozenlake", train_size=200, test_size=0, validation_seeds=range(123, 124))
    tag = replace(asked.tag, env_config=asked.tag.env_config | {"size": 2, "p": 1.0})
    asked, env = replace(asked, tag=tag, validation_tags=(tag,)), make(tag)
    data = make_data(asked)
    assert "data: 200 levels (11 different) with " in describe(data, tmp_path)
    starts = {env.reset(seed, "sft") for seed in levels(data.train)}
    assert len(starts) == 11 and env.reset(123, "val") not in starts
    assert data.shared == 11 / 12 and min(levels(data.train)) == 100_050


def test_a_bandit_has_its_few_levels_everywhere(tmp_path):
    data = make_data(lesson(environment="two_armed_bandit", train_size=8, test_size=3))
    assert (len(data.train), len(data.test), data.num_skipped) == (8, 3, 0)
    assert data.shared > 0
    assert f"{percent(data.shared)} of the evaluation levels are among the training levels" in describe(data, tmp_path)


def test_the_recipe_of_the_bandit_shows_the_better_arm_and_plays_names_that_it_never_shows():
    words = ["rl_or_sft=sft", "sft.data_generation.train_size=200", "sft.data_generation.test_size=5"]
    config = resolve(words, config_name="_1_bandit", environ={}).config
    data = make_data(Lesson.of(config))
    replies = {f"<think></think><answer>{risky}</answer>" for _, risky in NAME_PAIRS["train"]}  # pays 0.25, not 0.1
    assert {row["response"] for row in data.train} == replies
    assert all(row["response"][23:-9] in row["prompt"][1]["content"] for row in data.train)
    assert (len(data.train), len(data.test), data.success) == (200, 5, 1.0)
    assert data.shared == 24 / 40  # twelve pairs in two orders are trained; of eight more none is


def test_the_levels_of_every_validated_tag_are_kept_back(monkeypatch):
    monkeypatch.setattr(data_module, "PATIENCE", 50)
    asked = lesson(environment="frozenlake", train_size=200, test_size=0, validation_seeds=range(123, 124))
    tiny, wide = (replace(asked.tag, env_config=asked.tag.env_config | {"size": size, "p": 1.0}) for size in (2, 3))
    data, env = make_data(replace(asked, tag=tiny, validation_tags=(wide, tiny))), make(tiny)
    starts = {env.reset(seed, "sft") for seed in levels(data.train)}
    assert len(starts) == 11 and env.reset(123, "val") not in starts


def test_processes_change_nothing(monkeypatch):
    monkeypatch.setattr(data_module, "MIN_LEVELS", 1)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    asked, told = lesson(train_size=45, test_size=15), []
    assert make_data(asked, num_processes=2, on_levels=told.append) == make_data(asked)
    assert sum(told) == 60


def test_parquet_is_read_by_others_and_comes_back_as_it_was(tmp_path):
    data = make_data(lesson(train_size=3, test_size=2))
    write_data(data, tmp_path)
    table = parquet.read_table(tmp_path / "train.parquet")
    assert table.column_names == ["data_source", "prompt", "response", "ability", "extra_info"]
    assert table.num_rows == len(data.train)
    assert table["prompt"][0].as_py()[0]["role"] == "system"
    assert (read_rows(tmp_path / "train.parquet"), read_rows(tmp_path / "test.parquet")) == (data.train, data.test)


def test_other_rows_are_not_overwritten(tmp_path):
    data = make_data(lesson(train_size=3, test_size=2))
    write_data(data, tmp_path)
    before = (tmp_path / "test.parquet").read_bytes()
    write_data(data, tmp_path)
    with pytest.raises(ConfigError, match=r"test\.parquet holds other rows"):
        write_data(replace(data, test=data.test[:-1]), tmp_path)
    assert (tmp_path / "test.parquet").read_bytes() == before
    write_data(replace(data, test=data.test[:-1]), tmp_path, replace=True)
    assert read_rows(tmp_path / "test.parquet") == data.test[:-1]
    (tmp_path / "train.parquet").write_bytes(b"not a table")
    with pytest.raises(ConfigError, match="is not a Parquet file"):
        write_data(data, tmp_path)


def test_what_cannot_be_won_is_said(monkeypatch):
    monkeypatch.setattr(data_module, "PATIENCE", 20)
    hard = lesson("sft.sokoban.num_boxes=3", "agent_proxy.max_turn=1")
    with pytest.raises(ConfigError, match="20 levels one after the other cannot be won within 1 turns"):
        make_data(hard)


def test_a_row_that_is_too_long_is_named():
    data = make_data(Lesson.of(CONFIG))
    chat, rules = ChatTemplate(make_tokenizer()), derive.rules(CONFIG)
    longest = max(len(answers.sequence.ids) for answers in answers_of(data.train, chat, rules, 10_000))
    assert len(answers_of(data.train, chat, rules, longest)) == 8
    with pytest.raises(
        ConfigError, match=rf"row \d+ of train.parquet \(level 1000\d\d, turn \d\) has {longest} tokens"
    ):
        answers_of(data.train, chat, rules, longest - 1)


def test_only_answers_are_learned():
    chat = ChatTemplate(make_tokenizer())
    data = make_data(Lesson.of(CONFIG))
    for row in data.train:
        if row["extra_info"]["turn"] < row["extra_info"]["num_turns"]:
            continue
        [answers] = answers_of([row], chat, derive.rules(CONFIG), 10_000)
        sequence = answers.sequence
        learned = chat.tokenizer.decode([id_ for id_, flag in zip(sequence.ids, sequence.sampled, strict=True) if flag])
        said = [message["content"] for message in row["prompt"] if message["role"] == "assistant"] + [row["response"]]
        end = chat.end_of_turn_text
        assert learned == "".join(f"{text.removeprefix('<think>')}{end}" for text in said)
        whole = chat.tokenizer.decode(sequence.ids)
        messages = [*row["prompt"], {"role": "assistant", "content": row["response"]}]
        rendered = chat.tokenizer.apply_chat_template(messages, tokenize=False)
        assert rendered.startswith(whole) and rendered[len(whole) :].strip() == ""


# --- the plan of the steps ----------------------------------------------------------------------------------------


@given(
    answers=st.lists(st.integers(1, 5), min_size=1, max_size=40),
    size=st.integers(1, 30),
    epochs=st.integers(1, 3),
)
def test_every_epoch_has_every_sequence_once(answers, size, epochs):
    training = replace(CONFIG.sft.training, train_batch_size=size, epochs=epochs)
    batches = plan_batches(answers, replace(CONFIG, sft=replace(CONFIG.sft, training=training)))
    for epoch in range(1, epochs + 1):
        here = [batch for batch in batches if batch.epoch == epoch]
        assert sorted(index for batch in here for index in batch.indices) == list(range(len(answers)))
        assert [batch.ends_epoch for batch in here] == [False] * (len(here) - 1) + [True]
        for batch in here:
            counts = [answers[index] for index in batch.indices]
            assert sum(counts[:-1]) < size and (sum(counts) >= size or batch.ends_epoch)
    assert [batch.epoch for batch in batches] == sorted(batch.epoch for batch in batches)


def test_epochs_have_orders_of_their_own():
    batches = plan_batches([1] * 40, CONFIG)
    first, second = ([batch.indices for batch in batches if batch.epoch == epoch] for epoch in (1, 2))
    assert first != second


def test_answers_are_counted_as_they_are_learned():
    for words in ([], ["agent_proxy.context_window_mode=single_turn"]):
        config = config_of(*words)
        data, rules = make_data(Lesson.of(config)), derive.rules(config)
        sequences = answers_of(data.train, ChatTemplate(make_tokenizer()), rules, 10_000)
        counts = num_answers(data.train, rules)
        assert counts == [len(answers.sequence.reply_spans) for answers in sequences]
        assert sum(counts) == len(data.train)


# --- config -------------------------------------------------------------------------------------------------------


def test_boards_are_those_of_validation_unless_typed():
    config = config_of("env.env_kwargs.size=5", environment="frozenlake")
    assert config.sft.frozenlake.size == 5 and config.sft.frozenlake.p == 0.8
    assert Lesson.of(config).tag.env_config["size"] == 5
    config = config_of("env.env_kwargs.size=5", "sft.frozenlake.size=3", environment="frozenlake")
    assert Lesson.of(config).tag.env_config["size"] == 3
    assert config.custom_envs["FrozenLakeV1"].env_config["size"] == 5
    coord = resolve(["rl_or_sft=sft"], config_name="_3_frozen_lake", environ={}).config
    assert Lesson.of(coord).tag.env_config["observation_format"] == "grid_coord"


def test_the_run_has_the_names_of_sft():
    trainer = config_of("sft.training.experiment_name=x", "sft.training.num_gpus=2", "sft.output_dir=models/y").trainer
    assert (trainer.experiment_name, trainer.n_gpus_per_node) == ("x", 2)
    assert trainer.default_local_dir == "models/y/lora_weights"


def test_the_model_may_be_named_as_in_rl():
    for key in ("model_path", "model.base_model"):
        config = resolve(["sokoban", "rl_or_sft=sft", f"{key}=pocket"], environ={}).config
        assert (config.sft.training.base_model, config.model_path) == ("pocket", "pocket")
    with pytest.raises(ConfigError, match="it is pocket-blank") as caught:
        config_of("model_path=other")
    assert (caught.value.code, caught.value.key) == ("fine-tuning", "model_path")


@pytest.mark.parametrize("below", ["", "/a/b"])
@pytest.mark.parametrize("key", ["sft.output_dir", "sft.data_generation.data_dir", "trainer.validation_data_dir"])
def test_what_is_to_be_written_lies_in_no_file(tmp_path, key, below):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError) as error:
        config_of(f"{key}={tmp_path}/file{below}")
    assert (error.value.code, error.value.key) == ("not-a-directory", key)
    assert f" {tmp_path}/file is not a directory" in str(error.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sft.data_generation.prefix=base"], "sft.data_generation.prefix=base: rows are chat messages"),
        (["sft.sokoban.num_boxes=30"], "sft.sokoban: num_boxes=30"),
        (["sft.training.num_gpus=3"], "sft.training.micro_batch_size=4: is a total"),
        (["sft.data_generation.num_processes=0"], "sft.data_generation.num_processes=0: must be at least 1"),
        (["trainer.experiment_name=x"], "trainer.experiment_name=x: with rl_or_sft=sft it is test_sft_lora"),
        (["es_manager.val.env_configs.tags=[SokobanV1,FrozenLake]", "es_manager.val.env_configs.n_groups=[1,1]"],
         "there is no fine-tuning data for frozen_lake, sokoban; validate in one of"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(words, message):
    with pytest.raises(ConfigError) as error:
        config_of(*words)
    assert message in str(error.value)
