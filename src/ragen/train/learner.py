"""What a run trains: the actor and, only where a loss term needs them, a reference model and a critic.

    learner = Learner(config, find_models(config), workers)
    token_scores = learner.score(samples, clock)                                       # log-probs, values
    targets, metrics = learner.make_targets(groups, scores, token_scores, kept_ratio, learner.kl_control, clock)
    updated = learner.update_actor(step, samples, targets)

With an adapter (`lora.rank` above 0) the reference is the actor with its adapter off.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ragen.algo.kl import KlController, kl_of_tokens, pay_kl
from ragen.checkpoint.parts import Part, part_of
from ragen.config import derive
from ragen.config.schema import Config, TrainedModel
from ragen.distributed.workers import Workers
from ragen.machine import ram_bytes
from ragen.model.activations import gpu_capacity
from ragen.model.critic import Critic
from ragen.model.load import LoadedModel, Source, find_model, load_model
from ragen.model.lora import BaseModel, add_adapters
from ragen.model.packing import Sample, samples_of
from ragen.model.redo import Redo
from ragen.model.scoring import Scorer, by_sample
from ragen.protocols import LanguageModel
from ragen.run.clock import Clock
from ragen.run.memory_plan import ACTOR, CRITIC, MemoryPlan, offloaded_by_key
from ragen.run.model_shape import ModelShape
from ragen.run.nearest_fit import check_fits
from ragen.train.offload import make_optimizer
from ragen.train.targets import Scores, estimate, experience_of
from ragen.train.update import REDONE, Limits, Targets, Updated, update_actor, update_critic
from ragen.types import Group

OnSamples = Callable[[int], None]


def find_models(config: Config) -> dict[str, Source]:
    """Where the files of each model that the run needs are."""
    actor = config.actor_rollout_ref.model.path
    names = {"actor": actor}
    if derive.reference_model(config).needed and not derive.reference_is_actor(config):
        names["reference"] = actor
    if derive.critic_model(config).needed:
        names["critic"] = config.critic.model.path
    return {role: find_model(name) for role, name in names.items()}


def plan_memory(config: Config, sources: Mapping[str, Source], device: torch.device) -> MemoryPlan | None:
    """The memory plan of a run on a GPU, before anything is loaded; None on a CPU, and for models of unknown shape.

    Raises `ConfigError` if the run cannot fit.
    """
    if device.type != "cuda":
        return None
    shapes = {role: ModelShape.of_folder(source.name, source.model_folder) for role, source in sources.items()}
    actor, critic = shapes["actor"], shapes.get("critic")
    if actor is None or (critic is None and "critic" in sources):
        return None
    _, host_memory = ram_bytes()
    return check_fits(actor, config, gpu_capacity(device), critic, host_memory)


class TokenScores(NamedTuple):
    """What the models say about samples: for each a tensor with one number per sampled token."""

    old_log_probs: Sequence[Tensor]
    reference: Sequence[Tensor] | None
    values: Sequence[Tensor] | None
    num_redone: int = 0  # passes that memory did not suffice for at first, on all workers


class Learner:
    """Without a memory plan, as on a CPU, the config alone says how large micro-batches are and what is offloaded."""

    def __init__(
        self,
        config: Config,
        sources: Mapping[str, Source],
        workers: Workers,
        plan: MemoryPlan | None = None,
        note: Callable[[str], None] = lambda line: None,
    ):
        self.config, self.workers = config, workers
        total, rollout = config.trainer.total_training_steps, config.actor_rollout_ref.rollout
        offloaded = offloaded_by_key(config) if plan is None else plan.offloaded
        num_tokens = None if plan is None else plan.num_tokens
        self.actor = self._load(sources["actor"], config.actor_rollout_ref.model)
        self.model = self.actor.model
        self.actor_optimizer = make_optimizer(
            self.model.parameters(), config.actor_rollout_ref.actor.optim, total, ACTOR in offloaded
        )
        self.actor_limits = Limits(num_tokens, Redo("the actor's update", note))
        self.reference: LanguageModel | None = None
        if "reference" in sources:
            self.reference = self._load(sources["reference"]).model.requires_grad_(False)
        elif derive.reference_model(config).needed:
            self.reference = BaseModel(self.model)
        self.critic: Critic | None = None
        if "critic" in sources:
            self.critic_loaded = self._load(sources["critic"], config.critic.model)
            self.critic = Critic(self.critic_loaded.model)
            self.critic_optimizer = make_optimizer(
                self.critic.parameters(), config.critic.optim, total, CRITIC in offloaded
            )
            self.critic_limits = Limits(num_tokens, Redo("the critic's update", note))
        self._redo = Redo("a scoring pass", note)
        self._num_reported = 0  # of the passes that were redone
        self.scorer, self._reference_scorer = (
            self._scorer(settings.log_prob_micro_batch_size_per_gpu, plan)
            for settings in (rollout, config.actor_rollout_ref.ref)
        )
        control = config.algorithm.kl_ctrl
        self.kl_control = KlController(control.type, control.kl_coef, control.target_kl, control.horizon)

    def _load(self, source: Source, settings: TrainedModel | None = None) -> LoadedModel:
        loaded = load_model(source, self.workers.device)
        if settings is not None:
            loaded.model.gradient_checkpointing = settings.enable_gradient_checkpointing and loaded.is_large
            if settings.lora_rank > 0:
                rank, alpha, seed = settings.lora_rank, settings.lora_alpha, self.config.seed.train
                add_adapters(loaded.model, rank, alpha, settings.target_modules, seed)
        return loaded

    def _scorer(self, micro_batch_size: int, plan: MemoryPlan | None) -> Scorer:
        rollout = self.config.actor_rollout_ref.rollout
        most = micro_batch_size * rollout.max_model_len
        most = most if plan is None else min(most, plan.num_scored_tokens)
        return Scorer(self.workers, rollout.temperature, micro_batch_size, most, self._redo)

    def score(self, samples: Sequence[Sample], clock: Clock) -> TokenScores:
        """Log-probs and values, as far as a term needs them."""
        with clock("old_log_prob"):
            old = self._old_log_probs(samples)
        reference = values = None
        if self.reference is not None:
            with clock("ref"):
                reference = self._reference_scorer.log_probs(self.reference, samples)
        if self.critic is not None:
            with clock("values"):
                values = self.scorer.values(self.critic, samples)
        new, self._num_reported = self._redo.count - self._num_reported, self._redo.count
        return TokenScores(old, reference, values, sum(self.workers.gather([new])))

    def _old_log_probs(self, samples: Sequence[Sample]) -> list[Tensor]:
        """Those of the sampler, or of a pass of the learner: `old_log_probs`."""
        whose = self.config.actor_rollout_ref.actor.old_log_probs
        if whose == "auto":
            whose = "sampler" if next(self.model.parameters()).dtype == torch.float32 else "learner"
        if whose == "learner":
            return self.scorer.log_probs(self.model, samples)
        return [torch.tensor(sample.log_probs) for sample in samples]

    def make_targets(
        self,
        groups: Sequence[Group],
        scores: Scores,
        token_scores: TokenScores,
        kept_ratio: float,
        control: KlController,
        clock: Clock,
    ) -> tuple[Targets, dict[str, float]]:
        """Advantages, and metrics of what they were made of. The control sees the KL."""
        config, samples, (old, reference, values, num_redone) = self.config, samples_of(groups), token_scores
        metrics: dict[str, float] = {f"perf/scores_{REDONE}": float(num_redone)} if num_redone else {}
        if reference is not None:
            metrics["rollout/ref_log_prob"] = float(torch.cat(list(reference)).mean())
        with clock("adv"):
            experience = experience_of(groups, scores, config, values)
            if config.algorithm.use_kl_in_reward and reference is not None:
                kl_T = kl_of_tokens(config.algorithm.kl_penalty, torch.cat(list(old)), torch.cat(list(reference)))
                experience, measured = pay_kl(experience, kl_T, control)
                metrics |= measured
            advantages_T, returns_T, measured = estimate(experience, config, kept_ratio)
        returns = None if returns_T is None else by_sample(returns_T, samples)
        return Targets(by_sample(advantages_T, samples), old, reference, values, returns), metrics | measured

    def update_critic(self, samples: Sequence[Sample], targets: Targets, on_samples: OnSamples) -> Updated:
        assert self.critic is not None
        return update_critic(
            self.critic, self.critic_optimizer, samples, targets, self.config, self.workers, on_samples,
            self.critic_limits,
        )  # fmt: skip

    def update_actor(self, step: int, samples: Sequence[Sample], targets: Targets, on_samples: OnSamples) -> Updated:
        return update_actor(
            self.model, self.actor_optimizer, samples, targets, self.config, self.workers,
            self.reference, step, on_samples, self.actor_limits,
        )  # fmt: skip

    def advance(self) -> None:
        """A training step has ended: learning rates follow training steps, not updates."""
        self.actor_optimizer.advance()
        if self.critic is not None:
            self.critic_optimizer.advance()

    def checkpoint_parts(self) -> tuple[Part, Part | None]:
        """Actor and critic."""
        critic = None
        if self.critic is not None:
            critic = replace(part_of(self.critic_loaded, self.critic_optimizer), model=self.critic)
        return part_of(self.actor, self.actor_optimizer), critic
