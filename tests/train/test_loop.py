"""Whole runs of the embedded model, tiny and short: what they write, and that the same seed gives the same run."""

import dataclasses
import json

import pytest
import torch
from without_clock import metrics_without_clock

from ragen.algo.filter import METRICS
from ragen.config.compose import resolve
from ragen.distributed.workers import ALONE
from ragen.model.load import find_model, load_model
from ragen.model.packing import pack, samples_of
from ragen.model.policy import score
from ragen.model.scoring import Scorer, by_sample
from ragen.store.episodes import read_episodes
from ragen.store.run_folder import RunFolder
from ragen.train.targets import estimate, experience_of, keep_groups, scores_of
from ragen.train.trainer import train
from ragen.types import Episode, EpisodeState, Group, Turn, TurnResult

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


def rows(folder):
    return metrics_without_clock(folder.path)


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
    """To what float32 can do: log-probs near -10 after sharp attention are good to a few 1e-6."""
    updated = [row for row in rows(finished) if "rollout/log_prob_diff_max" in row]
    assert updated
    assert max(row["rollout/log_prob_diff_max"] for row in updated) < 1e-5
    assert max(row["rollout/log_prob_diff_mean"] for row in updated) < 5e-7
    assert max(row["rollout/sampler_learner_kl"] for row in updated) < 1e-10


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


def made_up_group(number, rewards, lengths=(2, 1), full=True):
    """Episodes with these rewards, and turns of these lengths: one sequence each, or one a turn."""
    turns = [
        Turn((1, 2), full and index > 0, (3,) * length, (-1.0,) * length, "answer", "", "", "", TurnResult(*[0] * 6))
        for index, length in enumerate(lengths)
    ]
    episodes = [
        Episode("T", number, "train", number, member, "", tuple(turns), EpisodeState(None, reward=reward))
        for member, reward in enumerate(rewards)
    ]
    return Group("T", number, "train", number, tuple(episodes))


def no_entropies():
    raise AssertionError("not asked for")


@pytest.mark.parametrize("full", [True, False])
def test_filtered_groups_leave_whole_and_advantages_follow_their_episode(full):
    """With advantages worked out by hand from the scores; in every context window."""
    rewards = [[1.0, 1.0], [0.0, 10.0], [3.0, 5.0]]
    groups = [made_up_group(number, of_group, full=full) for number, of_group in enumerate(rewards)]
    config = resolve(["model_path=pocket"], environ={}).config
    chosen = keep_groups(groups, scores_of(groups), config, no_entropies)
    assert [g.group for g in chosen.kept] == [1, 2]
    assert chosen.metrics["rollout/filter_kept_count"] == 2 and chosen.metrics["rollout/filter_zero_count"] == 1

    def advantages():
        experience = experience_of(chosen.kept, scores_of(chosen.kept), config)
        return by_sample(estimate(experience, config, 1.0)[0], samples_of(chosen.kept))

    def expected(values):
        return [[value] * length for value in values for length in ((3,) if full else (2, 1))]

    one = 0.70710678  # 5 / sqrt(50), 1 / sqrt(2)
    for got, wanted in zip(advantages(), expected([-one, one, -one, one]), strict=True):
        assert got.tolist() == pytest.approx(wanted, abs=1e-5)
    config.algorithm.norm_adv_by_std_in_grpo = False
    assert [vector.tolist() for vector in advantages()] == expected([-5.0, 5.0, -1.0, 1.0])


def test_the_filter_looks_at_what_its_metric_says():
    groups = [made_up_group(0, [9.0, 0.0], (2, 1)), made_up_group(1, [1.0, 1.0], (5,))]
    config = resolve(["model_path=pocket"], environ={}).config
    rollout = config.actor_rollout_ref.rollout
    rollout.rollout_filter_strategy, rollout.rollout_filter_value = "top_k_abs", 1
    chosen = {}
    for metric in METRICS:
        rollout.rollout_filter_metric = metric
        selection = keep_groups(groups, scores_of(groups), config, lambda: [[0.1, 0.2], [0.5, 0.5]])
        chosen[metric] = selection.kept[0].group
        assert selection.metrics["rollout/in_group_reward_sum"] == 5.5  # of rewards there is always a report
    assert chosen == {
        "reward_variance": 0, "reward_std": 0, "reward": 0, "reward_sum": 0,
        "entropy": 1, "entropy_variance": 0, "entropy_std": 0, "length": 1,
    }  # fmt: skip


def test_entropies_of_episodes_are_means_over_their_own_tokens():
    loaded = load_model(find_model("pocket"))
    groups = [made_up_group(0, [0.0, 0.0], (2, 3), full=False), made_up_group(1, [0.0], (4,))]
    got = Scorer(ALONE, 1.0, 2).mean_entropies(loaded.model, groups)
    assert [len(of_group) for of_group in got] == [2, 1]
    for of_group, group in zip(got, groups, strict=True):
        for mean, episode in zip(of_group, group.episodes, strict=True):
            entropies = [score(loaded.model, pack([part], "cpu"), 1.0)[1] for part in episode.sequences()]
            assert mean == pytest.approx(torch.cat(entropies).mean().item(), rel=1e-5)


def test_a_run_with_the_other_choices(tmp_path):
    folder = run(
        tmp_path / "g",
        "trainer.total_training_steps=1",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "algorithm.adv_estimator=reinforce_plus_plus",
        "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm",
        "actor_rollout_ref.rollout.rollout_filter_metric=entropy",
        "actor_rollout_ref.rollout.rollout_filter_strategy=top_k",
        "actor_rollout_ref.rollout.rollout_filter_value=0.67",
        "agent_proxy.context_window_mode=single_turn",
    )
    last = folder.read_metrics().rows[-1]
    assert last["rollout/filter_kept_count"] == 2 and last["rollout/in_group_entropy_mean"] > 0
    assert last["train/batch_size"] > 8  # one sample a turn


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
