"""An override after `--` that a name or a label would contradict is refused, however it is written."""

import pytest
from dry_runs import dry_run

from ragen.errors import ConfigError
from ragen.experiment.expand import expand
from ragen.experiment.plan import Options
from ragen.experiment.template import recipe_and_environment

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
SEARCH = (("env_name", "sokoban"), ("train_batch_size", "4"), ("n_rollout", "4"))

# An experiment, what is typed after --, and what it contradicts.
REFUSED = [
    *(("kl_sweep", typed, "--kl-values 0,0.001,0.003,0.01,0.03,0.1") for typed in (
        f"{ACTOR}.kl_loss_coef=0.5", f"+{ACTOR}.kl_loss_coef=0.5", f"++{ACTOR}.kl_loss_coef=0.5",
        "optimization.kl_coef=0.5", "++optimization.kl_coef=0.5", f"{ACTOR}={{kl_loss_coef: 0.5}}",
        "actor_rollout_ref={actor: {kl_loss_coef: 0.5}}", f"~{ACTOR}.kl_loss_coef", f"~{ACTOR}",
        "~optimization.kl_coef", f"{ACTOR}.use_kl_loss=False", "training.use_kl_loss=False",
    )),
    ("kl_sweep", f"{ROLLOUT}.rollout_filter_include_zero=False", "--rollout_filter_include_zero True"),
    ("kl_sweep", "actor_rollout_ref.model.path=pocket", "--model"),
    ("entropy_sweep", f"{ACTOR}.entropy_coeff=1", "--entropy-values"),
    ("top_p_sweep", f"{ROLLOUT}.rollout_filter_value=0.5", "--rollout_filter_value"),
    ("top_p_sweep", f"{ROLLOUT}.rollout_filter_include_zero=True", "--rollout_filter_value"),
    ("smoke_test_for_ke", f"{ACTOR}.kl_loss_coef=1", "the grid's kl"),
    ("smoke_test_for_ke", f"{ACTOR}.kl_loss_type=mse", "--kl-type low_var_kl"),
    ("smoke_test_for_ke", f"{ACTOR}.entropy_coeff=1", "the grid's entropy"),
    ("smoke_test_for_ke", f"{ROLLOUT}.rollout_filter_value=0.5", "the grid's filter_value"),
    ("smoke_test_for_ke", f"{ROLLOUT}.rollout_filter_strategy=min_p", "--rollout_filter_strategy top_p"),
    ("smoke_test_for_ke", "algorithm.zero_task_advantage=False", "the grid's zero_task"),
    ("grad_analysis", "algorithm.adv_estimator=grpo", "--algo PPO"),
    ("main_table_diff_algo", "algorithm.adv_estimator=grpo", "--algos PPO,DAPO,GRPO,DrGRPO"),
    ("main_table_diff_algo", f"{ROLLOUT}.rollout_filter_value=0.5", "--filters all"),
    ("main_table_diff_model", "actor_rollout_ref.model.path=pocket", "--models"),
    ("frozen_lake_slipper_rate_sweep", "custom_envs.CoordFrozenLake.env_config.success_rate=0.3", "--slipper-rate"),
    ("frozen_lake_slipper_rate_sweep", "custom_envs.CoordFrozenLake={env_config: {success_rate: 0}}", "--slipper-rate"),
    ("hyperparam_search", "optimization.actor_lr=1", "--search_group 2"),
    ("hyperparam_search", f"{ACTOR}.optim.lr=1", "--search_group 2"),
    ("hyperparam_search", "es_manager.train.group_size=2", "--n_rollout 4"),
    ("hyperparam_search", "es_manager.train.env_configs.n_groups=[2]", "--train_batch_size 4"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "typed", "ours"), REFUSED)
def test_refused_naming_both(name, typed, ours, resolved_once):
    settings = (*SEARCH, ("search_group", "2")) if name == "hyperparam_search" else ()
    with pytest.raises(ConfigError) as error:
        expand(name, Options(settings=settings, gpus=("cpu",), overrides=(typed,)))
    assert str(error.value).startswith(ours) and f" and {typed} (after --) both set " in str(error.value)


def test_the_command_line_refuses_it_too():
    done = dry_run(f"./ragen sweep kl_sweep --kl-values 0.1 --gpus cpu -- {ACTOR}.kl_loss_coef=0.5")
    assert done.status == 2 and not done.runs
    assert "--kl-values 0.1 and actor_rollout_ref.actor.kl_loss_coef=0.5" in done.errors
    grouped = dry_run("./ragen sweep kl_sweep --gpus cpu -- 'trainer={experiment_name: x}'")
    assert grouped.status == 2 and "an experiment names its runs itself" in grouped.errors


@pytest.mark.parametrize(
    ("name", "typed"),
    [
        ("kl_sweep", f"{ACTOR}.kl_loss_type=mse"), ("kl_sweep", "trainer.save_freq=5"),
        ("kl_sweep", "ppo_mini_batch_size=8"),
        ("kl_sweep", "es_manager.train.env_groups=2"), ("kl_sweep", "trainer.project_name=mine"),
        ("grad_analysis", f"{ROLLOUT}.rollout_filter_value=0.5"),
        ("smoke_test_for_ke", "collapse_detection.num_samples=3"),
        ("hyperparam_search", "training.ppo_batch_size=8"), ("hyperparam_search", "ppo_mini_batch_size=8"),
    ],
)  # fmt: skip
def test_what_no_label_speaks_of_is_accepted(name, typed, resolved_once):
    settings = (*SEARCH, ("search_group", "2")) if name == "hyperparam_search" else ()
    plan = expand(name, Options(settings=settings, gpus=("cpu",), overrides=(typed,)))
    assert all(typed in cell.overrides for cell in plan.cells)


def test_variables_do_not_change_what_is_swept(monkeypatch):
    from ragen.run.prepare import prepare

    monkeypatch.setenv("CONFIG_OPTIMIZATION__ACTOR_LR", "0.5")
    plan = expand("hyperparam_search", Options(settings=(*SEARCH, ("search_group", "2")), model="pocket"))
    cell = plan.cells[0]
    recipe, environment = recipe_and_environment(cell.start)
    assert prepare([*environment, *cell.overrides], recipe).config.actor_rollout_ref.actor.optim.lr == 5e-7
