"""The hyper-parameter search: what a group starts from, and what it hands on."""

import json
import re
import shlex

import pytest
from dry_runs import effective

from ragen.cli import main
from ragen.errors import ConfigError
from ragen.experiment.expand import expand
from ragen.experiment.plan import Options, Plan
from ragen.experiment.results import write_record
from ragen.experiment.search import carry, score_of
from ragen.store.run_folder import RunFolder


@pytest.fixture(autouse=True)
def elsewhere(resolved_once, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return tmp_path


FOLDER = "log/searched_hyper_params/sokoban/Qwen__Qwen2.5-3B-Instruct/hyperparam_searching"


def group(number: str, *more: tuple[str, str], **others) -> Plan:
    settings = {"env_name": "sokoban", "search_group": number} | dict(more)
    return expand("hyperparam_search", Options(settings=tuple(settings.items()), **others))


def store(folder, number: str, **changes) -> None:
    path = folder / FOLDER / f"searched_params_group_{number}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    best = {"1": {"train_batch_size": "4", "n_rollout": "8"}, "2": {"actor_lr": 5e-6}}[number]
    record = {"environment": "sokoban", "model": "Qwen/Qwen2.5-3B-Instruct", "best": best} | changes
    path.write_text(json.dumps(record))


def test_a_start_without_results_names_the_commands_to_run_first(capsys):
    typed = ["--env_name=sokoban", "--exp_base_name=my_search", "--micro_batch_size=4", "--parallel"]
    others = ["--model=pocket", "--steps=3", "--gpus=cpu,cpu"]
    end = ["--", "es_manager.val.env_groups=4"]
    assert main(["sweep", "hyperparam_search", *typed, *others, "--search_group=3", *end]) == 2
    said = capsys.readouterr().err
    paths = [f"log/searched_hyper_params/sokoban/pocket/my_search/searched_params_group_{one}.json" for one in "12"]
    assert f"{', '.join(paths)} not found" in said
    commands = re.findall(r"^  bash scripts/hyperparam_search\.sh (.*)$", said, flags=re.MULTILINE)
    assert [shlex.split(command) for command in commands] == [
        [*typed, *others, f"--search_group={one}", *end] for one in "12"
    ]
    assert "--train_batch_size … --n_rollout … --actor_lr …" in said
    words = shlex.split(commands[0])
    assert main(["sweep", "hyperparam_search", "--dry-run", *words]) == 0, "as printed it works"


def test_the_command_to_run_first_names_the_same_gpus(capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert main(["sweep", "hyperparam_search", "--env_name=sokoban", "--gpus=1", "--search_group=2"]) == 2
    assert "--gpus=1 --search_group=1" in capsys.readouterr().err


def test_a_dry_run_assumes_the_published_start():
    assert group("3", dry_run=True).assumed == {"train_batch_size": "8", "n_rollout": "16", "actor_lr": "1e-6"}


def test_what_is_given_needs_no_results():
    plan = group("2", ("train_batch_size", "4"), ("n_rollout", "4"))
    assert plan.assumed == {}
    words = effective({"overrides": plan.cells[0].overrides})
    assert (words["training.train_batch_size"], words["training.ppo_batch_size"]) == ("4", "16")
    assert (words["optimization.kl_coef"], words["training.temperature"]) == ("0.04", "1.0")


def test_what_was_found_is_taken(elsewhere):
    store(elsewhere, "1")
    store(elsewhere, "2")
    plan = group("3")
    words = effective({"overrides": plan.cells[0].overrides})
    assert (words["training.train_batch_size"], words["training.n_rollout"]) == ("4", "8")
    assert words["training.ppo_batch_size"] == "32"
    assert float(words["optimization.actor_lr"]) == 5e-6
    assert plan.assumed == {}


def test_a_given_value_stands_over_a_found_one(elsewhere):
    store(elsewhere, "1")
    words = effective({"overrides": group("2", ("n_rollout", "16")).cells[0].overrides})
    assert (words["training.train_batch_size"], words["training.n_rollout"]) == ("4", "16")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"environment": "frozenlake"}, "was found for environment frozenlake, not for sokoban"),
        ({"model": "pocket"}, "was found for model pocket, not for Qwen/Qwen2.5-3B-Instruct"),
        ({"best": {"n_rollout": "8"}}, "has no train_batch_size"),
        ({"best": {"train_batch_size": "__import__('os')", "n_rollout": "8"}}, "takes a whole number"),
        ({"best": [4, 8]}, "holds no result of a search"),
    ],
)
def test_results_for_something_else_are_refused(elsewhere, changes, message):
    store(elsewhere, "1", **changes)
    for dry_run in (True, False):
        with pytest.raises(ConfigError) as error:
            group("2", dry_run=dry_run)
        assert message in str(error.value)


def test_a_torn_file_is_refused(elsewhere):
    store(elsewhere, "1")
    path = elsewhere / FOLDER / "searched_params_group_1.json"
    path.write_text(path.read_text()[:20])
    with pytest.raises(ConfigError, match="cannot be read"):
        group("2")


def test_one_run_at_a_time_unless_parallel():
    assert group("1").options.max_parallel == 1
    assert group("1", ("parallel", "True")).options.max_parallel is None


# --- what is handed on --------------------------------------------------------------------------------------------


def finish(plan: Plan, scores: dict[str, float | None], status: str = "success") -> None:
    """Runs as they lie on disk: validations that get better, and a line in the summary."""
    lines = []
    for cell in plan.cells:
        if cell.name not in scores:
            continue
        folder = RunFolder(cell.checkpoint_dir)
        score = scores[cell.name]
        if score is not None:
            folder.append_metrics(1, {"val-env/reward": -9.0})
            folder.append_metrics(2, {"actor/entropy": 1.0})
            folder.append_metrics(3, {"val-env/reward": score})
        values = [value if name == "name" else f"{name}={value}" for name, value in cell.fields]
        lines.append(" | ".join([*values, f"status={status}"]))
    plan.summary_path.parent.mkdir(parents=True, exist_ok=True)
    with open(plan.summary_path, "a") as file:
        file.write("\n".join([*lines, ""]))


def test_the_best_mean_return_is_handed_on(elsewhere):
    plan = group("1", ("parallel", "True"))
    best = "hyperparam_searching_train_batch_size_16_n_rollout_4"
    scores = {cell.name: float(place) for place, cell in enumerate(plan.cells)} | {best: 8.5}
    finish(plan, scores)
    assert score_of(plan.cells[0]) == 0.0
    said = carry(plan)
    assert "best of 9: train_batch_size=16, n_rollout=4 with a mean return of 8.5" in said
    stored = json.loads((elsewhere / FOLDER / "searched_params_group_1.json").read_text())
    assert stored["best"] == {"train_batch_size": "16", "n_rollout": "4"}
    assert (stored["environment"], stored["model"]) == ("sokoban", "Qwen/Qwen2.5-3B-Instruct")
    assert stored["runs"][0] == {"train_batch_size": "4", "n_rollout": "4", "score": 0.0}
    words = effective({"overrides": group("2").cells[0].overrides})
    assert (words["training.train_batch_size"], words["training.n_rollout"]) == ("16", "4")


def test_runs_that_did_not_succeed_have_no_score(elsewhere):
    plan = group("1")
    names = [cell.name for cell in plan.cells]
    finish(plan, {names[0]: 1.0, names[1]: None})
    finish(plan, {names[2]: 5.0}, status="early_stopped:reward_variance_collapse")
    finish(plan, {names[3]: 9.0}, status="fail")
    assert "best of 1: train_batch_size=4, n_rollout=4" in carry(plan)
    stored = json.loads((elsewhere / FOLDER / "searched_params_group_1.json").read_text())
    assert stored["without_score"] == 8


def test_with_seeds_the_mean_over_them_counts():
    plan = group("1", seeds=2)
    scores = {cell.name: 0.0 for cell in plan.cells}
    scores["hyperparam_searching_train_batch_size_4_n_rollout_4-s0"] = 10.0
    scores["hyperparam_searching_train_batch_size_8_n_rollout_4-s0"] = 6.0
    scores["hyperparam_searching_train_batch_size_8_n_rollout_4-s1"] = 6.0
    finish(plan, scores)
    assert "train_batch_size=8, n_rollout=4 with a mean return of 6" in carry(plan)


def test_ties_are_named(elsewhere):
    plan = group("1")
    finish(plan, {cell.name: 2.0 if place in (1, 4, 8) else 1.0 for place, cell in enumerate(plan.cells)})
    said = carry(plan)
    assert "best of 9: train_batch_size=4, n_rollout=8 with a mean return of 2, tied with " in said
    assert "tied with train_batch_size=8, n_rollout=8; train_batch_size=16, n_rollout=16: the first is taken" in said
    stored = json.loads((elsewhere / FOLDER / "searched_params_group_1.json").read_text())
    assert stored["tied"] == [
        {"train_batch_size": "8", "n_rollout": "8"}, {"train_batch_size": "16", "n_rollout": "16"}
    ]  # fmt: skip


OTHERS = [
    {"env_name": "two_armed_bandit"},
    {"exp_base_name": "other"},
    {"model": "pocket"},
    {"model": "mine/Qwen2.5-3B-Instruct"},
]


@pytest.mark.parametrize("change", OTHERS)
def test_searches_of_other_games_models_and_names_share_no_file(elsewhere, change):
    settings = tuple((name, value) for name, value in change.items() if name != "model")
    first, second = group("1"), group("1", *settings, model=change.get("model"))
    files = [
        {plan.summary_path, *(cell.log_path for cell in plan.cells), *(cell.checkpoint_dir for cell in plan.cells)}
        for plan in (first, second)
    ]
    assert files[0].isdisjoint(files[1])
    finish(first, {cell.name: 5.0 for cell in first.cells})
    carry(first)
    stored = (elsewhere / FOLDER / "searched_params_group_1.json").read_bytes()
    finish(second, {second.cells[0].name: 1.0})
    assert "best of 1: train_batch_size=4, n_rollout=4 with a mean return of 1; stored in " in carry(second)
    assert (elsewhere / FOLDER / "searched_params_group_1.json").read_bytes() == stored
    assert len(list(elsewhere.glob("log/searched_hyper_params/**/*.json"))) == 2


def test_runs_with_other_settings_do_not_count():
    """A group that is searched again with other values of the groups before it, one run at a time."""
    first = group("2", ("train_batch_size", "4"), ("n_rollout", "4"))
    finish(first, {cell.name: 9.0 for cell in first.cells})
    write_record(first, first.cells)
    again = group("2", ("train_batch_size", "8"), ("n_rollout", "4"), only=("hyperparam_searching_actor_lr_1e-6",))
    write_record(again, again.cells)
    finish(again, {cell.name: 1.0 for cell in again.cells})
    assert "best of 1: actor_lr=1e-6 with a mean return of 1;" in carry(again)


def test_runs_of_an_earlier_part_count_too():
    plan = group("1")
    finish(plan, {plan.cells[0].name: 3.0, plan.cells[1].name: 4.0})
    part = group("1", only=(plan.cells[0].name,))
    assert "train_batch_size=4, n_rollout=8 with a mean return of 4" in carry(part)


def test_without_any_score_nothing_is_written(elsewhere):
    plan = group("1")
    finish(plan, {plan.cells[0].name: 1.0}, status="fail")
    assert "no run of group 1 has a score" in carry(plan)
    assert not (elsewhere / "log/searched_hyper_params").exists()


def test_a_series_stops_where_it_cannot_go_on(monkeypatch):
    from ragen.experiment import command, scheduler

    plans = [expand("kl_sweep", Options(settings=(("kl", value),))) for value in ("0", "0.1", "0.2")]
    for statuses, started, status in (([0, 1, 0], 3, 1), ([0, 0, 0], 3, 0), ([1, 130], 2, 130), ([2], 1, 2)):
        left = list(statuses)
        monkeypatch.setattr(scheduler, "run", lambda plan, left=left: left.pop(0))
        assert command.start(plans) == status
        assert len(statuses) - len(left) == started
