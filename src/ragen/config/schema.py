"""The typed config tree: every key with its default, its range and what it changes, once.

Reading a config is attribute access on these classes, so no default can hide elsewhere:

    config = ragen.config.compose.resolve(["trainer.test_freq=5"], config_name="_2_sokoban").config
    config.trainer.test_freq

A field is *used*, or *accepted without effect* and says why (`no_effect`). `"${key}"` as a default follows another key.
A field may have bounds and `choices`. `changes_only` marks keys that do not change what a run computes: with
another value the same run resumes (see `identity`).

Plain dataclasses: this file needs neither Hydra nor OmegaConf, and `tree.build` rebuilds a stored config without them.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ragen.algo.filter import METRICS, PROB_MODES, STRATEGIES
from ragen.config import ranges
from ragen.config.ranges import NOT_EMPTY, Range, within
from ragen.env.base import Tag
from ragen.env.registry import catalogue

ESTIMATORS = ("gae", "grpo", "brpo", "arpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
_KL_KINDS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "low-var-kl", "k3", "full")
KL_TYPES = (*_KL_KINDS, *(f"{kind}+" for kind in _KL_KINDS))  # with +: the gradient of k2
LOGGERS = ("console", "wandb", "tensorboard")
SAVED = ("model", "optimizer", "extra")

# Why a key has no effect.
VLLM_ONLY = "belongs to the vLLM engine; the native engine has no such setting"
ONE_MODULE = "sampler and learner share one module, there is no second copy to place or to load"
FSDP_ONLY = "workers hold full weights; nothing is sharded"
PACKED = "training always runs packed, without padding"
CHUNKED = "entropy is always computed in chunks; the result is the same"
GEN_CONFIG = "sampling is set under actor_rollout_ref.rollout"

# What a key changes that does not change what a run computes.
MEMORY, SPEED, LOGGING, FILES, NAMES = "memory", "speed", "logging", "files", "names"
LOCATION, DEVICES, RESUMING, BUDGET = "location", "devices", "resuming", "budget"
FAILURES = "failures"  # only where an environment fails


def key(
    default: Any,
    allowed: Range | None = None,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    choices: Iterable[Any] = (),
    no_effect: str = "",
    changes_only: str = "",
) -> Any:
    """A field with what is known about its values."""
    allowed = allowed or within(at_least, above, at_most)
    known = {"range": allowed, "choices": tuple(choices), "no_effect": no_effect, "changes_only": changes_only}
    metadata = {name: value for name, value in known.items() if value}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def node(cls: type) -> Any:
    """A sub-tree."""
    return field(default_factory=cls)


# --- devices, seeds, adapters -------------------------------------------------------------------------------------


@dataclass
class System:
    CUDA_VISIBLE_DEVICES: str = key("0", changes_only=DEVICES)


@dataclass
class Seed:
    train: int = key(10000, at_least=0)  # advanced by env_groups each step
    val: int = key(123, at_least=0)  # validation levels never change


@dataclass
class Lora:
    rank: int = key(0, at_least=0)  # 0: all weights are trained
    alpha: int = 64
    target_modules: str | list[str] = "all-linear"


# --- actor, reference, rollout ------------------------------------------------------------------------------------


@dataclass
class Optimizer:
    lr: float = key(1e-6, at_least=0)
    betas: list[float] = key([0.9, 0.999], ranges.TWO_DECAYS)
    weight_decay: float = key(0.01, at_least=0)
    lr_warmup_steps: int = -1  # negative: from the ratio
    lr_warmup_steps_ratio: float = key(0.0, at_least=0, at_most=1)
    lr_scheduler_type: str = key("constant", choices=("constant", "linear", "cosine"))
    min_lr_ratio: float = key(0.0, at_least=0, at_most=1)


@dataclass
class CriticOptimizer(Optimizer):
    lr: float = key(1e-5, at_least=0)


@dataclass
class Checkpoint:
    save_contents: list[str] = key([*SAVED], ranges.HOLDS_MODEL, choices=SAVED, changes_only=FILES)


@dataclass
class Fsdp:
    model_dtype: str = key("fp32", no_effect="the optimizer always owns fp32 master weights")
    dtype: str = key("bfloat16", no_effect="fp32 on CPU, bf16 on GPU")
    param_offload: bool = key(False, no_effect=FSDP_ONLY)
    # Optimizer state in main memory; where it does not fit on the GPU, it is there anyway.
    optimizer_offload: bool = key(False, changes_only=MEMORY)


@dataclass
class CriticFsdp:
    optimizer_offload: bool = key(False, changes_only=MEMORY)  # as the actor's


@dataclass
class TrainedModel:
    path: str = key("${model_path}", NOT_EMPTY)
    lora_rank: int = key("${lora.rank}", at_least=0)
    lora_alpha: int = key("${lora.alpha}")
    target_modules: str | list[str] = "${lora.target_modules}"
    enable_gradient_checkpointing: bool = key(True, changes_only=MEMORY)


@dataclass
class CriticModel(TrainedModel):
    fsdp_config: CriticFsdp = node(CriticFsdp)


@dataclass
class ActorModel(TrainedModel):
    use_remove_padding: bool = key(False, no_effect=PACKED)


@dataclass
class Actor:
    strategy: str = key("fsdp", no_effect=FSDP_ONLY)
    ppo_mini_batch_size: int = key("${ppo_mini_batch_size}", at_least=1)
    ppo_micro_batch_size_per_gpu: int = key("${micro_batch_size_per_gpu}", at_least=1, changes_only=MEMORY)
    ppo_epochs: int = key(1, at_least=1)
    shuffle: bool = False
    use_dynamic_bsz: bool = key(False, no_effect=PACKED)
    use_torch_compile: bool = key(True, no_effect="entropy is computed in chunks, without compilation")
    use_ref: bool = key(True, no_effect="the reference model exists exactly when a KL term needs it")
    entropy_coeff: float = key(0.001, at_least=0)
    entropy_from_logits_with_chunking: bool = key(False, no_effect=CHUNKED)
    use_kl_loss: bool = False
    kl_loss_coef: float = key(0.0, at_least=0)
    kl_loss_type: str = key("low_var_kl", choices=KL_TYPES)
    clip_ratio: float = key(0.2, no_effect="clip_ratio_low and clip_ratio_high are always used")
    clip_ratio_low: float = key(0.2, at_least=0, at_most=1)
    clip_ratio_high: float = key(0.28, at_least=0)
    clip_ratio_c: float = key(3.0, above=1)
    grad_clip: float = key(1.0, above=0)
    grpo_advantage_length_weight: bool = key(
        "${grpo_advantage_length_weight}", no_effect="the top-level key of this name is the one that is read"
    )
    filter_loss_scaling: str = key("none", choices=("none", "linear", "sqrt"))
    loss_agg_mode: str = key(
        "token-mean", choices=("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
    )
    # Whose log-probs the updated policy is compared with: the sampler's own, or those of a pass of the learner before
    # the update. auto: the sampler's in float32, where both agree to rounding, else the learner's.
    old_log_probs: str = key("auto", choices=("auto", "sampler", "learner"))
    optim: Optimizer = node(Optimizer)
    checkpoint: Checkpoint = node(Checkpoint)
    fsdp_config: Fsdp = node(Fsdp)


@dataclass
class Reference:
    log_prob_micro_batch_size_per_gpu: int = key(
        "${log_prob_micro_batch_size_per_gpu}", at_least=1, changes_only=MEMORY
    )


@dataclass
class ValidationSampling:
    do_sample: bool = True
    temperature: float = key(0.5, at_least=0)
    top_p: float = key(1.0, above=0, at_most=1)
    top_k: int = -1
    n: int = key(1, no_effect="es_manager.val.group_size is the number of samples for a level")
    logprobs: int | None = key(None, no_effect="the log-prob of every sampled token is kept")


@dataclass
class Rollout:
    name: str = key("native", ranges.NATIVE, choices=("native", "vllm"))
    load_format: str = key("auto", no_effect=ONE_MODULE)
    dtype: str = key("bfloat16", no_effect="fp32 on CPU, bf16 on GPU")
    log_prob_micro_batch_size_per_gpu: int = key(
        "${log_prob_micro_batch_size_per_gpu}", at_least=1, changes_only=MEMORY
    )
    tensor_model_parallel_size: int = key(1, no_effect=ONE_MODULE)
    max_model_len: int = key(3600, at_least=1)
    prompt_length: int = key(1, no_effect="prompts are as long as they are")
    response_length: int = key(400, at_least=1)  # tokens sampled in a turn, at most
    stop_at_answer: bool = True  # a turn ends at its first complete </answer>
    forced_reply_tokens: str = key("", ranges.REPLY_LENGTHS)  # to measure: every reply has this length
    gpu_memory_utilization: float = key(0.3, above=0, at_most=1, changes_only=MEMORY)  # for conversations, at most
    max_num_batched_tokens: int = key(8192, no_effect=VLLM_ONLY)
    max_num_seqs: int = key(1024, no_effect=VLLM_ONLY)
    enforce_eager: bool = key(True, no_effect=VLLM_ONLY)
    free_cache_engine: bool = key(True, no_effect=ONE_MODULE)
    enable_prefix_caching: bool = key(True, no_effect="common prefixes are always computed once")
    enable_chunked_prefill: bool = key(True, no_effect=VLLM_ONLY)
    disable_log_stats: bool = key(True, no_effect=VLLM_ONLY)
    temperature: float = key(1.0, above=0)
    top_p: float = key(1.0, above=0, at_most=1)
    top_k: int = -1
    n: int = key(1, no_effect="es_manager.train.group_size is the number of samples for a level")
    val_kwargs: ValidationSampling = node(ValidationSampling)
    rollout_filter_value: float = 1.0
    rollout_filter_strategy: str = key("top_p", choices=STRATEGIES)
    rollout_filter_type: str = key("largest", choices=("largest", "smallest"))
    rollout_filter_include_zero: bool = True
    rollout_filter_top_p_prob_mode: str = key("linear", choices=PROB_MODES)
    rollout_filter_selection_eps: float = key(0.01, at_least=0)
    rollout_filter_empty_stop_steps: int = 5  # 0 or less: never
    rollout_filter_metric: str = key("reward_variance", choices=METRICS)
    rollout_filter_resample: bool = False  # play further levels until enough groups vary
    rollout_filter_resample_rounds: int = key(3, at_least=1)  # at most, in a step
    gradient_analysis_num_buckets: int = key(6, at_least=1)
    gradient_analysis_bucket_mode: str = key("quantile", choices=("quantile", "fixed_rv"))


@dataclass
class ActorRolloutRef:
    model: ActorModel = node(ActorModel)
    actor: Actor = node(Actor)
    ref: Reference = node(Reference)
    rollout: Rollout = node(Rollout)


# --- critic, algorithm, data --------------------------------------------------------------------------------------


@dataclass
class Critic:
    strategy: str = key("fsdp", no_effect=FSDP_ONLY)
    ppo_mini_batch_size: int = key("${ppo_mini_batch_size}", at_least=1)
    ppo_micro_batch_size_per_gpu: int = key("${micro_batch_size_per_gpu}", at_least=1, changes_only=MEMORY)
    grad_clip: float = key(1.0, above=0)
    cliprange_value: float = key(0.5, at_least=0)
    model: CriticModel = node(CriticModel)
    optim: CriticOptimizer = node(CriticOptimizer)
    checkpoint: Checkpoint = node(Checkpoint)


@dataclass
class KlControl:
    type: str = key("fixed", choices=("fixed", "adaptive"))
    kl_coef: float = key(0.0, at_least=0)
    horizon: int = key(10000, at_least=1)  # adaptive only
    target_kl: float = key(0.1, above=0)  # adaptive only


@dataclass
class Algorithm:
    adv_estimator: str = key("gae", choices=ESTIMATORS)
    gamma: float = key(1.0, at_least=0, at_most=1)
    lam: float = key(1.0, at_least=0, at_most=1)
    high_level_gamma: float = key(0.95, at_least=0, at_most=1)
    bi_level_gae: bool = False
    zero_task_advantage: bool = False
    norm_adv_by_std_in_grpo: bool = True
    soft_advantage_reweight: bool = False
    use_kl_in_reward: bool = False
    kl_penalty: str = key("kl", choices=KL_TYPES)
    kl_ctrl: KlControl = node(KlControl)


@dataclass
class Data:
    train_batch_size: int | None = key(None, at_least=1)  # null: env_groups x group_size
    # Validation levels that are played together; null: all.
    val_batch_size: int | None = key(None, at_least=1, changes_only=MEMORY)
    train_data_num: int | None = key(None, at_least=1)  # distinct training levels; null: new levels for ever
    max_prompt_length: int | None = key(None, no_effect="actor_rollout_ref.rollout.max_model_len is the limit")
    max_response_length: int | None = key(None, no_effect="actor_rollout_ref.rollout.response_length is the limit")


# --- agent and environments ---------------------------------------------------------------------------------------


@dataclass
class RewardNormalization:
    grouping: str = key("state", choices=("state", "inductive", "batch"))
    method: str = key("identity", choices=("identity", "mean", "mean_std", "asym_clip"))


@dataclass
class AgentProxy:
    context_window_mode: str = key("full", choices=("full", "limited_multi_turn", "single_turn"))
    max_context_window: int | None = -1  # turns shown; negative or null: all
    batch_adjust_mode: str = key("none", ranges.NO_ADJUSTING, choices=("none", "copy", "delete"))
    max_turn: int = key(5, at_least=1)
    action_sep: str = "||"
    max_actions_per_turn: int = key(2, at_least=1)
    use_turn_scores: bool = False
    enable_think: bool = True
    prompt_style: str = key("full", choices=("full", "terse"))
    reward_normalization: RewardNormalization = node(RewardNormalization)


@dataclass
class CollapseDetection:
    compute_freq: int = 5
    micro_batch_size: int = key(128, at_least=1, changes_only=MEMORY)
    first_turn_enabled: bool = True
    multi_turn_enabled: bool = True
    num_samples: int | str = key(64, ranges.COUNT_OR_ALL)  # or all
    std_eps: float = key(1e-3, at_least=0)
    ema_decay: float = key(0.9, at_least=0, at_most=1)


@dataclass
class TrainEnvConfigs:
    tags: list[str] = key(["CoordSokoban"], ranges.SOME_TAG)
    n_groups: list[int] = key(["${es_manager.train.env_groups}"])


@dataclass
class ValEnvConfigs(TrainEnvConfigs):
    n_groups: list[int] = key(["${es_manager.val.env_groups}"])


@dataclass
class TrainEnvs:
    env_groups: int = key(8, at_least=1)
    group_size: int = key(16, at_least=1)
    level_sampling: str = key("uniform", choices=("uniform", "steered"))  # steered: where outcomes vary most
    env_configs: TrainEnvConfigs = node(TrainEnvConfigs)


@dataclass
class ValEnvs:
    env_groups: int = key(512, at_least=1)
    group_size: int = key(1, at_least=1)
    env_configs: ValEnvConfigs = node(ValEnvConfigs)


@dataclass
class EsManager:
    format_penalty: float = key(-0.1, at_most=0)
    # Seconds for what an environment does in one turn; 0: no limit.
    env_timeout: float = key(60.0, at_least=0, at_most=1_000_000, changes_only=FAILURES)
    env_retries: int = key(1, at_least=0, changes_only=FAILURES)  # of a group whose environment failed
    max_failed_share: float = key(0.5, at_least=0, at_most=1, changes_only=FAILURES)  # of groups; more: the run stops
    train: TrainEnvs = node(TrainEnvs)
    val: ValEnvs = node(ValEnvs)


@dataclass
class GenConfig:
    response_length: int | None = key(None, no_effect=GEN_CONFIG)
    temperature: float | None = key(None, no_effect=GEN_CONFIG)
    top_p: float | None = key(None, no_effect=GEN_CONFIG)
    top_k: int | None = key(None, no_effect=GEN_CONFIG)
    kwargs: dict[str, Any] | None = key(None, no_effect=GEN_CONFIG)


@dataclass
class Generation:
    gen_config: GenConfig = node(GenConfig)


@dataclass
class CtxManager:
    generation: Generation = node(Generation)


# --- trainer, output ----------------------------------------------------------------------------------------------


@dataclass
class GenerationsToLog:
    val: int = key(20, no_effect="the run directory and its report hold every episode of every validation")


@dataclass
class Trainer:
    project_name: str = key("ragen", NOT_EMPTY, changes_only=NAMES)
    experiment_name: str = key("test", NOT_EMPTY, changes_only=NAMES)
    default_local_dir: str = key(
        "checkpoints/${trainer.project_name}/${trainer.experiment_name}", NOT_EMPTY, changes_only=LOCATION
    )
    default_hdfs_dir: str | None = key(None, no_effect="runs are written to local directories")
    local_log_dir: str = key("results/", no_effect="a run writes everything into trainer.default_local_dir")
    logger: list[str] = key(["console", "wandb"], choices=LOGGERS, changes_only=LOGGING)
    console_metrics: str = key("main", choices=("main", "all"), changes_only=LOGGING)  # of the piped line of a step
    total_training_steps: int = key(200, at_least=1, changes_only=BUDGET)
    total_epochs: int | None = key(None, no_effect="trainer.total_training_steps is the budget")
    n_gpus_per_node: int = key(1, at_least=1, at_most=1024, changes_only=DEVICES)
    nnodes: int = key(1, at_least=1, at_most=1024, changes_only=DEVICES)
    balance_batch: bool = key(True, no_effect=PACKED)
    critic_warmup: int = key(0, at_least=0)
    save_freq: int = key(100, changes_only=FILES)  # 0 or less: nothing is saved
    save_best: bool = key(False, changes_only=FILES)  # also keep the checkpoint with the best validation
    test_freq: int = 10  # 0 or less: no validation during training
    val_before_train: bool = True
    val_only: bool = False
    validation_steps: int = key(1, at_least=1)
    preemption_seconds: float = key(120.0, above=0, changes_only=RESUMING)  # from SIGTERM to exit status 143
    resume_mode: str = key("auto", choices=("auto", "disable", "resume_path"), changes_only=RESUMING)
    resume_from_path: str | None = key(None, ranges.CHECKPOINT_PATH, changes_only=RESUMING)
    max_actor_ckpt_to_keep: int | None = key(1, at_least=1, changes_only=FILES)
    max_critic_ckpt_to_keep: int | None = key(1, at_least=1, changes_only=FILES)
    generations_to_log_to_wandb: GenerationsToLog = node(GenerationsToLog)
    rollout_data_dir: str | None = key(None, changes_only=LOCATION)
    validation_data_dir: str | None = key(None, changes_only=LOCATION)
    log_group_rv_table: bool = key(False, changes_only=LOGGING)
    gradient_analysis_mode: bool = False
    gradient_analysis_every: int = key(50, at_least=1)
    gradient_analysis_env_groups: int | None = key(None, at_least=1)
    gradient_analysis_group_size: int | None = key(None, at_least=1)
    gradient_analysis_log_prefilter: bool = False
    gradient_analysis_only: bool = False
    exit_after_gradient_analysis: bool = False


@dataclass
class Output:
    """Where an evaluation writes its rollouts."""

    dir: str = key("results/eval", changes_only=FILES)
    filename: str = key("val_rollouts.pkl", changes_only=FILES)
    format: str = key("pkl", choices=("pkl", "jsonl"), changes_only=FILES)
    append_timestamp: bool = key(True, changes_only=FILES)
    save_jsonl_backup: bool = key(False, changes_only=FILES)
    save_pkl_backup: bool = key(False, changes_only=FILES)
    keep_batch_keys: list[str] | None = key(None, changes_only=FILES)
    keep_non_tensor_keys: list[str] | None = key(None, changes_only=FILES)
    keep_meta_info: bool = key(True, changes_only=FILES)


@dataclass
class RayKwargs:
    ray_init: dict[str, Any] = key({"num_cpus": None}, changes_only=DEVICES)


# --- supervised fine-tuning ---------------------------------------------------------------------------------------


@dataclass
class SftData:
    data_dir: str = key("sft/data", NOT_EMPTY, changes_only=LOCATION)
    algo: str = key("bfs", choices=("bfs",))
    seed: int = key(100000, at_least=0)
    train_size: int = key(1000, at_least=1)  # puzzles, not rows
    test_size: int = key(100, at_least=1)
    bfs_max_depths: int = key(100, at_least=1)
    prefix: str = key("message", ranges.CHAT_MESSAGES, choices=("message", "qwen-instruct", "base"))
    num_processes: int = key(16, at_least=1, changes_only=SPEED)  # that solve levels; no more than there are cores


@dataclass
class SftTraining:
    base_model: str = key("Qwen/Qwen2.5-0.5B-Instruct", NOT_EMPTY)
    project_name: str = key("RAGEN", changes_only=NAMES)
    experiment_name: str = key("test_sft_lora", changes_only=NAMES)
    logger: list[str] = key(["console", "wandb"], choices=LOGGERS, changes_only=LOGGING)
    epochs: int = key(5, at_least=1)
    learning_rate: float = key(1e-4, at_least=0)
    train_batch_size: int = key(128, at_least=1)
    micro_batch_size: int = key(4, at_least=1, changes_only=MEMORY)
    max_length: int = key(2048, at_least=1)
    validate_before_training: bool = True
    lora_rank: int = key(64, at_least=0)
    lora_alpha: int = 32
    target_modules: str | list[str] = "all-linear"
    enable_gradient_checkpointing: bool = key(False, changes_only=MEMORY)
    num_gpus: int = key(1, at_least=1, changes_only=DEVICES)
    hdfs_dir: str | None = key(None, no_effect="runs are written to local directories")


@dataclass
class SftSokoban:
    dim_x: int = 6
    dim_y: int = 6
    num_boxes: int = 1
    max_steps: int = key(5, at_least=1)
    search_depth: int = 30


@dataclass
class SftFrozenLake:
    size: int = 4
    p: float = 0.8
    is_slippery: bool = True


@dataclass
class Sft:
    env_type: str = key("sokoban", choices=("sokoban", "frozenlake", "bandit", "two_armed_bandit"))
    output_dir: str = key("models/sft", NOT_EMPTY, changes_only=LOCATION)
    data_generation: SftData = node(SftData)
    training: SftTraining = node(SftTraining)
    sokoban: SftSokoban = node(SftSokoban)
    frozenlake: SftFrozenLake = node(SftFrozenLake)


# --- the root -----------------------------------------------------------------------------------------------------


@dataclass
class Config:
    rl_or_sft: str = key("rl", choices=("rl", "sft", "sft_then_rl"))
    model_path: str = key("Qwen/Qwen2.5-3B-Instruct", NOT_EMPTY)
    ppo_mini_batch_size: int = key(32, at_least=1)
    micro_batch_size_per_gpu: int = key(1, at_least=1, changes_only=MEMORY)
    log_prob_micro_batch_size_per_gpu: int = key("${micro_batch_size_per_gpu}", at_least=1, changes_only=MEMORY)
    enable_response_mask: bool = key(True, no_effect="exactly the sampled tokens are trained")
    grpo_advantage_length_weight: bool = False
    system: System = node(System)
    seed: Seed = node(Seed)
    lora: Lora = node(Lora)
    actor_rollout_ref: ActorRolloutRef = node(ActorRolloutRef)
    critic: Critic = node(Critic)
    algorithm: Algorithm = node(Algorithm)
    data: Data = node(Data)
    agent_proxy: AgentProxy = node(AgentProxy)
    es_manager: EsManager = node(EsManager)
    ctx_manager: CtxManager = node(CtxManager)
    custom_envs: dict[str, Tag] = field(default_factory=catalogue)
    collapse_detection: CollapseDetection = node(CollapseDetection)
    trainer: Trainer = node(Trainer)
    ray_kwargs: RayKwargs = node(RayKwargs)
    output: Output = node(Output)
    sft: Sft = node(Sft)
