"""Load the embedded model: `pocket`, or `pocket-blank`, the same shape untrained.

decoder, tokenizer = load_pocket()
theirs = AutoModelForCausalLM.from_pretrained(pocket_folder())      # the same model in transformers
"""

from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast

from ragen.model.decoder import Decoder, Shape, from_huggingface
from ragen.model.pocket.tokenizer import make_tokenizer

SEED = 0  # of the untrained weights


def shape(vocab_size: int) -> Shape:
    return Shape(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=384,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        rope_theta=1_000.0,
        norm_eps=1e-6,
        qkv_bias=True,
        tied_embeddings=True,
    )


def blank(vocab_size: int, seed: int = SEED) -> Decoder:
    """Untrained weights, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    decoder = Decoder(shape(vocab_size))
    depth = 2 * decoder.shape.num_layers
    with torch.no_grad():
        for name, weight in decoder.named_parameters():
            if name.endswith("bias"):
                weight.zero_()
            elif weight.dim() == 2:
                into_residual = name.endswith(("out.weight", "down.weight"))
                std = 0.05 if name == "embed.weight" else weight.shape[1] ** -0.5
                weight.normal_(0.0, std / depth**0.5 if into_residual else std, generator=generator)
    return decoder


def pocket_folder() -> Path:
    """The directory of the shipped weights; `transformers` can open it too."""
    return Path(__file__).parent / "weights"


def load_pocket(folder: Path | None = None) -> tuple[Decoder, PreTrainedTokenizerFast]:
    """The shipped model, or one that `build` wrote to another directory."""
    folder = pocket_folder() if folder is None else folder
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    decoder = blank(len(tokenizer))
    from_huggingface(decoder, load_file(folder / "model.safetensors"))
    return decoder, tokenizer


def blank_pocket(seed: int = SEED) -> tuple[Decoder, PreTrainedTokenizerFast]:
    """Random weights, the same for the same seed; for tests and benchmarks."""
    tokenizer = make_tokenizer()
    return blank(len(tokenizer), seed), tokenizer
