"""Fine-tuning from solved levels to a model that has been seen playing.

    run = fine_tune(config)              # rl_or_sft=sft; -> Run, as of any training
    tuned = tune(config)                 # the same; tuned.output / MERGED is the model

    models/sft/                                    `sft.output_dir`
      sft/data/sokoban/{train,test}.parquet        the solved levels, see `data`
      lora_weights/                                a run folder: config, metrics, report, train.log, …
      lora_weights/global_step_30/                 a checkpoint after each epoch
      merged_model/                                the best of them, merged into its base: transformers opens it
      merged_model/validate.log                    how it played the validation levels of RL

The same command goes on where it was stopped. A finished run, one of other settings, and a folder that holds a merged
model of other origin are left alone: a numbered sibling of the output folder is taken, `models/sft-2`.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from ragen.agent.template import ChatTemplate
from ragen.checkpoint.model_folder import write_model_folder
from ragen.checkpoint.parts import part_of
from ragen.config import derive, devices
from ragen.config.schema import Config
from ragen.distributed.workers import Workers
from ragen.engine.native.engine import NativeEngine
from ragen.format import percent
from ragen.model.load import Source, find_model, load_model
from ragen.rollout.collect import World
from ragen.run import memory
from ragen.run.clock import Clock
from ragen.run.console import step_line
from ragen.run.interrupt import Interrupt
from ragen.run.run_logger import Silent, recording
from ragen.sft.data import Data, Lesson, Row, make_data, write_data
from ragen.sft.output_dir import MERGED, place
from ragen.sft.tokens import num_answers
from ragen.sft.train import Tuner, plan
from ragen.store.resume import Decision, claimed
from ragen.store.run_folder import write_whole
from ragen.train.loop import Run
from ragen.train.validation import Validator

VALIDATE_LOG = "validate.log"


@dataclass(frozen=True)
class Tuned:
    """How fine-tuning ended. Who presses Ctrl-C in its last step gets a finished run, and wants no other after it."""

    run: Run
    is_interrupted: bool

    @property
    def output(self) -> Path:
        """`sft.output_dir`, or the sibling of it that was taken."""
        return self.run.folder.parent


def fine_tune(config: Config) -> Run:
    """Make the data, learn it, merge the best epoch, and let it play; or until interrupted."""
    return tune(config).run


def tune(config: Config) -> Tuned:
    """`fine_tune`, and whether somebody wanted it to stop."""
    with ExitStack() as stack:
        stack.enter_context(devices.visible(config.system.CUDA_VISIBLE_DEVICES))
        workers = Workers.join()
        stack.enter_context(workers.together())
        source = find_model(config.sft.training.base_model)  # before anything else is built
        data = workers.agree(_solve(config) if workers.is_first else None)
        batches = plan(num_answers(data.train, derive.rules(config)), config)
        config = _as_run(config, len(batches))
        decision = workers.agree(stack.enter_context(claimed(config, place)) if workers.is_first else None)
        folder = decision.folder.path
        stack.enter_context(memory.explained(config, workers.device, folder))
        record = stack.enter_context(recording(config, decision)) if workers.is_first else Silent()
        if workers.is_first:
            _keep(data, config, decision)
            record.note(describe(data, data_folder(config, folder.parent)))
        with record.phase("loading"):
            tuner = Tuner(config, source, data, batches, workers, record, folder)
            if decision.checkpoint is not None:
                tuner.restore(decision.checkpoint)
        if decision.reason:
            record.note(decision.reason)
        with Interrupt(record.note) as interrupt:
            status, step = tuner.fit(decision.first_step, lambda: workers.agree(interrupt.is_set))
        is_interrupted = workers.agree(interrupt.is_set)
        if status == "finished":
            merged, best_step = _merge(tuner, source, folder.parent / MERGED), tuner.best.step
            del tuner  # the merged model needs its room
            _validate(config, merged, best_step, workers, record)
        report = record.ended(status, step)
        if status == "interrupted":
            record.note(f"interrupted after step {step}: the same command goes on from there")
    return Tuned(Run(folder, report, step, status), is_interrupted)


# --- where it happens ---------------------------------------------------------------------------------------------


def data_folder(config: Config, output: Path) -> Path:
    """Below the output folder, unless `data_dir` says where."""
    return output / config.sft.data_generation.data_dir / config.sft.env_type


def _as_run(config: Config, num_steps: int) -> Config:
    """The config under which the run is stored and shown: named as `sft.*` says, with the budget that the data ask."""
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


# --- data ---------------------------------------------------------------------------------------------------------


def _solve(config: Config) -> Data:
    lesson, num_processes = Lesson.of(config), config.sft.data_generation.num_processes
    with _progress("solving levels", lesson.train_size + lesson.test_size) as advance:
        return make_data(lesson, num_processes, advance)


def _keep(data: Data, config: Config, decision: Decision) -> None:
    """Store the rows. In an output folder in which no run has begun, those of an attempt that failed before are
    replaced; outside of it they may be another run's."""
    output = decision.folder.path.parent
    folder = data_folder(config, output).resolve()
    is_ours = folder.is_relative_to(output.resolve())
    write_data(data, folder, replace=is_ours and not decision.goes_on)


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on the terminal, which goes away; nothing elsewhere: the first line of a log names the run folder."""
    if not sys.stderr.isatty():
        yield lambda num: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda num: bar.advance(task, num)


def describe(data: Data, folder: Path) -> str:
    sizes = [f"{_num_levels(rows)} with {len(rows)} answers to {name}" for name, rows in data.sets().items()]
    return (
        f"data: {', '.join(sizes)}; the solver wins {percent(data.success)}; {data.num_left_out} left out; "
        f"{percent(data.shared)} of the levels that evaluations play are among those to train; {folder}"
    )


def _num_levels(rows: Sequence[Row]) -> str:
    """How many, and how many boards these are: small ones come from many seeds."""
    boards = [row["prompt"][-1]["content"] for row in rows if row["extra_info"]["turn"] == 1]
    num_boards = len(set(boards))
    return f"{len(boards)} levels" + (f" ({num_boards} different)" if num_boards < len(boards) else "")


# --- the result ---------------------------------------------------------------------------------------------------


def _merge(tuner: Tuner, source: Source, target: Path) -> Path:
    """Write the best weights as an ordinary model folder in float32; one that is there was written by this run."""
    checkpoint, record = tuner.best_checkpoint(), tuner.record
    if tuner.workers.is_first:
        if checkpoint is None:
            record.note(f"no epoch is better than the base model (loss {tuner.best.loss:.4f}): {target} is the base")
        else:
            record.note(f"best: step {tuner.best.step}, with loss {tuner.best.loss:.4f} on the test rows; in {target}")
        if not target.exists():
            with record.phase("merging"):
                best = load_model(source if checkpoint is None else find_model(str(checkpoint)), "cpu")
                write_model_folder(target, part_of(best), tuner.folder.path)
    tuner.workers.agree(None)
    return target


def _validate(config: Config, merged: Path, step: int, workers: Workers, record: Silent) -> None:
    """Let the merged model, as it is on disk, play the validation levels of RL. What it reaches is the success of the
    step whose weights it has, although later ones were recorded before."""
    with record.phase("loading"):
        loaded = load_model(find_model(str(merged)), workers.device)
        chat = ChatTemplate(loaded.tokenizer)
        worlds = {tag: World.make(config, tag, chat) for tag in config.es_manager.val.env_configs.tags}
        validator = Validator(config, worlds, workers)
    engine, clock = NativeEngine(loaded.model, loaded.tokenizer, chat.end_of_turn_id), Clock()
    with clock("testing"), record.phase("validation", total=validator.num_episodes):
        metrics, groups = validator.run(engine, record.advance)
    record.episodes(step, "val", groups, lambda tag, state: worlds[tag].env.render(state))
    record.validation(step, metrics)
    record.step(step, metrics | clock.metrics())
    if workers.is_first:
        write_whole(merged / VALIDATE_LOG, f"{step_line(step, metrics)}\n".encode())
    for tag in worlds:
        record.note(f"{merged}: {success_text(tag, metrics)}")


def success_text(tag: str, metrics: dict[str, float]) -> str:
    """Success with its interval, and between which ends it lies."""

    def of(name: str) -> str:
        return percent(metrics[f"val-env/{tag}/{name}"])

    return (
        f"{tag} success {of('success')} [{of('success_low')}, {of('success_high')}], greedily {of('greedy_success')}; "
        f"random play has {of('random')}, perfect play {of('optimal')}"
    )
