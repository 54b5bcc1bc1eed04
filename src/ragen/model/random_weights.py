"""Models with random weights and the exact shape of published ones: to size hardware and to measure speed.

    find("random:Qwen2.5-3B")                          # a directory with config and tokenizer, without weights
    decoder = make(config, torch.bfloat16, "cuda")     # the same weights for the same device and type

The tokenizer is that of the embedded model, whose 622 ids are the first of the published vocabulary: a prompt has about
as many tokens as a published tokenizer makes of it, and most sampled ids mean nothing.
"""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from ragen.config.model_name import RANDOM
from ragen.errors import ConfigError
from ragen.model.decoder import Decoder, Shape

PREFIX = RANDOM
STD = 0.02  # of all matrices, as transformers initialises them
# layers, hidden, intermediate, heads, key heads, vocabulary, tied embeddings
SHAPES = {
    "Qwen2.5-0.5B": (24, 896, 4864, 14, 2, 151936, True),
    "Qwen2.5-1.5B": (28, 1536, 8960, 12, 2, 151936, True),
    "Qwen2.5-3B": (36, 2048, 11008, 16, 2, 151936, True),
    "Qwen2.5-7B": (28, 3584, 18944, 28, 4, 152064, False),
    "Qwen2.5-14B": (48, 5120, 13824, 40, 8, 152064, False),
}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def is_random(name: str) -> bool:
    return name.startswith(PREFIX)


def find(name: str) -> Path:
    """The model's directory in the cache, made on first use."""
    shape = name.removeprefix(PREFIX)
    if shape not in SHAPES:
        known = ", ".join(PREFIX + known for known in SHAPES)
        raise ConfigError(f"model {name}: no such shape. Use one of {known}")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ragen" / "random" / shape
    if not (cache / "config.json").exists():
        _write(shape, cache)
    return cache


def _write(name: str, target: Path) -> None:
    from ragen.model.pocket.load import pocket_folder

    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        made = Path(temporary) / name
        made.mkdir()
        for file in TOKENIZER_FILES:
            shutil.copyfile(pocket_folder() / file, made / file)
        (made / "config.json").write_text(json.dumps(_config(name), indent=2) + "\n")
        try:
            os.rename(made, target)
        except OSError:  # another process was faster
            if not (target / "config.json").exists():
                raise


def _config(name: str) -> dict[str, Any]:
    num_layers, hidden, intermediate, num_heads, num_kv_heads, vocabulary, tied = SHAPES[name]
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "num_hidden_layers": num_layers,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "use_sliding_window": False,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }


def make(config: Any, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> Decoder:
    """Made on the device, in its final type: a large model is never in memory twice."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            decoder = Decoder(Shape.of(config))
    finally:
        torch.set_default_dtype(before)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, weight in decoder.named_parameters():
            if weight.dim() == 2:
                weight.normal_(0.0, STD, generator=generator)
            elif name.endswith("bias"):
                weight.zero_()
    return decoder
