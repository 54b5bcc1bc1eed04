"""Whole runs of the embedded model, tiny and short: what they write, and that the same seed gives the same run."""

import dataclasses
import json

import pytest

from ragen.algo.advantage import ESTIMATORS
from ragen.algo.filter import METRICS, STRATEGIES
from ragen.algo.loss import AGGREGATIONS
from ragen.config.compose import resolve
from ragen.report.folder import RunFolder, read_episodes
from ragen.train import supported
from ragen.train.levels import levels
from ragen.train.loop import estimate, keep_groups, train
from ragen.typed import ConfigError

SMALL = [
    "model_path=pocket",
    "es_manager.train.env_groups=3",
    "es_manager.train.group_size=4",
    "es_manager.val.env_groups=6",
    "ppo_mini_batch_size=8",
    "trainer.total_training_steps=2",
    "trainer.test_freq=2",
]


def run(folder, *words):
    config = resolve(["sokoban", *SMALL, *words, f"trainer.default_local_dir={folder}"], environ={}).config
    return RunFolder(train(config).folder)


def rows(folder, without=("timing_s/", "perf/")):
    return [
        {key: value for key, value in row.items() if not key.startswith(without)} for row in folder.read_metrics().rows
    ]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return run(tmp_path_factory.mktemp("run") / "a")


def test_a_run_is_a_folder(finished):
    assert finished.read_config()["model_path"] == "pocket"
    assert [row["step"] for row in finished.read_metrics().rows] == [0, 1, 2]
    assert [(file.split, file.step) for file in finished.episode_files()] == [
        ("train", 1),
        ("train", 2),
        ("val", 0),
        ("val", 2),
    ]
    assert len(read_episodes(finished.episode_files("train")[0].path)) == 12
    assert finished.report_path.read_text().startswith("<!DOCTYPE html>")


def test_metrics_have_their_names(finished):
    first, step, last = finished.read_metrics().rows
    for name in ("success", "success_low", "success_high", "random", "optimal", "greedy_success", "format_valid"):
        assert f"val-env/SimpleSokoban/{name}" in first and f"val-env/SimpleSokoban/{name}" in last
    assert first["val-env/SimpleSokoban/optimal"] == 1.0
    for name in ("train/SimpleSokoban/success", "rollout/filter_kept_count", "timing_s/gen", "perf/tokens_per_s"):
        assert name in step
    assert not any(key.startswith("val-env/") for key in step)


def test_the_same_seed_gives_the_same_run_bit_for_bit(finished, tmp_path):
    again = run(tmp_path / "b")
    assert rows(again) == rows(finished)
    for left, right in zip(finished.episode_files(), again.episode_files(), strict=True):
        assert left.path.read_bytes() == right.path.read_bytes()


def test_another_seed_gives_another_run(finished, tmp_path):
    other = run(tmp_path / "c", "seed.train=77")
    assert rows(other)[0] == rows(finished)[0]  # validation before training does not depend on it
    assert rows(other)[1] != rows(finished)[1]


def test_sampler_and_learner_agree(finished):
    differences = [row["rollout/log_prob_diff_max"] for row in rows(finished) if "rollout/log_prob_diff_max" in row]
    assert differences and max(differences) < 1e-4


def test_a_finished_folder_is_not_touched(finished, capsys):
    before = finished.metrics_path.read_bytes()
    sibling = run(finished.path)
    assert sibling.path.name == f"{finished.path.name}-2"
    assert finished.metrics_path.read_bytes() == before
    printed = capsys.readouterr().out.splitlines()
    assert str(sibling.path) in printed[0] and str(sibling.path) in printed[-1]


def test_plain_output_is_one_line_a_step(tmp_path, capsys):
    run(tmp_path / "d")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" - ")[0] for line in lines if line.startswith("step:")] == ["step:0", "step:1", "step:2"]


def test_an_empty_step_still_validates(tmp_path):
    # No total of scores reaches this: the filter keeps nothing.
    folder = run(tmp_path / "e", "actor_rollout_ref.rollout.rollout_filter_selection_eps=1000")
    last = folder.read_metrics().rows[-1]
    assert last["rollout/empty_after_filter"] == 1 and last["train/batch_size"] == 0
    assert "val-env/SimpleSokoban/success" in last


def test_levels_advance_with_the_step_and_come_round():
    config = resolve(["data.train_data_num=20"], environ={}).config
    assert [request.seed for request in levels(config, 1)] == list(range(10000, 10008))
    assert [request.seed for request in levels(config, 3)] == [*range(10016, 10020), *range(10000, 10004)]
    assert {request.size for request in levels(config, 1)} == {16}


def test_filtered_groups_leave_whole_and_advantages_follow_their_episode(finished):
    """With episodes as a rollout made them, and advantages worked out by hand from their scores."""
    from ragen.agent.episode import EpisodeState
    from ragen.types import Episode, Group

    def group(number, rewards):
        episodes = [
            Episode("T", number, "train", number, member, "", (), EpisodeState(None, reward=reward))
            for member, reward in enumerate(rewards)
        ]
        return Group("T", number, "train", number, tuple(episodes))

    groups = [group(0, [1.0, 1.0]), group(1, [0.0, 10.0]), group(2, [3.0, 5.0])]
    config = resolve(["model_path=pocket"], environ={}).config
    kept, metrics = keep_groups(groups, config)
    assert [g.group for g in kept] == [1, 2]
    assert metrics["rollout/filter_kept_count"] == 2 and metrics["rollout/filter_zero_count"] == 1
    assert estimate(kept, config) == pytest.approx([-0.70710678, 0.70710678, -0.70710678, 0.70710678], abs=1e-5)
    config.algorithm.norm_adv_by_std_in_grpo = False
    assert estimate(kept, config) == pytest.approx([-5.0, 5.0, -1.0, 1.0])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["algorithm.adv_estimator=gae"], "trains with grpo, brpo"),
        (["actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.kl_loss_coef=0.1"], "a KL term"),
        (["lora.rank=8"], "lora.rank"),
        (["trainer.save_freq=10"], "checkpoints"),
        (["actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum"], "token-mean"),
    ],
)
def test_what_is_not_built_is_refused_not_ignored(words, message):
    with pytest.raises(ConfigError, match=message):
        supported.check(resolve(["sokoban", *SMALL, *words], environ={}).config)


def test_the_supported_names_are_those_of_the_tables():
    assert set(supported.ESTIMATORS) == set(ESTIMATORS)
    assert set(supported.AGGREGATIONS) == set(AGGREGATIONS)
    assert set(supported.STRATEGIES) == set(STRATEGIES)
    assert set(supported.METRICS) == set(METRICS)


def test_a_stored_config_runs_again(finished, tmp_path):
    from ragen.config.schema import Config
    from ragen.config.tree import build

    stored = build(Config, finished.read_config())
    stored = dataclasses.replace(
        stored, trainer=dataclasses.replace(stored.trainer, default_local_dir=str(tmp_path / "f"))
    )
    assert rows(RunFolder(train(stored).folder)) == rows(finished)


def test_metrics_file_is_plain_json(finished):
    assert all(json.loads(line)["step"] >= 0 for line in finished.metrics_path.read_text().splitlines())
