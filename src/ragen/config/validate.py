"""What cannot work, said before anything is loaded. Types, names and choices are already right here.

Each check is a generator of problems; a problem names the keys, their values and a way out. `validate` raises all of
them as one `ConfigError`, and returns notes on what is allowed and probably not meant.
"""

from collections.abc import Iterator

from ragen.config import derive
from ragen.config.schema import Config
from ragen.config.tree import ConfigError, did_you_mean
from ragen.env.registry import make

Problems = Iterator[str]


def validate(config: Config) -> list[str]:
    checks = [numbers, environments, groups, devices, engine, rollout_filter, estimator, resume]
    if config.rl_or_sft == "rl":
        checks.append(batches)
    problems = [problem for check in checks for problem in check(config)]
    if problems:
        raise ConfigError(
            problems[0] if len(problems) == 1 else "\n  - ".join([f"{len(problems)} problems", *problems])
        )
    return list(notes(config))


# --- one value at a time ------------------------------------------------------------------------------------------

AT_LEAST_ONE = (
    "ppo_mini_batch_size",
    "micro_batch_size_per_gpu",
    "log_prob_micro_batch_size_per_gpu",
    "actor_rollout_ref.actor.ppo_mini_batch_size",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
    "actor_rollout_ref.actor.ppo_epochs",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
    "actor_rollout_ref.rollout.max_model_len",
    "actor_rollout_ref.rollout.response_length",
    "actor_rollout_ref.rollout.gradient_analysis_num_buckets",
    "critic.ppo_mini_batch_size",
    "critic.ppo_micro_batch_size_per_gpu",
    "agent_proxy.max_turn",
    "agent_proxy.max_actions_per_turn",
    "es_manager.train.env_groups",
    "es_manager.train.group_size",
    "es_manager.val.env_groups",
    "es_manager.val.group_size",
    "collapse_detection.compute_freq",
    "trainer.total_training_steps",
    "trainer.n_gpus_per_node",
    "trainer.nnodes",
    "trainer.validation_steps",
    "trainer.gradient_analysis_every",
    "trainer.gradient_analysis_env_groups",
    "trainer.gradient_analysis_group_size",
    "data.train_batch_size",
    "data.val_batch_size",
    "data.train_data_num",
    "sft.data_generation.train_size",
    "sft.data_generation.test_size",
    "sft.training.epochs",
    "sft.training.micro_batch_size",
    "sft.training.train_batch_size",
)
NOT_NEGATIVE = (
    "lora.rank",
    "actor_rollout_ref.actor.entropy_coeff",
    "actor_rollout_ref.actor.kl_loss_coef",
    "actor_rollout_ref.actor.clip_ratio_low",
    "actor_rollout_ref.actor.clip_ratio_high",
    "actor_rollout_ref.actor.optim.lr",
    "actor_rollout_ref.actor.optim.weight_decay",
    "actor_rollout_ref.rollout.val_kwargs.temperature",
    "actor_rollout_ref.rollout.rollout_filter_selection_eps",
    "critic.optim.lr",
    "critic.cliprange_value",
    "algorithm.kl_ctrl.kl_coef",
    "seed.train",
    "seed.val",
    "trainer.critic_warmup",
    "sft.training.learning_rate",
    "sft.training.lora_rank",
)
POSITIVE = (
    "actor_rollout_ref.actor.grad_clip",
    "actor_rollout_ref.actor.clip_ratio_c",
    "actor_rollout_ref.rollout.temperature",
    "critic.grad_clip",
)
FRACTIONS = (
    "algorithm.gamma",
    "algorithm.lam",
    "algorithm.high_level_gamma",
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio",
    "actor_rollout_ref.actor.optim.min_lr_ratio",
    "critic.optim.lr_warmup_steps_ratio",
    "critic.optim.min_lr_ratio",
    "collapse_detection.ema_decay",
)
SHARES = ("actor_rollout_ref.rollout.top_p", "actor_rollout_ref.rollout.val_kwargs.top_p")

RANGES = (
    (AT_LEAST_ONE, lambda value: value >= 1, "must be at least 1"),
    (NOT_NEGATIVE, lambda value: value >= 0, "must not be negative"),
    (POSITIVE, lambda value: value > 0, "must be above 0"),
    (FRACTIONS, lambda value: 0 <= value <= 1, "must lie between 0 and 1"),
    (SHARES, lambda value: 0 < value <= 1, "must be above 0 and at most 1"),
)


def numbers(config: Config) -> Problems:
    for keys, holds, rule in RANGES:
        for key in keys:
            value = config
            for part in key.split("."):
                value = getattr(value, part)
            if value is not None and not holds(value):
                yield f"{key}={value}: {rule}"
    samples = config.collapse_detection.num_samples
    if samples != "all" and (isinstance(samples, str) or samples < 1):
        yield f"collapse_detection.num_samples={samples}: a number of at least 1, or all"
    for name, optimizer in (
        ("actor_rollout_ref.actor", config.actor_rollout_ref.actor.optim),
        ("critic", config.critic.optim),
    ):
        if len(optimizer.betas) != 2 or not all(0 <= beta < 1 for beta in optimizer.betas):
            yield f"{name}.optim.betas={optimizer.betas}: takes two numbers from 0 up to (not including) 1"
    rollout = config.actor_rollout_ref.rollout
    if rollout.response_length >= rollout.max_model_len:
        yield (
            f"actor_rollout_ref.rollout.response_length={rollout.response_length} leaves no room for a prompt in "
            f"actor_rollout_ref.rollout.max_model_len={rollout.max_model_len}"
        )


# --- combinations -------------------------------------------------------------------------------------------------


def environments(config: Config) -> Problems:
    """Every tag in the catalogue must describe an environment that can be made."""
    for name, tag in config.custom_envs.items():
        try:
            make(tag)
        except ValueError as error:
            yield f"custom_envs.{name}: {error}"
        if tag.max_actions_per_traj < 1:
            yield f"custom_envs.{name}.max_actions_per_traj={tag.max_actions_per_traj}: must be at least 1"


def groups(config: Config) -> Problems:
    for split, envs in (("train", config.es_manager.train), ("val", config.es_manager.val)):
        where, tags, sizes = f"es_manager.{split}", envs.env_configs.tags, envs.env_configs.n_groups
        for tag in tags:
            if tag not in config.custom_envs:
                known = ", ".join(config.custom_envs)
                near = did_you_mean(tag, config.custom_envs)
                yield f"{where}.env_configs.tags: unknown tag {tag}{near} Known: {known}"
        if len(tags) != len(sizes):
            yield f"{where}.env_configs: {len(tags)} tags {tags} but {len(sizes)} n_groups {sizes}: one for each tag"
        elif min(sizes) < 1:
            yield f"{where}.env_configs.n_groups={sizes}: each must be at least 1"
        elif sum(sizes) != envs.env_groups:
            yield (
                f"{where}.env_configs.n_groups={sizes} sums to {sum(sizes)}, but {where}.env_groups is "
                f"{envs.env_groups}: set {where}.env_groups={sum(sizes)} or change n_groups"
            )


def batches(config: Config) -> Problems:
    samples, episodes = derive.samples_per_step(config), derive.episodes_per_step(config)
    train = config.es_manager.train
    if config.data.train_batch_size not in (None, episodes):
        yield (
            f"data.train_batch_size={config.data.train_batch_size}: it is env_groups x group_size = "
            f"{train.env_groups} x {train.group_size} = {episodes}; leave it null"
        )
    sizes = {"actor_rollout_ref.actor.ppo_mini_batch_size": config.actor_rollout_ref.actor.ppo_mini_batch_size}
    if derive.critic_model(config).needed:
        sizes["critic.ppo_mini_batch_size"] = config.critic.ppo_mini_batch_size
    if len(set(sizes.values())) == 1 and config.ppo_mini_batch_size in sizes.values():
        sizes = {"ppo_mini_batch_size (training.ppo_batch_size)": config.ppo_mini_batch_size}
    for key, size in sizes.items():
        if size > samples:
            yield (
                f"{key}={size} is larger than the batch: {train.env_groups} groups x {train.group_size} = {samples}; "
                f"set it to {samples} or less, or collect more episodes"
            )


def devices(config: Config) -> Problems:
    listed = config.system.CUDA_VISIBLE_DEVICES
    count = len(listed.split(",")) if listed else 0
    if count and count != config.trainer.n_gpus_per_node:
        yield (
            f"system.CUDA_VISIBLE_DEVICES={listed} lists {count}, but trainer.n_gpus_per_node (system.n_gpus) is "
            f"{config.trainer.n_gpus_per_node}: make them agree"
        )


def engine(config: Config) -> Problems:
    if config.actor_rollout_ref.rollout.name == "vllm":
        yield "actor_rollout_ref.rollout.name=vllm: this version has the native engine only; use native"
    mode = config.agent_proxy.batch_adjust_mode
    if mode != "none":
        yield (
            f"agent_proxy.batch_adjust_mode={mode}: duplicating or dropping random episodes distorts group statistics, "
            f"and nothing here needs sizes that divide; use none"
        )


def rollout_filter(config: Config) -> Problems:
    rollout, where = config.actor_rollout_ref.rollout, "actor_rollout_ref.rollout.rollout_filter_value"
    value, strategy = rollout.rollout_filter_value, rollout.rollout_filter_strategy
    if strategy in ("top_k", "top_f") and not 0 < value <= 1:
        yield f"{where}={value:g}: {strategy} keeps a fraction of the groups, at most 1; for a count use top_k_abs"
    if strategy == "top_k_abs" and (value < 1 or value != int(value)):
        yield f"{where}={value:g}: top_k_abs keeps a whole number of groups, at least 1; for a fraction use top_k"
    if strategy == "top_p" and value <= 0:
        yield f"{where}={value:g}: top_p takes a share above 0; 1 keeps every candidate"
    if strategy == "min_p" and not 0 <= value <= 1:
        yield f"{where}={value:g}: min_p takes a share of the best score, between 0 and 1"
    spread = rollout.rollout_filter_metric in ("reward_variance", "reward_std", "entropy_variance", "entropy_std")
    if spread and not rollout.rollout_filter_include_zero and config.es_manager.train.group_size == 1:
        yield (
            f"rollout_filter_metric={rollout.rollout_filter_metric} is 0 in groups of one, and "
            f"rollout_filter_include_zero=False drops these: nothing would be left; raise es_manager.train.group_size "
            f"or set include_zero=True"
        )


def estimator(config: Config) -> Problems:
    algorithm = config.algorithm
    if algorithm.bi_level_gae and algorithm.adv_estimator != "gae":
        yield f"algorithm.bi_level_gae=True needs algorithm.adv_estimator=gae, not {algorithm.adv_estimator}"
    if algorithm.bi_level_gae and not config.agent_proxy.use_turn_scores:
        yield "algorithm.bi_level_gae=True needs the reward of each turn: set agent_proxy.use_turn_scores=True"


def resume(config: Config) -> Problems:
    trainer = config.trainer
    if trainer.resume_mode == "resume_path" and not trainer.resume_from_path:
        yield "trainer.resume_mode=resume_path needs trainer.resume_from_path=…/global_step_<N>"
    if trainer.resume_from_path and "global_step_" not in trainer.resume_from_path:
        yield f"trainer.resume_from_path={trainer.resume_from_path}: must name a folder global_step_<N>"


# --- allowed, but probably not meant ------------------------------------------------------------------------------


def notes(config: Config) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    if rollout.top_p < 1 or rollout.top_k > 0:
        yield "top_p < 1 or top_k > 0 in training: the policy that acts is not the one whose log-probs are trained"
    actor = config.actor_rollout_ref.actor
    if actor.kl_loss_coef > 0 and not actor.use_kl_loss:
        yield f"kl_loss_coef={actor.kl_loss_coef:g} has no effect while use_kl_loss is False"
    if config.algorithm.adv_estimator in ("grpo", "rloo") and config.es_manager.train.group_size == 1:
        yield f"{config.algorithm.adv_estimator} compares the members of a group, and group_size is 1"
