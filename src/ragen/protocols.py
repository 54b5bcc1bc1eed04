"""What the code expects of models, tokenizers and training samples. Torch is imported for type checkers only.

    def score(model: LanguageModel, packed: PackedTokens, temperature: float) -> Scored: ...

`ragen.model.decoder.Decoder` and `ragen.model.huggingface.HuggingFaceModel` can be scored and sampled from;
`ragen.model.lora.BaseModel`, the reference of an adapter, can only be scored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ragen.types import TokenSequence

# (layer, query [T, heads, head_dim], key and value [T, kv_heads, head_dim]) -> [T, heads, head_dim]. A layer of which
# tokens attend only to the last ones also passes their number, `window=`.
Attend = Callable[..., "Tensor"]


class ModelShape(Protocol):
    """The sizes that callers read; `ragen.model.decoder.Shape` has all of them."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


class LanguageModel(Protocol):
    """A model that scores packed tokens."""

    @property
    def shape(self) -> ModelShape: ...

    @property
    def is_cacheable(self) -> bool:
        """Whether keys and values are all that later tokens need of earlier ones."""

    @property
    def window(self) -> int | None:
        """The number of tokens that a token attends to, itself included, where some layer limits it."""

    def hidden(self, ids: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None = None) -> Tensor:
        """The last hidden state of each token, or of some `rows` only."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Over the whole vocabulary."""

    @property
    def head_weight(self) -> Tensor | None:
        """The matrix W with logits = hidden W^T, or None if the logits are made in another way."""


class SampledModel(LanguageModel, Protocol):
    """A model that an engine samples from."""

    def fill(self, ids: Tensor, positions: Tensor, attend: Any) -> None:
        """Store keys and values in the cache behind `attend`."""

    def parameters(self) -> Iterator[nn.Parameter]: ...


class Tokenizer(Protocol):
    """The methods of Hugging Face tokenizers that engine and diagnostics use."""

    @property
    def eos_token_id(self) -> int | None: ...
    @property
    def pad_token_id(self) -> int | None: ...

    def __len__(self) -> int: ...
    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = ...) -> str: ...
    def batch_decode(self, ids: Sequence[Sequence[int]]) -> list[str]: ...


class TrainingSample(Protocol):
    """A sequence that updates learn from: `ragen.model.packing.Sample`, or `ragen.sft.tokens.Answers`."""

    @property
    def sequence(self) -> TokenSequence: ...
    @property
    def num_sampled(self) -> int: ...
