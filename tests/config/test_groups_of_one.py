"""Groups of one: a filter that would drop all of them is refused, with advice that works; the documented rows train."""

import re
from itertools import product

import pytest

from ragen.algo.filter import METRICS, PROB_MODES, STRATEGIES, group_score, select
from ragen.cli import main
from ragen.config import derive
from ragen.config.compose import resolve
from ragen.config.schema import Config
from ragen.config.validate import Subject, analysis, rollout_filter
from ragen.errors import ConfigError
from ragen.store.run_folder import RunFolder

ROLLOUT = "actor_rollout_ref.rollout.rollout_filter_"
VALUES = {"top_k_abs": [1, 9], "min_p": [0.0, 0.5, 1.0], "top_p": [1e-6, 0.9, 1.0, 1.5]}
FILTERS = [
    {"strategy": strategy, "value": value, "top_p_prob_mode": mode, "selection_eps": eps}
    for strategy in STRATEGIES
    for value in VALUES.get(strategy, [0.1, 1.0])
    for mode in (PROB_MODES if strategy == "top_p" else ["linear"])
    for eps in ((0.0, 2.0) if strategy == "top_p" else [0.01])
]


def configured(chosen: dict, num_groups: int, group_size: int) -> Config:
    config = Config()
    config.es_manager.train.env_groups, config.es_manager.train.group_size = num_groups, group_size
    for name, value in chosen.items():
        setattr(config.actor_rollout_ref.rollout, f"rollout_filter_{name}", value)
    return config


def problem_of(config: Config) -> ConfigError | None:
    return next(rollout_filter(Subject(config, str)), None)


def kept(config: Config, values_G_E: list[list[float]]) -> int:
    metric = config.actor_rollout_ref.rollout.rollout_filter_metric
    scores = [group_score(metric, values_E) for values_E in values_G_E]
    return sum(verdict.keep for verdict in select(scores, derive.filter_rule(config)))


def can_keep(config: Config) -> bool:
    """Whether some step leaves a group: one of very different values is tried, and one of equal values."""
    train = config.es_manager.train
    apart = [
        [1e9 * (group % 2 + member + 1) for member in range(train.group_size)] for group in range(train.env_groups)
    ]
    return any(kept(config, values) for values in (apart, [[5.0] * train.group_size] * train.env_groups))


@pytest.mark.parametrize("group_size", [1, 2, 4])
@pytest.mark.parametrize("num_groups", [1, 2, 8])
def test_what_is_accepted_can_keep_something_and_the_advice_leads_there(num_groups, group_size):
    others = product(FILTERS, METRICS, ("largest", "smallest"), (True, False))
    refusals = [
        check(chosen | {"metric": metric, "type": kind, "include_zero": include_zero}, num_groups, group_size)
        for chosen, metric, kind, include_zero in others
    ]
    assert any(refusals) == (group_size == 1)


def check(chosen: dict, num_groups: int, group_size: int) -> bool:
    """Whether a filter is refused: exactly if it can keep nothing."""
    config = configured(chosen, num_groups, group_size)
    problem = problem_of(config)
    assert (problem is None) == can_keep(config), problem
    if problem is None:
        return False
    assert (problem.code, problem.key, group_size) == ("groups-of-one", "es_manager.train.group_size", 1)
    larger, *changes = re.findall(r"(\S+) to 2 or more|rollout_filter_(\w+=\w+)", str(problem).partition("; ")[2])
    assert larger[0] == "es_manager.train.group_size" and changes, str(problem)
    advised = {name: {"True": True, "1": 1.0}[value] for name, value in (change[1].split("=") for change in changes)}
    for way_out in (configured(chosen, num_groups, 2), configured(chosen | advised, num_groups, group_size)):
        assert problem_of(way_out) is None and can_keep(way_out)
    return True


@pytest.mark.parametrize(
    ("chosen", "advice"),
    [
        (["include_zero=False"], ["include_zero=True"]),
        (["value=0.9"], ["value=1"]),
        (["value=0.9", "include_zero=False"], ["include_zero=True", "value=1"]),
        (["value=0.9", "top_p_prob_mode=softmax", "include_zero=False"], ["include_zero=True"]),
        (["strategy=top_k_abs", "value=2", "include_zero=False"], ["include_zero=True"]),
        (["metric=entropy_std", "value=0.5"], ["value=1"]),
    ],
)
def test_the_advice_can_be_pasted(chosen, advice):
    start = ["sokoban", "training.n_rollout=1"]
    typed = [*start, "ppo_mini_batch_size=4", *(f"{ROLLOUT}{one}" for one in chosen)]
    with pytest.raises(ConfigError) as refused:
        resolve(typed, environ={})
    name = start[-1].partition("=")[0]
    assert (refused.value.code, refused.value.key) == ("groups-of-one", name)
    pasted = " ".join(f"{ROLLOUT}{one}" for one in advice)
    assert str(refused.value).endswith(f"set {name} to 2 or more, or {pasted}")
    assert resolve([*typed, *pasted.split()], environ={})
    assert resolve([*typed, f"{name}=2"], environ={})


def test_an_analysis_of_groups_of_one_is_refused_alike():
    config = configured({"value": 0.9, "include_zero": True}, 8, 16)
    config.trainer.gradient_analysis_mode = True
    assert not list(analysis(Subject(config, str)))
    config.trainer.gradient_analysis_group_size = 1
    (problem,) = analysis(Subject(config, str))
    assert (problem.code, problem.key) == ("groups-of-one", "trainer.gradient_analysis_group_size")
    assert "trainer.gradient_analysis_group_size to 2 or more, or " in str(problem)
    config.actor_rollout_ref.rollout.rollout_filter_value = 1.0
    assert not list(analysis(Subject(config, str)))


ROW = [
    "two_armed_bandit", "model.base_model=pocket", "training.micro_batch_size=4", "training.train_batch_size=32",
    "training.ppo_batch_size=32", "training.max_turns=1", "training.n_rollout=1", "optimization.kl_coef=0.001",
    "optimization.adv_estimator=brpo",
]  # fmt: skip


@pytest.mark.parametrize("think", [[], ["training.no_think_rl=True"]])
def test_the_documented_bandit_rows_with_pocket(think):
    config = resolve([*ROW, *think], environ={}).config
    assert (config.es_manager.train.env_groups, config.es_manager.train.group_size) == (32, 1)
    assert kept(config, [[reward] for reward in (0.0, 1.0) * 16]) == 32, "nothing is filtered"
    assert config.algorithm.adv_estimator == "brpo"
    usual = resolve([*ROW, *think, "training.n_rollout=4"], environ={}).config
    assert usual.actor_rollout_ref.rollout.rollout_filter_include_zero is False, "larger groups are filtered as before"


@pytest.mark.slow
def test_the_documented_bandit_row_trains(tmp_path):
    places = [f"trainer.default_local_dir={tmp_path}/run", "trainer.total_training_steps=2", "training.val_data_num=8"]
    assert main(["train", *ROW, *places]) == 0
    metrics = RunFolder(tmp_path / "run").read_metrics()
    assert [count for _, count in metrics.series("rollout/filter_kept_count")] == [32.0, 32.0]
    assert all(norm > 0 for _, norm in metrics.series("actor/grad_norm"))
