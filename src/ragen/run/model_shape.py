"""The sizes of a model, known without loading it: from its `config.json`, or since it is published.

shape_of("random:Qwen2.5-3B")                 # also a directory, a published name, a model in the local cache
ModelShape.of_folder("mine", folder)          # None if it is of another family
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ragen.config.model_name import FAMILIES, RANDOM, folder_of
from ragen.machine import cached_folder

HEAD_DIMS = {"qwen3": 128}  # where a config.json leaves it out, and it is not hidden_size / heads


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
            head_dim=stored.get("head_dim") or HEAD_DIMS.get(stored["model_type"]) or stored["hidden_size"] // heads,
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


POCKET = ModelShape("pocket", 4, 128, 384, 4, 2, 32, 622)
SMOLLM2 = ModelShape("smollm2", 30, 576, 1536, 9, 3, 64, 49152, qkv_bias=False)
QWEN_05B = ModelShape("Qwen/Qwen2.5-0.5B-Instruct", 24, 896, 4864, 14, 2, 64, 151936)
QWEN_15B = ModelShape("Qwen/Qwen2.5-1.5B-Instruct", 28, 1536, 8960, 12, 2, 128, 151936)
QWEN_3B = ModelShape("Qwen/Qwen2.5-3B-Instruct", 36, 2048, 11008, 16, 2, 128, 151936)
QWEN_7B = ModelShape("Qwen/Qwen2.5-7B-Instruct", 28, 3584, 18944, 28, 4, 128, 152064, tied=False)
QWEN_14B = ModelShape("Qwen/Qwen2.5-14B-Instruct", 48, 5120, 13824, 40, 8, 128, 152064, tied=False)
QWEN_3B_BASE = QWEN_3B._replace(name="Qwen/Qwen2.5-3B")
PUBLISHED = (QWEN_14B, QWEN_7B, QWEN_3B, QWEN_15B, QWEN_05B)  # large ones first


def shape_of(name: str, environ: Mapping[str, str] = os.environ) -> ModelShape | None:
    """The shape of a model by the name that a user gives it; None if it is not known without a download."""
    folder = folder_of(name) or cached_folder(name, environ)
    if folder is not None:
        return ModelShape.of_folder(name, folder)
    short = name.removeprefix(RANDOM).rpartition("/")[2].removesuffix("-Instruct")
    known = {shape.short_name: shape for shape in (*PUBLISHED, SMOLLM2, POCKET)} | {"pocket-blank": POCKET}
    return known[short]._replace(name=name) if short in known else None
