"""Learning from answers: epochs over the training rows, the loss on the test rows between them, the best one kept.

    batches = plan(num_answers(rows, rules), config)         # known before anything is loaded
    tuner = Tuner(config, source, data, batches, workers, record, folder)
    status, step = tuner.fit(first_step=1)
    tuner.best                                               # Best(step=30, loss=0.12)

A step is one optimizer step. `sft.training.train_batch_size` counts answers; a level's answers stay together, so a
batch may hold a few more. Every epoch has an order of its own, drawn from the seed: where a run stands is told by its
step alone, and one that goes on from a checkpoint ends like one that was never stopped.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ragen.agent.template import ChatTemplate
from ragen.checkpoint.parts import Parts, part_of
from ragen.checkpoint.restore import restore
from ragen.checkpoint.save import CheckpointStore
from ragen.config import derive
from ragen.config.schema import Config, Optimizer
from ragen.distributed.workers import Workers
from ragen.errors import RunFailed
from ragen.model.load import LoadedModel, Source, load_model
from ragen.model.lora import add_adapters
from ragen.model.scoring import Scorer
from ragen.prng import bits
from ragen.run.clock import Clock, Totals
from ragen.run.console import step_line
from ragen.run.run_logger import Silent
from ragen.sft.data import Data
from ragen.sft.tokens import Answers, answers_of
from ragen.store.run_folder import RunFolder, write_whole
from ragen.train.optimizer import MasterAdamW
from ragen.train.update import imitate

BETAS = [0.9, 0.95]
WEIGHT_DECAY = 0.01
WARM_UP = 0.1  # of all steps
GRAD_CLIP = 1.0
LOG = "train.log"


@dataclass(frozen=True)
class Batch:
    """The sequences of one step. Epochs count from 1."""

    epoch: int
    indices: tuple[int, ...]
    ends_epoch: bool


@dataclass(frozen=True)
class Best:
    """The step after which the loss on the test rows was lowest; 0 is the model as it came."""

    step: int | None = None
    loss: float = math.inf


def plan(answers: Sequence[int], config: Config) -> list[Batch]:
    """All steps of a run, from the number of answers in each sequence."""
    training = config.sft.training
    batches = []
    for epoch in range(1, training.epochs + 1):
        parts = list(_cut(_order(len(answers), config.seed.train, epoch), answers, training.train_batch_size))
        batches += [Batch(epoch, tuple(part), part is parts[-1]) for part in parts]
    return batches


def _order(num: int, seed: int, epoch: int) -> list[int]:
    return sorted(range(num), key=lambda index: bits("sft", seed, epoch, index, num_bits=64))


def _cut(order: Sequence[int], answers: Sequence[int], size: int) -> Iterator[list[int]]:
    """Batches of at least `size` answers, but for the last one."""
    batch: list[int] = []
    for index in order:
        batch.append(index)
        if sum(answers[index] for index in batch) >= size:
            yield batch
            batch = []
    if batch:
        yield batch


class Tuner:
    """What fine-tuning holds while it learns."""

    def __init__(
        self,
        config: Config,
        source: Source,
        data: Data,
        batches: Sequence[Batch],
        workers: Workers,
        record: Silent,
        folder: Path,
    ):
        self.config, self.workers, self.record, self.batches = config, workers, record, batches
        self.folder = RunFolder(folder)
        training = config.sft.training
        self.micro_size = training.micro_batch_size // training.num_gpus
        self.loaded = self._load(source)
        self.model = self.loaded.model
        chat, rules = ChatTemplate(self.loaded.tokenizer), derive.rules(config)
        self.train, self.test = (answers_of(rows, chat, rules, training.max_length) for rows in (data.train, data.test))
        settings = Optimizer(
            lr=training.learning_rate,
            betas=BETAS,
            weight_decay=WEIGHT_DECAY,
            lr_warmup_steps_ratio=WARM_UP,
            lr_scheduler_type="cosine",
        )
        self.optimizer = MasterAdamW(self.model.parameters(), settings, len(batches))
        self.scorer = Scorer(workers, temperature=1.0, micro_batch_size=self.micro_size)
        self.store = CheckpointStore(folder, keep_actor=None, note=record.note)
        self.best, self.totals = Best(), Totals()

    def _load(self, source: Source) -> LoadedModel:
        training = self.config.sft.training
        loaded = load_model(source, self.workers.device)
        loaded.model.gradient_checkpointing = training.enable_gradient_checkpointing
        if training.lora_rank > 0:
            seed = self.config.seed.train
            add_adapters(loaded.model, training.lora_rank, training.lora_alpha, training.target_modules, seed)
        return loaded

    # --- the run --------------------------------------------------------------------------------------------------

    def fit(self, first_step: int = 1, is_interrupted: Callable[[], bool] = lambda: False) -> tuple[str, int]:
        """All steps from `first_step` on; returns how it ended and the last step."""
        self._begin_log()
        if first_step == 1 and self.config.sft.training.validate_before_training:
            clock = Clock()
            self._record(0, self._validate(0, clock), clock)
        for step in range(first_step, len(self.batches) + 1):
            batch, clock = self.batches[step - 1], Clock()
            with clock("step"):
                metrics = self._step(step, batch, clock)
                if batch.ends_epoch:
                    metrics |= self._validate(step, clock)
            self.optimizer.advance()
            self._record(step, metrics, clock)
            interrupted = is_interrupted()
            if batch.ends_epoch or interrupted:
                self._save(step)
            if interrupted and step < len(self.batches):
                return "interrupted", step
        return "finished", len(self.batches)

    def _step(self, step: int, batch: Batch, clock: Clock) -> dict[str, float]:
        samples = [self.train[index] for index in batch.indices]
        with clock("update_actor"), self.record.phase("update", total=len(samples)):
            updated = imitate(
                self.model, self.optimizer, samples, self.micro_size, GRAD_CLIP, self.workers, self.record.advance
            )
        if updated.spoilt:
            self.record.note(f"step {step}: loss or gradient was not finite, so the weights stay as they are")
        return updated.metrics | {
            "train/epoch": float(batch.epoch),
            "train/num_sequences": float(len(samples)),
            "train/num_tokens": float(sum(len(sample.sequence.ids) for sample in samples)),
            "train/num_answer_tokens": float(sum(sample.num_sampled for sample in samples)),
        }

    def _validate(self, step: int, clock: Clock) -> dict[str, float]:
        with clock("testing"), self.record.phase("test loss"):
            loss = self.loss(self.test)
        if loss < self.best.loss:
            self.best = Best(step, loss)
        return {"val/loss": loss}

    def loss(self, samples: Sequence[Answers]) -> float:
        """The mean cross-entropy of a token of an answer."""
        return -float(torch.cat(self.scorer.log_probs(self.model, samples)).double().mean())

    def best_checkpoint(self) -> Path | None:
        """Where the best weights are; None if they are those of the base model."""
        if self.best.step is None:
            raise RunFailed("no loss on the test rows was finite: lower sft.training.learning_rate")
        return None if self.best.step == 0 else self.folder.path / f"global_step_{self.best.step}"

    # --- what is recorded -----------------------------------------------------------------------------------------

    def _record(self, step: int, metrics: dict[str, float], clock: Clock) -> None:
        metrics = metrics | clock.metrics() | self.totals.add(clock)
        self.record.step(step, metrics)
        if self.workers.is_first:
            with open(self.folder.path / LOG, "a", encoding="utf-8") as file:
                file.write(f"{step_line(step, metrics)}\n")

    def _begin_log(self) -> None:
        """The lines of the steps that are behind us."""
        if self.workers.is_first:
            lines = [step_line(row["step"], {key: row[key] for key in row if key != "step"}) for row in self._rows()]
            write_whole(self.folder.path / LOG, "".join(f"{line}\n" for line in lines).encode())

    def _rows(self) -> list[dict[str, Any]]:
        return self.folder.read_metrics().rows

    # --- checkpoints ----------------------------------------------------------------------------------------------

    def _parts(self) -> Parts:
        best = None if self.best.step is None else {"step": self.best.step, "loss": self.best.loss}
        state = {"best": best, "totals": self.totals.state()}
        return Parts(part_of(self.loaded, self.optimizer), state=state)

    def _save(self, step: int) -> None:
        if self.workers.is_first:
            with self.record.phase("checkpoint"):
                self.store.save(step, self._parts())
        self.workers.agree(None)  # nobody goes on before it is written

    def restore(self, checkpoint: Path) -> None:
        state = restore(checkpoint, self._parts())
        if state:
            self.best = Best() if state["best"] is None else Best(**state["best"])
            self.totals.restore(state["totals"])
