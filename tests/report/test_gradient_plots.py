"""Gradient analysis as tables, pictures and one sentence: against made-up runs whose numbers are known."""

import csv
import json
import math
import re
import statistics
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image

from ragen.cli import main
from ragen.errors import ConfigError
from ragen.report import gradient_plots
from ragen.report.charts import Line, xy_chart
from ragen.report.gradient_data import (
    AFTER,
    BEFORE,
    Source,
    analyses,
    answer,
    at,
    from_folder,
    from_wandb,
    rank_correlation,
    steps,
)
from ragen.report.run_report import write_report
from ragen.store.run_folder import RunFolder

STDS = {"bucket_1": 0.1, "bucket_2": 0.4, "bucket_10": 2.0}
TASK = {"bucket_1": 0.2, "bucket_2": 0.3, "bucket_10": 1.0}
SEVEN = {
    "gradient_analysis_plots_step_{}.png",
    "gradient_analysis_loss_plots_step_{}.png",
    "gradient_analysis_reward_std_step_{}.png",
    "gradient_analysis_normed_grads_step_{}.png",
    "gradient_analysis_summary_step_{}.png",
    "gradient_analysis_metrics_step_{}.json",
    "gradient_analysis_bucket_rv_table_step_{}.csv",
}
OURS = {"gradient_analysis_snr_cosine_step_{}.png"}
GRID = {"gradient_analysis_grid.png", "gradient_analysis_grid.svg"}


def row(step: int, stds=STDS, task=TASK, regularisers=(0.01, 0.002), prefixes=(AFTER,), **more) -> dict:
    """What a step writes; the regularisers are the same in every bucket."""
    found = {"step": step, **more}
    for prefix in prefixes:
        for name in (*stds, "all"):
            start, std = f"{prefix}/{name}", stds.get(name, 0.5)
            norms = {"task": task.get(name, 0.4), **dict(zip(("entropy", "kl"), regularisers, strict=False))}
            found |= {f"{start}/{term}": norm for term, norm in norms.items()}
            found |= {f"{start}/per_sample/{term}": norm / 32 for term, norm in norms.items()}
            found |= {f"{start}/per_token/{term}": norm / 999 for term, norm in norms.items()}
            found |= {f"{start}/loss/{loss}": value for loss, value in {"policy": -0.1, "total": 0.05}.items()}
            found |= {
                f"{start}/reward_std_{end}": std * share for end, share in (("mean", 1), ("min", 0.5), ("max", 2))
            }
            found |= {f"{start}/sample_count": 32.0, f"{start}/group_rv_count": 2.0}
            found[f"grad_snr{prefix.removeprefix(AFTER)}/{name}/task"] = 15.0
    names = list(stds)
    found |= {f"grad_cos/task/{a}/{b}": -0.25 for place, a in enumerate(names) for b in names[place + 1 :]}
    return found | {f"grad_cos/{name}/task_entropy": 0.125 for name in names}


def write(folder: Path, *rows: dict, table: bool = True) -> Path:
    run = RunFolder(folder)
    for one in rows:
        run.append_metrics(one["step"], one)
    if table:
        lines = [
            {"step": one["step"], "prefix": AFTER, "bucket": name, "group_id": group, "reward_std": share * std}
            for one in rows
            for name, std in STDS.items()
            for group, share in enumerate((0.5, 1.5))
        ]
        (folder / "grad_group_rv_table.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder


# --- reading ------------------------------------------------------------------------------------------------------


def test_a_step_counts_if_a_bucket_has_a_number_that_is_not_zero():
    rows = {
        1: {"grad_norm/bucket_1/task": 0.0, "grad_norm/bucket_2/kl": None},
        2: {"grad_norm/bucket_1/task": 0.5},
        3: {"grad_norm/all/task": 0.5, "actor/grad_norm": 1.0},
        4: {"grad_norm_prefilter/bucket_1/task": 0.5},
        5: {"grad_norm/bucket_3/kl": math.nan},
        6: {"grad_norm/bucket_3/per_token/kl": -1e-9},
    }
    assert steps(Source("run", rows)) == [2, 6]


def test_buckets_are_in_order_of_their_numbers(tmp_path):
    source = from_folder(write(tmp_path / "run", row(7)))
    assert source.name == "run" and steps(source) == [7]
    found = at(source, 7)
    assert [bucket.name for bucket in found.buckets()] == ["bucket_1", "bucket_2", "bucket_10"]
    assert found.buckets()[2].reward_stds == (1.0, 3.0)
    assert found.buckets(BEFORE) == []
    assert found.terms() == ["task", "entropy", "kl"]
    assert found.cosine("bucket_10", "bucket_1") == found.cosine("bucket_1", "bucket_10") == -0.25
    assert found.cosine("bucket_1", "bucket_1") == 1.0 and found.cosine("bucket_1", "all") is None
    assert found.with_whole()[-1].get("task") == 0.4


def test_a_torn_line_of_the_group_table_is_left_out(tmp_path):
    folder = write(tmp_path / "run", row(1))
    with open(folder / "grad_group_rv_table.jsonl", "a") as file:
        file.write('{"step": 1, "prefix": "grad_')
    assert len(from_folder(folder).table) == 6


def test_steps_that_are_not_there_are_refused_with_those_that_are():
    one = Source("one", {1: row(1), 51: row(51)})
    other = Source("other", {51: row(51)})
    assert [(found.run, found.step) for found in analyses([one, other], [1, 51])] == [
        ("one", 1), ("one", 51), ("other", 51)
    ]  # fmt: skip
    with pytest.raises(
        ConfigError, match=r"--step 2: no gradient analysis at that step\. There are: one: 1, 51; other: 51"
    ):
        analyses([one, other], [1, 2])
    with pytest.raises(
        ConfigError, match=r"empty holds no gradient analysis: train with trainer\.gradient_analysis_mode"
    ):
        analyses([one, Source("empty", {1: {"actor/grad_norm": 1.0}})])


def fake_wandb(monkeypatch, rows, summary=None):
    run = SimpleNamespace(name="my run / 1", id="ab12", summary=summary or {}, scan_history=lambda: iter(rows))
    package = SimpleNamespace(Api=lambda: SimpleNamespace(run=lambda path: run), Error=RuntimeError)
    monkeypatch.setitem(sys.modules, "wandb", package)


def test_the_history_of_a_wandb_run(monkeypatch):
    first = {"_step": 3, "grad_norm/bucket_1/task": 0.5, "grad_norm/bucket_1/kl": None}
    fake_wandb(monkeypatch, [first, {"_step": 3, "grad_norm/bucket_1/kl": 0.1}, {"_step": 4, "actor/entropy": 1.0}])
    source = from_wandb("me/ragen/ab12")
    assert source.name == "my_run_1_ab12" and steps(source) == [3]
    assert at(source, 3).buckets()[0].get("kl") == 0.1


def test_a_wandb_run_without_a_history_has_a_summary(monkeypatch):
    fake_wandb(monkeypatch, [], {"_step": 9, "grad_norm/bucket_1/task": 0.5})
    assert steps(from_wandb("me/ragen/ab12")) == [9]


def test_a_wandb_run_that_cannot_be_had_is_one_message(monkeypatch):
    with pytest.raises(ConfigError, match="--wandb-path run: takes entity/project/run"):
        from_wandb("run")
    fake_wandb(monkeypatch, [])

    def refuse():
        raise RuntimeError("no such\nrun")

    monkeypatch.setattr(sys.modules["wandb"], "Api", refuse)
    with pytest.raises(ConfigError, match="--wandb-path a/b/c: no such run"):
        from_wandb("a/b/c")


# --- the question -------------------------------------------------------------------------------------------------


def test_the_question_is_answered_with_its_numbers():
    found = answer(at(Source("run", {51: row(51)}), 51))
    task, entropy, kl = found.trends
    assert (task.word, task.ratio, task.correlation) == ("grows", 5.0, pytest.approx(1.0))
    assert (entropy.word, entropy.ratio, entropy.correlation) == ("stays flat", 1.0, None)
    assert kl.word == "stays flat"
    assert found.sentence == (
        "At step 51, after the filter, from bucket_1 (reward std 0.1) to bucket_10 (2), the task gradient grows: its "
        "norm goes from 0.2 to 1 (5 times, rank correlation 1.00); the entropy gradient stays flat: its norm goes from "
        "0.01 to 0.01 (1 times); the KL gradient stays flat: its norm goes from 0.002 to 0.002 (1 times). So the task "
        "gradient grows with the reward variance while the regularisers stay flat."
    )


@pytest.mark.parametrize(
    ("norms", "word"),
    [
        ((0.2, 0.3, 0.31), "grows"),  # 1.55 times
        ((0.2, 0.3, 0.29), "stays flat"),  # 1.45 times
        ((0.3, 0.25, 0.1), "falls"),
        ((0.1, 9.0, 0.2), "has no clear trend"),  # twice, but ranks agree to 0.5 only
        ((0.0, 0.0, 0.0), "is 0"),
        ((0.0, 0.1, 0.2), "grows"),
    ],
)
def test_words_for_a_trend(norms, word):
    found = answer(at(Source("run", {1: row(1, task=dict(zip(STDS, norms, strict=True)))}), 1))
    assert found.trends[0].word == word
    assert ("So it is not the case" in found.sentence) == (word != "grows")


def test_noise_is_called_noise():
    measured = row(3) | {"grad_snr/bucket_2/task": 1.9}
    told = answer(at(Source("run", {3: measured}), 3)).sentence
    assert told.endswith("Of these norms, those of bucket_2 are mostly noise (signal to noise below 2).")
    measured |= {"grad_snr/bucket_1/task": 0.9, "grad_snr/bucket_10/task": 1.25}
    told = answer(at(Source("run", {3: measured}), 3)).sentence
    assert "But these norms are mostly noise, since signal to noise is 1.9 at best" in told
    assert "noise" not in answer(at(Source("run", {3: row(3)}), 3)).sentence


def test_one_bucket_answers_nothing():
    found = answer(at(Source("run", {4: row(4, stds={"bucket_1": 1.0})}), 4))
    assert found.trends == () and "fewer than two buckets" in found.sentence


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=9))
def test_rank_correlation_is_that_of_the_ranks(pairs):
    def naive_ranks(values):
        return [1 + sum(a < b for a in values) + (sum(a == b for a in values) - 1) / 2 for b in values]

    xs, ys = [x for x, _ in pairs], [y for _, y in pairs]
    found = rank_correlation(xs, ys)
    if len(set(xs)) == 1 or len(set(ys)) == 1:
        assert found is None
    else:
        assert found == pytest.approx(statistics.correlation(naive_ranks(xs), naive_ranks(ys)), abs=1e-12)


# --- pictures -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """One step of one run, as the command draws it."""
    root = tmp_path_factory.mktemp("drawn")
    odd = {"actor/entropy": math.nan, "config/words": "text"}
    folder = write(root / "my-run", row(51, prefixes=(AFTER, BEFORE), **odd))
    paths = gradient_plots.plot([from_folder(folder)], [51], root / "out")
    return folder, {path.name: path for path in paths}


def test_the_documented_files_are_there(drawn):
    _, paths = drawn
    assert set(paths) == {name.format(51) for name in SEVEN | OURS} | GRID
    for path in paths.values():
        assert path.stat().st_size > 50


def test_pictures_have_three_hundred_dots_an_inch(drawn):
    _, paths = drawn
    for name in SEVEN | OURS:
        if name.endswith(".png"):
            with Image.open(paths[name.format(51)]) as picture:
                assert [round(dots) for dots in picture.info["dpi"]] == [300, 300]
                assert picture.convert("L").getextrema() == (0, 255)


def test_numbers_beside_the_pictures(drawn):
    folder, paths = drawn
    stored = json.loads(paths["gradient_analysis_metrics_step_51.json"].read_text())
    (expected,) = RunFolder(folder).read_metrics().rows
    assert stored == {**expected, "actor/entropy": "nan"}
    with open(paths["gradient_analysis_bucket_rv_table_step_51.csv"]) as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["bucket", "reward_std"]
    assert [(name, float(value)) for name, value in rows[1:]] == [
        ("bucket_1", 0.05), ("bucket_1", pytest.approx(0.15)),
        ("bucket_2", 0.2), ("bucket_2", pytest.approx(0.6)),
        ("bucket_10", 1.0), ("bucket_10", 3.0),
    ]  # fmt: skip


def figures(found) -> dict:
    return {
        "norms": gradient_plots.norms_figure(found),
        "losses": gradient_plots.losses_figure(found),
        "std": gradient_plots.reward_std_figure(found),
        "normed": gradient_plots.normed_figure(found),
        "summary": gradient_plots.grid_figure([found], is_log=False),
        "grid": gradient_plots.grid_figure([found]),
        "snr": gradient_plots.snr_figure(found),
    }


LONG = "sokoban-PPO-filter-topp09-Qwen2.5-3B-train8x16-analysis128x16-grad-every50"
SIX = {f"bucket_{number}": 0.0456789 * 2**number for number in range(1, 7)}
KINDS = {
    "three buckets": row(51),
    "six and before the filter": row(
        51, SIX, {name: std * 0.0123456 for name, std in SIX.items()}, (1.2345e-05, 6.789e-07), (AFTER, BEFORE)
    ),
    "no variance": row(51, dict.fromkeys(SIX, 0.0), dict.fromkeys(SIX, 0.0), (0.1,)),
    "one without variance": row(51, SIX | {"bucket_1": 0.0}, regularisers=()),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_person_can_read_every_picture(kind):
    """Axes are named, all data lie inside, and no two texts lie over each other."""
    with gradient_plots.drawing():
        for name, figure in figures(at(Source(LONG, {51: KINDS[kind]}), 51)).items():
            if figure is None:
                assert name == "std" and kind == "no variance"
                continue
            figure.set_dpi(60)
            canvas = FigureCanvasAgg(figure)
            canvas.draw()
            for ax in figure.axes:
                assert ax.get_xlabel() and ax.get_ylabel() and (ax.get_title() or ax.get_title(loc="left"))
                low, high = ax.get_ylim()
                heights = [patch.get_height() for patch in ax.patches if hasattr(patch, "get_height")]
                heights += [
                    float(y) for line in ax.get_lines() if line.get_marker() != "None" for y in line.get_ydata()
                ]
                assert all(low <= height <= high for height in heights), (name, heights, (low, high))
                check_texts(ax, canvas, name)


def shown_ticks(ax) -> list:
    """matplotlib also keeps those beyond the ends."""
    ends = ((ax.xaxis, sorted(ax.get_xlim())), (ax.yaxis, sorted(ax.get_ylim())))
    return [
        tick.label1 for axis, (low, high) in ends for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high
    ]


def check_texts(ax, canvas, name) -> None:
    renderer = canvas.get_renderer()
    width, height = canvas.get_width_height()
    texts = [*ax.texts, *shown_ticks(ax), ax.title, ax._left_title, ax.xaxis.label, ax.yaxis.label]
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in texts if text.get_text()]
    for place, (words, box) in enumerate(boxes):
        assert min(box.x0, box.y0) >= -1 and box.x1 <= width + 1 and box.y1 <= height + 1, (name, words)
        for other, there in boxes[place + 1 :]:
            across = min(box.x1, there.x1) - max(box.x0, there.x0)
            down = min(box.y1, there.y1) - max(box.y0, there.y0)
            assert across <= 1 or down <= 1, (name, words, other)


def test_terms_differ_without_colour():
    for parts in (gradient_plots.MARKERS, gradient_plots.DASHES, gradient_plots.HATCHES):
        terms = [parts[term] for term in ("task", "entropy", "kl")]
        assert len(set(terms)) == 3


def test_zeros_have_a_place_on_a_log_axis():
    with gradient_plots.drawing():
        zero = gradient_plots.grid_figure([at(Source("run", {51: KINDS["one without variance"]}), 51)])
        plain = gradient_plots.grid_figure([at(Source("run", {51: KINDS["three buckets"]}), 51)])
    assert [ax.get_xscale() for ax in zero.axes[1:2]] == ["symlog"] and zero.axes[0].get_yscale() == "symlog"
    assert [ax.get_xscale() for ax in plain.axes[1:]] == ["log", "log"] and plain.axes[0].get_yscale() == "log"
    assert zero.axes[1].get_xticks()[0] == 0.0


@given(st.floats(1e-9, 1e3), st.floats(1.001, 1e9))
def test_log_ticks_lie_between_the_ends(low, factor):
    ticks = gradient_plots.log_ticks(low, low * factor)
    assert 2 <= len(ticks) <= 20 and ticks == sorted(ticks)
    if len(ticks) > 2:
        assert all(low <= tick <= low * factor for tick in ticks)


def test_several_runs_have_a_folder_each_and_share_the_grid(tmp_path, monkeypatch):
    monkeypatch.setattr(gradient_plots, "_save", lambda figure, path, dpi: path)
    monkeypatch.chdir(tmp_path)
    folders = [write(tmp_path / "a/run", row(1), row(51)), write(tmp_path / "b/run", row(51), table=False)]
    paths = gradient_plots.plot([from_folder(folder) for folder in folders], [51])
    root = Path("gradient_analysis_outputs")
    assert {path for path in paths if path.parent == root} == {root / name for name in GRID}
    assert {path.name for path in paths if path.parent == root / "run"} == {name.format(51) for name in SEVEN | OURS}
    assert {path.name for path in paths if path.parent == root / "run-2"} == {name.format(51) for name in SEVEN | OURS}
    means = (root / "run-2/gradient_analysis_bucket_rv_table_step_51.csv").read_text()
    assert means == "bucket,reward_std\nbucket_1,0.1\nbucket_2,0.4\nbucket_10,2.0\n"


def test_equal_data_give_equal_files(tmp_path):
    found = at(Source("run", {51: row(51, {"bucket_1": 1.0})}), 51)
    with gradient_plots.drawing():
        paths = [
            gradient_plots._save(gradient_plots.snr_figure(found), tmp_path / name, 20) for name in ("a.svg", "b.svg")
        ]
    assert paths[0].read_bytes() == paths[1].read_bytes()


# --- the command --------------------------------------------------------------------------------------------------


def test_the_command_lists_steps(tmp_path, capsys, monkeypatch):
    write(tmp_path / "run", row(1), row(51))
    RunFolder(tmp_path / "plain").append_metrics(1, {"actor/entropy": 1.0})
    monkeypatch.setenv("RAGEN_CALLER_DIR", str(tmp_path))
    assert main(["plot", "gradients", "run", "plain", "--list-steps"]) == 0
    assert capsys.readouterr().out == "run: 1, 51\nplain: no gradient analysis\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "--step", "1", "3"], "--step 3: no gradient analysis at that step. There are: run: 1"),
        (["plain"], "plain holds no gradient analysis: train with trainer.gradient_analysis_mode=True"),
        (["nothing"], "run nothing: no such run"),
        ([], "name a run directory"),
    ],
)
def test_the_command_refuses_with_one_message(words, message, tmp_path, capsys, monkeypatch):
    write(tmp_path / "run", row(1))
    RunFolder(tmp_path / "plain").append_metrics(1, {"actor/entropy": 1.0})
    monkeypatch.chdir(tmp_path)
    assert main(["plot", "gradients", *words]) == 2
    assert message in capsys.readouterr().err
    assert not Path("gradient_analysis_outputs").exists()


def test_the_command_draws_where_it_is_told(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(gradient_plots, "_save", lambda figure, path, dpi: path)
    write(tmp_path / "run", row(1), row(3), table=False)
    monkeypatch.chdir(tmp_path)
    assert main(["plot", "gradients", "run", "--step", "3", "--output-dir", "here"]) == 0
    said = capsys.readouterr()
    assert sorted(said.out.split()) == sorted(f"here/{name}" for name in {n.format(3) for n in SEVEN | OURS} | GRID)
    assert "its CSV holds the means of the buckets" in said.err


def test_matplotlib_is_loaded_by_what_draws_only():
    modules = "sys, ragen.cli, ragen.report.gradient_plots, ragen.report.run_report"
    code = f"import {modules}; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# --- the report ---------------------------------------------------------------------------------------------------


def test_the_report_has_the_section(tmp_path):
    folder = write(tmp_path / "run", row(1), row(51, prefixes=(AFTER, BEFORE)))
    text = write_report(RunFolder(folder)).read_text()
    assert "<h2>Where the gradient comes from</h2>" in text
    assert (
        "At step 51, after the filter, from bucket_1 (reward std 0.1) to bucket_10 (2), the task gradient grows" in text
    )
    assert "At step 51, among all groups, from bucket_1" in text
    part = text.split("Where the gradient comes from")[1].split("Other metrics")[0]
    names = re.findall(r'aria-label="([^"]+)"', part)
    assert names[:3] == [
        "Task gradient and reward variance",
        "Entropy and KL gradient and reward variance",
        "Signal to noise of the task gradient",
    ]
    assert "All groups, before the filter" in part and "Earlier steps" in part
    assert part.count(">-0.25</td>") == 6 and part.count(">0.12</td>") == 3
    assert "step 1</span>" in part and "step 51, before the filter</span>" in part


def test_a_run_without_analysis_has_no_such_section(tmp_path):
    RunFolder(tmp_path).append_metrics(1, {"actor/grad_norm": 1.0})
    assert "Where the gradient" not in write_report(RunFolder(tmp_path)).read_text()


def test_the_section_bears_what_is_missing(tmp_path):
    """Names from outside are escaped; single numbers may be missing or not finite."""
    thin = {
        "step": 1,
        "grad_norm/bucket_1/task": 0.5,
        "grad_norm/bucket_<b>/task": 1.0,
        "grad_norm/bucket_2/task": math.nan,
    }
    folder = RunFolder(tmp_path / "<run>")
    folder.append_metrics(1, thin)
    text = write_report(folder).read_text()
    assert "Where the gradient comes from" in text and "fewer than two buckets" in text
    assert "<b>" not in text and "<run>" not in text


def test_a_chart_holds_all_its_points():
    text = xy_chart([Line("a", [(0.1, -2.0), (3.0, 7.5)]), Line("b", [(1.0, 0.0)])], "x", "y", (360, 220), "n")
    for x, y in re.findall(r"([\d.-]+),([\d.-]+)", " ".join(re.findall(r'points="([^"]+)"', text))):
        assert 0 <= float(x) <= 360 and 0 <= float(y) <= 220
    assert text.count("<title>") == 3
