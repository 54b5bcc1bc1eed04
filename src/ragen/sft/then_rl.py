"""Fine-tuning, then reinforcement learning from the model that it has written, as one run.

    run = tune_then_train(config)             # rl_or_sft=sft_then_rl; -> Run of RL
    tune_then_train(config, stage="sft")      # only the first half, in processes that end before RL needs the room

RL has the folder, the names and the settings that it would have alone; only its model is the merged one, wherever
fine-tuning has put it. Fine-tuning that is finished with these settings is not repeated, so that the same command,
after a kill or Ctrl-C, resumes in fine-tuning or at the last checkpoint of RL. Several commands at once that differ
only in RL fine-tune once: the others wait. Each half is an ordinary run.
"""

import gc
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch

from ragen.config.schema import Config
from ragen.errors import ConfigError
from ragen.run.session import Run
from ragen.sft.output_dir import finished_output, tuning_config, wait_for_others
from ragen.sft.run import tune
from ragen.store.lineage import MERGED
from ragen.store.run_folder import FolderInUse, RunFolder
from ragen.train.trainer import train


def tune_then_train(config: Config, stage: str | None = None) -> Run:
    """Both, or one of them: the first ends with its merged model, the second starts from it."""
    if stage is None and not _is_alone():  # workers join once in the life of a process
        raise ConfigError(
            f"rl_or_sft=sft_then_rl with {os.environ['WORLD_SIZE']} workers: run torchrun twice, first with "
            f"--stage sft, then with --stage rl"
        )
    tuning = tuning_config(config)
    if stage != "rl" and _is_alone():
        wait_for_others(tuning)
    output = finished_output(tuning)
    if output is not None:
        _say(f"fine-tuning: already finished with these settings, in {output}")
    elif stage == "rl":
        raise ConfigError(
            f"--stage rl: fine-tuning with these settings is not finished in {config.sft.output_dir} or a numbered "
            f"sibling; run --stage sft first"
        )
    else:
        try:
            tuned = tune(tuning)
        except FolderInUse:
            if not _is_alone():
                raise
            return tune_then_train(config, stage)  # another process has just started: wait for it
        if tuned.stopped:
            if tuned.run.status == "finished":
                _say(f"{tuned.stopped} before reinforcement learning: run the same command to resume")
            return replace(tuned.run, status=tuned.stopped)
        output = tuned.output
    if stage == "sft":
        return _finished_run(tuning, output)
    _free_memory()
    model = output / MERGED
    _say(f"model: {model} (reinforcement learning starts from it: {config.sft.training.base_model}, fine-tuned)")
    return train(training_config(config, model))


def training_config(config: Config, model: Path) -> Config:
    """The second half: `rl_or_sft=rl`, where actor, critic and reference start from this model, wherever it is read."""
    name, actor, critic = str(model.absolute()), config.actor_rollout_ref, config.critic
    return replace(
        config,
        rl_or_sft="rl",
        model_path=name,
        actor_rollout_ref=replace(actor, model=replace(actor.model, path=name)),
        critic=replace(critic, model=replace(critic.model, path=name)),
    )


def _finished_run(tuning: Config, output: Path) -> Run:
    folder = RunFolder(output / Path(tuning.trainer.default_local_dir).name)
    record = folder.read_finished() or {}
    return Run(folder.path, folder.report_path, record.get("step", 0), "finished")


def _is_alone() -> bool:
    return "RANK" not in os.environ or int(os.environ.get("WORLD_SIZE", 1)) == 1


def _free_memory() -> None:
    """Free what is left of the fine-tuned model: RL needs the memory."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _say(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(text, file=sys.stderr)
