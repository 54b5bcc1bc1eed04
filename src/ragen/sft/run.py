"""Fine-tuning: from solved levels to a validated model.

    run = fine_tune(config)              # rl_or_sft=sft; -> Run, as of any training
    tuned = tune(config)                 # the same; tuned.output / MERGED is the model

    models/sft/                                    `sft.output_dir`
      sft/data/sokoban/{train,test}.parquet        the solved levels, see `data`
      lora_weights/                                a run folder: config, metrics, report, train.log, …
      lora_weights/global_step_30/                 a checkpoint after each epoch
      merged_model/                                the best of them, merged into its base: transformers opens it
      merged_model/validate.log                    how it played the validation levels of RL

The same command resumes. A finished run, one with other settings, and a directory that holds another merged model are
left untouched: a numbered sibling of the output directory is used, `models/sft-2`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ragen.agent.chat_template import ChatTemplate
from ragen.checkpoint.model_folder import write_model_folder
from ragen.checkpoint.parts import part_of
from ragen.checkpoint.save import CheckpointStore
from ragen.config import derive
from ragen.config.schema import Config
from ragen.engine.native.engine import NativeEngine
from ragen.format import percent
from ragen.model.load import Source, find_model, load_model
from ragen.rollout.collect import World
from ragen.run.clock import Clock
from ragen.run.progress import progress
from ragen.run.session import Run, Session, joined, session
from ragen.run.step_line import step_line
from ragen.sft.data import AnswerRow, Data, Lesson, make_data, write_data
from ragen.sft.output_dir import choose_output
from ragen.sft.tokens import num_answers
from ragen.sft.train import Tuner, plan_batches
from ragen.store.fsync import write_whole
from ragen.store.lineage import MERGED
from ragen.store.resume import Decision
from ragen.train.validation import Validator

TRAIN_LOG, VALIDATE_LOG = "train.log", "validate.log"


@dataclass(frozen=True)
class Tuned:
    """How fine-tuning ended. A signal in its last step leaves a finished run, but no RL should follow."""

    run: Run
    stopped: str = ""  # interrupted or preempted, if it was

    @property
    def output(self) -> Path:
        """`sft.output_dir`, or the sibling of it that was taken."""
        return self.run.folder.parent


def fine_tune(config: Config) -> Run:
    """Make the data, learn it, merge the best epoch, and let it play; or until interrupted."""
    return tune(config).run


def tune(config: Config) -> Tuned:
    """`fine_tune`, and whether the user asked it to stop."""
    with joined(config) as workers:
        source = find_model(config.sft.training.base_model)  # before the folder is claimed
        data = workers.agree(_solve(config) if workers.is_first else None)
        batches = plan_batches(num_answers(data.train, derive.rules(config)), config)
        config = _as_run(config, len(batches))
        keep_all = partial(CheckpointStore, keep_actor=None)  # the best epoch is merged
        with session(config, workers, choose_output, keep_all, TRAIN_LOG) as run:
            output = run.folder.path.parent
            if workers.is_first:
                _store_data(data, config, run.decision)
                run.log.note(describe(data, data_folder(config, output)))
            tuner = run.load(lambda: Tuner(config, source, data, batches, run))
            ending = run.fit(tuner)
            stopped = run.stop_status()
            if ending.status == "finished":
                merged, best_step = _merge(tuner, source, output / MERGED), tuner.best.step
                assert best_step is not None  # else there was nothing to merge
                del tuner  # the merged model needs its memory
                _validate(config, merged, best_step, run)
            return Tuned(run.finish(ending), stopped)


def data_folder(config: Config, output: Path) -> Path:
    """Below the output directory, unless `data_dir` is absolute."""
    return output / config.sft.data_generation.data_dir / config.sft.env_type


def _as_run(config: Config, num_steps: int) -> Config:
    """The config that the run stores and shows: names from `sft.*`, and a budget that follows from the data."""
    training = config.sft.training
    trainer = replace(
        config.trainer,
        project_name=training.project_name,
        experiment_name=training.experiment_name,
        logger=training.logger,
        total_training_steps=num_steps,
        gradient_analysis_only=False,
    )
    return replace(config, trainer=trainer)


def _solve(config: Config) -> Data:
    lesson, num_processes = Lesson.of(config), config.sft.data_generation.num_processes
    with progress("solving levels", lesson.train_size + lesson.test_size, "levels", is_brief=True) as advance:
        return make_data(lesson, num_processes, advance)


def _store_data(data: Data, config: Config, decision: Decision) -> None:
    """Write the rows; inside the output folder they replace those of an attempt that failed before its first step."""
    output = decision.folder.path.parent
    folder = data_folder(config, output).resolve()
    is_ours = folder.is_relative_to(output.resolve())
    write_data(data, folder, replace=is_ours and not decision.resumes)


def describe(data: Data, folder: Path) -> str:
    sizes = [f"{_num_levels(rows)} with {len(rows)} answers to {name}" for name, rows in data.sets().items()]
    return (
        f"data: {', '.join(sizes)}; the solver wins {percent(data.success)}; {data.num_skipped} skipped; "
        f"{percent(data.shared)} of the evaluation levels are among the training levels; {folder}"
    )


def _num_levels(rows: Sequence[AnswerRow]) -> str:
    """How many levels, and how many different boards: seeds may repeat small ones."""
    boards = [row["prompt"][-1]["content"] for row in rows if row["extra_info"]["turn"] == 1]
    num_boards = len(set(boards))
    return f"{len(boards)} levels" + (f" ({num_boards} different)" if num_boards < len(boards) else "")


def _merge(tuner: Tuner, source: Source, target: Path) -> Path:
    """Write the best weights as an ordinary model folder in float32; an existing one was written by this run."""
    checkpoint, run = tuner.best_checkpoint(), tuner.session
    if run.workers.is_first:
        if checkpoint is None:
            run.log.note(f"no epoch is better than the base model (loss {tuner.best.loss:.4f}): {target} is the base")
        else:
            run.log.note(f"best: step {tuner.best.step}, with loss {tuner.best.loss:.4f} on the test rows; in {target}")
        if not target.exists():
            with run.log.phase("merging"):
                best = load_model(source if checkpoint is None else find_model(str(checkpoint)), "cpu")
                write_model_folder(target, part_of(best), run.folder.path)
    run.workers.agree(None)
    return target


def _validate(config: Config, merged: Path, step: int, run: Session) -> None:
    """Play RL's validation levels with the merged model on disk, as the step whose weights it has."""
    with run.log.phase("loading"):
        loaded = load_model(find_model(str(merged)), run.workers.device)
        chat = ChatTemplate(loaded.tokenizer)
        worlds = {tag: World.make(config, tag, chat) for tag in config.es_manager.val.env_configs.tags}
        validator = Validator(config, worlds, run.workers)
    share = config.actor_rollout_ref.rollout.gpu_memory_utilization
    engine = NativeEngine(loaded.model, loaded.tokenizer, chat.end_of_turn_id, memory_share=share)
    clock = Clock()
    metrics = validator.validate(engine, run.log, step, clock)
    run.log.step(step, metrics | clock.metrics())
    if run.workers.is_first:
        write_whole(merged / VALIDATE_LOG, f"{step_line(step, metrics)}\n".encode())
    for tag in worlds:
        run.log.note(f"{merged}: {success_text(tag, metrics)}")


def success_text(tag: str, metrics: dict[str, float]) -> str:
    """Success with its interval and baselines."""

    def of(name: str) -> str:
        value = metrics.get(f"val-env/{tag}/{name}")
        return "unknown" if value is None else percent(value)

    return (
        f"{tag} success {of('success')} [{of('success_low')}, {of('success_high')}], greedy {of('greedy_success')}; "
        f"random play {of('random')}, optimal play {of('optimal')}"
    )
