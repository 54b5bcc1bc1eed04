"""Which keys a kind of run does not read: most keys of reinforcement learning in fine-tuning, and `sft.*` in RL.

    reason("lora.rank", "sft")                   # fine-tuning reads sft.training.lora_rank instead
    reason("optimization.adv_estimator", "sft")  # only reinforcement learning reads this
    reason("training.n_rollout", "sft")          # empty: it has an effect

`rl_or_sft=sft_then_rl` is both kinds, and reads all keys.
"""

from collections.abc import Mapping
from typing import Any

from ragen.config import keys

BUDGET = "trainer.total_training_steps"
OF_STEPS = (BUDGET, "trainer.total_epochs")  # the data decides the number of fine-tuning steps
# Prefixes of keys. `sft.*` has a model and names as well.
NOT_IN_SFT = (
    "model_path",
    "ppo_mini_batch_size",
    "micro_batch_size_per_gpu",
    "log_prob_micro_batch_size_per_gpu",
    "grpo_advantage_length_weight",
    *("lora.", "critic.", "algorithm.", "es_manager.train.", "collapse_detection.", "output."),
    *(f"actor_rollout_ref.{name}" for name in ("model.", "actor.", "ref.")),
    *(f"actor_rollout_ref.rollout.{name}" for name in ("log_prob_", "temperature", "top_")),
    *(f"actor_rollout_ref.rollout.{name}" for name in ("rollout_filter_", "gradient_analysis_")),
    *(f"data.{name}" for name in ("train_", "max_")),
    *(f"agent_proxy.{name}" for name in ("use_turn_scores", "reward_normalization.")),
    *(f"trainer.{name}" for name in ("critic_warmup", "save_", "test_freq", "val_before_train", "val_only")),
    *(f"trainer.{name}" for name in ("gradient_analysis_", "exit_after_gradient_analysis", "log_group_rv_table")),
    *(f"trainer.{name}" for name in ("max_", "rollout_data_dir", "validation_data_dir")),
)
# In a run of fine-tuning alone a different model is refused, and the result's validation writes there.
READ_ALONE = ("model_path", "trainer.validation_data_dir")
# The key of `sft.training` that fine-tuning reads instead.
COUNTERPARTS = {
    "actor_rollout_ref.model.path": "base_model",
    "lora.rank": "lora_rank",
    "lora.alpha": "lora_alpha",
    "lora.target_modules": "target_modules",
    **{
        f"actor_rollout_ref.model.{name}": name
        for name in ("lora_rank", "lora_alpha", "target_modules", "enable_gradient_checkpointing")
    },
    "actor_rollout_ref.actor.optim.lr": "learning_rate",
    "ppo_mini_batch_size": "train_batch_size",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "train_batch_size",
    "data.train_batch_size": "train_batch_size",
    "training.train_batch_size": "train_batch_size",
    "micro_batch_size_per_gpu": "micro_batch_size",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "micro_batch_size",
    BUDGET: "epochs",
    "trainer.total_epochs": "epochs",
    "trainer.val_before_train": "validate_before_training",
}
# v1 keys, and the tree keys that follow from them in fine-tuning.
FOLLOWERS = {
    "training.total_epochs": (BUDGET,),
    "training.micro_batch_size": ("micro_batch_size_per_gpu",),
    "training.n_rollout": ("es_manager.val.group_size",),
}
ONLY_RL = "only reinforcement learning reads this"
ONLY_SFT = "only fine-tuning reads this, with rl_or_sft=sft or sft_then_rl"


def reason(key: str, rl_or_sft: str) -> str:
    """Why a typed key, of the tree or v1, changes nothing in this kind of run; empty where it may."""
    if rl_or_sft == "sft":
        return _reason_in_sft(key)
    return keys.no_effect(key) or (ONLY_SFT if rl_or_sft == "rl" and key.startswith("sft.") else "")


def without_adapter(key: str, tree: Mapping[str, Any]) -> str:
    """Why a key that describes an adapter changes nothing: the rank is 0. The tree is flat."""
    section, _, name = key.rpartition(".")
    if name not in ("alpha", "lora_alpha", "target_modules"):
        return ""
    rank = "lora.rank" if section == "lora" else f"{section}.lora_rank"
    has_adapter = any(tree[other] > 0 for other in (rank, *keys.followed_by(rank)))
    return "" if has_adapter else f"{rank} is 0: all weights are trained, and there is no adapter"


def of_another_game(key: str, tree: Mapping[str, Any]) -> str:
    """Why a key that describes boards changes nothing: the run plays others. The tree is flat."""
    kind, game = tree["rl_or_sft"], tree["sft.env_type"]
    section, _, rest = key.partition(".")
    name = rest.partition(".")[0]
    if section == "custom_envs":
        splits = ("val",) if kind == "sft" else ("train", "val")
        played = {tag: None for split in splits for tag in tree[f"es_manager.{split}.env_configs.tags"]}
        return "" if name in played else f"this run plays {', '.join(played)}"
    is_other = kind != "rl" and section == "sft" and name in ("sokoban", "frozenlake") and name != game
    return f"the game of the data is {game}" if is_other else ""


def _reason_in_sft(key: str) -> str:
    targets = FOLLOWERS.get(key) or keys.targets(key)
    unread = [name for name in targets if name.startswith((*NOT_IN_SFT, *OF_STEPS)) and name not in READ_ALONE]
    if not targets or len(unread) < len(targets):
        return keys.no_effect(key)
    counterpart = next((COUNTERPARTS[name] for name in (key, *targets) if name in COUNTERPARTS), None)
    instead = f"fine-tuning reads sft.training.{counterpart} instead" if counterpart else ""
    return instead or keys.no_effect(key) or ONLY_RL
