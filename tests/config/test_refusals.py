"""Wrong input: one clear message that names the value and what would be right."""

import pytest

from ragen.config.compose import resolve
from ragen.config.tree import ConfigError

REFUSED = [
    # unknown keys, with the nearest one in the dialect that was typed
    (["trainer.test_frq=5"], "unknown key trainer.test_frq; did you mean trainer.test_freq?"),
    (["+trainer.test_frq=5"], "did you mean trainer.test_freq?"),
    (["++trainer.test_frq=5"], "did you mean trainer.test_freq?"),
    (["sokoban", "training.n_rollouts=8"], "unknown key training.n_rollouts; did you mean training.n_rollout?"),
    (["sokoban", "optimisation.kl_coef=1"], "did you mean optimization.kl_coef?"),
    (["actor_rollout_ref.rollout_filter_strategy=top_p"], "did you mean actor_rollout_ref.rollout.rollout_filter_strategy?"),
    (["custom_envs.CoordSokoban.max_actions=3"], "did you mean custom_envs.CoordSokoban.max_actions_per_traj?"),
    (["nonsense=1"], "unknown key nonsense"),
    (["lora_rank=4"], "unknown key lora_rank; did you mean lora.rank? (in fine-tuning: sft.training.lora_rank)"),
    (["sokoban", "model.lora_rank=4"], "did you mean lora.rank?"),
    (["sokoban", "training.lora_alpha=4"], "did you mean lora.alpha?"),
    (["sft.lora_rank=4"], "did you mean sft.training.lora_rank?"),
    (["lora.dropout=0.1"], "unknown key lora.dropout; there are lora.rank, lora.alpha, lora.target_modules"),
    (["~trainer.test_frq"], "unknown key trainer.test_frq"),
    # types
    (["trainer.test_freq=often"], "trainer.test_freq=often: takes a whole number"),
    (["trainer.test_freq=1.5"], "takes a whole number"),
    (["trainer.test_freq=null"], "trainer.test_freq=null: takes a whole number"),
    (["trainer.test_freq="], "takes a whole number"),
    (["actor_rollout_ref.actor.use_kl_loss=maybe"], "takes true or false"),
    (["actor_rollout_ref.actor.optim.lr=fast"], "takes a number"),
    (["es_manager.train.env_configs.n_groups=[a]"], "a list, each item a whole number"),
    (["trainer=5"], "a group of keys"),
    (["sokoban", "training.micro_batch_size=many"], "training.micro_batch_size"),
    # choices
    (["algorithm.adv_estimator=ppo"], "algorithm.adv_estimator=ppo: must be one of gae, grpo, brpo"),
    (["sokoban", "optimization.adv_estimator=ppo"], "must be one of gae, grpo, brpo"),
    (["actor_rollout_ref.actor.kl_loss_type=k9"], "must be one of kl, k1"),
    (["agent_proxy.context_window_mode=half"], "must be one of full, limited_multi_turn, single_turn"),
    (["trainer.logger=[console,mlflow]"], "must be one of console, wandb, tensorboard"),
    (["actor_rollout_ref.rollout.name=vllm"], "native engine only"),
    (["agent_proxy.batch_adjust_mode=copy"], "distorts group statistics"),
    (["custom_envs.CoordSokoban.env_config.observation_format=picture"], "grid"),
    # combinations
    (["es_manager.train.env_configs.n_groups=[4]"], "sums to 4, but es_manager.train.env_groups is 8"),
    (["es_manager.train.env_groups=8", "es_manager.train.env_configs.n_groups=[4,2]"], "2 n_groups"),
    (["es_manager.val.env_configs.tags=[Sokobna]"], "unknown tag Sokobna"),
    (["ppo_mini_batch_size=256"], "larger than the batch"),
    (["sokoban", "training.n_rollout=4"], "training.ppo_batch_size"),
    (["algorithm.bi_level_gae=True"], "agent_proxy.use_turn_scores=True"),
    (["algorithm.bi_level_gae=True", "agent_proxy.use_turn_scores=True", "algorithm.adv_estimator=grpo"], "adv_estimator=gae"),
    (["algorithm.soft_advantage_reweight=True"], "algorithm.soft_advantage_reweight=True needs algorithm.adv_estimator=grpo, not gae"),
    (["grpo_advantage_length_weight=True", "algorithm.adv_estimator=brpo"], "grpo_advantage_length_weight=True needs algorithm.adv_estimator=grpo, not brpo"),
    (["agent_proxy.use_turn_scores=True", "agent_proxy.reward_normalization.method=mean"], "method=mean compares whole episodes"),
    (["algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef=0.1", "algorithm.kl_penalty=full"], "actor_rollout_ref.actor.kl_loss_type=full"),
    (["algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef=0.1", "algorithm.kl_penalty=full+"], "algorithm.kl_penalty=full+"),
    (["actor_rollout_ref.actor.checkpoint.save_contents=[optimizer]"], "must hold model"),
    (["critic.checkpoint.save_contents=[]"], "critic.checkpoint.save_contents=[]: must hold model"),
    (["actor_rollout_ref.actor.clip_ratio_low=1.5"], "actor_rollout_ref.actor.clip_ratio_low=1.5: must lie between 0 and 1"),
    (["actor_rollout_ref.actor.clip_ratio_c=1"], "actor_rollout_ref.actor.clip_ratio_c=1.0: must be above 1"),
    (["actor_rollout_ref.rollout.rollout_filter_strategy=top_p", "actor_rollout_ref.rollout.rollout_filter_value=0"], "top_p takes a share above 0"),
    (["actor_rollout_ref.rollout.rollout_filter_strategy=min_p", "actor_rollout_ref.rollout.rollout_filter_value=1.5"], "min_p takes a share of the best score"),
    (["actor_rollout_ref.rollout.rollout_filter_strategy=top_k_abs", "actor_rollout_ref.rollout.rollout_filter_value=1.5"], "a whole number of groups"),
    (["system.CUDA_VISIBLE_DEVICES='0,1'"], "lists 2, but trainer.n_gpus_per_node"),
    (["sokoban", "system.n_gpus=2", "system.cuda_visible_devices=0", "training.micro_batch_size=2"], "lists 1"),
    (["sokoban", "system.n_gpus=2"], "must be at least the number of GPUs"),
    (["actor_rollout_ref.rollout.rollout_filter_strategy=top_k", "actor_rollout_ref.rollout.rollout_filter_value=4"], "top_k_abs"),
    (["actor_rollout_ref.rollout.rollout_filter_strategy=top_f", "actor_rollout_ref.rollout.rollout_filter_value=1.5"], "top_k_abs"),
    (["trainer.resume_mode=resume_path"], "resume_from_path"),
    (["custom_envs.FrozenLake.env_config.sucess_rate=1"], "did you mean success_rate?"),
    (["custom_envs.FrozenLake.env_type=lake"], "unknown environment 'lake'"),
    (["es_manager.train.group_size=0"], "must be at least 1"),
    (["actor_rollout_ref.rollout.response_length=4000"], "leaves no room for a prompt"),
    (["sokoban", "training.n_rollout=8", "es_manager.train.group_size=16"], "training.n_rollout and es_manager.train.group_size"),
    (["sokoban", "training.train_data_num=4"], "fewer than the 8 groups"),
    (["sokoban", "actor_rollout_ref.actor.use_ref=False"], "KL loss with coefficient 0.001"),
    (["agent_proxy.max_context_window=0"], "agent_proxy.max_context_window=0"),
    (["agent_proxy.action_sep=' '"], "agent_proxy.action_sep=' '"),
    (["sokoban", "env.env_kwargs.dim_x=4", "env.env_kwargs.dim_y=4"], "no Sokoban level"),
    (["es_manager.format_penalty=0.1"], "must not be above 0"),
    (["custom_envs.CoordSokoban.max_tokens=0"], "custom_envs.CoordSokoban.max_tokens=0: must be at least 1"),
    (["model_path=''"], "model_path=: must not be empty"),
    (["trainer.default_local_dir=''"], "must not be empty"),
    (["trainer.experiment_name=' '"], "must not be empty"),
    (["lora.alpha=0", "lora.rank=8"], "lora.alpha=0: must be at least 1 with lora.rank=8"),
    (["lora.rank=8", "lora.target_modules=[]"], "lora.target_modules=[]: names no layer"),
    (["lora.rank=8", "lora.target_modules=' , '"], "names no layer"),
    (["lora.rank=8", "lora.target_modules=all_linear"], "lora.target_modules=all_linear: did you mean all-linear?"),
    (["critic.model.lora_rank=8", "critic.model.target_modules=[All-Linear]"], "critic.model.target_modules=['All-Linear']: did you mean all-linear?"),
    (["model_path=pocket", "lora.rank=8", "lora.target_modules=[q_prj]"], "lora.target_modules=['q_prj']: no linear layer is called q_prj; did you mean q_proj?"),
    (["model_path=pocket", "lora.rank=8", "lora.target_modules=mlp"], "no linear layer is called mlp. Known: q_proj"),
    (["trainer.resume_from_path=/x/global_step_foo"], "global_step_<N>"),
    (["trainer.gradient_analysis_only=True"], "gradient_analysis_mode=True"),
    (["es_manager.train.env_configs.tags=[]"], "tags is empty"),
    (["es_manager.val.env_configs.tags=[CoordSokoban,CoordSokoban]", "es_manager.val.env_configs.n_groups=[256,256]"], "listed twice"),
    (["trainer.n_gpus_per_node=100000000"], "is more than 1024"),
    (["actor_rollout_ref.rollout.rollout_filter_strategy=top_k_abs", "actor_rollout_ref.rollout.rollout_filter_value=inf"], "finite"),
    (["algorithm.gamma=nan"], "finite"),
    (["actor_rollout_ref.actor.optim.betas=[0.9,nan]"], "a list, each item a number"),
    (["trainer.test_freq=1" + "0" * 400], "a number of 401 digits"),
    (["algorithm.gamma=1" + "0" * 400], "a number of 401 digits"),
    (["trainer.test_freq=1" + "0" * 5000], "cannot read"),
    (["custom_envs.CoordSokoban.env_type=os:path"], "no subclass of ragen.env.base.Environment"),
    (["custom_envs.CoordSokoban.env_type=.a:x"], "package.module:Class"),
    (["custom_envs.CoordSokoban.env_type=ragen.env.base:Environment"], "is not complete"),
    (["~custom_envs.CoordSokoban.env_config.dim_x", "~custom_envs.CoordSokoban.env_config.dim_y", "custom_envs.CoordSokoban.env_config={dim_room: [a,b]}"], "dim_room=['a', 'b']: takes a list of 2"),
    (["~custom_envs.CoordSokoban.env_config.dim_x", "~custom_envs.CoordSokoban.env_config.dim_y", "custom_envs.CoordSokoban.env_config={dim_room: [6.5,6]}"], "takes a list of 2"),
    (["system.CUDA_VISIBLE_DEVICES=0,0", "trainer.n_gpus_per_node=2"], "listed twice"),
    (["system.CUDA_VISIBLE_DEVICES=a,b", "trainer.n_gpus_per_node=2"], "'a' is no device"),
    # the command itself
    (["~"], "names no key"),
    (["=5"], "names no key"),
    (["trainer="], "trainer=null: this is a group of keys"),
    (["training="], "training=null: this is a group of keys"),
    (["trainer.test_freq@x=5"], "@x"),
    (["trainer.test_freq={a: 1}"], "trainer.test_freq={'a': 1}: takes a whole number"),
    (["actor_rollout_ref.rollout={enforce_eagr: False}"], "did you mean actor_rollout_ref.rollout.enforce_eager?"),
    (["zzz.y=3"], "unknown key zzz.y. Sections: actor_rollout_ref, "),
    (["es_manager.train.env_configs.tags=[Qqq]"], "unknown tag Qqq. Known: Bandit"),
    (["qqq"], "key=value. Environments: sokoban"),
    (["sokobann"], "did you mean sokoban?"),
    (["sokoban", "frozenlake"], "more than one environment"),
    (["trainer.test_freq=1,2"], "several values"),
    (["trainer.logger=[console"], "cannot read"),
    (["env.env_kwargs.dim_x=8"], "needs an environment"),
    (["model_path=${no.such.key}"], "model_path: Interpolation key 'no.such.key' not found"),
    (["bandit"], "did you mean two_armed_bandit or --config-name _1_bandit?"),
    (["_2_sokoban"], "--config-name _2_sokoban"),
    (["es_manager.train.group_size"], "give a value: es_manager.train.group_size=…"),
    (["lora"], "lora is a group of keys; give one of them a value: lora.rank=…"),
    (["trainer.test_frq"], "there is no such key; did you mean trainer.test_freq?"),
    (["custom_envs.Nope.max_tokens=3"], "there is no tag Nope. A new one needs custom_envs.Nope.env_type=…"),
    (["custom_envs.CoordSokobn.max_tokens=3"], "there is no tag CoordSokobn; did you mean CoordSokoban?"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "message"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_refused(words, message):
    with pytest.raises(ConfigError) as caught:
        resolve(words, environ={})
    assert message in str(caught.value)


@pytest.mark.parametrize("key", ["trainer.default_local_dir", "trainer.rollout_data_dir"])
def test_a_run_is_not_written_into_a_file(tmp_path, key):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=f"{key}={tmp_path}/file/a: {tmp_path}/file is no folder"):
        resolve([f"{key}={tmp_path}/file/a"], environ={})
    assert resolve([f"{key}={tmp_path}/new/a"], environ={})


@pytest.mark.parametrize(
    "targets",
    ["all-linear", "[all-linear]", "[q_proj,self_attn.v_proj]", "'q_proj, v_proj'", "'.*_proj'", r"'.*\.(q|v)_prj'"],
)
def test_layers_that_may_be_there(targets):
    words = ["model_path=pocket", "lora.rank=8", f"lora.target_modules={targets}"]
    assert resolve(words, environ={}).config.lora.rank == 8
    assert resolve(["model_path=pocket", "lora.target_modules=[]"], environ={}).config.lora.rank == 0, "without a rank"


def test_unknown_recipe_lists_the_known():
    with pytest.raises(ConfigError, match="_2_sokoban"):
        resolve([], config_name="_2_sokobn", environ={})


@pytest.mark.parametrize("name", ["", "zzzzzzz"])
def test_a_recipe_without_a_name_is_refused(name):
    with pytest.raises(ConfigError, match=r"no such recipe\. Known: _1_bandit"):
        resolve([], config_name=name, environ={})


def test_sections_are_only_sections():
    with pytest.raises(ConfigError) as caught:
        resolve(["zzz.y=3"], environ={})
    assert "model_path" not in str(caught.value) and "ppo_mini_batch_size" not in str(caught.value)


def test_ranges_stop_before_combinations():
    with pytest.raises(ConfigError) as caught:
        resolve(["ppo_mini_batch_size=-3", "algorithm.bi_level_gae=True"], environ={})
    assert str(caught.value) == "ppo_mini_batch_size=-3: must be at least 1"


@pytest.mark.parametrize("visible", ["0,0", "a,b"])
def test_a_wrong_device_list_in_the_environment_names_the_variable(visible):
    with pytest.raises(ConfigError, match=r"^variable CUDA_VISIBLE_DEVICES="):
        resolve([], environ={"CUDA_VISIBLE_DEVICES": visible})


def test_a_filter_that_keeps_more_than_there_is_is_noted():
    where = "actor_rollout_ref.rollout.rollout_filter"
    notes = resolve([f"{where}_strategy=top_k_abs", f"{where}_value=9"], environ={}).notes
    assert notes == ["top_k_abs keeps 9 groups, and there are only 8: nothing is filtered"]


def test_environment_and_recipe_are_two_starting_points():
    with pytest.raises(ConfigError, match="name one"):
        resolve(["sokoban"], config_name="_2_sokoban", environ={})


def test_equal_values_under_two_names_are_no_conflict():
    words = ["sokoban", "training.n_rollout=16", "es_manager.train.group_size=16"]
    assert resolve(words, environ={}).config.es_manager.train.group_size == 16


def test_too_few_visible_devices():
    with pytest.raises(ConfigError, match="unset the variable"):
        resolve(["trainer.n_gpus_per_node=2"], environ={"CUDA_VISIBLE_DEVICES": "0"})


def test_every_misspelt_key_is_named():
    with pytest.raises(ConfigError) as caught:
        resolve(["trainer.test_frq=5", "lora.rank=x", "lora.rnk=4"], environ={})
    for text in ("3 problems", "did you mean trainer.test_freq?", "lora.rank=x: takes", "did you mean lora.rank?"):
        assert text in str(caught.value)


def test_several_problems_come_in_one_message():
    with pytest.raises(ConfigError) as caught:
        resolve(["ppo_mini_batch_size=256", "algorithm.bi_level_gae=True"], environ={})
    assert "2 problems" in str(caught.value)
