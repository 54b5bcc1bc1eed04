"""Health where people meet it: in the console and the metrics of a run, in its report, in the list of runs."""

import json
import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up_runs import make_episode, make_groups, make_turn, validation_metrics

from ragen.algo.filter import KEPT, OUTSIDE, GroupVerdict, faint_share
from ragen.cli import main
from ragen.cli.runs import columns_of
from ragen.config.schema import Config
from ragen.report.run_report import write_report
from ragen.report.runs import read_run
from ragen.report.verdict import verdict
from ragen.rollout.summary import repeated_share, summarize
from ragen.run.run_logger import RunLogger
from ragen.statistics import wilson
from ragen.train.targets import keep_groups
from ragen.types import Group

CALM = {"train/CoordSokoban/success": 0.4, "rollout/in_group_reward_std": 2.0, "actor/ppo_kl": 0.001}


class FakeConsole:
    def __init__(self):
        self.steps, self.notes = [], []

    def step(self, step, metrics):
        self.steps.append((step, metrics))

    def note(self, text):
        self.notes.append(text)

    def close(self, report): ...


def record(folder, *parts, first=1):
    """(number of steps, what differs from the calm ones); what the console was told."""
    console, logged = FakeConsole(), []
    sink = SimpleNamespace(log=lambda step, metrics: logged.append((step, metrics)))
    recorder = RunLogger(Config(), folder, console, [sink])
    step = first
    for num, changes in parts:
        for _ in range(num):
            recorder.step(step, CALM | changes)
            step += 1
    assert logged == console.steps
    return console


JUMP = {"actor/ppo_kl": 0.5}


def test_a_warning_is_told_once_and_stored_while_it_holds(folder):
    console = record(folder, (2, {}), (3, JUMP), (1, {}))
    (note,) = console.notes
    assert note.startswith(
        "step 3: warning: an update goes too far: KL from the policy that played is 0.5 (threshold 0.1"
    )
    assert "actor_rollout_ref.actor.optim.lr" in note
    rows = folder.read_metrics().rows
    assert [row["health/num_warnings"] for row in rows] == [0, 0, 1, 1, 1, 0]
    assert [row.get("health/policy_jumps") for row in rows] == [None, None, 1, 1, 1, None]
    assert console.steps == [(row["step"], {k: v for k, v in row.items() if k != "step"}) for row in rows]


def test_a_validation_before_training_gets_no_flags(folder):
    console = FakeConsole()
    RunLogger(Config(), folder, console, []).step(0, {"val-env/CoordSokoban/success": 0.5})
    assert console.steps == [(0, {"val-env/CoordSokoban/success": 0.5})]


def test_a_run_that_goes_on_remembers(folder, tmp_path):
    spread = {"rollout/in_group_reward_std": 0.1}
    record(folder, (7, {}), (2, spread))
    later = record(folder, (6, spread), first=10)
    other = type(folder)(tmp_path / "whole")
    whole = record(other, (7, {}), (8, spread))
    assert later.notes == whole.notes != []
    assert folder.read_metrics().rows == other.read_metrics().rows


def test_the_report_of_a_healthy_run_says_so_first(folder):
    record(folder, (6, {}), (6, {"train/CoordSokoban/success": 0.6}))
    text = write_report(folder).read_text(encoding="utf-8").replace("\xa0", " ")
    assert "Healthy: training success rose (40.0 % at step 5, 60.0 % at step 12, best 60.0 % at step 11)" in text
    assert "none of 21 checks warned in 12 steps" in text
    assert "<h2>Warnings</h2>" not in text and " warned" not in text.partition("<body>")[2].partition("<p")[0]
    assert text.index("Healthy") < text.index("No validation was made")


def test_a_run_without_a_valid_reply_in_report_list_and_closing_line(folder):
    never = {"train/CoordSokoban/action_is_valid": 0.0, "train/CoordSokoban/success": 0.0}
    record(folder, (6, never))
    first = "No valid reply since step 1: no reply was ever valid in 6 steps, so no action counted"
    page = write_report(folder).read_text(encoding="utf-8").partition("<body>")[2]
    assert first in page.partition("</p>")[0], "the first sentence"
    assert columns_of(read_run("a", folder))["health"] == "no valid reply"
    console = FakeConsole()
    RunLogger(Config(), folder, console, []).ended("finished", 6)
    assert f"verdict: {first}" in console.notes


@pytest.mark.slow
def test_a_model_that_knows_no_format_is_not_called_healthy(tmp_path, capfd):
    """As a user sees it: the untrained model on Sokoban, from the command line."""
    small = ["trainer.total_training_steps=2", "es_manager.train.env_groups=2", "es_manager.train.group_size=4"]
    small += ["ppo_mini_batch_size=8", "es_manager.val.env_groups=4", "actor_rollout_ref.rollout.response_length=16"]
    small += ["model.base_model=pocket-blank", f"trainer.default_local_dir={tmp_path / 'run'}"]
    assert main(["train", "sokoban", *small]) == 0
    first = "No valid reply since step 1: no reply was ever valid in 2 steps"
    assert f"verdict: {first}" in capfd.readouterr().out
    assert first in (tmp_path / "run/report.html").read_text(encoding="utf-8")
    assert main(["runs", str(tmp_path)]) == 0
    out = capfd.readouterr().out
    assert "no valid reply" in out and "healthy" not in out


def test_the_list_sees_a_gain_level_by_level(folder):
    """24 of 50 levels after 17, none lost: too little for two intervals, enough for pairs."""
    for step, won in ((0, 17), (12, 24)):
        low, high = wilson(won, 50)
        folder.append_metrics(step, CALM | validation_metrics(won / 50, low, high))
        folder.write_episodes(step, "val", make_groups((100 + level, level < won) for level in range(50)))
    assert read_run("a", folder).health == "healthy"
    for path in folder.episodes_path.iterdir():
        path.write_bytes(b"broken")
    assert read_run("a", folder).health == "no_gain"


def test_the_report_of_a_sick_run_has_verdict_evidence_and_advice(folder):
    record(folder, (10, {}), (1, JUMP), (10, {"rollout/in_group_reward_std": 0.2}))
    text = write_report(folder).read_text(encoding="utf-8")
    headline = "Rewards alike since step 15: the spread of rewards in a group fell to 0.2 (threshold 0.9, start 2)"
    assert headline in text
    warnings = text.partition("<h2>Warnings</h2>")[2].partition("</section>")[0]
    assert warnings.index("Rewards alike") < warnings.index("An update goes too far"), "what holds comes first"
    assert "since step 15" in warnings and "steps 11 to 11, over" in warnings
    assert warnings.count("<svg") == 2 and 'class="level"' in warnings
    assert "rollout_filter_value=0.9" in warnings


def test_every_warning_can_be_drawn(folder):
    """Also those without a curve, and those whose quantity was measured once."""
    bad = {
        "actor/pg_loss": math.nan, "actor/pg_clipfrac": 0.9, "rollout/sampler_learner_kl": 1.0,
        "train/format_valid": 0.1, "actor/entropy": 5.0,
    }  # fmt: skip
    record(folder, (1, {"train/format_valid": 0.9, "actor/entropy": 0.1}), (4, bad))
    text = write_report(folder).read_text(encoding="utf-8")
    for title in ("A number is not finite", "Format is being lost", "Entropy explodes", "Many tokens are clipped"):
        assert title in text, title


def test_the_list_of_runs_has_a_word(folder):
    record(folder, (4, {}), (1, JUMP))
    run = read_run("a", folder)
    assert (run.health, columns_of(run)["health"]) == ("policy_jumps", "an update goes too far")
    assert json.loads(json.dumps(run.as_data()))["health"] == "policy_jumps"


def test_health_does_not_change_what_is_said_of_success(folder):
    record(folder, (4, {}), (1, JUMP))
    found = verdict(folder.read_metrics())
    assert found.headline == "No validation was made" and found.health.word == "policy_jumps"


# --- what was added to the metrics --------------------------------------------------------------------------------


def test_replies_alike_and_repeated_by_hand():
    turns = [make_turn(reply_ids=ids, log_probs=(0.0,) * len(ids)) for ids in ((1, 2), (1, 2), (3,), (4,) * 6)]
    episode = make_episode(1, True, *turns)
    metrics = summarize([Group(episode.tag, 1, "train", 0, (episode,))])
    assert metrics["reply_distinct"] == 3 / 4
    assert metrics["reply_repeats"] == pytest.approx((0 + 0 + 0 + 2 / 3) / 4)  # 4444 three times, twice as before


@given(st.lists(st.integers(0, 2), max_size=12))
def test_repeated_runs_of_tokens_against_a_naive_count(ids):
    runs = [ids[start : start + 4] for start in range(len(ids) - 3)]
    repeated = [run in runs[:index] for index, run in enumerate(runs)]
    assert repeated_share(ids) == pytest.approx(sum(repeated) / len(runs) if runs else 0.0)


def test_faint_groups_by_hand():
    """The largest std is 5, so below 0.5 is faint; a zero is none, since nothing divides it; the last was left out."""
    verdicts = [GroupVerdict(True, KEPT)] * 4 + [GroupVerdict(False, OUTSIDE)]
    assert faint_share([5.0, 0.4, 0.5, 0.0, 0.1], verdicts) == 1 / 4
    assert faint_share([5.0], [GroupVerdict(False, OUTSIDE)]) == 0.0
    assert faint_share([0.0, 0.0], [GroupVerdict(True, KEPT)] * 2) == 0.0


def test_what_division_blows_up_is_measured_where_there_is_a_division():
    def ratio(**algorithm):
        config = Config()
        for key, value in ({"adv_estimator": "grpo"} | algorithm).items():
            setattr(config.algorithm, key, value)
        scores = [[0.0, 10.0], [0.0, 0.1], [1.0, 1.0]]
        groups = [Group("CoordSokoban", seed, "train", seed, ()) for seed in range(3)]
        return keep_groups(groups, scores, config).metrics.get("rollout/chosen_blown_up_ratio")

    assert ratio() == 1 / 3
    assert ratio(adv_estimator="rloo") is ratio(norm_adv_by_std_in_grpo=False) is None
    assert ratio(soft_advantage_reweight=True) is None
