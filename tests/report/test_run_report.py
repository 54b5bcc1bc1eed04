"""The report: well formed, self-contained, harmless whatever a reply contains, and right in its words."""

import gzip
import math
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up_runs import make_episode, make_groups, make_turn, validation_metrics

from ragen.config.schema import Config
from ragen.config.tree import leaves
from ragen.report.charts import Axis, Line, line_chart, moving_average, nice_ticks, spread, thinned
from ragen.report.pages import environment
from ragen.report.replay import choose, reply_spans
from ragen.report.run_report import write_report
from ragen.report.settings import not_default
from ragen.report.stop_section import RULES
from ragen.report.verdict import Stop, early_stop, verdict
from ragen.store.run_folder import Metrics
from ragen.types import Group

VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """Checks that tags are closed in order, and collects what a reader sees."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.attributes, self.texts = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.texts.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.texts).replace("\xa0", " ").split())


def page_of(folder):
    text = write_report(folder).read_text(encoding="utf-8")
    # Stricter than HTML asks: the page is also XML, so nothing is left to a browser's guesswork.
    ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>\n"))
    return Page(text), text


def reply_html(text):
    return str(environment().get_template("episode.html.jinja").module.spans(reply_spans(text)))


def metrics_of(*rows):
    return Metrics([{"step": step, **metrics} for step, metrics in rows])


# --- the page -----------------------------------------------------------------------------------------------------


def test_a_full_run(full_folder):
    page, text = page_of(full_folder)
    assert full_folder.report_path.exists()
    for part in (
        "ragen / test", "pocket", "CoordSokoban", "Validation success rose by 60.0 points", "do not overlap",
        "on 50 shared levels", "covered 75.0 % of the way", "actor/grad_norm was not finite once",
        "first at step 7 (nan)",
        "By optimal length", "n = 20", "Training success", "Entropy", "Gradient norm", "Seconds in a step",
        "new/metric", "val-env/CoordSokoban/new", "model_path", "Qwen/Qwen2.5-3B-Instruct",
        "trainer.total_training_steps",
        "CoordSokoban level 110", "learned", "sampled 80.0 %", "greedy 60.0 %", "random 20.0 %", "optimal 100.0 %",
        "step 15: 50.0 % [40.0 %, 60.0 %]",
    ):  # fmt: skip
        assert part in page.text, part
    assert text.count("<svg") >= 14
    assert "val-env/CoordSokoban/success_low" not in page.text


def test_nothing_is_loaded_and_nothing_runs(full_folder):
    page, text = page_of(full_folder)
    assert not {"script", "link", "img", "iframe", "object", "embed", "base", "form"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name in ("src", "href", "srcset") or name.startswith("on")]
    assert not re.search(r"https?:|//[a-z]|@import|url\(", text)
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in page.attributes


HOSTILE = '</span><script>alert(1)</script><img src=x onerror="alert(2)">&amp; \x00\x1b[31m \u202e </pre></style>'


def test_hostile_text_is_shown_and_not_obeyed(folder):
    config = Config()
    config.trainer.experiment_name = HOSTILE
    config.model_path = HOSTILE
    folder.write_config(config)
    folder.append_metrics(0, {HOSTILE: 1.0, f"val-env/{HOSTILE}/success": 0.5, f"train/{HOSTILE}/success": 0.5})
    turn = make_turn(f"<think>{HOSTILE}</think>\n<answer>{HOSTILE}</answer>", state_text=HOSTILE)
    episode = make_episode(1, True, turn, tag=HOSTILE)
    folder.write_episodes(0, "val", [Group(HOSTILE, 1, "val", 0, (episode,))])
    page, text = page_of(folder)
    assert "script" not in page.tags
    assert "img" not in page.tags
    assert "<script" not in text
    assert "alert(1)" in page.text, "the reader still sees what was written"
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", text)


@given(st.text(max_size=200) | st.text("<>/&\"' thinkaswer\n", max_size=80))
def test_no_reply_can_add_a_tag(text):
    shown = reply_html(text)
    page = Page(shown)
    assert set(page.tags) <= {"span"}
    seen = "".join(page.texts)
    # Nothing is lost: control characters become symbols, the rest is as it was written.
    assert len(seen) == len(text)


def test_think_and_answer_are_told_apart():
    def marked(kind, text):
        marks = [f'<span class="mark">&lt;{name}&gt;</span>' for name in (kind, f"/{kind}")]
        return f'<span class="{kind}">{marks[0]}{text}{marks[1]}</span>'

    shown = reply_html("<think>a</think> <answer>Up</answer> b")
    assert shown == f"{marked('think', 'a')} {marked('answer', 'Up')} b"
    assert reply_html("<think>cut") == '<span class="think"><span class="mark">&lt;think&gt;</span>cut</span>'
    assert "and 2000 more characters" in reply_html("x" * 5000)


def test_boards_are_coloured_and_only_boards(full_folder):
    _, text = page_of(full_folder)
    assert '<span class="c-player">P</span><span class="c-box">X</span>' in text
    assert '<span class="c-player">P</span>layer' not in text


def test_empty_folder(folder):
    page, _ = page_of(folder)
    assert "Nothing was measured yet" in page.text


def test_training_without_validation(folder):
    folder.append_metrics(1, {"actor/entropy": 0.4})
    page, _ = page_of(folder)
    assert "No validation was made" in page.text
    assert "Entropy" in page.text


def test_one_step(folder):
    folder.append_metrics(0, validation_metrics(0.33, 0.29, 0.37, random=0.2, optimal=1.0) | {"actor/entropy": 0.4})
    folder.write_episodes(0, "val", make_groups([(1, True), (2, False), (3, False)]))
    page, _ = page_of(folder)
    assert "only one validation" in page.text
    assert "Validation success is 33.0 %; too early to see a change" in page.text
    assert "CoordSokoban level 2" in page.text


def test_all_values_not_finite(folder):
    for step in range(3):
        folder.append_metrics(
            step, validation_metrics(math.nan, math.nan, math.nan) | {"actor/entropy": math.inf, "x": math.nan}
        )
    page, _ = page_of(folder)
    assert "No validation gave a finite success rate" in page.text
    assert "actor/entropy was not finite 3 times" in page.text


def test_values_of_other_types_are_ignored(folder):
    lengths = {"success_len_1-2": "n/a", "num_len_1-2": 3, "success_len_7+": 0.5, "num_len_7+": math.nan}
    others = {"actor/entropy": "n/a", "flag": True, "nothing": None}
    folder.append_metrics(0, others | validation_metrics(0.5, **lengths))
    page, _ = page_of(folder)
    assert "No intervals" not in page.text


def test_a_torn_metrics_file_is_mentioned(full_folder):
    with full_folder.metrics_path.open("ab") as file:
        file.write(b'{"step": 31, "actor/en')
    page, _ = page_of(full_folder)
    assert "the last line of metrics.jsonl is torn" in page.text


def test_a_damaged_episode_file_is_mentioned(full_folder):
    path = full_folder.episode_files("val")[-1].path
    whole = path.read_bytes()
    for content in (b"", b"garbage", whole[: len(whole) // 2], gzip.compress(b"{}\n"), gzip.compress(b"no json")):
        path.write_bytes(content)
        page, _ = page_of(full_folder)
        assert ("val-000030.jsonl.gz cannot be read" in page.text) == (content != b""), (
            "an empty file holds no episodes"
        )


def test_long_runs_stay_small(folder):
    folder.metrics_path.parent.mkdir()
    with folder.metrics_path.open("w") as file:
        file.writelines(f'{{"step": {step}, "actor/entropy": {step % 7}}}\n' for step in range(20_000))
    _, text = page_of(folder)
    assert len(text) < 200_000


def test_unknown_environment_and_settings_of_another_version(folder):
    config = Config()
    folder.write_config(config)
    text = folder.config_path.read_text()
    folder.config_path.write_text(text.replace("env_type: sokoban", "env_type: no.such:Thing") + "future:\n  key: 3\n")
    folder.append_metrics(0, validation_metrics(0.5))
    folder.write_episodes(0, "val", make_groups([(1, True)]))
    page, _ = page_of(folder)
    assert "future.key" in page.text
    assert "#PX#" in page.text


def test_report_does_not_import_torch(full_folder):
    code = (
        "import sys; from ragen.store.run_folder import RunFolder; from ragen.report.run_report import write_report\n"
        "import ragen.run.console\n"
        "write_report(RunFolder(sys.argv[1])); print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(full_folder.path)], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False False\n"


# --- an early stop ------------------------------------------------------------------------------------------------


def test_a_collapse_of_the_reward_variance_shows_its_numbers(folder):
    """Ten steps of 1 to 10: baseline 5.5, threshold 0.55. Step 5 is empty and counts for nothing."""
    stds = [1, 2, 3, 4, 99, 5, 6, 7, 8, 9, 10] + [4] * 20 + [0.5] * 10
    for step, std in enumerate(stds, start=1):
        folder.append_metrics(step, {"rollout/in_group_reward_std": std, "rollout/empty_after_filter": step == 5})
    folder.append_metrics(len(stds), {"early_stopped/reward_variance_collapse": 1.0})
    page, text = page_of(folder)
    for part in (
        "Stopped early", "All episodes of a group earn the same", "reward_variance_collapse", "41",
        "baseline, mean of the first 10 steps 5.5", "threshold, 10 % of it 0.55",
        "last 10 steps 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5",
        "What usually helps", "actor_rollout_ref.actor.entropy_coeff", "over the run", "its end", "threshold 0.55",
    ):  # fmt: skip
        assert part in page.text, part
    assert text.index("Stopped early") < text.index("Reward spread in a group")


def test_low_success_shows_each_environment_and_the_record_explains(folder):
    for step in range(0, 70, 10):
        folder.append_metrics(
            step, validation_metrics(0.5 if step == 0 else 0.004, tag="A") | validation_metrics(0.2, tag="B")
        )
    folder.write_finished("early_stopped", 60, "low_validation_success", "val-env/A/success was below 1 %")
    page, _ = page_of(folder)
    for part in (
        "val-env/A/success was below 1 %.", "threshold 1.0 %", "at step 60 by the rule low_validation_success",
        "last 5 validations of A 0.4 %, 0.4 %, 0.4 %, 0.4 %, 0.4 %", "last 5 validations of B 20.0 %",
        "supervised fine-tuning first",
    ):  # fmt: skip
        assert part in page.text, part


def test_empty_steps_are_counted_against_their_limit(folder):
    config = Config()
    config.actor_rollout_ref.rollout.rollout_filter_empty_stop_steps = 3
    folder.write_config(config)
    for step, empty in enumerate((0, 1, 0, 1, 2, 3)):
        counts = {"rollout/filter_kept_count": 0.0 if empty else 4.0}
        folder.append_metrics(step, counts | {"rollout/consecutive_empty_after_filter_steps": float(empty)})
    folder.append_metrics(5, {"early_stopped/empty_filtered_steps": 1.0})
    page, _ = page_of(folder)
    for part in (
        "The filter keeps no group", "limit, empty steps one after the other 3",
        "groups kept in the last 10 steps 4, 0, 4, 0, 0, 0", "limit 3", "rollout_filter_empty_stop_steps",
    ):  # fmt: skip
        assert part in page.text, part


@pytest.mark.parametrize("rule", [*RULES, HOSTILE])
def test_a_stop_without_its_numbers_is_still_said(folder, rule):
    folder.write_finished("early_stopped", 2, rule, HOSTILE)
    page, text = page_of(folder)
    assert "Stopped early" in page.text and "Nothing was measured yet" in page.text
    assert "<script" not in text and "script" not in page.tags


def test_a_finished_run_has_no_such_section(full_folder):
    full_folder.write_finished("finished", 30)
    assert "Stopped early" not in page_of(full_folder)[0].text
    full_folder.finished_path.write_text("torn {")
    assert "Stopped early" not in page_of(full_folder)[0].text


def test_critic_and_kl_have_charts_where_they_were_measured(full_folder):
    before, _ = page_of(full_folder)
    titles = ("Value loss", "KL to the reference", "Explained variance", "Values and returns")
    assert not [title for title in titles if title in before.text]
    for step in range(1, 31):
        full_folder.append_metrics(
            step,
            {
                "critic/vf_loss": 1.0, "critic/grad_norm": 2.0, "critic/vf_explained_var": 0.3, "actor/kl_loss": 0.01,
                "critic/values/mean": 0.5, "critic/returns/mean": 0.7, "timing_s/update_critic": 0.4,
            },
        )  # fmt: skip
    after, _ = page_of(full_folder)
    assert not [title for title in titles if title not in after.text]
    assert "critic, step 30: 2" in after.text, "beside the actor's gradient norm"


# --- the words ----------------------------------------------------------------------------------------------------


def test_a_rise_with_separate_intervals():
    found = verdict(metrics_of((0, validation_metrics(0.3, 0.26, 0.34)), (9, validation_metrics(0.5, 0.46, 0.54))))
    assert (found.headline, found.tone) == ("Validation success rose by 20.0 points", "good")
    assert found.sentences == [
        "From 30.0 % [26.0, 34.0] at step 0 to 50.0 % [46.0, 54.0] at step 9: +20.0 points. "
        "The 95 % intervals do not overlap."
    ]


def test_overlapping_intervals_are_noise():
    found = verdict(metrics_of((0, validation_metrics(0.3, 0.26, 0.34)), (9, validation_metrics(0.33, 0.29, 0.37))))
    assert found.headline == "Validation success rose by 3.0 points, which is within noise"
    assert found.tone == "flat"


def test_pairs_can_tell_more_than_intervals():
    metrics = metrics_of((0, validation_metrics(0.5, 0.4, 0.6)), (9, validation_metrics(0.6, 0.5, 0.7)))
    before = [{"tag": "CoordSokoban", "seed": seed, "success": seed < 50} for seed in range(100)]
    after = [{"tag": "CoordSokoban", "seed": seed, "success": seed < 60} for seed in range(100)]
    found = verdict(metrics, before, after)
    assert found.headline == "Validation success rose by 10.0 points"
    assert "The 95 % intervals overlap. Level by level, on 100 shared levels, +10.0 [" in found.sentences[0]
    assert found.sentences[0].endswith("this is more than noise.")
    twice = verdict(metrics, before * 2, after * 2)
    assert "Level by level" not in twice.sentences[0], "two tries at a level are no pair"


def test_a_fall_and_its_peak():
    rows = [(0, 0.5, 0.46, 0.54), (5, 0.7, 0.66, 0.74), (9, 0.2, 0.16, 0.24)]
    found = verdict(
        metrics_of(*((step, validation_metrics(*values, random=0.2, optimal=0.9)) for step, *values in rows))
    )
    assert (found.headline, found.tone) == ("Validation success fell by 30.0 points", "bad")
    assert "It was at its best at step 5 with 70.0 % [66.0, 74.0], and has fallen since." in found.sentences
    assert "The agent is not distinguishable from random play." in found.sentences


@pytest.mark.parametrize(
    ("success", "words"),
    [
        (0.55, "the agent has covered 50.0 % of the way between them."),
        (1.0, "the agent is at the optimum."),
        (0.05, "It is worse than random play."),
    ],
)
def test_standing(success, words):
    metrics = metrics_of((0, validation_metrics(success, success - 0.01, success + 0.01, random=0.1, optimal=1.0)))
    assert any(words in sentence for sentence in verdict(metrics).sentences)


def test_no_change_and_no_intervals():
    same = verdict(metrics_of((0, validation_metrics(0.3)), (9, validation_metrics(0.3))))
    assert same.headline == "Validation success did not change"
    rose = verdict(metrics_of((0, validation_metrics(0.3)), (9, validation_metrics(0.6))))
    assert "No intervals were stored: whether this is more than noise is unknown." in rose.sentences[0]


def test_early_stop_is_said():
    metrics = metrics_of((0, validation_metrics(0.5)), (7, {"early_stopped/reward_variance_collapse": 1}))
    found = verdict(metrics)
    assert "The run was stopped early at step 7 by the rule reward_variance_collapse." in found.sentences
    assert found.tone == "bad"


def test_the_record_of_the_end_tells_more_than_the_metrics():
    metrics = metrics_of((0, validation_metrics(0.5)), (7, {"early_stopped/reward_variance_collapse": 1}))
    assert early_stop(metrics, None) == Stop("reward_variance_collapse", 7)
    record = {"status": "early_stopped", "rule": "empty_filtered_steps", "step": 6, "explanation": "kept no group"}
    assert early_stop(metrics, record) == Stop("empty_filtered_steps", 6, "kept no group")
    assert "at step 6 by the rule empty_filtered_steps." in verdict(metrics, finished=record).sentences[-1]
    assert early_stop(metrics_of((3, {})), {"status": "early_stopped"}) == Stop("unknown", 3)
    for other in (None, {}, {"status": "finished", "rule": None}, {"status": "unknown"}):
        assert early_stop(metrics_of((3, {"early_stopped/x": 0.0})), other) is None
    assert verdict(metrics_of((3, {})), finished={"status": "finished"}).tone == "flat"


def test_several_environments_are_named():
    rows = [
        (step, validation_metrics(success, tag="A") | validation_metrics(0.5, tag="B"))
        for step, success in [(0, 0.2), (9, 0.9)]
    ]
    assert verdict(metrics_of(*rows)).headline == (
        "A: success rose by 70.0 points, which is within noise; B: success did not change"
    )


# --- parts --------------------------------------------------------------------------------------------------------


def test_settings_that_only_follow_another_key_are_not_listed():
    config = Config()
    config.trainer.experiment_name = "mine"
    flat = leaves(config) | {
        "micro_batch_size_per_gpu": 4,
        "log_prob_micro_batch_size_per_gpu": 4,
        "trainer.default_local_dir": "checkpoints/ragen/mine",
        "es_manager.val.env_configs.n_groups": [512],
        "actor_rollout_ref.rollout.dtype": "float16",
        "actor_rollout_ref.model.path": config.model_path,
        "custom_envs.CoordSokoban.env_config.num_boxes": 2,
        "custom_envs.LargerSokoban.env_config.num_boxes": 3,
    }
    listed = {key: (value, default) for key, value, default in not_default(flat) if not str(value).startswith("${")}
    assert listed["micro_batch_size_per_gpu"] == (4, "1")
    assert listed["trainer.experiment_name"] == ("mine", "test")
    assert listed["custom_envs.CoordSokoban.env_config.num_boxes"] == (2, "1")
    assert "custom_envs.LargerSokoban.env_config.num_boxes" not in listed, "not an environment of this run"
    for follower in (
        "log_prob_micro_batch_size_per_gpu", "trainer.default_local_dir", "es_manager.val.env_configs.n_groups",
        "actor_rollout_ref.model.path", "actor_rollout_ref.rollout.dtype",
    ):  # fmt: skip
        assert follower not in listed


def test_a_resolved_default_config_differs_in_nothing():
    from ragen.config.compose import resolve

    config = resolve([], "base", environ={}).config
    assert {key for key, _, _ in not_default(leaves(config))} <= {"actor_rollout_ref.actor.use_ref"}


def test_exhibits_show_the_same_level_before_and_after():
    def records(won):
        return [{"tag": "T", "seed": seed, "success": seed in won} for seed in range(8)]

    exhibits = choose(records({0, 1}), records({1, 2, 3, 4, 5}))
    found = [(item.kind, [episode["seed"] for episode in item.episodes]) for item in exhibits]
    assert found == [
        ("learned", [2, 2]),
        ("learned", [3, 3]),
        ("learned", [4, 4]),
        ("lost again", [0, 0]),
        ("still not solved", [6, 6]),
        ("solved from the start", [1, 1]),
    ]
    alone = choose(records({0, 1, 2}), [])
    assert [(item.kind, item.episodes[0]["seed"]) for item in alone] == [
        ("solved", 0), ("solved", 1), ("not solved", 3), ("not solved", 4),
    ]  # fmt: skip
    assert choose([], []) == []


@given(st.floats(-1e12, 1e12), st.floats(1e-9, 1e12), st.integers(1, 20))
def test_ticks_are_few_round_and_enclose(low, span, num):
    high = low + span
    if high - low < 1e-9 * max(abs(low), abs(high)):
        return
    ticks = nice_ticks(low, high, num)
    slack = 1e-6 * span + 1e-11
    assert ticks[0] <= low + slack
    assert ticks[-1] >= high - slack
    assert 2 <= len(ticks) <= num + 3


def test_lines_break_at_numbers_that_are_not_finite():
    points = [(0, 1.0), (1, 2.0), (2, math.nan), (3, math.inf), (4, 1.5), (5, 1.0)]
    svg = line_chart([Line("x", points)], Axis(), (360, 180))
    assert svg.count("<polyline") == 2
    assert svg.count('class="nonfinite"') == 2
    assert "nan," not in svg


@given(
    st.lists(st.tuples(st.integers(0, 50), st.floats(width=32)), max_size=30),
    st.booleans(),
    st.sampled_from([None, 0.0]),
)
def test_any_numbers_give_a_chart(points, as_percent, low):
    svg = line_chart([Line("a", points, window=5), Line("b", points[:1], dots=True)], Axis(as_percent, low), (360, 180))
    ElementTree.fromstring(svg)
    assert not re.search(r'(x|y|cx|cy|x1|y1)="-?(nan|inf)', svg)


def test_averages_by_hand():
    points = [(0, 0.0), (1, 3.0), (2, 6.0), (3, 0.0)]
    assert moving_average(points, 3) == [(0, 1.5), (1, 3.0), (2, 3.0), (3, 3.0)]
    assert len(thinned([(x, 1.0) for x in range(1000)])) == 250
    assert thinned([(0, 1.0), (1, 3.0)]) == [(0, 1.0), (1, 3.0)]
    assert spread([10, 12, 90], gap=14, low=0, high=100) == [10, 24, 90]
    assert spread([90, 95], gap=14, low=0, high=100) == [86, 100]


def test_an_episode_file_of_another_kind_is_not_needed(full_folder):
    with gzip.open(full_folder.episodes_path / "val-greedy-000000.jsonl.gz", "wt") as file:
        file.write("")
    page, _ = page_of(full_folder)
    assert "Episodes" in page.text
