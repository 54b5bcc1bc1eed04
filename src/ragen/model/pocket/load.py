"""Opening the embedded model: `pocket`, and `pocket-blank`, the same shape untrained.

decoder, tokenizer = load_pocket()
theirs = AutoModelForCausalLM.from_pretrained(pocket_folder())      # the same in the hands of transformers
"""

from pathlib import Path

from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast

from ragen.model.decoder import Decoder, from_huggingface
from ragen.model.pocket.build import SEED, blank
from ragen.model.pocket.tokenizer import make_tokenizer


def pocket_folder() -> Path:
    """The shipped weights, a folder that `transformers` opens too."""
    return Path(__file__).parent / "weights"


def load_pocket(folder: Path | None = None) -> tuple[Decoder, PreTrainedTokenizerFast]:
    """The shipped model, or one that `build` wrote to another folder."""
    folder = pocket_folder() if folder is None else folder
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    decoder = blank(len(tokenizer))
    from_huggingface(decoder, load_file(folder / "model.safetensors"))
    return decoder, tokenizer


def blank_pocket(seed: int = SEED) -> tuple[Decoder, PreTrainedTokenizerFast]:
    """Random weights, the same for the same seed; for tests and benchmarks that need a model and no knowledge."""
    tokenizer = make_tokenizer()
    return blank(len(tokenizer), seed), tokenizer
