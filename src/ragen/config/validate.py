"""What cannot work, said before anything is loaded. Types, names and choices are already right here.

Each check is a generator of problems; a problem names the keys, their values and a way out. `validate` raises all of
them as one `ConfigError`, and returns notes on what is allowed and probably not meant. Combinations are looked at only
once every number is within its range. `name` turns a key of the tree into the one that the user typed.
"""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from ragen.algo.filter import VALUES
from ragen.config import derive, devices, model_name
from ragen.config.schema import Config
from ragen.config.tree import value_at
from ragen.env.base import Tag
from ragen.env.registry import make
from ragen.errors import did_you_mean, nearest_of, one_error, shown

ALL_LINEAR = "all-linear"
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")  # of Llama and Qwen2
Problems = Iterator[str]
Name = Callable[[str], str]


def validate(config: Config, name: Name = str) -> list[str]:
    check_numbers(config, name)
    checks = [environments, groups, lengths, agent, device_list, engine, models, adapters, folders, resume, rows]
    reinforces, fine_tunes = config.rl_or_sft != "sft", config.rl_or_sft != "rl"
    checks += [rollout_filter, estimator, rewards, batches, checkpoints, analysis] if reinforces else []
    checks += [fine_tuning] if fine_tunes else []
    _raise(problem for check in checks for problem in check(config, name))
    return list(notes(config)) if reinforces else []


def check_numbers(config: Config, name: Name = str) -> None:
    """Only the ranges: what is computed from a config that passes neither divides by zero nor runs away."""
    _raise(numbers(config, name))


def _raise(problems: Problems) -> None:
    found = list(dict.fromkeys(problems))  # keys that follow one another have one problem between them
    if found:
        raise one_error(found)


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
    "sft.training.max_length",
    "sft.training.num_gpus",
    "sft.data_generation.bfs_max_depths",
    "sft.data_generation.num_processes",
    "sft.sokoban.max_steps",
    "algorithm.kl_ctrl.horizon",
    "collapse_detection.micro_batch_size",
    "trainer.max_actor_ckpt_to_keep",
    "trainer.max_critic_ckpt_to_keep",
)
NOT_NEGATIVE = (
    "lora.rank",
    "actor_rollout_ref.actor.entropy_coeff",
    "actor_rollout_ref.actor.kl_loss_coef",
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
    "sft.data_generation.seed",
    "actor_rollout_ref.model.lora_rank",
    "critic.model.lora_rank",
    "collapse_detection.std_eps",
)
NOT_POSITIVE = ("es_manager.format_penalty",)
POSITIVE = (
    "actor_rollout_ref.actor.grad_clip",
    "actor_rollout_ref.rollout.temperature",
    "critic.grad_clip",
    "algorithm.kl_ctrl.target_kl",
)
FRACTIONS = (
    "actor_rollout_ref.actor.clip_ratio_low",
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

NOT_EMPTY = (
    "model_path",
    "actor_rollout_ref.model.path",
    "critic.model.path",
    "trainer.project_name",
    "trainer.experiment_name",
    "trainer.default_local_dir",
    "sft.output_dir",
    "sft.data_generation.data_dir",
    "sft.training.base_model",
)
MAX_GPUS = 1024

RANGES = (
    (AT_LEAST_ONE, lambda value: value >= 1, "must be at least 1"),
    (NOT_NEGATIVE, lambda value: value >= 0, "must not be negative"),
    (NOT_POSITIVE, lambda value: value <= 0, "is a penalty and must not be above 0"),
    (NOT_EMPTY, lambda value: value.strip() != "", "must not be empty"),
    (("trainer.n_gpus_per_node", "trainer.nnodes"), lambda value: value <= MAX_GPUS, f"is more than {MAX_GPUS}"),
    (POSITIVE, lambda value: value > 0, "must be above 0"),
    (("actor_rollout_ref.actor.clip_ratio_c",), lambda value: value > 1, "must be above 1"),
    (FRACTIONS, lambda value: 0 <= value <= 1, "must lie between 0 and 1"),
    (SHARES, lambda value: 0 < value <= 1, "must be above 0 and at most 1"),
)


def numbers(config: Config, name: Name) -> Problems:
    for keys, holds, rule in RANGES:
        for key in keys:
            value = value_at(config, key)
            if value is not None and not holds(value):
                yield f"{name(key)}={value}: {rule}"
    samples = config.collapse_detection.num_samples
    if samples != "all" and (isinstance(samples, str) or samples < 1):
        yield f"collapse_detection.num_samples={samples}: a number of at least 1, or all"
    for key in ("actor_rollout_ref.actor.optim.betas", "critic.optim.betas"):
        betas = value_at(config, key)
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            yield f"{name(key)}={betas}: takes two numbers from 0 up to (not including) 1"
    for tag_name, tag in config.custom_envs.items():
        for field in ("max_actions_per_traj", "max_tokens"):
            value = getattr(tag, field)
            if value is not None and value < 1:
                yield f"custom_envs.{tag_name}.{field}={value}: must be at least 1"


# --- combinations -------------------------------------------------------------------------------------------------


def environments(config: Config, name: Name) -> Problems:
    """Every tag in the catalogue must describe an environment that can be made, and the used ones must have levels."""
    for tag_name, tag in config.custom_envs.items():
        if not tag.env_type:
            others = [other for other in config.custom_envs if other != tag_name]
            near, where = did_you_mean(tag_name, others), f"custom_envs.{tag_name}"
            yield f"{where}: there is no tag {tag_name}{near or '.'} A new one needs {where}.env_type=…"
            continue
        splits = [split for split in ("train", "val") if tag_name in _envs(config, split).env_configs.tags]
        try:
            _try_levels(tag, [(getattr(config.seed, split), split) for split in splits])
        except ValueError as error:
            yield _setting_named(str(error), f"custom_envs.{tag_name}", name)


def _setting_named(problem: str, where: str, name: Name) -> str:
    """A problem with one setting, `env_config.size=0: …`, under the key that the user knows it by."""
    setting = re.match(r"env_config\.\w+", problem)
    return f"{name(f'{where}.{setting[0]}')}{problem[setting.end() :]}" if setting else f"{where}: {problem}"


def _try_levels(tag: Tag, levels: list[tuple[int, str]]) -> None:
    env = make(tag)
    for seed, split in levels:
        env.reset(seed, split)


def _envs(config: Config, split: str):
    return getattr(config.es_manager, split)


def groups(config: Config, name: Name) -> Problems:
    for split in ("train", "val"):
        envs, where = _envs(config, split), f"es_manager.{split}"
        tags, sizes, total = envs.env_configs.tags, envs.env_configs.n_groups, name(f"{where}.env_groups")
        for tag in tags:
            if tag not in config.custom_envs:
                yield f"{where}.env_configs.tags: unknown tag {tag}{nearest_of(tag, config.custom_envs)}"
        if not tags:
            yield f"{where}.env_configs.tags is empty: name at least one tag"
        elif len(set(tags)) < len(tags):
            yield f"{where}.env_configs.tags={tags}: a tag is listed twice; give it one larger entry in n_groups"
        elif len(tags) != len(sizes):
            yield f"{where}.env_configs: {len(tags)} tags {tags} but {len(sizes)} n_groups {sizes}: one for each tag"
        elif min(sizes) < 1:
            yield f"{where}.env_configs.n_groups={sizes}: each must be at least 1"
        elif sum(sizes) != envs.env_groups:
            yield (
                f"{where}.env_configs.n_groups={sizes} sums to {sum(sizes)}, but {total} is {envs.env_groups}: "
                f"set {total}={sum(sizes)} or change n_groups"
            )


def lengths(config: Config, name: Name) -> Problems:
    reply, limit = "actor_rollout_ref.rollout.response_length", "actor_rollout_ref.rollout.max_model_len"
    if value_at(config, reply) >= value_at(config, limit):
        yield (
            f"{name(reply)}={value_at(config, reply)} leaves no room for a prompt in "
            f"{name(limit)}={value_at(config, limit)}"
        )


def agent(config: Config, name: Name) -> Problems:
    try:
        derive.rules(config)
    except ValueError as error:
        yield f"agent_proxy.{error}"


def models(config: Config, name: Name) -> Problems:
    """A model is named by its own folder, and not by one that holds others beside it."""
    for key in derive.MODELS if config.rl_or_sft == "rl" else ("sft.training.base_model",):  # the others follow it
        inside = model_name.model_inside(value_at(config, key))
        if inside is not None:
            yield f"{name(key)}={value_at(config, key)}: this folder is no model, but holds one: name {inside}"


def adapters(config: Config, name: Name) -> Problems:
    """An adapter scaled by 0, or on no layer, never learns anything."""
    for model, where in (
        ("actor_rollout_ref.model.path", "actor_rollout_ref.model"),
        ("critic.model.path", "critic.model"),
        ("sft.training.base_model", "sft.training"),
    ):
        rank, alpha, targets = (f"{where}.{part}" for part in ("lora_rank", "lora_alpha", "target_modules"))
        if value_at(config, rank) == 0:
            continue
        if value_at(config, alpha) < 1:
            yield (
                f"{name(alpha)}={value_at(config, alpha)}: must be at least 1 with {name(rank)}="
                f"{value_at(config, rank)}"
            )
        wanted = value_at(config, targets)
        problem = _target_problem(wanted, model_name.is_decoder(value_at(config, model)))
        if problem:
            yield f"{name(targets)}={shown(wanted)}: {problem}"


def _target_problem(wanted: str | list[str], is_decoder: bool) -> str:
    """What is wrong with the layers that get adapters, as far as it shows before the model is loaded.

    Text with other characters than names have is a regular expression.
    """
    parts = wanted.split(",") if isinstance(wanted, str) else wanted
    names = [part.strip() for part in parts if part.strip()]
    if not names:
        return f"names no layer; {ALL_LINEAR} stands for all of them, or name some: [{','.join(LINEAR[:2])}]"
    if isinstance(wanted, str) and not re.fullmatch(r"[\w.,\s-]*", wanted):
        return ""
    for part in names:
        if part != ALL_LINEAR and re.sub("[^a-z]", "", part.lower()) == "alllinear":
            return f"did you mean {ALL_LINEAR}?"
        if is_decoder and part.rpartition(".")[2] not in (*LINEAR, ALL_LINEAR):
            return f"no linear layer is called {part}{nearest_of(part, [*LINEAR, ALL_LINEAR])}"
    return ""


def folders(config: Config, name: Name) -> Problems:
    """Nothing that a run writes to is a file, or lies below one."""
    keys = ["trainer.validation_data_dir"]
    keys += ["trainer.default_local_dir", "trainer.rollout_data_dir"] if config.rl_or_sft != "sft" else []
    keys += ["sft.output_dir", "sft.data_generation.data_dir"] if config.rl_or_sft != "rl" else []
    problems: dict[Path, str] = {}
    for key in keys:
        value = value_at(config, key) or ""
        path = Path(config.sft.output_dir if key == "sft.data_generation.data_dir" else "", value)
        there = next((place for place in (path, *path.parents) if os.path.lexists(place)), Path())
        if not os.path.isdir(there):
            problems.setdefault(there, f"{name(key)}={value}: {there} is no folder, so nothing can be written there")
    yield from problems.values()


def rows(config: Config, name: Name) -> Problems:
    prefix = config.sft.data_generation.prefix
    if prefix != "message":
        yield (
            f"sft.data_generation.prefix={prefix}: rows are chat messages, which the template of the model puts into "
            f"its own form; use message"
        )


def fine_tuning(config: Config, name: Name) -> Problems:
    tags, training = config.es_manager.val.env_configs.tags, config.sft.training
    if tags and tags[0] in config.custom_envs:
        try:
            _try_levels(derive.sft_tag(config)[1], [(config.sft.data_generation.seed, "sft")])
        except ValueError as error:
            setting = re.sub(r"^env_config\.", "", str(error))
            yield f"sft.{config.sft.env_type}: {setting}"
    micro, num_gpus = training.micro_batch_size, training.num_gpus
    if micro % num_gpus:
        yield (
            f"sft.training.micro_batch_size={micro}: is a total and must divide evenly among the "
            f"sft.training.num_gpus={num_gpus} GPUs"
        )


def analysis(config: Config, name: Name) -> Problems:
    if config.trainer.gradient_analysis_only and not config.trainer.gradient_analysis_mode:
        yield "trainer.gradient_analysis_only=True would do nothing: set trainer.gradient_analysis_mode=True as well"
    _, size = derive.analysis_shape(config)
    if config.trainer.gradient_analysis_mode and size == 1 and _drops_groups_of_one(config):
        yield (
            f"trainer.gradient_analysis_group_size={size}: rollout_filter_metric="
            f"{config.actor_rollout_ref.rollout.rollout_filter_metric} is 0 in groups of one, and "
            f"rollout_filter_include_zero=False drops these: nothing would be left to analyse; raise it"
        )


def batches(config: Config, name: Name) -> Problems:
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
    for key, size in sizes.items():
        if size > samples:
            yield (
                f"{name(key)}={size} is larger than the batch: {train.env_groups} groups x {train.group_size}"
                f"{derive.turns_text(config)} = {samples}; set it to {samples} or less, or collect more episodes"
            )


def device_list(config: Config, name: Name) -> Problems:
    listed, num_gpus = config.system.CUDA_VISIBLE_DEVICES, config.trainer.n_gpus_per_node
    if listed and devices.count(listed) != num_gpus:
        yield (
            f"{name(devices.KEY)}={listed} lists {devices.count(listed)}, but {name('trainer.n_gpus_per_node')} is "
            f"{num_gpus}: make them agree"
        )


def engine(config: Config, name: Name) -> Problems:
    if config.actor_rollout_ref.rollout.name == "vllm":
        yield "actor_rollout_ref.rollout.name=vllm: this version has the native engine only; use native"
    mode = config.agent_proxy.batch_adjust_mode
    if mode != "none":
        yield (
            f"agent_proxy.batch_adjust_mode={mode}: duplicating or dropping random episodes distorts group statistics, "
            f"and nothing here needs sizes that divide; use none"
        )


def rollout_filter(config: Config, name: Name) -> Problems:
    rollout, where = config.actor_rollout_ref.rollout, "actor_rollout_ref.rollout.rollout_filter_value"
    value, strategy = rollout.rollout_filter_value, rollout.rollout_filter_strategy
    fits, takes = VALUES[strategy]
    if not fits(value):
        yield f"{where}={value:g}: {strategy} {takes}"
    if config.es_manager.train.group_size == 1 and _drops_groups_of_one(config):
        yield (
            f"rollout_filter_metric={rollout.rollout_filter_metric} is 0 in groups of one, and "
            f"rollout_filter_include_zero=False drops these: nothing would be left; raise es_manager.train.group_size "
            f"or set include_zero=True"
        )


def _drops_groups_of_one(config: Config) -> bool:
    rollout = config.actor_rollout_ref.rollout
    spread = rollout.rollout_filter_metric in ("reward_variance", "reward_std", "entropy_variance", "entropy_std")
    return spread and not rollout.rollout_filter_include_zero


def estimator(config: Config, name: Name) -> Problems:
    algorithm = config.algorithm
    if algorithm.bi_level_gae and algorithm.adv_estimator != "gae":
        yield f"algorithm.bi_level_gae=True needs algorithm.adv_estimator=gae, not {algorithm.adv_estimator}"
    if algorithm.bi_level_gae and not config.agent_proxy.use_turn_scores:
        yield "algorithm.bi_level_gae=True needs the reward of each turn: set agent_proxy.use_turn_scores=True"
    for key in ("algorithm.soft_advantage_reweight", "grpo_advantage_length_weight"):
        if value_at(config, key) and algorithm.adv_estimator != "grpo":
            yield f"{name(key)}=True needs algorithm.adv_estimator=grpo, not {algorithm.adv_estimator}"


def rewards(config: Config, name: Name) -> Problems:
    """What scores are made of."""
    proxy, algorithm = config.agent_proxy, config.algorithm
    method = proxy.reward_normalization.method
    if proxy.use_turn_scores and method != "identity":
        yield (
            f"agent_proxy.reward_normalization.method={method} compares whole episodes, and "
            f"agent_proxy.use_turn_scores=True scores turns: choose one of them"
        )
    kind = algorithm.kl_penalty
    if algorithm.use_kl_in_reward and algorithm.kl_ctrl.kl_coef != 0 and kind.removesuffix("+") == "full":
        yield (
            f"algorithm.kl_penalty={kind}: the reward of a token is about that token, and full is about all others "
            f"too; choose another one, or take it into the loss with actor_rollout_ref.actor.kl_loss_type=full"
        )


def checkpoints(config: Config, name: Name) -> Problems:
    for key in ("actor_rollout_ref.actor.checkpoint.save_contents", "critic.checkpoint.save_contents"):
        contents = value_at(config, key)
        if "model" not in contents:
            yield f"{name(key)}={contents}: must hold model; to save nothing at all, set trainer.save_freq=-1"


def resume(config: Config, name: Name) -> Problems:
    trainer = config.trainer
    if trainer.resume_mode == "resume_path" and not trainer.resume_from_path:
        yield "trainer.resume_mode=resume_path needs trainer.resume_from_path=…/global_step_<N>"
    if trainer.resume_from_path and not re.search(r"(^|/)global_step_\d+/*$", trainer.resume_from_path):
        yield f"trainer.resume_from_path={trainer.resume_from_path}: must name a folder global_step_<N>"


# --- allowed, but probably not meant ------------------------------------------------------------------------------


def notes(config: Config) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    if rollout.top_p < 1 or rollout.top_k > 0:
        yield "top_p < 1 or top_k > 0 in training: the policy that acts is not the one whose log-probs are trained"
    actor = config.actor_rollout_ref.actor
    if actor.kl_loss_coef > 0 and not actor.use_kl_loss:
        yield f"kl_loss_coef={actor.kl_loss_coef:g} has no effect while use_kl_loss is False"
    groups, value = config.es_manager.train.env_groups, rollout.rollout_filter_value
    if rollout.rollout_filter_strategy == "top_k_abs" and value > groups:
        yield f"top_k_abs keeps {value:g} groups, and there are only {groups}: nothing is filtered"
    if config.trainer.exit_after_gradient_analysis and not config.trainer.gradient_analysis_mode:
        yield "exit_after_gradient_analysis has no effect while gradient_analysis_mode is False"
    if config.algorithm.adv_estimator in ("grpo", "rloo") and config.es_manager.train.group_size == 1:
        yield f"{config.algorithm.adv_estimator} compares the members of a group, and group_size is 1"
    train, val = config.es_manager.train.env_configs.tags, config.es_manager.val.env_configs.tags
    if set(train) != set(val):
        yield f"training on {', '.join(train)}, validating on {', '.join(val)}"
