"""Refuse what cannot work before anything is loaded. Types, names and choices are already right here.

    notes = validate(config)        # ConfigError lists every problem; notes are allowed, but probably not intended

Ranges come from the schema. Rules over several keys are generators of problems: each names the keys, their values and a
way out. They run only once every value is within its range. `name` turns a key of the tree into the one that was typed.
"""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ragen.algo.filter import METRICS, VALUES, FilterRule, sample_std, select
from ragen.config import derive, devices, keys, model_name
from ragen.config.schema import Config
from ragen.config.tree import value_at
from ragen.env.base import Tag
from ragen.env.failure import LIMIT_OF_A_LEVEL, EnvironmentFailed, call, level
from ragen.env.registry import make
from ragen.errors import ConfigError, did_you_mean, nearest_of, raise_any, refused, shown

ALL_LINEAR = "all-linear"
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")  # of `model.decoder`
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
NUM_TRIED = 3  # levels of a split, if the first one is refused
Problems = Iterator[ConfigError]


@dataclass(frozen=True)
class Subject:
    """A config under check, and what the user calls its keys."""

    config: Config
    name: Callable[[str], str]

    def __getitem__(self, key: str) -> Any:
        return value_at(self.config, key)

    def shown(self, key: str) -> str:
        """`key=value` as the user would type it."""
        return f"{self.name(key)}={shown(self[key])}"

    def refuse(self, code: str, key: str, why: str) -> ConfigError:
        return ConfigError(f"{self.shown(key)}: {why}", key=self.name(key), code=code)


def validate(config: Config, name: Callable[[str], str] = str) -> list[str]:
    """Raise for what cannot work; return notes on what is probably not intended."""
    check_ranges(config, name)
    checks = [environments, groups, lengths, agent, device_list, adapters, directories, resume]
    reinforces, fine_tunes = config.rl_or_sft != "sft", config.rl_or_sft != "rl"
    checks += [rollout_filter, estimator, rewards, batches, analysis] if reinforces else []
    checks += [fine_tuning] if fine_tunes else []
    raise_any(problem for check in checks for problem in check(Subject(config, name)))
    return list(notes(config)) if reinforces else []


def check_ranges(config: Config, name: Callable[[str], str] = str) -> None:
    """Check each value alone: with a config that passes, derived numbers neither divide by zero nor explode."""
    raise_any(_out_of_range(Subject(config, name)))


def _out_of_range(tree: Subject) -> Problems:
    for key, (spec, _) in keys.FIELDS.items():
        allowed = spec.metadata.get("range")
        if allowed is not None and tree[key] is not None and not allowed.holds(tree[key]):
            yield tree.refuse("range", key, allowed.text)
    for tag_name, tag in tree.config.custom_envs.items():
        for field in ("max_actions_per_traj", "max_tokens"):
            value = getattr(tag, field)
            if value is not None and value < 1:
                yield refused(f"custom_envs.{tag_name}.{field}", value, "must be at least 1", code="range")


# --- environments and levels --------------------------------------------------------------------------------------


def environments(tree: Subject) -> Problems:
    """Every tag of the catalogue describes an environment that can be made, and those in use have levels."""
    config = tree.config
    for tag_name, tag in config.custom_envs.items():
        where = f"custom_envs.{tag_name}"
        if not tag.env_type:
            near = did_you_mean(tag_name, [other for other in config.custom_envs if other != tag_name])
            message = f"{where}: there is no tag {tag_name}{near or '.'} A new one needs {where}.env_type=…"
            yield ConfigError(message, key=where, code="unknown-tag")
            continue
        splits = [split for split in ("train", "val") if tag_name in tree[f"es_manager.{split}.env_configs.tags"]]
        try:
            _try_levels(tag_name, tag, [(getattr(config.seed, split), split) for split in splits])
        except ValueError as error:
            # A problem with one setting, `env_config.size=0: …`, is reported under the key that the user typed.
            setting = re.match(r"env_config\.\w+", str(error))
            key = tree.name(f"{where}.{setting[0]}") if setting else where
            rest = str(error)[setting.end() :] if setting else f": {error}"
            yield ConfigError(f"{key}{rest}", key=key, code="environment")


def _try_levels(name: str, tag: Tag, levels: list[tuple[int, str]]) -> None:
    """Raises a ValueError of the environment if the first few levels of a split all do: its settings are wrong.

    Other failures, or those of a single level, are for the run: it drops what cannot be played.
    """
    env = make(tag)
    for first, split in levels:
        refusals = []
        for seed in range(first, first + NUM_TRIED):
            try:
                with suppress(EnvironmentFailed):
                    call(partial(env.reset, seed, split), level(name, seed, split), LIMIT_OF_A_LEVEL, (ValueError,))
                break
            except ValueError as refusal:
                refusals.append(refusal)
        else:
            raise refusals[0]


def groups(tree: Subject) -> Problems:
    for where in ("es_manager.train", "es_manager.val"):
        tags, sizes, total = f"{where}.env_configs.tags", f"{where}.env_configs.n_groups", f"{where}.env_groups"
        listed, counts = tree[tags], tree[sizes]
        for tag in listed:
            if tag not in tree.config.custom_envs:
                message = f"{tags}: unknown tag {tag}{nearest_of(tag, tree.config.custom_envs)}"
                yield ConfigError(message, key=tags, code="unknown-tag")
        if len(set(listed)) < len(listed):
            yield tree.refuse("repeated-tag", tags, "a tag is listed twice; give it one larger entry in n_groups")
        elif len(listed) != len(counts):
            why = f"there are {len(counts)} n_groups for {len(listed)} tags {listed}; give one for each tag"
            yield tree.refuse("group-counts", sizes, why)
        elif min(counts) < 1:
            yield tree.refuse("range", sizes, "each must be at least 1")
        elif sum(counts) != tree[total]:
            way_out = f"set {tree.name(total)}={sum(counts)} or change n_groups"
            why = f"the sum is {sum(counts)}, but {tree.name(total)} is {tree[total]}; {way_out}"
            yield tree.refuse("group-counts", sizes, why)


def lengths(tree: Subject) -> Problems:
    reply, limit = f"{ROLLOUT}.response_length", f"{ROLLOUT}.max_model_len"
    if tree[reply] >= tree[limit]:
        yield tree.refuse("no-room", reply, f"leaves no room for a prompt in {tree.shown(limit)}; make it smaller")


def agent(tree: Subject) -> Problems:
    try:
        derive.rules(tree.config)
    except ValueError as error:
        key = f"agent_proxy.{str(error).partition('=')[0]}"
        yield ConfigError(f"agent_proxy.{error}", key=key, code="agent")


# --- models, devices, directories ---------------------------------------------------------------------------------


def adapters(tree: Subject) -> Problems:
    """An adapter scaled by 0, or on no layer, never learns anything."""
    for model in ("actor_rollout_ref.model.path", "critic.model.path", "sft.training.base_model"):
        where = model.rpartition(".")[0]
        rank, alpha, targets = (f"{where}.{part}" for part in ("lora_rank", "lora_alpha", "target_modules"))
        if tree[rank] == 0:
            continue
        if tree[alpha] < 1:
            yield tree.refuse("adapter-scale", alpha, f"must be at least 1 with {tree.shown(rank)}")
        problem = _target_problem(tree[targets], model_name.is_decoder(tree[model]))
        if problem:
            yield tree.refuse("adapter-layers", targets, problem)


def _target_problem(wanted: str | list[str], is_decoder: bool) -> str:
    """What is wrong with the layers that get adapters, as far as it is known before the model is loaded."""
    parts = wanted.split(",") if isinstance(wanted, str) else wanted
    names = [part.strip() for part in parts if part.strip()]
    if not names:
        return f"names no layer; {ALL_LINEAR} means all of them, or name some: [{','.join(LINEAR[:2])}]"
    if isinstance(wanted, str) and not re.fullmatch(r"[\w.,\s-]*", wanted):
        return ""  # a regular expression
    for part in names:
        if part != ALL_LINEAR and re.sub("[^a-z]", "", part.lower()) == "alllinear":
            return f"did you mean {ALL_LINEAR}?"
        if is_decoder and part.rpartition(".")[2] not in (*LINEAR, ALL_LINEAR):
            return f"no linear layer is called {part}{nearest_of(part, [*LINEAR, ALL_LINEAR])}"
    return ""


def device_list(tree: Subject) -> Problems:
    listed, num_gpus = tree[devices.KEY], tree.config.trainer.n_gpus_per_node
    if listed and devices.count(listed) != num_gpus:
        why = f"lists {devices.count(listed)}, but {tree.name('trainer.n_gpus_per_node')} is {num_gpus}"
        yield tree.refuse("device-count", devices.KEY, f"{why}: make them agree")


def directories(tree: Subject) -> Problems:
    """Nothing that a run writes to is a file, or lies below one."""
    kind, data = tree.config.rl_or_sft, "sft.data_generation.data_dir"
    written = ["trainer.validation_data_dir"]
    written += ["trainer.default_local_dir", "trainer.rollout_data_dir"] if kind != "sft" else []
    written += ["sft.output_dir", data] if kind != "rl" else []
    problems: dict[Path, ConfigError] = {}
    for key in written:
        path = Path(tree.config.sft.output_dir if key == data else "", tree[key] or "")
        existing = next((parent for parent in (path, *path.parents) if os.path.lexists(parent)), Path())
        if not os.path.isdir(existing):
            why = f"{existing} is not a directory, so nothing can be written there"
            problems.setdefault(existing, tree.refuse("not-a-directory", key, why))
    yield from problems.values()


def resume(tree: Subject) -> Problems:
    if tree.config.trainer.resume_mode == "resume_path" and not tree.config.trainer.resume_from_path:
        yield tree.refuse("resume-path", "trainer.resume_mode", "needs trainer.resume_from_path=…/global_step_<N>")


# --- training -----------------------------------------------------------------------------------------------------


def fine_tuning(tree: Subject) -> Problems:
    config, micro = tree.config, "sft.training.micro_batch_size"
    tags, num_gpus = config.es_manager.val.env_configs.tags, config.sft.training.num_gpus
    if tags and tags[0] in config.custom_envs:
        try:
            _try_levels(*derive.sft_tag(config), [(config.sft.data_generation.seed, "sft")])
        except ValueError as error:
            key, problem = f"sft.{config.sft.env_type}", re.sub(r"^env_config\.", "", str(error))
            yield ConfigError(f"{key}: {problem}", key=key, code="environment")
    if tree[micro] % num_gpus:
        why = f"is a total and must divide evenly among {tree.shown('sft.training.num_gpus')} GPUs"
        yield tree.refuse("micro-batch", micro, why)


def analysis(tree: Subject) -> Problems:
    mode, only, size = (f"trainer.gradient_analysis_{part}" for part in ("mode", "only", "group_size"))
    if tree[only] and not tree[mode]:
        yield tree.refuse("analysis-mode", only, f"would do nothing: set {mode}=True as well")
    num_groups, group_size = derive.analysis_shape(tree.config)
    if tree[mode] and _is_valid_filter(tree) and (problem := _keeps_nothing(tree, num_groups, group_size)):
        why = f"{problem}: nothing would be left to analyse"
        yield refused(size, group_size, f"{why}; {_way_out(tree, num_groups, size)}", code="groups-of-one")


def batches(tree: Subject) -> Problems:
    config, batch = tree.config, "data.train_batch_size"
    samples, episodes = derive.samples_per_step(config), derive.episodes_per_step(config)
    shape = config.es_manager.train
    if tree[batch] not in (None, episodes):
        product = f"{shape.env_groups} x {shape.group_size} = {episodes}"
        yield tree.refuse("train-batch", batch, f"it is env_groups x group_size = {product}; leave it null")
    for where in (ACTOR, *(["critic"] if derive.critic_model(config).needed else [])):
        key = f"{where}.ppo_mini_batch_size"
        if tree[key] > samples:
            product = f"{shape.env_groups} groups x {shape.group_size}{derive.turns_text(config)} = {samples}"
            why = f"is larger than the batch: {product}; set it to {samples} or less, or collect more episodes"
            yield tree.refuse("mini-batch", key, why)


def rollout_filter(tree: Subject) -> Problems:
    value, size = f"{ROLLOUT}.rollout_filter_value", "es_manager.train.group_size"
    strategy, num_groups = tree[f"{ROLLOUT}.rollout_filter_strategy"], tree["es_manager.train.env_groups"]
    if not _is_valid_filter(tree):
        yield tree.refuse("filter-value", value, f"{strategy} {VALUES[strategy][1]}")
    elif problem := _keeps_nothing(tree, num_groups, tree[size]):
        why = f"{problem}: nothing would be left"
        yield tree.refuse("groups-of-one", size, f"{why}; {_way_out(tree, num_groups, size)}")
    resample, sampling = f"{ROLLOUT}.rollout_filter_resample", "es_manager.train.level_sampling"
    for key in [resample] * tree[resample] + [sampling] * (tree[sampling] == "steered"):
        if tree[size] == 1:
            why = "looks at how rewards vary within a group, and in groups of one nothing varies"
            yield tree.refuse("groups-of-one", key, f"{why}: set {tree.name(size)} to 2 or more")


def _is_valid_filter(tree: Subject) -> bool:
    return VALUES[tree[f"{ROLLOUT}.rollout_filter_strategy"]][0](tree[f"{ROLLOUT}.rollout_filter_value"])


def _keeps_nothing(tree: Subject, num_groups: int, group_size: int) -> str:
    """Why the filter drops every group, whatever is played; empty where it can keep some.

    That happens in groups of one: their spread is always 0.
    """
    rule, metric = derive.filter_rule(tree.config), tree[f"{ROLLOUT}.rollout_filter_metric"]
    if group_size > 1 or METRICS[metric].reduce is not sample_std or _keeps_zeros(rule, num_groups):
        return ""
    share = f"{rule.strategy} with rollout_filter_top_p_prob_mode={rule.prob_mode} and a value below 1"
    dropped_by = share if rule.include_zero else "rollout_filter_include_zero=False"
    return f"{metric} is 0 in groups of one, and {dropped_by} drops groups that score 0"


def _keeps_zeros(rule: FilterRule, num_groups: int) -> bool:
    return any(verdict.keep for verdict in select([0.0] * num_groups, rule))


def _way_out(tree: Subject, num_groups: int, group_size: str) -> str:
    """Larger groups, or the fewest changes of the filter with which it keeps groups that score 0."""
    rule = derive.filter_rule(tree.config)
    changes = [] if rule.include_zero else ["include_zero=True"]
    if not _keeps_zeros(replace(rule, include_zero=True), num_groups):
        changes.append("value=1")
    typed = " ".join(f"{ROLLOUT}.rollout_filter_{change}" for change in changes)
    return f"set {tree.name(group_size)} to 2 or more, or {typed}"


def estimator(tree: Subject) -> Problems:
    chosen, bi_level = tree["algorithm.adv_estimator"], "algorithm.bi_level_gae"
    of_grpo = dict.fromkeys(("algorithm.soft_advantage_reweight", "grpo_advantage_length_weight"), "grpo")
    for key, needed in {bi_level: "gae", **of_grpo}.items():
        if tree[key] and chosen != needed:
            yield tree.refuse("estimator", key, f"needs algorithm.adv_estimator={needed}, not {chosen}")
    if tree[bi_level] and not tree["agent_proxy.use_turn_scores"]:
        why = "needs the reward of each turn: set agent_proxy.use_turn_scores=True"
        yield tree.refuse("turn-scores", bi_level, why)


def rewards(tree: Subject) -> Problems:
    method, penalty = "agent_proxy.reward_normalization.method", "algorithm.kl_penalty"
    if tree["agent_proxy.use_turn_scores"] and tree[method] != "identity":
        why = "compares whole episodes, and agent_proxy.use_turn_scores=True scores turns: choose one of them"
        yield tree.refuse("turn-scores", method, why)
    algorithm = tree.config.algorithm
    has_kl = algorithm.use_kl_in_reward and algorithm.kl_ctrl.kl_coef != 0
    if has_kl and tree[penalty].removesuffix("+") == "full":
        why = "a reward is about the sampled token, and full is about the whole vocabulary"
        way_out = f"choose another one, or use it in the loss with {ACTOR}.kl_loss_type=full"
        yield tree.refuse("full-kl", penalty, f"{why}; {way_out}")


# --- allowed, but probably not intended ---------------------------------------------------------------------------


def notes(config: Config) -> Iterator[str]:
    rollout, actor, trainer = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor, config.trainer
    if rollout.top_p < 1 or rollout.top_k > 0:
        yield "top_p < 1 or top_k > 0 in training: the policy that acts is not the one whose log-probs are trained"
    if actor.kl_loss_coef > 0 and not actor.use_kl_loss:
        yield f"kl_loss_coef={actor.kl_loss_coef:g} has no effect while use_kl_loss is False"
    if actor.kl_loss_type in ("kl", "k1"):
        yield (
            f"kl_loss_type={actor.kl_loss_type}: the gradient of this loss is zero on average, so it adds only noise; "
            "kl+ has the same value and the gradient of the KL"
        )
    num_groups, value = config.es_manager.train.env_groups, rollout.rollout_filter_value
    if rollout.rollout_filter_strategy == "top_k_abs" and value > num_groups:
        yield f"top_k_abs keeps {value:g} groups, and there are only {num_groups}: nothing is filtered"
    if trainer.exit_after_gradient_analysis and not trainer.gradient_analysis_mode:
        yield "exit_after_gradient_analysis has no effect while gradient_analysis_mode is False"
    if config.algorithm.adv_estimator in ("grpo", "rloo") and config.es_manager.train.group_size == 1:
        yield f"{config.algorithm.adv_estimator} compares the members of a group, and group_size is 1"
    train, val = config.es_manager.train.env_configs.tags, config.es_manager.val.env_configs.tags
    if set(train) != set(val):
        yield f"training on {', '.join(train)}, validating on {', '.join(val)}"
