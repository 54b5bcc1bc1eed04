"""What an experiment's report says, from made-up runs with hand-counted outcomes."""

import gzip
import json
import re
import statistics
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stub_plans import make_cell, make_plan

from ragen.cli import main
from ragen.errors import ConfigError
from ragen.experiment.compare import Change, compare, findings, headline, read_study, standings
from ragen.experiment.results import write_record
from ragen.experiment.sweep_report import find_record, markdown, write_sweep_report
from ragen.statistics import mean_interval, paired_difference
from ragen.store.run_folder import RunFolder
from ragen.store.sweep_results import SummaryLog, keep_older, read_record, record_path, result_line

TAG = "CoordSokoban"
RECORD = Path("logs/stub.json")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write_run(name, outcomes, step=10, tag=TAG, stopped=None):
    """A run that was validated at step 0 and at its end, where it has won the levels that `outcomes` says."""
    folder = RunFolder(Path("saved") / name)
    folder.path.mkdir(parents=True)
    folder.config_path.write_text("model_path: Qwen/Qwen2.5-3B\ntrainer: {total_training_steps: 10}\n")
    rate = sum(outcomes) / len(outcomes)
    shown = {"random": 0.2, "optimal": 1.0}
    for at, success in ((0, 0.25), (step, rate)):
        values = shown | {"success": success, "success_low": success - 0.1, "success_high": success + 0.1}
        metrics = {f"val-env/{tag}/{key}": value for key, value in values.items()}
        others = {"actor/entropy": 0.4, "actor/grad_norm": 1.0, "rollout/in_group_reward_std": 2.0} if at else {}
        folder.append_metrics(at, metrics | others)
    episodes = [
        {"tag": tag, "seed": seed, "success": won, "reward": 0, "penalty": 0, "sequences": [],
         "turns": [{"state_text": f"level {seed}", "reward": 0, "penalty": 0}]}
        for seed, won in enumerate(outcomes)
    ]  # fmt: skip
    folder.episodes_path.mkdir()
    lines = "".join(f"{json.dumps(episode)}\n" for episode in episodes)
    (folder.episodes_path / f"val-{step:06d}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    folder.write_finished("early_stopped" if stopped else "finished", step, stopped)


def write_experiment(statuses, reference="0", fields=None, groups=None):
    """The record and the summary log of cells whose labels and statuses are given; `label-s<k>` is a repetition."""
    cells = []
    for label in statuses:
        base, _, seed = label.partition("-s")
        given_fields = fields(base) if fields else (("kl", base), ("include_zero", "True"))
        more = (("seed", seed),) if seed else ()
        cells.append(
            make_cell(label, group=(groups or {}).get(label, ""), seed=int(seed) if seed else None,
                      fields=(*given_fields, *more))
        )  # fmt: skip
    names = list(dict.fromkeys(name for cell in cells for name, _ in cell.fields))
    plan = make_plan(cells, title="KL sweep: Qwen2.5-3B", reference=reference, summary_fields=(*names, "status"))
    log = SummaryLog(plan.summary_path)
    plan.summary_path.parent.mkdir(exist_ok=True)
    for cell, status in zip(cells, statuses.values(), strict=True):
        cell.log_path.parent.mkdir(parents=True, exist_ok=True)
        if status:
            log.append([result_line(plan.summary_fields, cell, {"status": status})])
    log.append([])
    write_record(plan, cells)


# --- comparing ----------------------------------------------------------------------------------------------------


def levels(won, num=100, first=0):
    """Which of `num` levels were won: `won` of them from `first` on."""
    return [first <= place < first + won for place in range(num)]


def test_settings_are_compared_on_the_same_levels():
    """40 of 100 against 60 and 41: the first gains 20 levels and loses none, the second gains 11 and loses 10."""
    write_run("0", levels(40))
    write_run("0.01", levels(60))
    write_run("0.1", levels(41, first=10))
    write_experiment(dict.fromkeys(["0", "0.01", "0.1"], "success"))
    zero, better, same = standings(read_study(RECORD), TAG)
    assert zero.is_reference and zero.change is None and zero.success.value == 0.4
    assert better.change.pooled == paired_difference(levels(40), levels(60)) and better.change.verdict == "more"
    assert better.change.pooled.mean == pytest.approx(0.2)
    assert same.change.pooled.mean == pytest.approx(0.01) and same.change.verdict == "noise"
    told = " ".join(findings([zero, better, same]))
    assert "Compared with 0, 40.0 % [30.0, 50.0], on the same validation levels." in told
    assert "More than noise: 0.01 +20.0 [" in told and "Within noise: 0.1 +1.0 [" in told
    assert "One training seed" in told
    assert headline([zero, better, same]) == ("1 of 2 settings differs from 0 by more than noise: 1 better", "good")


def test_seeds_are_paired_with_their_own():
    """Seed 0 gains 20 of 100 levels, seed 1 gains 10: pooled 30 of 200."""
    for name, won in {"0-s0": 40, "0-s1": 50, "0.01-s0": 60, "0.01-s1": 60}.items():
        write_run(name, levels(won))
    write_experiment(dict.fromkeys(["0-s0", "0-s1", "0.01-s0", "0.01-s1"], "success"))
    zero, other = standings(read_study(RECORD), TAG)
    assert zero.by_seed == (0.4, 0.5) and zero.success.value == pytest.approx(0.45)
    assert other.change.by_seed == pytest.approx((0.2, 0.1))
    assert other.change.pooled.mean == pytest.approx(0.15) and other.change.pooled.num_levels == 200
    # t with one degree of freedom: 0.15 ± 12.706 * 0.0707 / 1.414
    assert other.change.over_seeds == pytest.approx((0.15 - 0.6353, 0.15 + 0.6353), abs=1e-3)
    assert other.change.verdict == "unsure"
    assert "but not over the seeds" in " ".join(findings([zero, other]))


def test_seeds_that_agree_make_a_difference_real():
    for seed, won in enumerate((58, 60, 62)):
        write_run(f"0-s{seed}", levels(40))
        write_run(f"0.01-s{seed}", levels(won))
    write_experiment({f"{value}-s{seed}": "success" for value in ("0", "0.01") for seed in range(3)})
    _, other = standings(read_study(RECORD), TAG)
    assert other.change.verdict == "more" and other.change.over_seeds.low > 0.1
    told = " ".join(findings(standings(read_study(RECORD), TAG)))
    assert "One training seed" not in told


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=40))
def test_the_interval_over_seeds_is_students(values):
    """Against tabulated quantiles, by the formula as it stands in a textbook."""
    quantiles = {
        2: 12.706,
        3: 4.303,
        4: 3.182,
        5: 2.776,
        6: 2.571,
        11: 2.228,
        16: 2.131,
        21: 2.086,
        31: 2.042,
        40: 2.023,
    }
    num = len(values)
    if num not in quantiles:
        return
    middle = sum(values) / num
    variance = sum((value - middle) ** 2 for value in values) / (num - 1)
    reach = quantiles[num] * (variance / num) ** 0.5
    low, high = mean_interval(values)
    assert low == pytest.approx(middle - reach, abs=0.01 * reach + 1e-9)
    assert high == pytest.approx(middle + reach, abs=0.01 * reach + 1e-9)


@given(st.integers(2, 4), st.lists(st.tuples(st.booleans(), st.booleans()), min_size=3, max_size=12), st.data())
def test_a_change_is_real_only_if_levels_and_seeds_say_so(seeds, pairs, data):
    """The verdict from all pairs at once and from the seeds' means, worked out beside."""
    per_seed = [data.draw(st.permutations(pairs)) for _ in range(seeds)]
    shifts = [data.draw(st.integers(0, len(pairs))) for _ in range(seeds)]
    played = [[(old, new or place < shift) for place, (old, new) in enumerate(own)]
              for own, shift in zip(per_seed, shifts, strict=True)]  # fmt: skip
    everything = [pair for own in played for pair in own]
    pooled = paired_difference([old for old, _ in everything], [new for _, new in everything])
    means = [sum(new - old for old, new in own) / len(own) for own in played]
    verdict = Change(pooled, tuple(means)).verdict
    reach = {2: 12.706, 3: 4.303, 4: 3.182}[seeds] * statistics.stdev(means) / seeds**0.5
    outside = abs(statistics.mean(means)) > reach
    if pooled.low <= 0 <= pooled.high:
        assert verdict == "noise"
    elif abs(abs(statistics.mean(means)) - reach) > 1e-9:
        assert verdict == (("more" if pooled.mean > 0 else "less") if outside else "unsure")


def test_early_stops_and_what_has_not_ended_are_told_apart():
    write_run("0", levels(40))
    write_run("0.01", levels(5), step=4, stopped="low_validation_success")
    write_run("0.03", levels(80))
    write_experiment({"0": "success", "0.01": "early_stopped:low_validation_success", "0.03": "fail", "0.1": ""})
    found = standings(read_study(RECORD), TAG)
    assert [standing.setting.status for standing in found][2:] == ["fail", "missing"]
    assert found[2].change is None and found[2].problem == "0.03 has not ended (fail)"
    told = " ".join(findings(found))
    assert "counts as a failed training regime: 0.01 (low_validation_success at step 4)." in told
    assert "Not ended: 0.03 (fail); 0.1 (missing)." in told
    assert "More than noise" not in told and headline(found) == ("Stopped early by a rule: 0.01", "bad")


def test_without_its_reference_the_first_is_compared_with():
    write_run("0.01", levels(40))
    write_run("0.1", levels(60))
    write_experiment(dict.fromkeys(["0.01", "0.1"], "success"), reference=None)
    first, second = standings(read_study(RECORD), TAG)
    assert first.is_reference and second.change.verdict == "more"


def test_other_games_are_compared_among_themselves():
    write_run("sokoban", levels(40), tag="CoordSokoban")
    write_run("lake", levels(60), tag="CoordFrozenLake")
    write_run("lake2", levels(70), tag="CoordFrozenLake")
    write_experiment(dict.fromkeys(["sokoban", "lake", "lake2"], "success"), reference=None)
    study = read_study(RECORD)
    assert study.tags == ["CoordSokoban", "CoordFrozenLake"]
    assert [standing.setting.title for standing in standings(study, "CoordFrozenLake")] == ["lake", "lake2"]
    assert compare(study.settings[0], study.settings[1], "CoordSokoban")[1].startswith("lake has no stored episodes")


def test_many_comparisons_come_with_a_warning():
    write_run("0", levels(40))
    names = [f"0.{number}" for number in range(1, 7)]
    for name in names:
        write_run(name, levels(41))
    write_experiment(dict.fromkeys(["0", *names], "success"))
    assert "Of 6 comparisons at 95 %, about 0.3 would look real" in " ".join(
        findings(standings(read_study(RECORD), TAG))
    )


def test_cells_are_called_by_what_they_differ_in():
    def two(name):
        filtered, kl = name.split("_")
        return (("filter", filtered), ("kl", kl), ("collapse", "all"))

    write_experiment(dict.fromkeys(["1.0_0.1", "1.0_0.3", "0.8_0.1", "0.8_0.3"], ""), fields=two)
    study = read_study(RECORD)
    assert study.axis == "filter and kl"
    assert [setting.title for setting in study.settings][:2] == ["filter=1.0, kl=0.1", "filter=1.0, kl=0.3"]


# --- the two files ------------------------------------------------------------------------------------------------


def small_experiment():
    write_run("0", levels(40))
    write_run("0.01", levels(60))
    write_run("0.1", levels(5), step=4, stopped="low_validation_success")
    write_experiment({"0": "success", "0.01": "success", "0.1": "early_stopped:low_validation_success"})


def test_the_page_and_the_table_say_the_same(capsys):
    small_experiment()
    assert main(["report", "logs/stub.log"]) == 0
    assert capsys.readouterr().out.splitlines() == ["report: logs/stub.html", "report: logs/stub.md"]
    text, html = Path("logs/stub.md").read_text(), Path("logs/stub.html").read_text()
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    assert rows[0] == ["kl", "status", "step", "success [95 %]", "difference [95 %]", "verdict"]
    assert rows[2] == ["0", "success", "10", "40.0 % [30.0, 50.0]", "–", "reference"]
    assert rows[3][-1] == "better, more than noise" and rows[4][-1] == "stopped early"
    words = re.sub(r"\s+", " ", "".join(ET.fromstring(_body(html)).itertext()))
    for row in rows[2:]:
        assert all(cell in words.replace("early_stopped: ", "early_stopped:") for cell in row)
    assert all(
        title in words for title in ("Success against kl", "Entropy", "Gradient norm", "Reward spread in a group")
    )
    assert "✕" in words and "random play 20.0 %, " not in text
    assert "<script" not in html and "http://" not in html and "https://" not in html


def _body(html):
    return html[html.index("<body>") : html.index("</html>")]


def test_a_report_from_another_folder_finds_the_runs(monkeypatch, tmp_path):
    small_experiment()
    monkeypatch.chdir("/")
    (html, _) = write_sweep_report(tmp_path / RECORD)
    assert "better, more than noise" in html.read_text()


def test_experiments_of_many_cells_are_drawn_in_panels():
    labels = [f"0.{number:02d}" for number in range(20)]
    for label in labels:
        write_run(label, levels(40))
    write_experiment(
        dict.fromkeys(labels, "success"), reference=labels[0], groups={label: label[:3] for label in labels}
    )
    html = write_sweep_report(RECORD)[0].read_text()
    ET.fromstring(_body(html))
    assert html.count(">Entropy<") == 4  # two groups of ten, cut after every eighth


def test_hostile_names_are_harmless():
    write_experiment({"a": ""}, fields=lambda name: (("kl", "<script>|"), ("other", "1")))
    html, text = write_sweep_report(RECORD)
    assert "<script>" not in html.read_text() and "No validation was made yet" in text.read_text()


def test_an_experiment_that_has_only_begun_is_shown():
    write_experiment({"0": "", "0.1": ""})
    assert "- 0.1: missing" in markdown(read_study(RECORD))


def test_a_sweep_is_found_by_its_log_its_record_and_its_folder(capsys):
    small_experiment()
    for word in ("logs/stub.log", "logs/stub.json", "logs/stub", "logs"):
        assert find_record(word) == RECORD
    assert find_record("saved") is None and find_record("logs/none.log") is None
    assert main(["report", "saved"]) == 2
    assert (
        "saved: not a run directory (no metrics.jsonl). An experiment is named by its summary log"
        in capsys.readouterr().err
    )
    Path("logs/other.json").write_bytes(RECORD.read_bytes())
    Path("logs/other.log").touch()
    with pytest.raises(ConfigError, match="several experiments: name one of"):
        find_record("logs")
    Path("logs/other.json").write_text("{}")
    with pytest.raises(ConfigError, match="not the record of an experiment"):
        read_study(record_path(Path("logs/other.log")))


def test_an_experiment_that_started_over_can_still_be_reported(capsys):
    """The second start writes other runs under the same names, in other folders, and says so in the same logs."""
    write_run("a", [True] * 4)
    write_experiment({"a": "success"}, reference=None)
    log = read_record(RECORD).cells["a"].log_path
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("run folder: saved/a\n")
    for number in (2, 3):
        keep_older(Path("logs/stub.log"))
        write_run(f"a-{number}", [True, False] * number)
        write_experiment({"a": "success"}, reference=None)
        log.write_text(f"run folder: saved/a-{number}\n")
    shown = {}
    for name in ("stub.log", "stub.log.1", "stub.log.2", "stub.json.2"):
        assert main(["report", f"logs/{name}"]) == 0
        path = Path(re.search(r"report: (\S+\.md)", capsys.readouterr().out)[1])
        shown[name] = (path.name, re.search(r"\| success \| 10 \| ([\d.]+ %)", path.read_text())[1])
    assert shown == {
        "stub.log": ("stub.md", "50.0 %"),
        "stub.log.1": ("stub.1.md", "50.0 %"),
        "stub.log.2": ("stub.2.md", "100.0 %"),
        "stub.json.2": ("stub.2.md", "100.0 %"),
    }
    assert [read_record(Path(f"logs/stub.json{end}")).summary.name for end in ("", ".1", ".2")] == [
        "stub.log", "stub.log.1", "stub.log.2"
    ]  # fmt: skip
    assert main(["report", "logs/stub.log.3"]) == 2
