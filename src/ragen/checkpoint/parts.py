"""What a checkpoint holds: trained models, their optimizers and the state of the run.

parts = Parts(part_of(loaded, optimizer), state={"early_stop": stop.state()})
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from ragen.model import lora
from ragen.model.critic import Critic
from ragen.model.decoder import TrainableModel
from ragen.model.load import LoadedModel


class OptimizerState(Protocol):
    """What saving and restoring need of an optimizer (`train.optimizer.MasterAdamW`)."""

    num_steps: int

    def tensors(self, model: nn.Module) -> dict[str, Tensor]: ...

    def shapes(self, model: nn.Module) -> dict[str, tuple[int, ...]]: ...

    def load(self, model: nn.Module, stored: Mapping[str, Tensor], num_steps: int) -> None: ...

    def in_full(self) -> AbstractContextManager[None]: ...


@dataclass(frozen=True)
class Part:
    """A trained model, as a checkpoint sees it.

    `model` is a `Decoder` or the adapter of another family; a critic has one of these as `backbone`, and its value head
    as `head`. `config` is the Hugging Face config of the weights. Of a model with an adapter only that is stored:
    `base_model` names what it belongs to, and `base_digest` tells that from other weights.
    """

    model: "TrainableModel | Critic"
    config: Any
    tokenizer: Any = None
    optimizer: OptimizerState | None = None
    generation_config: str = ""  # the content of a file that came with the weights
    base_model: str = ""
    base_digest: str = ""

    @property
    def backbone(self) -> TrainableModel:
        return self.model.backbone if isinstance(self.model, Critic) else self.model

    @property
    def value_head(self) -> nn.Module | None:
        return self.model.head if isinstance(self.model, Critic) else None


@dataclass(frozen=True)
class Parts:
    """What a checkpoint holds. `state` is any tree that JSON can hold, its keys texts."""

    actor: Part
    critic: Part | None = None
    state: Mapping[str, Any] = field(default_factory=dict)

    def by_name(self) -> dict[str, Part]:
        return {"actor": self.actor} | ({} if self.critic is None else {"critic": self.critic})


def part_of(loaded: LoadedModel, optimizer: OptimizerState | None = None) -> Part:
    """A loaded model as a part."""
    from transformers import AutoConfig

    folder = loaded.source.model_folder
    generation = folder / "generation_config.json"
    return Part(
        loaded.model,
        AutoConfig.from_pretrained(folder),
        loaded.tokenizer,
        optimizer,
        generation.read_text(encoding="utf-8") if generation.exists() else "",
        loaded.source.lasting_name,
        loaded.source.digest if lora.has_adapters(loaded.model) else "",
    )


def stored_parameters(part: Part) -> list[nn.Parameter]:
    """Of a model with an adapter, that and the value head."""
    parameters = list(part.model.parameters())
    if not lora.has_adapters(part.backbone):
        return parameters
    return [parameter for parameter in parameters if parameter.requires_grad]
