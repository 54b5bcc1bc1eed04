"""A run of the embedded model that takes a second, with every setting that the tests of training rely on.

    resolve([*TINY, "trainer.total_training_steps=3", f"trainer.default_local_dir={folder}"])

Of a key that is given twice the last one wins, so a test adds what it needs.
"""

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"

TINY = [
    "sokoban",
    "model_path=pocket",
    "agent_proxy.max_turn=2",
    "agent_proxy.max_actions_per_turn=2",
    "es_manager.train.env_groups=2",
    "es_manager.train.group_size=3",
    "es_manager.val.env_groups=2",
    "algorithm.adv_estimator=grpo",
    "ppo_mini_batch_size=6",
    "micro_batch_size_per_gpu=64",
    f"{ACTOR}.optim.lr=2e-4",
    f"{ACTOR}.optim.lr_scheduler_type=constant",
    f"{ACTOR}.optim.lr_warmup_steps=0",
    f"{ROLLOUT}.response_length=48",
    f"{ROLLOUT}.max_model_len=1024",
    f"{ROLLOUT}.rollout_filter_strategy=top_p",
    f"{ROLLOUT}.rollout_filter_value=1",
    f"{ROLLOUT}.rollout_filter_include_zero=True",
    "trainer.test_freq=-1",
    "trainer.val_before_train=False",
    "trainer.save_freq=-1",
    "trainer.save_best=False",
    "trainer.logger=console",
]
