"""Where fine-tuning writes: in its output directory, or in a numbered sibling of it. No torch in here.

    decision = choose_output(config)         # where to start or resume
    wait_for_others(config)                  # until no other process works there
    output = finished_output(config)         # where these very settings have been fine-tuned already, or None
    model = output / MERGED

RL has many settings that fine-tuning does not read: several runs of RL may start from one fine-tuning.
"""

import sys
from dataclasses import replace
from pathlib import Path
from time import sleep

from ragen.config import derive
from ragen.config.schema import Config
from ragen.store.free_name import numbered
from ragen.store.lineage import MERGED
from ragen.store.resume import Decision, decide, holds_finished, stored_steps
from ragen.store.run_folder import RunFolder

POLL_SECONDS = 5.0


def tuning_config(config: Config) -> Config:
    """The first half of `rl_or_sft=sft_then_rl` as a separate run. Where and how RL starts is not its concern."""
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


def choose_output(config: Config, is_planned: bool = False) -> Decision:
    """The first of the output directory and its numbered siblings in which this run can start or resume.

    Only the data tell how many steps there are. A plan makes none: equal settings have as many as are stored.
    """
    untouched = ""
    for output in numbered(Path(config.sft.output_dir)):
        folder = _run_folder(config, output)
        decision = decide(_as_planned(config, folder) if is_planned else config, folder)
        is_taken = (output / MERGED).exists() and not decision.resumes
        if decision.folder.path == folder and not is_taken:
            return replace(decision, reason=decision.reason or untouched)
        found = f"{output / MERGED} exists: it is left untouched, and this run writes to another directory"
        untouched = untouched or decision.reason or found
    raise AssertionError("there is always another number")


def finished_output(config: Config) -> Path | None:
    """The first of these directories in which this very fine-tuning is finished, with its merged model."""
    for output in numbered(Path(config.sft.output_dir)):
        folder = _run_folder(config, output)
        if not folder.exists() and not (output / MERGED).exists():
            return None
        if (output / MERGED / "config.json").exists() and holds_finished(config, RunFolder(folder)):
            return output
    raise AssertionError("there is always another number")


def planned_output(config: Config) -> tuple[Path, bool]:
    """For a plan: where fine-tuning would write; before RL, perhaps where it has written, and whether it has."""
    if config.rl_or_sft == "sft":
        return choose_output(config, is_planned=True).folder.path.parent, False
    tuning = tuning_config(config)
    if output := finished_output(tuning):
        return output, True
    return choose_output(tuning, is_planned=True).folder.path.parent, False


def wait_for_others(config: Config) -> None:
    """While another process fine-tunes where this run would: say so once, and wait for it.

    With these settings it leaves a finished model. With others this run writes elsewhere once it has logged a step.
    """
    was_announced = False
    while owner := (folder := choose_output(config, is_planned=True).folder).live_owner():
        if not was_announced:
            print(f"fine-tuning: waiting for {owner} in {folder} (Ctrl-C to stop waiting)", file=sys.stderr)
            was_announced = True
        sleep(POLL_SECONDS)


def _as_planned(config: Config, folder: Path) -> Config:
    num_steps = stored_steps(RunFolder(folder)) or config.trainer.total_training_steps
    trainer = replace(config.trainer, total_training_steps=num_steps, gradient_analysis_only=False)
    return replace(config, trainer=trainer)


def _run_folder(config: Config, output: Path) -> Path:
    return output / Path(derive.sft_folder(config)).name
