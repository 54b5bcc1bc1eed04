"""The typed config tree: every key, every default, once.

A field is *used*, or it is *accepted without effect* and says why (`no_effect`). A field may name its `choices`;
`"${key}"` as a default follows another key. Reading a config is attribute access on these classes, so there is no other
place where a default could hide:

    config = ragen.config.compose.resolve(["trainer.test_freq=5"], config_name="_2_sokoban").config
    config.trainer.test_freq

Plain dataclasses: this file needs neither Hydra nor OmegaConf, and `tree.build` rebuilds a stored config without them.
"""

from dataclasses import dataclass, field
from typing import Any

from ragen.algo.filter import METRICS, PROB_MODES, STRATEGIES
from ragen.env.base import Tag
from ragen.env.registry import catalogue

ESTIMATORS = ("gae", "grpo", "brpo", "arpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
_KL_KINDS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "low-var-kl", "k3", "full")
KL_TYPES = (*_KL_KINDS, *(f"{kind}+" for kind in _KL_KINDS))  # with +: the gradient of k2

VLLM_ONLY = "belongs to the vLLM engine; the native engine has no such setting"
ONE_MODULE = "sampler and learner share one module, there is no second copy to place or to load"
FSDP_ONLY = "workers hold full weights; nothing is sharded or offloaded"
PACKED = "training always runs packed, without padding"


def choice(default: Any, *options: Any) -> Any:
    return field(default=default, metadata={"choices": options})


def no_effect(default: Any, reason: str) -> Any:
    metadata = {"no_effect": reason}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def items(*values: Any, choices: tuple = ()) -> Any:
    """A list field."""
    return field(default_factory=lambda: list(values), metadata={"choices": choices} if choices else {})


def node(cls: type) -> Any:
    """A sub-tree."""
    return field(default_factory=cls)


# --- devices, seeds, adapters -------------------------------------------------------------------------------------


@dataclass
class System:
    CUDA_VISIBLE_DEVICES: str = "0"


@dataclass
class Seed:
    train: int = 10000  # advanced by env_groups each step
    val: int = 123  # validation levels never change


@dataclass
class Lora:
    rank: int = 0  # 0: all weights are trained
    alpha: int = 64
    target_modules: str | list[str] = "all-linear"


# --- actor, reference, rollout ------------------------------------------------------------------------------------


@dataclass
class Optimizer:
    lr: float = 1e-6
    betas: list[float] = items(0.9, 0.999)
    weight_decay: float = 0.01
    lr_warmup_steps: int = -1  # negative: from the ratio
    lr_warmup_steps_ratio: float = 0.0
    lr_scheduler_type: str = choice("constant", "constant", "linear", "cosine")
    min_lr_ratio: float = 0.0


@dataclass
class CriticOptimizer(Optimizer):
    lr: float = 1e-5


@dataclass
class Checkpoint:
    save_contents: list[str] = items("model", "optimizer", "extra", choices=("model", "optimizer", "extra"))


@dataclass
class Fsdp:
    model_dtype: str = no_effect("fp32", "the optimizer always owns fp32 master weights")
    dtype: str = no_effect("bfloat16", "fp32 on CPU, bf16 on GPU")
    param_offload: bool = no_effect(False, FSDP_ONLY)
    optimizer_offload: bool = no_effect(False, FSDP_ONLY)


@dataclass
class ActorModel:
    path: str = "${model_path}"
    lora_rank: int = "${lora.rank}"
    lora_alpha: int = "${lora.alpha}"
    target_modules: str | list[str] = "${lora.target_modules}"
    enable_gradient_checkpointing: bool = True
    use_remove_padding: bool = no_effect(False, PACKED)


@dataclass
class Actor:
    strategy: str = no_effect("fsdp", FSDP_ONLY)
    ppo_mini_batch_size: int = "${ppo_mini_batch_size}"
    ppo_micro_batch_size_per_gpu: int = "${micro_batch_size_per_gpu}"
    ppo_epochs: int = 1
    shuffle: bool = False
    use_dynamic_bsz: bool = no_effect(False, PACKED)
    use_torch_compile: bool = no_effect(True, "entropy is computed in chunks, without compilation")
    use_ref: bool = no_effect(True, "the reference model exists exactly when a KL term needs it")
    entropy_coeff: float = 0.001
    entropy_from_logits_with_chunking: bool = no_effect(
        False, "entropy is always computed in chunks; the result is the same"
    )
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.0
    kl_loss_type: str = choice("kl", *KL_TYPES)
    clip_ratio: float = no_effect(0.2, "clip_ratio_low and clip_ratio_high are always used")
    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.28
    clip_ratio_c: float = 3.0
    grad_clip: float = 1.0
    grpo_advantage_length_weight: bool = no_effect(
        "${grpo_advantage_length_weight}", "the top-level key of this name is the one that is read"
    )
    filter_loss_scaling: str = choice("none", "none", "linear", "sqrt")
    loss_agg_mode: str = choice(
        "token-mean", "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
    )
    optim: Optimizer = node(Optimizer)
    checkpoint: Checkpoint = node(Checkpoint)
    fsdp_config: Fsdp = node(Fsdp)


@dataclass
class Reference:
    log_prob_micro_batch_size_per_gpu: int = "${log_prob_micro_batch_size_per_gpu}"


@dataclass
class ValidationSampling:
    do_sample: bool = True
    temperature: float = 0.5
    top_p: float = 1.0
    top_k: int = -1
    n: int = no_effect(1, "es_manager.val.group_size is the number of samples for a level")
    logprobs: int | None = no_effect(None, "the log-prob of every sampled token is kept")


@dataclass
class Rollout:
    name: str = choice("native", "native", "vllm")
    load_format: str = no_effect("auto", ONE_MODULE)
    dtype: str = no_effect("bfloat16", "fp32 on CPU, bf16 on GPU")
    log_prob_micro_batch_size_per_gpu: int = "${log_prob_micro_batch_size_per_gpu}"
    tensor_model_parallel_size: int = no_effect(1, ONE_MODULE)
    max_model_len: int = 3600
    prompt_length: int = no_effect(1, "prompts are as long as they are")
    response_length: int = 400  # tokens sampled in a turn, at most
    stop_at_answer: bool = True  # a turn ends at its first complete </answer>
    gpu_memory_utilization: float = no_effect(0.3, VLLM_ONLY)
    max_num_batched_tokens: int = no_effect(8192, VLLM_ONLY)
    max_num_seqs: int = no_effect(1024, VLLM_ONLY)
    enforce_eager: bool = no_effect(True, VLLM_ONLY)
    free_cache_engine: bool = no_effect(True, ONE_MODULE)
    enable_prefix_caching: bool = no_effect(True, "common prefixes are always computed once")
    enable_chunked_prefill: bool = no_effect(True, VLLM_ONLY)
    disable_log_stats: bool = no_effect(True, VLLM_ONLY)
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    n: int = no_effect(1, "es_manager.train.group_size is the number of samples for a level")
    val_kwargs: ValidationSampling = node(ValidationSampling)
    rollout_filter_value: float = 1.0
    rollout_filter_strategy: str = choice("top_p", *STRATEGIES)
    rollout_filter_type: str = choice("largest", "largest", "smallest")
    rollout_filter_include_zero: bool = True
    rollout_filter_top_p_prob_mode: str = choice("linear", *PROB_MODES)
    rollout_filter_selection_eps: float = 0.01
    rollout_filter_empty_stop_steps: int = 5  # 0 or less: never
    rollout_filter_metric: str = choice("reward_variance", *METRICS)
    gradient_analysis_num_buckets: int = 6
    gradient_analysis_bucket_mode: str = choice("quantile", "quantile", "fixed_rv")


@dataclass
class ActorRolloutRef:
    model: ActorModel = node(ActorModel)
    actor: Actor = node(Actor)
    ref: Reference = node(Reference)
    rollout: Rollout = node(Rollout)


# --- critic, algorithm, data --------------------------------------------------------------------------------------


@dataclass
class CriticModel:
    path: str = "${model_path}"
    lora_rank: int = "${lora.rank}"
    lora_alpha: int = "${lora.alpha}"
    target_modules: str | list[str] = "${lora.target_modules}"
    enable_gradient_checkpointing: bool = True


@dataclass
class Critic:
    strategy: str = no_effect("fsdp", FSDP_ONLY)
    ppo_mini_batch_size: int = "${ppo_mini_batch_size}"
    ppo_micro_batch_size_per_gpu: int = "${micro_batch_size_per_gpu}"
    grad_clip: float = 1.0
    cliprange_value: float = 0.5
    model: CriticModel = node(CriticModel)
    optim: CriticOptimizer = node(CriticOptimizer)
    checkpoint: Checkpoint = node(Checkpoint)


@dataclass
class KlControl:
    type: str = choice("fixed", "fixed", "adaptive")
    kl_coef: float = 0.0
    horizon: int = 10000  # adaptive only
    target_kl: float = 0.1  # adaptive only


@dataclass
class Algorithm:
    adv_estimator: str = choice("gae", *ESTIMATORS)
    gamma: float = 1.0
    lam: float = 1.0
    high_level_gamma: float = 0.95
    bi_level_gae: bool = False
    zero_task_advantage: bool = False
    norm_adv_by_std_in_grpo: bool = True
    soft_advantage_reweight: bool = False
    use_kl_in_reward: bool = False
    kl_penalty: str = choice("kl", *KL_TYPES)
    kl_ctrl: KlControl = node(KlControl)


@dataclass
class Data:
    train_batch_size: int | None = None  # null: env_groups x group_size
    val_batch_size: int | None = None  # validation levels played together; null: all
    train_data_num: int | None = None  # distinct training levels; null: new levels for ever
    max_prompt_length: int | None = no_effect(None, "actor_rollout_ref.rollout.max_model_len is the limit")
    max_response_length: int | None = no_effect(None, "actor_rollout_ref.rollout.response_length is the limit")


# --- agent and environments ---------------------------------------------------------------------------------------


@dataclass
class RewardNormalization:
    grouping: str = choice("state", "state", "inductive", "batch")
    method: str = choice("identity", "identity", "mean", "mean_std", "asym_clip")


@dataclass
class AgentProxy:
    context_window_mode: str = choice("full", "full", "limited_multi_turn", "single_turn")
    max_context_window: int | None = -1  # turns shown; negative or null: all
    batch_adjust_mode: str = choice("none", "none", "copy", "delete")
    max_turn: int = 5
    action_sep: str = "||"
    max_actions_per_turn: int = 2
    use_turn_scores: bool = False
    enable_think: bool = True
    prompt_style: str = choice("full", "full", "terse")
    reward_normalization: RewardNormalization = node(RewardNormalization)


@dataclass
class CollapseDetection:
    compute_freq: int = 5
    micro_batch_size: int = 128
    first_turn_enabled: bool = True
    multi_turn_enabled: bool = True
    num_samples: int | str = 64  # or the word all
    std_eps: float = 1e-3
    ema_decay: float = 0.9


@dataclass
class TrainEnvConfigs:
    tags: list[str] = items("CoordSokoban")
    n_groups: list[int] = items("${es_manager.train.env_groups}")


@dataclass
class ValEnvConfigs:
    tags: list[str] = items("CoordSokoban")
    n_groups: list[int] = items("${es_manager.val.env_groups}")


@dataclass
class TrainEnvs:
    env_groups: int = 8
    group_size: int = 16
    env_configs: TrainEnvConfigs = node(TrainEnvConfigs)


@dataclass
class ValEnvs:
    env_groups: int = 512
    group_size: int = 1
    env_configs: ValEnvConfigs = node(ValEnvConfigs)


@dataclass
class EsManager:
    format_penalty: float = -0.1
    train: TrainEnvs = node(TrainEnvs)
    val: ValEnvs = node(ValEnvs)


GEN_CONFIG = "sampling is set under actor_rollout_ref.rollout"


@dataclass
class GenConfig:
    response_length: int | None = no_effect(None, GEN_CONFIG)
    temperature: float | None = no_effect(None, GEN_CONFIG)
    top_p: float | None = no_effect(None, GEN_CONFIG)
    top_k: int | None = no_effect(None, GEN_CONFIG)
    kwargs: dict[str, Any] | None = no_effect(None, GEN_CONFIG)


@dataclass
class Generation:
    gen_config: GenConfig = node(GenConfig)


@dataclass
class CtxManager:
    generation: Generation = node(Generation)


# --- trainer, output ----------------------------------------------------------------------------------------------


@dataclass
class GenerationsToLog:
    val: int = no_effect(20, "the run folder and its report hold every episode of every validation")


@dataclass
class Trainer:
    project_name: str = "ragen"
    experiment_name: str = "test"
    default_local_dir: str = "checkpoints/${trainer.project_name}/${trainer.experiment_name}"
    default_hdfs_dir: str | None = no_effect(None, "runs are written to local folders")
    local_log_dir: str = no_effect("results/", "a run writes everything into trainer.default_local_dir")
    logger: list[str] = items("console", "wandb", choices=("console", "wandb", "tensorboard"))
    total_training_steps: int = 200
    total_epochs: int | None = no_effect(None, "trainer.total_training_steps is the budget")
    n_gpus_per_node: int = 1
    nnodes: int = 1
    balance_batch: bool = no_effect(True, PACKED)
    critic_warmup: int = 0
    save_freq: int = 100  # 0 or less: nothing is ever saved
    test_freq: int = 10  # 0 or less: no validation during training
    val_before_train: bool = True
    val_only: bool = False
    validation_steps: int = 1
    resume_mode: str = choice("auto", "auto", "disable", "resume_path")
    resume_from_path: str | None = None
    max_actor_ckpt_to_keep: int | None = 1
    max_critic_ckpt_to_keep: int | None = 1
    generations_to_log_to_wandb: GenerationsToLog = node(GenerationsToLog)
    rollout_data_dir: str | None = None
    validation_data_dir: str | None = None
    log_group_rv_table: bool = False
    gradient_analysis_mode: bool = False
    gradient_analysis_every: int = 50
    gradient_analysis_env_groups: int | None = None
    gradient_analysis_group_size: int | None = None
    gradient_analysis_log_prefilter: bool = False
    gradient_analysis_only: bool = False
    exit_after_gradient_analysis: bool = False


@dataclass
class Output:
    """Where an evaluation writes its rollouts."""

    dir: str = "results/eval"
    filename: str = "val_rollouts.pkl"
    format: str = choice("pkl", "pkl", "jsonl")
    append_timestamp: bool = True
    save_jsonl_backup: bool = False
    save_pkl_backup: bool = False
    keep_batch_keys: list[str] | None = None
    keep_non_tensor_keys: list[str] | None = None
    keep_meta_info: bool = True


@dataclass
class RayKwargs:
    ray_init: dict[str, Any] = field(default_factory=lambda: {"num_cpus": None})


# --- supervised fine-tuning ---------------------------------------------------------------------------------------


@dataclass
class SftData:
    data_dir: str = "sft/data"
    algo: str = choice("bfs", "bfs")
    seed: int = 100000
    train_size: int = 1000  # puzzles, not rows
    test_size: int = 100
    bfs_max_depths: int = 100
    prefix: str = choice("message", "message", "qwen-instruct", "base")
    num_processes: int = 16  # that solve levels; no more than there are cores


@dataclass
class SftTraining:
    base_model: str = "Qwen/Qwen2.5-0.5B-Instruct"
    project_name: str = "RAGEN"
    experiment_name: str = "test_sft_lora"
    logger: list[str] = items("console", "wandb", choices=("console", "wandb", "tensorboard"))
    epochs: int = 5
    learning_rate: float = 1e-4
    train_batch_size: int = 128
    micro_batch_size: int = 4
    max_length: int = 2048
    validate_before_training: bool = True
    lora_rank: int = 64
    lora_alpha: int = 32
    target_modules: str | list[str] = "all-linear"
    enable_gradient_checkpointing: bool = False
    num_gpus: int = 1
    hdfs_dir: str | None = no_effect(None, "runs are written to local folders")


@dataclass
class SftSokoban:
    dim_x: int = 6
    dim_y: int = 6
    num_boxes: int = 1
    max_steps: int = 5
    search_depth: int = 30


@dataclass
class SftFrozenLake:
    size: int = 4
    p: float = 0.8
    is_slippery: bool = True


@dataclass
class Sft:
    env_type: str = choice("sokoban", "sokoban", "frozenlake", "bandit", "two_armed_bandit")
    output_dir: str = "models/sft"
    data_generation: SftData = node(SftData)
    training: SftTraining = node(SftTraining)
    sokoban: SftSokoban = node(SftSokoban)
    frozenlake: SftFrozenLake = node(SftFrozenLake)


# --- the root -----------------------------------------------------------------------------------------------------


@dataclass
class Config:
    rl_or_sft: str = choice("rl", "rl", "sft", "sft_then_rl")
    model_path: str = "Qwen/Qwen2.5-3B-Instruct"
    ppo_mini_batch_size: int = 32
    micro_batch_size_per_gpu: int = 1
    log_prob_micro_batch_size_per_gpu: int = "${micro_batch_size_per_gpu}"
    enable_response_mask: bool = no_effect(True, "exactly the sampled tokens are trained")
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
