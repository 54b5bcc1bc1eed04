"""What a run will hold on a GPU, before anything is loaded, and the choices that make it fit.

    found = plan(shape_of("random:Qwen2.5-3B"), config, capacity=80 * 10**9)
    found.num_tokens, found.num_recomputed, found.num_slots, found.offloaded       # what was chosen
    found.peak, found.fits
    found.line()                # memory: 78 GB of 80 GB at the peak: weights 12.3, masters 12.3, …

Held all the time: weights in bf16 (of actor, critic and reference), float32 master weights and Adam's moments of what
is trained. On top comes the largest of three that are never alive together: the sampler's slots and a prefill; a
scoring pass; the float32 gradients of one model and the activations of a micro-batch (`model.activations`). Episodes
are assumed to have the maximum length.

The first choice that fits is taken. In this order a run gives up: micro-batches above 4,096 tokens; slots that stay
during updates (captured graphs have fixed addresses, so slots are kept whole, or released before every update, which
costs about a second a step); layers that are not recomputed; the critic's optimizer state on the GPU, then the actor's
(`train.offload`); at last micro-batches of more than one sequence. `nearest_fit` refuses what does not fit even then.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ragen.engine.native.slot_memory import CUDA_BURST, MAX_ROWS, capacity, slot_bytes, slots_within
from ragen.model.activations import (
    CONTEXT,
    FULL_SPEED,
    OFFLOAD_CHUNK,
    OFFLOAD_CHUNKS,
    fewest_recomputed,
    fits,
    fitting_tokens,
    forward_bytes,
    pass_bytes,
)
from ragen.run.model_shape import ModelShape

if TYPE_CHECKING:
    from ragen.config.schema import Config

ACTOR, CRITIC, REFERENCE = "actor", "critic", "reference"
LARGE = 50_000_000  # parameters from which layers may be recomputed, as in `model.load`
PREFILL_TOKENS = 16384  # that the engine computes at once, at most
SIZE = 2  # bytes of a number in bf16
STATE = 12  # bytes of a trained parameter: a float32 master and two moments
GB = 10**9


# --- what a run has ------------------------------------------------------------------------------------------------


class PlannedModel(NamedTuple):
    """A model of a run. `rank` is that of its adapter, 0 if all weights are trained, None if nothing is."""

    role: str
    shape: ModelShape
    rank: int | None

    @property
    def num_trained(self) -> int:
        if self.rank is None:
            return 0
        return self.shape.num_adapter_parameters(self.rank) if self.rank > 0 else self.shape.num_parameters


def models_of(model: ModelShape, config: "Config", critic: ModelShape | None = None) -> list[PlannedModel]:
    """Actor, critic and reference, as far as the run has them; the critic has the actor's shape unless it is given."""
    from ragen.config import derive

    if config.rl_or_sft == "sft":
        return [PlannedModel(ACTOR, model, config.sft.training.lora_rank)]
    models = [PlannedModel(ACTOR, model, config.actor_rollout_ref.model.lora_rank)]
    if derive.critic_model(config).needed:
        models.append(PlannedModel(CRITIC, critic or model, config.critic.model.lora_rank))
    if derive.reference_model(config).needed and not derive.reference_is_actor(config):
        models.append(PlannedModel(REFERENCE, model, None))
    return models


def offloaded_by_key(config: "Config") -> tuple[str, ...]:
    """Whose optimizer state the user wants in main memory."""
    asked = {
        CRITIC: config.critic.model.fsdp_config.optimizer_offload,
        ACTOR: config.actor_rollout_ref.actor.fsdp_config.optimizer_offload,
    }
    return tuple(role for role, flag in asked.items() if flag)


class MicroBatches(NamedTuple):
    """What a config asks of an update."""

    most: int  # tokens
    longest: int  # sequence: what a micro-batch must hold at least
    share: float  # of the tokens, whose logits are computed
    recomputes: bool  # whether layers may be


def micro_batches_of(model: ModelShape, config: "Config") -> MicroBatches:
    from ragen.config import derive

    if config.rl_or_sft == "sft":
        training = config.sft.training
        most = training.micro_batch_size * training.max_length
        return MicroBatches(most, most, 1.0, training.enable_gradient_checkpointing)
    longest, rollout = longest_sequence(config), config.actor_rollout_ref.rollout
    num_turns = config.agent_proxy.max_turn if config.agent_proxy.context_window_mode == "full" else 1
    sizes = [config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu]
    if derive.critic_model(config).needed:
        sizes.append(config.critic.ppo_micro_batch_size_per_gpu)
    share = min(1.0, num_turns * rollout.response_length / longest)
    recomputes = config.actor_rollout_ref.model.enable_gradient_checkpointing and model.num_parameters > LARGE
    return MicroBatches(max(sizes) * longest, longest, share, recomputes)


def num_conversations(config: "Config") -> int:
    """How many a worker wants to sample at once, in training or validation."""
    train, val, trainer = config.es_manager.train, config.es_manager.val, config.trainer
    num_workers = trainer.n_gpus_per_node * trainer.nnodes
    played = [(train.env_groups, train.group_size)]
    if trainer.test_freq > 0 or trainer.val_before_train or trainer.val_only:
        played.append((min(config.data.val_batch_size or val.env_groups, val.env_groups), val.group_size))
    return min(MAX_ROWS, max(-(-groups // num_workers) * size for groups, size in played))


def longest_sequence(config: "Config") -> int:
    return config.actor_rollout_ref.rollout.max_model_len


# --- the plan ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by purpose, and the choices that they follow from."""

    capacity: int
    weights: int
    masters: int
    moments: int
    gradients: int
    activations: int  # of an update, or the buffers of an offloaded optimizer
    scoring: int  # a pass without gradients
    cache: int  # the sampler's slots
    prefill: int
    host: int  # main memory, of optimizers that are offloaded
    host_free: int | None  # for this worker, if known
    offloaded: tuple[str, ...]
    num_tokens: int  # of a micro-batch
    num_scored_tokens: int  # of a scoring pass
    num_recomputed: int  # layers
    num_layers: int
    num_slots: int
    slot_tokens: int
    keeps_slots: bool  # during updates

    @property
    def held(self) -> int:
        """All the time."""
        return self.weights + self.masters + self.moments

    @property
    def kept(self) -> int:
        """Of the slots, while learning."""
        return self.cache if self.keeps_slots else 0

    @property
    def update(self) -> int:
        return self.held + self.kept + self.gradients + self.activations

    @property
    def peak(self) -> int:
        sampling = self.held + self.cache + self.prefill
        return max(self.update, sampling, self.held + self.kept + self.scoring)

    @property
    def fits(self) -> bool:
        return self.peak + CONTEXT <= self.capacity and not self.fills_host

    @property
    def fills_host(self) -> bool:
        """Whether the state that is offloaded is more than is free in main memory."""
        return self.host_free is not None and self.host > self.host_free

    def line(self) -> str:
        """For the user."""
        return f"memory: {self.peak / GB:.0f} GB of {self.capacity / GB:.0f} GB at the peak: {self.parts()}"

    def parts(self) -> str:
        parts = {
            "weights": self.weights,
            "masters": self.masters,
            "Adam": self.moments,
            "gradients": self.gradients,
            "activations": self.activations,
        }
        listed = ", ".join(f"{name} {value / GB:.1f}" for name, value in parts.items())
        slots = f"{self.num_slots} slots of {self.slot_tokens:,} tokens {self.cache / GB:.1f}"
        slots += ", kept during updates" if self.keeps_slots else ", released before updates"
        text = (
            f"{listed} (micro-batches of {self.num_tokens:,} tokens, {self.num_recomputed} of {self.num_layers} layers "
            f"recomputed); sampler: {slots}"
        )
        if self.offloaded:
            whose = " and ".join(f"{role}'s" for role in self.offloaded)
            text += f"; in main memory: the {whose} masters and Adam {self.host / GB:.1f}"
        return text


def plan(
    model: ModelShape,
    config: "Config",
    capacity: int,
    critic: ModelShape | None = None,
    host_memory: int | None = None,
) -> MemoryPlan:
    """The first choice that fits on a GPU with `capacity` bytes; if none does, the one that needs least.

    `host_memory` is the main memory that is free, if known; the workers of a machine share it.
    """
    host_free = None if host_memory is None else host_memory // config.trainer.n_gpus_per_node
    ways = [
        _Way(model, config, capacity, critic, offloaded, host_free) for offloaded in _offloads(config, model, critic)
    ]
    for way in ways:
        for keeps_slots in (True, False):
            found = way.planned(keeps_slots)
            if found is not None:
                return found
    least = [way.least() for way in ways]
    return next((one for one in least if one.fits), min(least, key=lambda one: (one.fills_host, one.peak)))


def _offloads(config: "Config", model: ModelShape, critic: ModelShape | None) -> Iterator[tuple[str, ...]]:
    """Whose state is in main memory: as few as possible, and all that the user asks for."""
    if config.rl_or_sft == "sft":
        yield ()
        return
    asked, roles = offloaded_by_key(config), [one.role for one in models_of(model, config, critic)]
    trained = [role for role in (CRITIC, ACTOR) if role in roles]
    found = [tuple(role for role in trained if role in asked or role in trained[:count]) for count in range(3)]
    yield from dict.fromkeys(found)


class _Way:
    """What follows from the models and from whose optimizer state is offloaded."""

    def __init__(
        self,
        model: ModelShape,
        config: "Config",
        capacity: int,
        critic: ModelShape | None,
        offloaded: tuple[str, ...],
        host_free: int | None,
    ):
        self.model, self.config, self.capacity, self.offloaded = model, config, capacity, offloaded
        self.host_free = host_free
        models = models_of(model, config, critic)
        self.largest = max((one for one in models if one.rank is not None), key=lambda one: one.shape.num_parameters)
        self.asked = micro_batches_of(self.largest.shape, config)
        self.weights = SIZE * sum(one.shape.num_parameters for one in models)
        self.state = STATE * sum(one.num_trained for one in models if one.role not in offloaded)
        self.host = STATE * sum(one.num_trained for one in models if one.role in offloaded)
        self.buffers = STATE * OFFLOAD_CHUNK * OFFLOAD_CHUNKS if offloaded else 0
        self.gradients = 4 * max(one.num_trained for one in models)
        self.trains_head = any(one.rank == 0 for one in models if one.role == ACTOR)
        self.usable = capacity - CONTEXT
        self._choose_slots()

    def _choose_slots(self) -> None:
        config, longest = self.config, longest_sequence(self.config)
        self.num_wanted = num_conversations(config)
        self.prefill = forward_bytes(self.model, min(PREFILL_TOKENS, self.num_wanted * longest), 0, SIZE)
        share = config.actor_rollout_ref.rollout.gpu_memory_utilization
        room = min(share * self.capacity, self.usable - self.weights - self.state - self.prefill)
        self.num_slots = slots_within(self.model, self.num_wanted, longest, SIZE, room)
        self.cache = slot_bytes(self.model, self.num_slots, longest, SIZE)

    def planned(self, keeps_slots: bool) -> MemoryPlan | None:
        """With room to spare; None if micro-batches would be slow, or if slots that stay cost recomputing."""
        asked, shape = self.asked, self.largest.shape
        free = self._free(keeps_slots)
        num_tokens = fitting_tokens(shape, asked.most, SIZE, free, asked.recomputes, self.trains_head)
        num_tokens = max(num_tokens, asked.longest)
        num_recomputed = self._recomputed(num_tokens, free)
        if not fits(self._pass(num_tokens, num_recomputed), free) or num_tokens < min(asked.most, FULL_SPEED):
            return None
        found = self._made(keeps_slots, num_tokens, num_recomputed)
        return found if found.fits and not (keeps_slots and num_recomputed) else None

    def least(self) -> MemoryPlan:
        """One sequence at a time."""
        num_tokens = self.asked.longest
        return self._made(False, num_tokens, self._recomputed(num_tokens, self._free(False)))

    def _free(self, keeps_slots: bool) -> int:
        return self.usable - self.weights - self.state - self.gradients - (self.cache if keeps_slots else 0)

    def _recomputed(self, num_tokens: int, free: int) -> int:
        if not self.asked.recomputes:
            return 0
        return fewest_recomputed(self.largest.shape, num_tokens, self._rows(num_tokens), SIZE, free, self.trains_head)

    def _rows(self, num_tokens: int) -> int:
        return round(self.asked.share * num_tokens)

    def _pass(self, num_tokens: int, num_recomputed: int) -> int:
        shape, rows = self.largest.shape, self._rows(num_tokens)
        return max(pass_bytes(shape, num_tokens, rows, num_recomputed, SIZE, self.trains_head), self.buffers)

    def _made(self, keeps_slots: bool, num_tokens: int, num_recomputed: int) -> MemoryPlan:
        num_scored = self._scored_tokens(keeps_slots)
        return MemoryPlan(
            capacity=self.capacity,
            weights=self.weights,
            masters=self.state // 3,
            moments=self.state - self.state // 3,
            gradients=self.gradients,
            activations=self._pass(num_tokens, num_recomputed),
            scoring=forward_bytes(self.largest.shape, num_scored, self._rows(num_scored), SIZE),
            cache=self.cache,
            prefill=self.prefill,
            host=self.host,
            host_free=self.host_free,
            offloaded=self.offloaded,
            num_tokens=num_tokens,
            num_scored_tokens=num_scored,
            num_recomputed=num_recomputed,
            num_layers=self.largest.shape.num_layers,
            num_slots=self.num_slots,
            slot_tokens=capacity(longest_sequence(self.config) + CUDA_BURST),
            keeps_slots=keeps_slots,
        )

    def _scored_tokens(self, keeps_slots: bool) -> int:
        """Of a pass without gradients, which are not in memory then; at least those of one sequence."""
        longest, shape = longest_sequence(self.config), self.largest.shape
        wanted = self.config.actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu
        free = self._free(keeps_slots) + self.gradients
        fitting = (
            count * longest
            for count in range(wanted, 1, -1)
            if fits(forward_bytes(shape, count * longest, self._rows(count * longest), SIZE), free)
        )
        return next(fitting, longest)
