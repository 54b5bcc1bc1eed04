"""Where fine-tuning happens: in its output folder, or in a numbered sibling of it. No torch in here.

    decision = place(config)                 # where to begin or to go on
    output = finished_output(config)         # where these very settings have been fine-tuned already, or None
    model = output / MERGED

A run of RL has many settings that fine-tuning does not look at (`NOT_READ`). They make no other fine-tuning: several
runs of RL may start from one of it.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

from ragen.config import derive
from ragen.config.schema import Config
from ragen.report.folder import RunFolder
from ragen.train.resume import Decision, decide, holds_finished

MERGED = "merged_model"
ROLLOUT = "actor_rollout_ref.rollout."
# Beginnings of keys. A model and names are in `sft.*` as well.
NOT_READ = (
    "model_path",
    "ppo_mini_batch_size",
    "micro_batch_size_per_gpu",
    "log_prob_micro_batch_size_per_gpu",
    "grpo_advantage_length_weight",
    "lora.",
    "actor_rollout_ref.model.",
    "actor_rollout_ref.actor.",
    "actor_rollout_ref.ref.",
    f"{ROLLOUT}log_prob_",
    f"{ROLLOUT}temperature",
    f"{ROLLOUT}top_",
    f"{ROLLOUT}rollout_filter_",
    f"{ROLLOUT}gradient_analysis_",
    "critic.",
    "algorithm.",
    "data.train_",
    "data.max_",
    "agent_proxy.use_turn_scores",
    "agent_proxy.reward_normalization.",
    "es_manager.train.",
    "collapse_detection.",
    "trainer.critic_warmup",
    "trainer.save_freq",
    "trainer.test_freq",
    "trainer.val_before_train",
    "trainer.val_only",
    "trainer.max_",
    "trainer.log_group_rv_table",
    "trainer.gradient_analysis_",
    "trainer.exit_after_gradient_analysis",
    "trainer.rollout_data_dir",
    "trainer.validation_data_dir",
    "output.",
)
ASIDE = (*NOT_READ, "sft.training.num_gpus", "sft.data_generation.num_processes")  # these decide how long it takes


def tuning_config(config: Config) -> Config:
    """The first half of `rl_or_sft=sft_then_rl` as a run of its own. Where and how RL begins is not its concern."""
    trainer = replace(
        config.trainer,
        project_name=config.sft.training.project_name,
        experiment_name=config.sft.training.experiment_name,
        logger=config.sft.training.logger,
        default_local_dir=derive.sft_folder(config),
        resume_mode="auto",
        resume_from_path=None,
        gradient_analysis_only=False,
        rollout_data_dir=None,
        validation_data_dir=None,
    )
    return replace(config, rl_or_sft="sft", trainer=trainer)


def place(config: Config) -> Decision:
    """The first of the output folder and its numbered siblings in which this run can begin or go on."""
    left_alone = ""
    for output in _outputs(config):
        folder = _run_folder(config, output)
        decision = decide(config, folder, ASIDE)
        is_taken = (output / MERGED).exists() and not decision.goes_on
        if decision.folder.path == folder and not is_taken:
            return replace(decision, reason=decision.reason or left_alone)
        found = decision.reason or f"{output / MERGED} is there already: it stays as it is, and this run goes beside it"
        left_alone = left_alone or found
    raise AssertionError("there is always another number")


def finished_output(config: Config) -> Path | None:
    """The first of these folders in which this very fine-tuning is finished, with its merged model."""
    for output in _outputs(config):
        folder = _run_folder(config, output)
        if not folder.exists() and not (output / MERGED).exists():
            return None
        if (output / MERGED / "config.json").exists() and holds_finished(config, RunFolder(folder), ASIDE):
            return output
    raise AssertionError("there is always another number")


def planned_output(config: Config) -> tuple[Path, bool]:
    """For a plan of both halves: where fine-tuning would write, or has written; and whether it is finished there."""
    tuning = tuning_config(config)
    if output := finished_output(tuning):
        return output, True
    # Only the data tell how many steps there are, and those are not made now: no run on disk has more than this.
    endless = replace(tuning, trainer=replace(tuning.trainer, total_training_steps=sys.maxsize))
    return place(endless).folder.path.parent, False


def _outputs(config: Config) -> Iterator[Path]:
    base = Path(config.sft.output_dir)
    yield base
    for number in count(2):
        yield base.with_name(f"{base.name}-{number}")


def _run_folder(config: Config, output: Path) -> Path:
    return output / Path(derive.sft_folder(config)).name
