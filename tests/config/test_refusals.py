"""Wrong input is refused, with the kind of problem, the key as it was typed and a way out."""

from functools import reduce

import pytest

from ragen.coerce import convert
from ragen.config.compose import resolve
from ragen.config.keys import FIELDS
from ragen.config.validate import check_ranges
from ragen.errors import ConfigError


def refusal(*overrides, environ=None, **options) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        resolve(overrides, environ=environ or {}, **options)
    return caught.value


# Overrides, the code of the refusal, the key as it was typed, and a part of the way out.

REFUSED = [
    # unknown keys, with the nearest one on the command line that was used
    (["trainer.test_frq=5"], "unknown-key", "trainer.test_frq", "trainer.test_freq"),
    (["+trainer.test_frq=5"], "unknown-key", "trainer.test_frq", "trainer.test_freq"),
    (["++trainer.test_frq=5"], "unknown-key", "trainer.test_frq", "trainer.test_freq"),
    (["sokoban", "training.n_rollouts=8"], "unknown-key", "training.n_rollouts", "training.n_rollout"),
    (["sokoban", "optimisation.kl_coef=1"], "unknown-key", "optimisation.kl_coef", "optimization.kl_coef"),
    (["actor_rollout_ref.rollout_filter_strategy=top_p"], "unknown-key", "actor_rollout_ref.rollout_filter_strategy", "actor_rollout_ref.rollout.rollout_filter_strategy"),
    (["custom_envs.CoordSokoban.max_actions=3"], "unknown-key", "custom_envs.CoordSokoban.max_actions", "custom_envs.CoordSokoban.max_actions_per_traj"),
    (["nonsense=1"], "unknown-key", "nonsense", "Sections: "),
    (["lora_rank=4"], "unknown-key", "lora_rank", "lora.rank? (in fine-tuning: sft.training.lora_rank)"),
    (["sokoban", "model.lora_rank=4"], "unknown-key", "model.lora_rank", "lora.rank"),
    (["sokoban", "training.lora_alpha=4"], "unknown-key", "training.lora_alpha", "lora.alpha"),
    (["sft.lora_rank=4"], "unknown-key", "sft.lora_rank", "sft.training.lora_rank"),
    (["lora.dropout=0.1"], "unknown-key", "lora.dropout", "lora.rank, lora.alpha, lora.target_modules"),
    (["~trainer.test_frq"], "unknown-key", "trainer.test_frq", "trainer.test_freq"),
    # types
    (["trainer.test_freq=often"], "type", "trainer.test_freq", "a whole number"),
    (["trainer.test_freq=1.5"], "type", "trainer.test_freq", "a whole number"),
    (["trainer.test_freq=null"], "type", "trainer.test_freq", "a whole number"),
    (["trainer.test_freq="], "type", "trainer.test_freq", "a whole number"),
    (["actor_rollout_ref.actor.use_kl_loss=maybe"], "type", "actor_rollout_ref.actor.use_kl_loss", "true or false"),
    (["actor_rollout_ref.actor.optim.lr=fast"], "type", "actor_rollout_ref.actor.optim.lr", "a number"),
    (["es_manager.train.env_configs.n_groups=[a]"], "type", "es_manager.train.env_configs.n_groups", "a list, each item a whole number"),
    (["trainer=5"], "group", "trainer", "trainer.project_name=…"),
    (["sokoban", "training.micro_batch_size=many"], "type", "training.micro_batch_size", "a whole number"),
    # choices
    (["algorithm.adv_estimator=ppo"], "choice", "algorithm.adv_estimator", "gae, grpo, brpo"),
    (["sokoban", "optimization.adv_estimator=ppo"], "choice", "optimization.adv_estimator", "gae, grpo, brpo"),
    (["actor_rollout_ref.actor.kl_loss_type=k9"], "choice", "actor_rollout_ref.actor.kl_loss_type", "kl, k1"),
    (["agent_proxy.context_window_mode=half"], "choice", "agent_proxy.context_window_mode", "full, limited_multi_turn, single_turn"),
    (["trainer.logger=[console,mlflow]"], "choice", "trainer.logger", "console, wandb, tensorboard"),
    (["actor_rollout_ref.rollout.name=vllm"], "range", "actor_rollout_ref.rollout.name", "use native"),
    (["agent_proxy.batch_adjust_mode=copy"], "range", "agent_proxy.batch_adjust_mode", "use none"),
    (["custom_envs.CoordSokoban.env_config.observation_format=picture"], "environment", "custom_envs.CoordSokoban", "grid"),
    # combinations
    (["es_manager.train.env_configs.n_groups=[4]"], "group-counts", "es_manager.train.env_configs.n_groups", "es_manager.train.env_groups=4"),
    (["es_manager.train.env_groups=8", "es_manager.train.env_configs.n_groups=[4,2]"], "group-counts", "es_manager.train.env_configs.n_groups", "2 n_groups"),
    (["es_manager.val.env_configs.tags=[Sokobna]"], "unknown-tag", "es_manager.val.env_configs.tags", "CoordSokoban"),
    (["ppo_mini_batch_size=256"], "mini-batch", "ppo_mini_batch_size", "128 or less"),
    (["sokoban", "training.n_rollout=4"], "mini-batch", "training.ppo_batch_size", "32 or less"),
    (["algorithm.bi_level_gae=True"], "turn-scores", "algorithm.bi_level_gae", "agent_proxy.use_turn_scores=True"),
    (["algorithm.bi_level_gae=True", "agent_proxy.use_turn_scores=True", "algorithm.adv_estimator=grpo"], "estimator", "algorithm.bi_level_gae", "adv_estimator=gae"),
    (["algorithm.soft_advantage_reweight=True"], "estimator", "algorithm.soft_advantage_reweight", "needs algorithm.adv_estimator=grpo"),
    (["grpo_advantage_length_weight=True", "algorithm.adv_estimator=brpo"], "estimator", "grpo_advantage_length_weight", "needs algorithm.adv_estimator=grpo"),
    (["agent_proxy.use_turn_scores=True", "agent_proxy.reward_normalization.method=mean"], "turn-scores", "agent_proxy.reward_normalization.method", "use_turn_scores=True"),
    (["algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef=0.1", "algorithm.kl_penalty=full"], "full-kl", "algorithm.kl_penalty", "actor_rollout_ref.actor.kl_loss_type=full"),
    (["algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef=0.1", "algorithm.kl_penalty=full+"], "full-kl", "algorithm.kl_penalty", "algorithm.kl_penalty=full+"),
    (["actor_rollout_ref.actor.checkpoint.save_contents=[optimizer]"], "range", "actor_rollout_ref.actor.checkpoint.save_contents", "trainer.save_freq=-1"),
    (["critic.checkpoint.save_contents=[]"], "range", "critic.checkpoint.save_contents", "trainer.save_freq=-1"),
    (["actor_rollout_ref.actor.clip_ratio_low=1.5"], "range", "actor_rollout_ref.actor.clip_ratio_low", "at most 1"),
    (["actor_rollout_ref.actor.clip_ratio_c=1"], "range", "actor_rollout_ref.actor.clip_ratio_c", "above 1"),
    (["actor_rollout_ref.rollout.rollout_filter_strategy=top_p", "actor_rollout_ref.rollout.rollout_filter_value=0"], "filter-value", "actor_rollout_ref.rollout.rollout_filter_value", "above 0"),
    (["actor_rollout_ref.rollout.rollout_filter_strategy=min_p", "actor_rollout_ref.rollout.rollout_filter_value=1.5"], "filter-value", "actor_rollout_ref.rollout.rollout_filter_value", "between 0 and 1"),
    (["actor_rollout_ref.rollout.rollout_filter_strategy=top_k_abs", "actor_rollout_ref.rollout.rollout_filter_value=1.5"], "filter-value", "actor_rollout_ref.rollout.rollout_filter_value", "a whole number of groups"),
    (["system.CUDA_VISIBLE_DEVICES='0,1'"], "device-count", "system.CUDA_VISIBLE_DEVICES", "trainer.n_gpus_per_node is 1"),
    (["sokoban", "system.n_gpus=2", "system.cuda_visible_devices=0", "training.micro_batch_size=2"], "device-count", "system.cuda_visible_devices", "lists 1"),
    (["sokoban", "system.n_gpus=2"], "micro-batch", "training.micro_batch_size", "at least the number of GPUs"),
    (["actor_rollout_ref.rollout.rollout_filter_strategy=top_k", "actor_rollout_ref.rollout.rollout_filter_value=4"], "filter-value", "actor_rollout_ref.rollout.rollout_filter_value", "top_k_abs"),
    (["actor_rollout_ref.rollout.rollout_filter_strategy=top_f", "actor_rollout_ref.rollout.rollout_filter_value=1.5"], "filter-value", "actor_rollout_ref.rollout.rollout_filter_value", "top_k_abs"),
    (["trainer.resume_mode=resume_path"], "resume-path", "trainer.resume_mode", "resume_from_path"),
    (["custom_envs.FrozenLake.env_config.sucess_rate=1"], "environment", "custom_envs.FrozenLake.env_config.sucess_rate", "success_rate"),
    (["custom_envs.FrozenLake.env_type=lake"], "environment", "custom_envs.FrozenLake", "lake"),
    (["es_manager.train.group_size=0"], "range", "es_manager.train.group_size", "at least 1"),
    (["actor_rollout_ref.rollout.response_length=4000"], "no-room", "actor_rollout_ref.rollout.response_length", "max_model_len=3600"),
    (["sokoban", "training.n_rollout=8", "es_manager.train.group_size=16"], "conflict", "es_manager.train.group_size", "keep one of them"),
    (["sokoban", "training.train_data_num=4"], "too-few-levels", "training.train_data_num", "at least 8"),
    (["sokoban", "actor_rollout_ref.actor.use_ref=False"], "reference-model", "actor_rollout_ref.actor.use_ref", "KL loss with coefficient 0.001"),
    (["agent_proxy.max_context_window=0"], "agent", "agent_proxy.max_context_window", "agent_proxy.max_context_window=0"),
    (["agent_proxy.action_sep=' '"], "agent", "agent_proxy.action_sep", "agent_proxy.action_sep=' '"),
    (["sokoban", "env.env_kwargs.dim_x=4", "env.env_kwargs.dim_y=4"], "environment", "custom_envs.SokobanV1", "4"),
    (["es_manager.format_penalty=0.1"], "range", "es_manager.format_penalty", "at most 0"),
    (["custom_envs.CoordSokoban.max_tokens=0"], "range", "custom_envs.CoordSokoban.max_tokens", "at least 1"),
    (["model_path=''"], "range", "model_path", "not be empty"),
    (["trainer.default_local_dir=''"], "range", "trainer.default_local_dir", "not be empty"),
    (["trainer.experiment_name=' '"], "range", "trainer.experiment_name", "not be empty"),
    (["lora.alpha=0", "lora.rank=8"], "adapter-scale", "lora.alpha", "at least 1 with lora.rank=8"),
    (["lora.rank=8", "lora.target_modules=[]"], "adapter-layers", "lora.target_modules", "all-linear"),
    (["lora.rank=8", "lora.target_modules=' , '"], "adapter-layers", "lora.target_modules", "all-linear"),
    (["lora.rank=8", "lora.target_modules=all_linear"], "adapter-layers", "lora.target_modules", "all-linear"),
    (["critic.model.lora_rank=8", "critic.model.target_modules=[All-Linear]"], "adapter-layers", "critic.model.target_modules", "all-linear"),
    (["model_path=pocket", "lora.rank=8", "lora.target_modules=[q_prj]"], "adapter-layers", "lora.target_modules", "q_proj"),
    (["model_path=pocket", "lora.rank=8", "lora.target_modules=mlp"], "adapter-layers", "lora.target_modules", "q_proj, k_proj"),
    (["trainer.resume_from_path=/x/global_step_foo"], "range", "trainer.resume_from_path", "global_step_<N>"),
    (["trainer.gradient_analysis_only=True"], "analysis-mode", "trainer.gradient_analysis_only", "gradient_analysis_mode=True"),
    (["es_manager.train.env_configs.tags=[]"], "range", "es_manager.train.env_configs.tags", "at least one tag"),
    (["model_path=pocket", "es_manager.train.env_configs.tags=[]"], "range", "es_manager.train.env_configs.tags", "at least one tag"),
    (["rl_or_sft=sft", "es_manager.val.env_configs.tags=[]"], "range", "es_manager.val.env_configs.tags", "at least one tag"),
    (["rl_or_sft=sft_then_rl", "es_manager.val.env_configs.tags=[]"], "range", "es_manager.val.env_configs.tags", "at least one tag"),
    (["es_manager.val.env_configs.tags=[CoordSokoban,CoordSokoban]", "es_manager.val.env_configs.n_groups=[256,256]"], "repeated-tag", "es_manager.val.env_configs.tags", "listed twice"),
    (["trainer.n_gpus_per_node=100000000"], "range", "trainer.n_gpus_per_node", "1024"),
    (["actor_rollout_ref.rollout.rollout_filter_strategy=top_k_abs", "actor_rollout_ref.rollout.rollout_filter_value=inf"], "not-finite", "actor_rollout_ref.rollout.rollout_filter_value", "finite"),
    (["algorithm.gamma=nan"], "not-finite", "algorithm.gamma", "finite"),
    (["actor_rollout_ref.actor.optim.betas=[0.9,nan]"], "type", "actor_rollout_ref.actor.optim.betas", "a list, each item a number"),
    (["trainer.test_freq=1" + "0" * 400], "not-finite", "trainer.test_freq", "a number of 401 digits"),
    (["algorithm.gamma=1" + "0" * 400], "not-finite", "algorithm.gamma", "a number of 401 digits"),
    (["trainer.test_freq=1" + "0" * 5000], "unreadable", "trainer.test_freq", "trainer.test_freq=\"'…'\""),
    (["custom_envs.CoordSokoban.env_type=os:path"], "environment", "custom_envs.CoordSokoban", "ragen.env.base.Environment"),
    (["custom_envs.CoordSokoban.env_type=.a:x"], "environment", "custom_envs.CoordSokoban", "package.module:Class"),
    (["custom_envs.CoordSokoban.env_type=ragen.env.base:Environment"], "environment", "custom_envs.CoordSokoban", "ragen.env.base:Environment"),
    (["~custom_envs.CoordSokoban.env_config.dim_x", "~custom_envs.CoordSokoban.env_config.dim_y", "custom_envs.CoordSokoban.env_config={dim_room: [a,b]}"], "environment", "custom_envs.CoordSokoban.env_config.dim_room", "a list of 2"),
    (["~custom_envs.CoordSokoban.env_config.dim_x", "~custom_envs.CoordSokoban.env_config.dim_y", "custom_envs.CoordSokoban.env_config={dim_room: [6.5,6]}"], "environment", "custom_envs.CoordSokoban.env_config.dim_room", "a list of 2"),
    (["system.CUDA_VISIBLE_DEVICES=0,0", "trainer.n_gpus_per_node=2"], "device", "system.CUDA_VISIBLE_DEVICES", "listed twice"),
    (["system.CUDA_VISIBLE_DEVICES=a,b", "trainer.n_gpus_per_node=2"], "device", "system.CUDA_VISIBLE_DEVICES", "GPU-"),
    # the command itself
    (["~"], "no-key", None, "~key"),
    (["=5"], "no-key", None, "key=value"),
    (["trainer="], "group", "trainer", "trainer.project_name=…"),
    (["training="], "group", "training", "training.micro_batch_size=…"),
    (["trainer.test_freq@x=5"], "package", "trainer.test_freq@x", "@x"),
    (["trainer.test_freq={a: 1}"], "type", "trainer.test_freq", "a whole number"),
    (["actor_rollout_ref.rollout={enforce_eagr: False}"], "unknown-key", "actor_rollout_ref.rollout.enforce_eagr", "actor_rollout_ref.rollout.enforce_eager"),
    (["zzz.y=3"], "unknown-key", "zzz.y", "Sections: actor_rollout_ref, "),
    (["es_manager.train.env_configs.tags=[Qqq]"], "unknown-tag", "es_manager.train.env_configs.tags", "Known: Bandit"),
    (["qqq"], "unknown-environment", "qqq", "sokoban, frozenlake, two_armed_bandit"),
    (["sokobann"], "unknown-environment", "sokobann", "sokoban"),
    (["sokoban", "frozenlake"], "two-environments", None, "sokoban, frozenlake"),
    (["trainer.test_freq=1,2"], "several-values", "trainer.test_freq", "trainer.test_freq=[…]"),
    (["trainer.logger=[console"], "unreadable", "trainer.logger", "trainer.logger=\"'…'\""),
    (["env.env_kwargs.dim_x=8"], "no-environment", "env.env_kwargs.dim_x", "train.sh sokoban"),
    (["model_path=${no.such.key}"], "reference", "model_path", "no.such.key"),
    (["bandit"], "unknown-environment", "bandit", "two_armed_bandit or --config-name _1_bandit"),
    (["_2_sokoban"], "unknown-environment", "_2_sokoban", "--config-name _2_sokoban"),
    (["es_manager.train.group_size"], "no-value", "es_manager.train.group_size", "es_manager.train.group_size=…"),
    (["lora"], "no-value", "lora", "lora.rank=…"),
    (["trainer.test_frq"], "unknown-key", "trainer.test_frq", "trainer.test_freq"),
    (["custom_envs.Nope.max_tokens=3"], "unknown-tag", "custom_envs.Nope", "custom_envs.Nope.env_type=…"),
    (["custom_envs.CoordSokobn.max_tokens=3"], "unknown-tag", "custom_envs.CoordSokobn", "CoordSokoban"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "code", "key", "way_out"), REFUSED)
def test_refused(overrides, code, key, way_out):
    error = refusal(*overrides)
    assert (error.code, error.key) == (code, key)
    assert way_out in str(error)


@pytest.mark.parametrize("key", ["trainer.default_local_dir", "trainer.rollout_data_dir"])
def test_a_run_is_not_written_into_a_file(tmp_path, key):
    (tmp_path / "file").touch()
    error = refusal(f"{key}={tmp_path}/file/a")
    assert (error.code, error.key) == ("not-a-directory", key)
    assert resolve([f"{key}={tmp_path}/new/a"], environ={})


@pytest.mark.parametrize(
    "targets",
    ["all-linear", "[all-linear]", "[q_proj,self_attn.v_proj]", "'q_proj, v_proj'", "'.*_proj'", r"'.*\.(q|v)_prj'"],
)
def test_layers_that_may_be_there(targets):
    overrides = ["model_path=pocket", "lora.rank=8", f"lora.target_modules={targets}"]
    assert resolve(overrides, environ={}).config.lora.rank == 8
    assert resolve(["model_path=pocket", "lora.target_modules=[]"], environ={}).config.lora.rank == 0, "without a rank"


@pytest.mark.parametrize("name", ["", "zzzzzzz", "_2_sokobn"])
def test_an_unknown_recipe_is_refused_with_the_known_ones(name):
    error = refusal(config_name=name)
    assert (error.code, error.key) == ("unknown-recipe", "--config-name")
    assert "Known: _1_bandit, _2_sokoban" in str(error)


def test_sections_are_only_sections():
    assert "model_path" not in str(refusal("zzz.y=3")) and "ppo_mini_batch_size" not in str(refusal("zzz.y=3"))


def test_ranges_stop_before_combinations():
    error = refusal("ppo_mini_batch_size=-3", "algorithm.bi_level_gae=True")
    assert [(problem.code, problem.key) for problem in error.problems] == [("range", "ppo_mini_batch_size")]


@pytest.mark.parametrize("visible", ["0,0", "a,b"])
def test_a_wrong_device_list_in_the_environment_names_the_variable(visible):
    error = refusal(environ={"CUDA_VISIBLE_DEVICES": visible})
    assert (error.code, error.key) == ("device", "variable CUDA_VISIBLE_DEVICES")


@pytest.mark.parametrize(
    "start", [["sokoban", "optimization.kl_loss_type="], ["actor_rollout_ref.actor.kl_loss_type="]]
)
def test_a_kl_loss_whose_gradient_is_zero_on_average_is_noted(start):
    *environment, key = start
    for kind in ("kl", "k1"):
        (note,) = [note for note in resolve([*environment, key + kind], environ={}).notes if "kl_loss_type" in note]
        assert f"kl_loss_type={kind}" in note and "kl+" in note
    for kind in ("kl+", "low_var_kl", "mse"):
        assert not any("kl_loss_type" in note for note in resolve([*environment, key + kind], environ={}).notes)
    config = resolve(environment, environ={}).config
    assert config.actor_rollout_ref.actor.kl_loss_type == "low_var_kl"


def test_a_filter_that_keeps_more_than_there_is_is_noted():
    where = "actor_rollout_ref.rollout.rollout_filter"
    (note,) = resolve([f"{where}_strategy=top_k_abs", f"{where}_value=9"], environ={}).notes
    assert "top_k_abs keeps 9 groups" in note


def test_environment_and_recipe_are_two_starting_points():
    assert refusal("sokoban", config_name="_2_sokoban").code == "two-starts"


def test_equal_values_under_two_names_do_not_conflict():
    overrides = ["sokoban", "training.n_rollout=16", "es_manager.train.group_size=16"]
    assert resolve(overrides, environ={}).config.es_manager.train.group_size == 16


def test_too_few_visible_devices():
    error = refusal("trainer.n_gpus_per_node=2", environ={"CUDA_VISIBLE_DEVICES": "0"})
    assert (error.code, error.key) == ("device-count", "trainer.n_gpus_per_node")


def test_every_misspelt_key_is_named():
    error = refusal("trainer.test_frq=5", "lora.rank=x", "lora.rnk=4")
    found = [(problem.code, problem.key) for problem in error.problems]
    assert found == [("unknown-key", "trainer.test_frq"), ("type", "lora.rank"), ("unknown-key", "lora.rnk")]
    assert str(error).startswith("3 problems\n") and all(str(problem) in str(error) for problem in error.problems)


def test_several_problems_come_in_one_error():
    error = refusal("ppo_mini_batch_size=256", "algorithm.bi_level_gae=True")
    assert {problem.code for problem in error.problems} == {"mini-batch", "turn-scores"}


def test_keys_that_follow_one_another_are_one_problem():
    assert len(refusal("lora.rank=-1").problems) == 1


def test_every_range_of_the_schema_is_checked():
    ranged = [key for key, (spec, _) in FIELDS.items() if "range" in spec.metadata]
    assert len(ranged) > 90
    config = resolve([], environ={}).config
    for key in ranged:
        holds, hint = FIELDS[key][0].metadata["range"].holds, FIELDS[key][1]
        bad = next(value for value in BAD if _fits(value, hint, key) and not holds(value))
        *path, name = key.split(".")
        group = reduce(getattr, path, config)
        good = getattr(group, name)
        setattr(group, name, bad)
        with pytest.raises(ConfigError) as caught:
            check_ranges(config)
        assert (caught.value.code, caught.value.key) == ("range", key)
        setattr(group, name, good)


BAD = (-1, 0, 1.5, 2.0, 0.0, "", "bad", [], "vllm", "copy", "base", "global_step_x")


def _fits(value, hint, key):
    try:
        return convert(value, hint, key) == value
    except ConfigError:
        return False
