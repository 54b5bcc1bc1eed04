"""Learning from answers: epochs over the training rows, the loss on the test rows between them, the best one kept.

    batches = plan_batches(num_answers(rows, rules), config)         # known before anything is loaded
    tuner = Tuner(config, source, data, batches, session)
    session.fit(tuner)
    tuner.best                                                       # Best(step=30, loss=0.12)

A step is one optimizer step. `sft.training.train_batch_size` counts answers; a level's answers stay together, so a
batch may hold a few more. The order of each epoch is drawn from the seed, so the step alone says where a run is, and a
resumed run ends like one that was never stopped.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ragen.agent.chat_template import ChatTemplate
from ragen.checkpoint.parts import Parts, part_of
from ragen.config import derive
from ragen.config.schema import Config, Optimizer
from ragen.errors import RunFailed
from ragen.model.load import Source, load_model
from ragen.model.lora import add_adapters
from ragen.model.redo import Redo
from ragen.model.scoring import Scorer
from ragen.prng import bits
from ragen.run.clock import Clock
from ragen.run.session import Ending, Session
from ragen.sft.data import Data
from ragen.sft.tokens import Answers, answers_of
from ragen.store.manifest import checkpoint_name
from ragen.train.optimizer import MasterAdamW
from ragen.train.update import imitate

BETAS = [0.9, 0.95]
WEIGHT_DECAY = 0.01
WARM_UP = 0.1  # of all steps
GRAD_CLIP = 1.0


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


def plan_batches(answers: Sequence[int], config: Config) -> list[Batch]:
    """All steps of a run, from the number of answers in each sequence."""
    training = config.sft.training
    batches = []
    for epoch in range(1, training.epochs + 1):
        draws = ("sft", config.seed.train, epoch)
        order = sorted(range(len(answers)), key=lambda index: bits(*draws, index, num_bits=64))
        parts = list(_cut(order, answers, training.train_batch_size))
        batches += [Batch(epoch, tuple(part), part is parts[-1]) for part in parts]
    return batches


def _cut(order: Sequence[int], answers: Sequence[int], size: int) -> Iterator[list[int]]:
    """Batches of at least `size` answers; the last may be smaller."""
    batch: list[int] = []
    for index in order:
        batch.append(index)
        if sum(answers[index] for index in batch) >= size:
            yield batch
            batch = []
    if batch:
        yield batch


class Tuner:
    def __init__(self, config: Config, source: Source, data: Data, batches: Sequence[Batch], session: Session):
        self.config, self.session, self.log, self.batches = config, session, session.log, batches
        self.num_steps, self.best = len(batches), Best()
        training = config.sft.training
        self.micro_size = training.micro_batch_size // training.num_gpus
        self.loaded = load_model(source, session.workers.device)
        self.model = self.loaded.model
        self.model.gradient_checkpointing = training.enable_gradient_checkpointing
        if training.lora_rank > 0:
            rank, alpha, seed = training.lora_rank, training.lora_alpha, config.seed.train
            add_adapters(self.model, rank, alpha, training.target_modules, seed)
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
        self.redo = Redo("fine-tuning", session.log.note)
        self.scorer = Scorer(session.workers, temperature=1.0, micro_batch_size=self.micro_size, redo=self.redo)

    def fit(self) -> Ending:
        if self.session.first_step == 1 and self.config.sft.training.validate_before_training:
            clock = Clock()
            with self.session.droppable():
                metrics = self._test(0, clock)
            self.session.log_step(0, metrics, clock)
        return self.session.steps(self)

    def step(self, step: int, clock: Clock) -> dict[str, float]:
        batch = self.batches[step - 1]
        samples = [self.train[index] for index in batch.indices]
        self.session.commit()
        with clock("update_actor"), self.log.phase("update", total=len(samples)):
            updated = imitate(
                self.model, self.optimizer, samples, self.micro_size, GRAD_CLIP, self.session.workers, self.log.advance,
                self.redo,
            )  # fmt: skip
        if updated.skipped:
            self.log.note(f"step {step}: loss or gradient was not finite: the update is skipped")
        metrics = updated.metrics | {
            "train/epoch": float(batch.epoch),
            "train/num_sequences": float(len(samples)),
            "train/num_tokens": float(sum(len(sample.sequence.ids) for sample in samples)),
            "train/num_answer_tokens": float(sum(sample.num_sampled for sample in samples)),
        }
        self.optimizer.advance()
        return metrics

    def validate(self, step: int, clock: Clock) -> dict[str, float]:
        if not self.batches[step - 1].ends_epoch:
            return {}
        with self.session.droppable():
            return self._test(step, clock)

    def _test(self, step: int, clock: Clock) -> dict[str, float]:
        with clock("testing"), self.log.phase("test loss"):
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
        return None if self.best.step == 0 else self.session.folder.path / checkpoint_name(self.best.step)

    def ending(self, step: int) -> Ending | None:
        return None

    def save(self, step: int, now: bool) -> None:
        if now or self.batches[step - 1].ends_epoch:
            self.session.save(step, self.parts())

    def parts(self) -> Parts:
        return Parts(part_of(self.loaded, self.optimizer), state=self.state())

    def state(self) -> dict[str, Any]:
        best = None if self.best.step is None else {"step": self.best.step, "loss": self.best.loss}
        return {"best": best, "totals": self.session.totals.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        if state:
            self.best = Best() if state["best"] is None else Best(**state["best"])
            self.session.totals.restore(state["totals"])
