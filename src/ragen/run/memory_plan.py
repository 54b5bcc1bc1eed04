"""What a run holds on one GPU, before anything is loaded.

    found = plan(ModelShape("x", 36, 2048, 11008, 16, 2, 128, 151936), config, capacity=141 * 10**9)
    found.peak, found.num_tokens, found.num_recomputed
    found.line(141 * 10**9)                          # memory: 81 GB of 141 GB at the peak: weights 6, …

Held all the time: weights in bf16 (of actor, critic and reference), float32 master weights and Adam's moments of what
is trained. On top comes the larger of two that are never alive together: the sampler's cache; or the float32
gradients of one model and the activations of a micro-batch (`model.activations`, which also makes the choice when the
run is under way, from what is free then). Episodes are assumed to have the maximum length.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ragen.config.model_name import FAMILIES
from ragen.model.activations import fewest_recomputed, fitting_tokens, pass_bytes

if TYPE_CHECKING:
    from ragen.config.schema import Config

LARGE = 50_000_000  # parameters from which layers may be recomputed, as in `model.load`
MAX_ROWS = 256  # conversations that the engine samples at once
SIZE = 2  # bytes of a number in bf16
CONTEXT = 1 << 30  # CUDA's own
GB = 10**9


class ModelShape(NamedTuple):
    """The sizes of a decoder (`model.decoder`)."""

    name: str
    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = True
    qkv_bias: bool = True

    @classmethod
    def of_folder(cls, name: str, folder: Path) -> "ModelShape | None":
        """From a model's `config.json`; None if that is of another family."""
        path = folder / "config.json"
        stored = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if stored.get("model_type") not in FAMILIES:
            return None
        heads = stored["num_attention_heads"]
        return cls(
            name=name,
            num_layers=stored["num_hidden_layers"],
            hidden=stored["hidden_size"],
            intermediate=stored["intermediate_size"],
            num_heads=heads,
            num_kv_heads=stored.get("num_key_value_heads") or heads,
            head_dim=stored.get("head_dim") or stored["hidden_size"] // heads,
            vocab=stored["vocab_size"],
            tied=bool(stored.get("tie_word_embeddings", False)),
            qkv_bias=stored["model_type"] == "qwen2",
        )

    @property
    def hidden_size(self) -> int:
        return self.hidden

    @property
    def intermediate_size(self) -> int:
        return self.intermediate

    @property
    def vocab_size(self) -> int:
        return self.vocab

    @property
    def short_name(self) -> str:
        return self.name.rpartition("/")[2].removesuffix("-Instruct")

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def num_parameters(self) -> int:
        attention = self.hidden * (2 * self.q_size + 2 * self.kv_size)
        bias = (self.q_size + 2 * self.kv_size) * self.qkv_bias
        layer = attention + bias + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.vocab * self.hidden * (1 if self.tied else 2) + self.num_layers * layer + self.hidden

    def num_adapter_parameters(self, rank: int) -> int:
        """LoRA on every linear layer: rank x (inputs + outputs) of each."""
        attention = 2 * (self.hidden + self.q_size) + 2 * (self.hidden + self.kv_size)
        return self.num_layers * rank * (attention + 3 * (self.hidden + self.intermediate))


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by purpose, and the choices that they follow from."""

    weights: int
    masters: int
    moments: int
    gradients: int
    activations: int
    cache: int
    num_tokens: int  # of a micro-batch
    num_recomputed: int  # layers
    num_layers: int

    @property
    def held(self) -> int:
        """All the time."""
        return self.weights + self.masters + self.moments

    @property
    def update(self) -> int:
        """While learning."""
        return self.held + self.gradients + self.activations

    @property
    def peak(self) -> int:
        return max(self.update, self.held + self.cache)

    def line(self, capacity: int) -> str:
        """For the user."""
        parts = {
            "weights": self.weights,
            "masters": self.masters,
            "Adam": self.moments,
            "gradients": self.gradients,
            "activations": self.activations,
        }
        listed = ", ".join(f"{name} {value / GB:.1f}" for name, value in parts.items())
        fits = "" if self.peak + CONTEXT <= capacity else "; this does not fit"
        return (
            f"memory: {self.peak / GB:.0f} GB of {capacity / GB:.0f} GB at the peak{fits}: {listed} (micro-batches of "
            f"{self.num_tokens:,} tokens, {self.num_recomputed} of {self.num_layers} layers recomputed); while "
            f"sampling, a cache of up to {self.cache / GB:.1f} instead of the last two"
        )


class TrainedModels(NamedTuple):
    """The models of a run: their number, and of those that are trained the rank of the adapter and the parameters."""

    num_models: int
    ranks: list[int]
    trained: list[int]


def trained_models(model: ModelShape, config: "Config") -> TrainedModels:
    from ragen.config import derive

    if config.rl_or_sft == "sft":
        ranks, num_models = [config.sft.training.lora_rank], 1
    else:
        ranks = [config.actor_rollout_ref.model.lora_rank]
        if derive.critic_model(config).needed:
            ranks.append(config.critic.model.lora_rank)
        has_reference = derive.reference_model(config).needed and not derive.reference_is_actor(config)
        num_models = len(ranks) + has_reference
    trained = [model.num_adapter_parameters(rank) if rank > 0 else model.num_parameters for rank in ranks]
    return TrainedModels(num_models, ranks, trained)


def plan(model: ModelShape, config: "Config", capacity: int | None = None) -> MemoryPlan:
    """What a run will hold on a GPU with so many bytes; without a number, the least that it can do with."""
    models, (most, share, recomputes) = trained_models(model, config), _micro_batch(config)
    recomputes = recomputes and model.num_parameters > LARGE
    weights, trained = models.num_models * model.num_parameters * SIZE, sum(models.trained)
    gradients = 4 * max(models.trained)
    if capacity is None:
        num_tokens, num_recomputed = most, model.num_layers if recomputes else 0
    else:
        free = capacity - CONTEXT - weights - 12 * trained - gradients
        num_tokens = fitting_tokens(model, most, SIZE, free, recomputes)
        rows = round(share * num_tokens)
        num_recomputed = fewest_recomputed(model, num_tokens, rows, SIZE, free) if recomputes else 0
    return MemoryPlan(
        weights=weights,
        masters=4 * trained,
        moments=8 * trained,
        gradients=gradients,
        activations=pass_bytes(model, num_tokens, round(share * num_tokens), num_recomputed, SIZE),
        cache=kv_cache(model, config, SIZE),
        num_tokens=num_tokens,
        num_recomputed=num_recomputed,
        num_layers=model.num_layers,
    )


def _micro_batch(config: "Config") -> tuple[int, float, bool]:
    """Tokens at most, the share of them whose logits are computed, and whether layers may be recomputed."""
    if config.rl_or_sft == "sft":
        training = config.sft.training
        return training.micro_batch_size * training.max_length, 1.0, training.enable_gradient_checkpointing
    longest, rollout = _longest(config), config.actor_rollout_ref.rollout
    num_turns = config.agent_proxy.max_turn if config.agent_proxy.context_window_mode == "full" else 1
    most = config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu * longest
    share = min(1.0, num_turns * rollout.response_length / longest)
    return most, share, config.actor_rollout_ref.model.enable_gradient_checkpointing


def kv_cache(model: ModelShape, config: "Config", size: int) -> int:
    """Bytes for the keys and values of the conversations that are sampled at once."""
    train, val = config.es_manager.train, config.es_manager.val
    validated = min(config.data.val_batch_size or val.env_groups, val.env_groups) * val.group_size
    rows = min(MAX_ROWS, max(train.env_groups * train.group_size, validated))
    return rows * _longest(config) * model.num_layers * 2 * model.kv_size * size


def _longest(config: "Config") -> int:
    return config.actor_rollout_ref.rollout.max_model_len
