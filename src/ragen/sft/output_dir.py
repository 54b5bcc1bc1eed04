"""Where fine-tuning happens: in its output folder, or in a numbered sibling of it. No torch in here.

    decision = choose_output(config)               # where to begin or to go on
    wait_for_others(config)                  # until no other process is at work there
    output = finished_output(config)         # where these very settings have been fine-tuned already, or None
    model = output / MERGED

A run of RL has many settings that fine-tuning does not look at (`config.unread`). They make no other fine-tuning:
several runs of RL may start from one of it.
"""

import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

from ragen.config import derive
from ragen.config.schema import Config
from ragen.config.unused_keys import NOT_IN_SFT
from ragen.store.lineage import MERGED
from ragen.store.resume import Decision, decide, holds_finished, stored_steps
from ragen.store.run_folder import RunFolder

POLL_SECONDS = 5.0
ASIDE = (*NOT_IN_SFT, "sft.training.num_gpus", "sft.data_generation.num_processes")  # these decide how long it takes


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


def choose_output(config: Config, is_planned: bool = False) -> Decision:
    """The first of the output folder and its numbered siblings in which this run can begin or go on.

    Only the data tell how many steps there are. A plan makes none: equal settings have as many as are stored.
    """
    left_alone = ""
    for output in _outputs(config):
        folder = _run_folder(config, output)
        decision = decide(_as_planned(config, folder) if is_planned else config, folder, ASIDE)
        is_taken = (output / MERGED).exists() and not decision.resumes
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
    """For a plan: where fine-tuning would write; before RL, perhaps where it has written, and whether it has."""
    if config.rl_or_sft == "sft":
        return choose_output(config, is_planned=True).folder.path.parent, False
    tuning = tuning_config(config)
    if output := finished_output(tuning):
        return output, True
    return choose_output(tuning, is_planned=True).folder.path.parent, False


def wait_for_others(config: Config) -> None:
    """While another process fine-tunes where this run would: say so once, and wait for it.

    With these settings it leaves a finished model. With others it has a place of its own once it has recorded a step.
    """
    is_told = False
    while owner := (folder := choose_output(config, is_planned=True).folder).live_owner():
        if not is_told:
            print(
                f"fine-tuning: process {owner['pid']} on {owner['host']} is at work in {folder}: waiting for it "
                f"(Ctrl-C ends the waiting; if that process is long gone, delete {folder.owner_path})",
                file=sys.stderr,
            )
            is_told = True
        time.sleep(POLL_SECONDS)


def _as_planned(config: Config, folder: Path) -> Config:
    num_steps = stored_steps(RunFolder(folder)) or config.trainer.total_training_steps
    trainer = replace(config.trainer, total_training_steps=num_steps, gradient_analysis_only=False)
    return replace(config, trainer=trainer)


def _outputs(config: Config) -> Iterator[Path]:
    base = Path(config.sft.output_dir)
    yield base
    for number in count(2):
        yield base.with_name(f"{base.name}-{number}")


def _run_folder(config: Config, output: Path) -> Path:
    return output / Path(derive.sft_folder(config)).name
