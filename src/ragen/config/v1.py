"""The older dialect: `bash train.sh ENV model.* training.* optimization.* …`, mapped onto the one tree.

An environment name starts from the defaults of `KEYS` and from that environment's v1 board and rules. Without one, only
the keys that were typed are translated, so both dialects can be mixed in one command. Some values follow from several
keys (`derived`): they are worked out once the rest of the tree is known.

Where this departs from the first version: KL is added to the loss, never subtracted; only sampled tokens are trained,
so `state_masking` is always on; the device list follows `system.n_gpus` when none is given.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ragen.config.schema import Sft
from ragen.config.tree import ConfigError, leaves

TRAIN_LEVELS = 10_000  # `train_data_num` null
VAL_LEVELS = 512  # `val_data_num` null


@dataclass(frozen=True)
class Key:
    """One key of the dialect: its default, the tree keys that take its value, or why it has no effect."""

    default: Any
    targets: tuple[str, ...] = ()
    value: Callable[[Any], Any] = lambda value: value
    null_is_unset: bool = False
    no_effect: str = ""

    def tree_values(self, typed: Any) -> dict[str, Any]:
        if typed is None and self.null_is_unset:
            return {}
        return {target: self.value(typed) for target in self.targets}


@dataclass(frozen=True)
class Environment:
    """What an environment name stands for. The penalty is what a turn without a valid action costs in all."""

    tag: str
    format_penalty: float


ENVIRONMENTS = {
    "sokoban": Environment("SokobanV1", -1.1),  # an invalid answer costs 1 besides the 0.1 of a step
    "frozenlake": Environment("FrozenLakeV1", -1.0),
    "two_armed_bandit": Environment("TwoArmedBandit", 0.0),
}

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
NEVER_WIRED = "the first version declared this key and never used it"
IN_MAX_MODEL_LEN = "nothing is cut to this length; it enters the limit of the whole conversation"
IN_RUN_FOLDER = "episodes are kept in the run folder"

KEYS = {
    "system.cuda_visible_devices": Key(None, ("system.CUDA_VISIBLE_DEVICES",), null_is_unset=True),
    "system.n_gpus": Key(1, ("trainer.n_gpus_per_node",)),
    "system.multi_processing": Key("ray", no_effect="workers are ordinary processes"),
    "system.vllm_attention_backend": Key("XFORMERS", no_effect="belongs to the vLLM engine"),
    "model.base_model": Key("Qwen/Qwen2.5-0.5B-Instruct", ("model_path",)),
    "model.experiment_name": Key("ragen-main-exp", ("trainer.experiment_name",)),
    "model.gradient_checkpointing": Key(
        True,
        ("actor_rollout_ref.model.enable_gradient_checkpointing", "critic.model.enable_gradient_checkpointing"),
    ),
    "training.micro_batch_size": Key(1),  # derived: a total, divided by the number of GPUs
    "training.train_batch_size": Key(8, ("es_manager.train.env_groups",)),
    "training.n_rollout": Key(16, ("es_manager.train.group_size",)),
    "training.ppo_batch_size": Key(128, ("ppo_mini_batch_size",)),
    "training.val_batch_size": Key(10, ("data.val_batch_size",)),
    "training.train_data_num": Key(None, ("data.train_data_num",), lambda num: num or TRAIN_LEVELS),
    "training.val_data_num": Key(50, ("es_manager.val.env_groups",), lambda num: num or VAL_LEVELS),
    "training.max_turns": Key(5, ("agent_proxy.max_turn",)),
    "training.max_start_length": Key(400, no_effect=IN_MAX_MODEL_LEN),
    "training.max_obs_length": Key(200, no_effect=IN_MAX_MODEL_LEN),
    "training.max_response_length": Key(400, (f"{ROLLOUT}.response_length",)),
    "training.rollout_tp_size": Key(1, (f"{ROLLOUT}.tensor_model_parallel_size",)),
    "training.temperature": Key(0.7, (f"{ROLLOUT}.temperature",)),
    "training.total_epochs": Key(5, ("trainer.total_epochs",)),
    "training.total_training_steps": Key(None, ("trainer.total_training_steps",), null_is_unset=True),
    "training.use_kl_loss": Key(True, (f"{ACTOR}.use_kl_loss",)),
    "training.no_think_rl": Key(False, ("agent_proxy.enable_think",), lambda no_think: not no_think),
    "training.state_masking": Key(False, no_effect="always on: only sampled tokens are trained"),
    "training.use_sft": Key(False, no_effect=NEVER_WIRED),
    "training.binary_reward": Key(False, no_effect=NEVER_WIRED),
    "training.mask_state": Key(False, no_effect=NEVER_WIRED),
    "training.length_penalty": Key(False, no_effect=NEVER_WIRED),
    "training.ref_update_steps": Key(None, no_effect="the reference stays the initial model"),
    "optimization.actor_lr": Key(1e-6, (f"{ACTOR}.optim.lr",)),
    "optimization.critic_lr": Key(1e-5, ("critic.optim.lr",)),
    "optimization.kl_coef": Key(0.001, (f"{ACTOR}.kl_loss_coef",)),
    "optimization.kl_loss_type": Key("low_var_kl", (f"{ACTOR}.kl_loss_type",)),
    "optimization.adv_estimator": Key("grpo", ("algorithm.adv_estimator",)),
    "optimization.gpu_memory_utilization": Key(0.4, (f"{ROLLOUT}.gpu_memory_utilization",)),
    "logging.mode": Key(["wandb"], ("trainer.logger",)),
    "logging.log_images": Key(True, no_effect=IN_RUN_FOLDER),
    "logging.log_image_dir": Key("log/trajectory", no_effect=IN_RUN_FOLDER),
    "logging.log_image_step_size": Key(4, no_effect=IN_RUN_FOLDER),
    "logging.log_n_image_per_batch": Key(32, no_effect=IN_RUN_FOLDER),
    "trainer.val_before_train": Key(False, ("trainer.val_before_train",)),
    "trainer.val_only": Key(False, ("trainer.val_only",)),
    "trainer.default_hdfs_dir": Key(None, ("trainer.default_hdfs_dir",)),
    "trainer.nnodes": Key(1, ("trainer.nnodes",)),
    "trainer.save_freq": Key(100, ("trainer.save_freq",)),
    "trainer.test_freq": Key(100, ("trainer.test_freq",)),
    "trainer.project_name": Key("RAGEN", ("trainer.project_name",)),
    "rl_or_sft": Key("rl", ("rl_or_sft",)),
    "env.data_dir": Key(None, no_effect="levels are generated from their seeds"),
}
KEYS |= {f"sft.{name}": Key(default, (f"sft.{name}",)) for name, default in leaves(Sft()).items()}

# Values that the first version's trainer had besides its own config.
INHERITED = {
    f"{ACTOR}.clip_ratio_low": 0.2,
    f"{ACTOR}.clip_ratio_high": 0.2,
    "agent_proxy.max_actions_per_turn": 1,
}

OWN_SECTIONS = ("model", "training", "optimization", "logging", "env")  # sections that only this dialect has
ENV_KWARGS = "env.env_kwargs."


def is_key(key: str) -> bool:
    return key in KEYS or key == "env.name" or key.startswith(ENV_KWARGS)


def defaults(environment: str) -> dict[str, Any]:
    """The tree values that `train.sh ENV` starts from."""
    start = ENVIRONMENTS[environment]
    values = dict(INHERITED)
    for spec in KEYS.values():
        values |= spec.tree_values(spec.default)
    values["es_manager.train.env_configs.tags"] = [start.tag]
    values["es_manager.val.env_configs.tags"] = [start.tag]
    values["es_manager.format_penalty"] = start.format_penalty
    values["sft.env_type"] = environment
    return values


def translate(key: str, value: Any, environment: str | None) -> dict[str, Any]:
    """The tree values that one typed key stands for; empty for a derived key or one without effect."""
    if key == "env.name":
        if value != environment:
            raise ConfigError(f"env.name={value}: name the environment as the first word: train.sh {value} …")
        return {}
    if key.startswith(ENV_KWARGS):
        if environment is None:
            raise ConfigError(f"{key}={value}: needs an environment as the first word, for example train.sh sokoban")
        return {f"custom_envs.{ENVIRONMENTS[environment].tag}.env_config.{key.removeprefix(ENV_KWARGS)}": value}
    return KEYS[key].tree_values(value)


def derived(
    environment: str | None, typed: Mapping[str, Any], tree: Callable[[str], Any]
) -> dict[str, tuple[Any, str]]:
    """Values that follow from several keys, as tree key -> (value, why). `tree` reads the rest of the tree.

    With an environment name the dialect's defaults take part; without one only what was typed does.
    """

    def asked(*keys: str) -> bool:
        return environment is not None or any(key in typed for key in keys)

    def v1(key: str) -> Any:
        return typed.get(key, KEYS[key].default)

    values: dict[str, tuple[Any, str]] = {}
    if asked("training.micro_batch_size"):
        micro, num_gpus = v1("training.micro_batch_size"), tree("trainer.n_gpus_per_node")
        if not isinstance(micro, int) or isinstance(micro, bool):
            raise ConfigError(f"training.micro_batch_size={micro}: takes a whole number")
        if micro < num_gpus:
            raise ConfigError(f"training.micro_batch_size={micro}: must be at least the number of GPUs, {num_gpus}")
        values["micro_batch_size_per_gpu"] = (micro // num_gpus, f"training.micro_batch_size / {num_gpus} GPUs")
    if asked("training.max_start_length", "training.max_obs_length"):
        turns, reply = tree("agent_proxy.max_turn"), tree(f"{ROLLOUT}.response_length")
        start, observation = v1("training.max_start_length"), v1("training.max_obs_length")
        prompt = start + reply * (turns - 1) + observation * turns
        values["data.max_prompt_length"] = (prompt, "start + response x (turns - 1) + obs x turns")
        values[f"{ROLLOUT}.max_model_len"] = (prompt + reply, "prompt + response")
    if asked("training.total_epochs"):
        levels, groups = tree("data.train_data_num") or TRAIN_LEVELS, tree("es_manager.train.env_groups")
        epochs = v1("training.total_epochs")
        if levels < groups:
            raise ConfigError(f"{levels} training levels are fewer than the {groups} groups of one step")
        values["trainer.total_training_steps"] = (
            levels // groups * epochs,
            f"{levels} levels / {groups} groups x {epochs} epochs",
        )
    if typed.get("training.use_kl_loss") is False:
        # The first version moves KL from the loss into the reward; a coefficient of 0 still means none at all.
        coefficient = tree(f"{ACTOR}.kl_loss_coef")
        values["algorithm.use_kl_in_reward"] = (coefficient > 0, "training.use_kl_loss is false")
        values["algorithm.kl_ctrl.kl_coef"] = (coefficient, "optimization.kl_coef")
    if tree("rl_or_sft") == "sft" and asked("training.n_rollout"):
        values["es_manager.val.group_size"] = (v1("training.n_rollout"), "training.n_rollout, in validation after SFT")
    return values
