"""What this version can train. A setting that would be ignored is refused, by name, before anything is loaded."""

from ragen.config import derive
from ragen.config.schema import Config
from ragen.typed import ConfigError

# The keys of the tables in `ragen.algo`, written out so that a refusal needs no torch. A test compares them.
ESTIMATORS = ("grpo", "brpo")
AGGREGATIONS = ("token-mean",)
STRATEGIES = ("top_p",)
METRICS = ("reward_variance", "reward_std")


def check(config: Config) -> None:
    """Raise `ConfigError` for everything that is not built yet."""
    actor, rollout, algorithm = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout, config.algorithm
    trainer = config.trainer
    choices = (
        ("algorithm.adv_estimator", algorithm.adv_estimator, ESTIMATORS),
        ("actor_rollout_ref.actor.loss_agg_mode", actor.loss_agg_mode, AGGREGATIONS),
        ("actor_rollout_ref.rollout.rollout_filter_strategy", rollout.rollout_filter_strategy, STRATEGIES),
        ("actor_rollout_ref.rollout.rollout_filter_metric", rollout.rollout_filter_metric, METRICS),
    )
    problems = [
        f"{key}={value}: this version trains with {', '.join(known)}"
        for key, value, known in choices
        if value not in known
    ]
    unbuilt = {
        "rl_or_sft=sft": config.rl_or_sft == "sft",
        f"a KL term ({derive.reference_model(config).why})": derive.reference_model(config).needed,
        "lora.rank above 0": config.lora.rank > 0,
        "trainer.save_freq above 0 (checkpoints); set it to -1": trainer.save_freq > 0,
        "more than one GPU or node": trainer.n_gpus_per_node * trainer.nnodes > 1,
        "agent_proxy.use_turn_scores": config.agent_proxy.use_turn_scores,
        "agent_proxy.reward_normalization": config.agent_proxy.reward_normalization.method != "identity",
        "actor_rollout_ref.actor.filter_loss_scaling": actor.filter_loss_scaling != "none",
        "actor_rollout_ref.actor.shuffle": actor.shuffle,
        "algorithm.soft_advantage_reweight": algorithm.soft_advantage_reweight,
        "algorithm.zero_task_advantage": algorithm.zero_task_advantage,
        "grpo_advantage_length_weight": config.grpo_advantage_length_weight,
        "trainer.gradient_analysis_mode": trainer.gradient_analysis_mode,
        "trainer.resume_mode=resume_path": trainer.resume_mode == "resume_path",
        "trainer.val_only": trainer.val_only,
    }
    problems += [f"{what} is not built yet" for what, asked in unbuilt.items() if asked]
    if problems:
        listed = "".join(f"\n  - {problem}" for problem in problems)
        raise ConfigError(f"this version cannot train that:{listed}\n--dry-run shows the resolved plan all the same")
