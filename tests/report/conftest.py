"""Small runs on disk, made of hand-written episodes."""

import math

import pytest
from made_up_runs import make_groups, validation_metrics

from ragen.config.schema import Config


@pytest.fixture
def full_folder(folder):
    """Thirty steps, three validations, every documented metric, and one NaN."""
    config = Config()
    config.model_path = "pocket"
    config.trainer.total_training_steps = 30
    folder.write_config(config)
    for step in range(31):
        metrics = {}
        if step % 15 == 0:
            won = 10 + step
            metrics |= validation_metrics(
                won / 50, won / 50 - 0.1, won / 50 + 0.1, random=0.2, optimal=1.0, format_valid=0.99,
                greedy_success=0.6, greedy_success_low=0.5, greedy_success_high=0.7,
                **{"success_len_1-2": 0.5, "num_len_1-2": 20, "success_len_7+": 0.1, "num_len_7+": 30}, new=1.5,
            )  # fmt: skip
            folder.write_episodes(step, "val", make_groups((100 + level, level < won) for level in range(50)))
        if step:
            metrics |= {
                "train/CoordSokoban/success": 0.3 + step / 100, "train/CoordSokoban/num_actions": 6.0,
                "train/response_length": 100, "train/reward": 1.5, "actor/entropy": 0.4, "actor/pg_loss": 0.01,
                "actor/pg_clipfrac": 0.02, "actor/ppo_kl": 1e-4, "actor/lr": 1e-4,
                "actor/grad_norm": math.nan if step == 7 else 1.0, "rollout/in_group_reward_std": 2.0,
                "rollout/filter_kept_ratio": 0.75, "rollout/filter_kept_count": 6, "rollout/empty_after_filter": 0,
                "rollout/log_prob_diff_max": 1e-6, "timing_s/gen": 1.0, "timing_s/filter": 0.01,
                "timing_s/update_actor": 0.8, "timing_s/step": 2.0, "perf/tokens_per_s": 9500.0, "new/metric": 3,
            }  # fmt: skip
        folder.append_metrics(step, metrics)
    return folder
