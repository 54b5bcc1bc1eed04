"""What people call the settings, for "did you mean": a name from another project, or from memory -> our key.

EVERYDAY_NAMES["total_steps"]       # "trainer.total_training_steps"
"""

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"

_NAMES_OF = {
    "model_path": "model_name base_model model.name model.path",
    "ppo_mini_batch_size": "batch_size mini_batch_size ppo_batch_size",
    "micro_batch_size_per_gpu": "micro_batch_size",
    f"{_ACTOR}.optim.lr": "lr learning_rate actor_lr policy_lr",
    f"{_ACTOR}.optim.weight_decay": "weight_decay",
    f"{_ACTOR}.kl_loss_coef": "kl kl_coef kl_coeff kl_weight kl_beta beta",
    f"{_ACTOR}.entropy_coeff": "entropy entropy_coef entropy_weight ent_coef",
    f"{_ACTOR}.clip_ratio_high": "clip clip_ratio clip_eps clip_range cliprange epsilon",
    f"{_ACTOR}.grad_clip": "max_grad_norm gradient_clip clip_grad",
    f"{_ACTOR}.optim.lr_warmup_steps": "warmup warmup_steps num_warmup_steps",
    "critic.optim.lr": "critic_lr value_lr",
    f"{_ROLLOUT}.temperature": "temp temperature sampling_temperature",
    f"{_ROLLOUT}.response_length": "max_tokens max_new_tokens max_response_length max_completion_length reply_length",
    f"{_ROLLOUT}.max_model_len": "max_length max_len context_length max_context max_seq_len max_seq_length",
    f"{_ROLLOUT}.rollout_filter_value": "filter filter_value filter_ratio",
    f"{_ROLLOUT}.name": "engine backend rollout_engine",
    "algorithm.adv_estimator": "estimator advantage advantage_estimator algo",
    "agent_proxy.max_turn": "turns max_turns num_turns n_turns",
    "agent_proxy.max_actions_per_turn": "max_actions num_actions actions_per_turn",
    "es_manager.train.env_groups": "env_groups groups num_groups num_envs n_envs num_prompts",
    "es_manager.train.group_size": "group_size num_rollouts n_rollouts rollouts num_generations num_samples n_samples",
    "es_manager.train.env_configs.tags": "env environment env_name task tasks game tag",
    "es_manager.val.env_groups": "val_size num_val val_groups eval_size",
    "sft.training.learning_rate": "sft.training.lr sft.lr sft.learning_rate",
    "seed.train": "seed seeds random_seed",
    "trainer.total_training_steps": (
        "steps total_steps max_steps num_steps n_steps train_steps training_steps total_training_step num_train_steps "
        "iterations num_iterations epochs num_epochs total_epochs"
    ),
    "trainer.save_freq": "save save_every save_steps save_interval save_frequency checkpoint_every ckpt_freq",
    "trainer.test_freq": (
        "eval_every eval_freq eval_steps eval_interval test_every val_freq val_every validate_every test_frequency"
    ),
    "trainer.n_gpus_per_node": "gpus num_gpus n_gpus ngpus num_devices",
    "trainer.nnodes": "nodes num_nodes n_nodes",
    "trainer.experiment_name": "run_name name experiment exp_name",
    "trainer.project_name": "project wandb_project",
    "trainer.default_local_dir": "output_dir out_dir save_dir run_dir checkpoint_dir ckpt_dir",
    "trainer.logger": "logger wandb logging log_to report_to tensorboard",
    "trainer.resume_mode": "resume auto_resume",
}
EVERYDAY_NAMES = {name: key for key, names in _NAMES_OF.items() for name in names.split()}
