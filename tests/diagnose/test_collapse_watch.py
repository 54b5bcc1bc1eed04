"""Collapse metrics in a run: when they are measured, what is logged, and that a resumed run equals an unbroken one."""

import json
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from made_up_pairs import groups_of

from ragen.cli import main
from ragen.config.compose import resolve
from ragen.diagnose.collapse import FIRST_TURN, TRAJECTORY, CollapseWatch
from ragen.distributed.workers import ALONE
from ragen.errors import RunFailed
from ragen.experiment.results import measured_times
from ragen.run.clock import Clock, Totals
from ragen.store.run_folder import RunFolder

WORDS = ["sokoban", "model_path=pocket"]
THINK_END = 9
COLLAPSE_TIMES = {"collapse_time", "collapse_first_time", "collapse_multi_time"}


class Digits:
    """Tokens are digits, but for the one that ends the thinking."""

    def decode(self, ids, skip_special_tokens=False):
        return "".join("</think>" if id_ == THINK_END else str(id_) for id_ in ids)


class Uniform:
    """Every token is as likely."""

    is_cacheable, window = True, None

    shape = SimpleNamespace(vocab_size=10)

    def hidden(self, ids, positions, attend, rows):
        return torch.zeros(len(rows), 10)

    def logits(self, hidden):
        return hidden


class Broken(Uniform):
    def __init__(self, error):
        self.error = error

    def hidden(self, ids, positions, attend, rows):
        raise self.error


@cache
def config_of(*words):
    return resolve([*WORDS, *words], environ={}).config


def watch(*words, told=None):
    return CollapseWatch(config_of(*words), Digits(), ALONE, (told if told is not None else []).append)


GROUPS = groups_of(
    [
        [[((1, 2), (3, 4, 9, 5)), ((6,), (7, 9))], [((1, 2), (3, 3, 3, 9))]],
        [[((1, 5), (4, 9)), ((6,), (9, 7))], [((1, 5), (8,))]],
    ]
)


def test_when():
    due = watch("collapse_detection.compute_freq=5")
    assert [step for step in range(1, 21) if due.is_due(step)] == [1, 5, 10, 15, 20]
    assert [step for step in range(1, 21) if watch("collapse_detection.compute_freq=999").is_due(step)] == [1]
    for off in ("compute_freq=0", "compute_freq=-1"):
        told = []
        off = watch(f"collapse_detection.{off}", told=told)
        assert not any(off.is_due(step) for step in range(1, 21)) and off.measure(1, GROUPS, Uniform(), Clock()) == {}
        assert told == [], "who switches it off knows it"


def test_everything_of_a_step():
    told, clock = [], Clock()
    got = watch(told=told).measure(1, GROUPS, Uniform(), clock)
    assert told == []
    assert got["collapse/valid_thinking_rate"] == pytest.approx(4 / 6)
    assert got["collapse/first_turn_num_total"] == 4 and got["collapse/first_turn_num_valid"] == 3
    assert got[f"{FIRST_TURN}/conditional_entropy_est"] == pytest.approx(torch.tensor(10.0).log().item())
    assert got[f"{FIRST_TURN}/mi_upper_bound"] == pytest.approx(torch.tensor(2.0).log().item())
    assert got[f"{TRAJECTORY}/mi_seq_estimate"] == pytest.approx(0, abs=1e-6)
    assert clock.seconds.keys() == {"collapse_metrics", "collapse_first_turn_step", "collapse_multi_turn_step"}


@pytest.mark.parametrize(
    ("flag", "label", "other"), [("first", FIRST_TURN, TRAJECTORY), ("multi", TRAJECTORY, FIRST_TURN)]
)
def test_each_sample_can_be_switched_off(flag, label, other):
    clock = Clock()
    got = watch(f"collapse_detection.{flag}_turn_enabled=False").measure(1, GROUPS, Uniform(), clock)
    assert not any(name.startswith(label) for name in got) and f"{other}/mi_estimate" in got
    assert f"collapse_{flag}_turn_step" not in clock.seconds
    neither = watch("collapse_detection.first_turn_enabled=False", "collapse_detection.multi_turn_enabled=False")
    assert neither.measure(1, GROUPS, Uniform(), Clock()) == {}


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["agent_proxy.enable_think=False"], "collapse metrics are off: with agent_proxy.enable_think=False"),
        (
            ["agent_proxy.context_window_mode=single_turn"],
            "agent_proxy.context_window_mode=single_turn; they need full",
        ),
    ],
)
def test_a_run_without_reasonings_to_measure_says_so_at_once(words, reason):
    told = []
    assert watch(*words, told=told).measure(1, GROUPS, Uniform(), Clock()) == {}
    assert len(told) == 1 and reason in told[0]
    off = []
    watch(*words, "collapse_detection.compute_freq=-1", told=off)
    assert off == []


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RuntimeError("boom"), "RuntimeError: boom"),
        (torch.OutOfMemoryError("CUDA out of memory"), "lower collapse_detection.micro_batch_size, now 128"),
        (RuntimeError("DefaultCPUAllocator: can't allocate"), "lower collapse_detection.micro_batch_size, now 128"),
    ],
)
def test_what_goes_wrong_is_told_once_and_the_run_goes_on(error, message):
    told = []
    broken = watch("collapse_detection.compute_freq=1", told=told)
    got = [broken.measure(step, GROUPS, Broken(error), Clock()) for step in (1, 2)]
    assert all(name.startswith("collapse/") for metrics in got for name in metrics) and len(got[0]) == 4
    assert len(told) == 2 and all(message in text for text in told)
    assert told[0].startswith(f"step 1, and whenever this happens again: {FIRST_TURN}/* skipped: ")
    assert f"{FIRST_TURN}/mi_estimate" in broken.measure(3, GROUPS, Uniform(), Clock())


def test_workers_that_are_gone_end_the_run():
    class Lonely:
        device = torch.device("cpu")

        def mine(self, items):
            return items

        def gather(self, mine):
            raise RunFailed("worker 0 lost contact with the others")

    with pytest.raises(RunFailed):
        CollapseWatch(config_of(), Digits(), Lonely(), print).measure(1, GROUPS, Uniform(), Clock())


def test_one_prompt_is_not_enough_and_that_is_said():
    told = []
    got = watch(told=told).measure(1, groups_of([[[((1, 2), (3, 9))]]]), Uniform(), Clock())
    assert got.keys() == {
        "collapse/valid_thinking_rate",
        "collapse/first_turn_num_total",
        "collapse/first_turn_num_valid",
        "collapse/first_turn_valid_rate",
    }
    assert len(told) == 2 and all("needs two prompts with a reasoning, found 1" in text for text in told)


def test_moving_averages_survive_in_the_state():
    words = ("collapse_detection.compute_freq=1", "collapse_detection.num_samples=all")
    whole, before, after = watch(*words), watch(*words), watch(*words)
    whole.measure(1, GROUPS, Uniform(), Clock())
    wanted = whole.measure(2, GROUPS[::-1], Uniform(), Clock())
    before.measure(1, GROUPS, Uniform(), Clock())
    after.restore(json.loads(json.dumps(before.state())))
    assert after.measure(2, GROUPS[::-1], Uniform(), Clock()) == wanted
    after.restore({})
    assert after.state() == {}


def test_draws_depend_on_seed_and_step():
    one = watch("collapse_detection.compute_freq=1", "collapse_detection.num_samples=2")
    first, again = (one.measure(step, GROUPS, Uniform(), Clock()) for step in (1, 1))
    same = {name for name in first if "ema" not in name}
    assert {name: first[name] for name in same} == {name: again[name] for name in same}


def test_totals_leave_collapse_out_of_training():
    totals, clock = Totals(), Clock()
    clock.seconds = {"step": 10.0, "testing": 2.0, "collapse_metrics": 1.5, "collapse_first_turn_step": 0.5}
    got = totals.add(clock)
    assert got["timing_s/train_step"] == got["timing_s/train_total"] == 6.5 and got["timing_s/total"] == 10.0
    assert got["timing_s/collapse_total"] == 1.5 and got["timing_s/collapse_first_turn_total"] == 0.5
    assert "timing_s/collapse_multi_turn_total" not in got, "it was not measured"
    clock.seconds = {"step": 4.0}
    gone_on = Totals()
    gone_on.restore(json.loads(json.dumps(totals.state())))
    assert gone_on.add(clock) == totals.add(clock)
    assert totals.add(clock)["timing_s/collapse_total"] == 1.5
    old = Totals()
    old.restore({"train": 3.0, "eval": 1.0})
    assert old.add(clock)["timing_s/total"] == 8.0 and "timing_s/collapse_total" not in old.add(clock)


# --- a run of pocket ----------------------------------------------------------------------------------------------

RUN = [
    "train",
    *WORDS,
    "agent_proxy.max_turn=2",
    "es_manager.train.env_groups=3",
    "es_manager.train.group_size=3",
    "algorithm.adv_estimator=grpo",
    "ppo_mini_batch_size=9",
    "actor_rollout_ref.rollout.response_length=40",
    "actor_rollout_ref.rollout.rollout_filter_value=1",
    "actor_rollout_ref.rollout.rollout_filter_include_zero=True",
    "trainer.test_freq=-1",
    "trainer.val_before_train=False",
    "trainer.save_freq=1",
    "trainer.logger=console",
    "collapse_detection.compute_freq=1",
]


def rows_of(folder, *words):
    assert main([*RUN, f"trainer.default_local_dir={folder}", *words]) == 0
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_resumed_run_ends_as_one_that_was_not(tmp_path, capsys):
    whole = rows_of(tmp_path / "whole", "trainer.total_training_steps=2")
    rows_of(tmp_path / "resumed", "trainer.total_training_steps=1")
    resumed = rows_of(tmp_path / "resumed", "trainer.total_training_steps=2")
    assert len(whole) == len(resumed) == 2
    measured = [name for name in whole[1] if name.startswith("collapse")]
    assert len(measured) == 4 + 2 * 30 and all(whole[1][name] == resumed[1][name] for name in measured)
    assert whole[1][f"{TRAJECTORY}/marginal_std_ema"] != whole[1][f"{TRAJECTORY}/marginal_std"]
    first = whole[0]
    assert 0 < first[f"{FIRST_TURN}/mi_seq_estimate"] <= first[f"{FIRST_TURN}/mi_upper_bound"]
    parts = first["timing_s/collapse_first_turn_step"] + first["timing_s/collapse_multi_turn_step"]
    assert 0 < parts <= first["timing_s/collapse_metrics"] == first["timing_s/collapse_total"] < first["timing_s/step"]
    assert resumed[1]["timing_s/collapse_total"] > resumed[0]["timing_s/collapse_total"] > 0
    times = measured_times(RunFolder(tmp_path / "resumed"))
    assert times["collapse_time"] == resumed[1]["timing_s/collapse_total"]
    assert times.keys() >= COLLAPSE_TIMES, "the fields of a sweep's summary"


def test_a_run_without_thinking_says_so_once(tmp_path, capsys):
    rows = rows_of(tmp_path, "trainer.total_training_steps=2", "agent_proxy.enable_think=False", "trainer.save_freq=-1")
    assert not [name for row in rows for name in row if "collapse" in name]
    assert capsys.readouterr().out.count("collapse metrics are off") == 1
    assert not COLLAPSE_TIMES & measured_times(RunFolder(tmp_path)).keys()
