"""Decode speed on one GPU at the shape of Qwen2.5-3B with random weights: which module serves the sampler?

    python benchmarks/decode_gpu.py            # needs a CUDA device; about two minutes

Three ways to add tokens to 128 sequences with a context of about 400: (a) the Hugging Face module with our attention
and cache, (b) our decoder, each op by op and as one CUDA graph; and the peer, `transformers.generate` with its dynamic
and its static cache. All in bf16, greedy, in one run, interleaved. Prints tokens a second, ratios and the share of the
bandwidth roofline (weights and cache read once a token at the copy bandwidth that is measured first).
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from transformers import Qwen2Config, Qwen2ForCausalLM

from ragen.engine.native.cache import Decode, RowCache
from ragen.model.decoder import Decoder, Shape, from_huggingface
from ragen.model.huggingface import ATTENTION, HuggingFaceModel

QWEN_3B = dict(
    vocab_size=151936,
    hidden_size=2048,
    intermediate_size=11008,
    num_hidden_layers=36,
    num_attention_heads=16,
    num_key_value_heads=2,
    tie_word_embeddings=True,
    rope_theta=1_000_000.0,
    max_position_embeddings=32768,
)


def fresh_cache(shape: Shape, num_rows: int, context: int, num_new: int) -> RowCache:
    like = torch.empty(0, dtype=torch.bfloat16, device="cuda")
    cache = RowCache(shape.num_layers, shape.num_kv_heads, shape.head_dim, num_rows, like)
    cache.reserve(context + num_new)
    generator = torch.Generator("cuda").manual_seed(0)
    for part in (*cache.keys, *cache.values):
        part.normal_(0, 1, generator=generator)
    cache.lengths.fill_(context)
    return cache


class Stepper:
    """One greedy token for every row, in place, so that it can be captured."""

    def __init__(self, model, num_rows: int, context: int, num_new: int):
        self.model, self.context, self.num_new = model, context, num_new
        self.cache = fresh_cache(model.shape, num_rows, context, num_new)
        self.ids = torch.randint(0, 1000, (num_rows,), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
        self.first_ids = self.ids.clone()

    def reset(self) -> None:
        self.cache.lengths.fill_(self.context)
        self.ids.copy_(self.first_ids)

    def step(self) -> None:
        attend = Decode(self.cache, self.cache.capacity)
        hidden = self.model.hidden(self.ids, self.cache.lengths, attend)
        self.ids.copy_(self.model.logits(hidden).argmax(-1))
        self.cache.lengths.add_(1)

    def run(self) -> None:
        for _ in range(self.num_new):
            self.step()


class Captured(Stepper):
    def capture(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(stream)
        self.reset()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.step()
        self.reset()

    def run(self) -> None:
        for _ in range(self.num_new):
            self.graph.replay()


def timed(action) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    action()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def copy_bandwidth() -> float:
    source = torch.randn(1 << 30, device="cuda")
    target = torch.empty_like(source)
    seconds = min(timed(lambda: target.copy_(source)) for _ in range(5))
    return 2 * source.numel() * 4 / seconds


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--context", type=int, default=400)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rows, context, tokens = options.rows, options.context, options.tokens

    config = Qwen2Config(**QWEN_3B)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        theirs = Qwen2ForCausalLM(config).eval()
        registered_config = Qwen2Config(**QWEN_3B)
        registered_config._attn_implementation = ATTENTION
        registered = Qwen2ForCausalLM(registered_config).eval()
        ours = Decoder(Shape.of(config)).eval()
    torch.set_default_dtype(torch.float32)
    registered.load_state_dict(theirs.state_dict())
    from_huggingface(ours, theirs.state_dict())
    adapter = HuggingFaceModel(registered)

    prompts = torch.randint(0, 1000, (rows, context), device="cuda")

    def generate(**extra):
        theirs.generate(
            prompts, attention_mask=torch.ones_like(prompts), min_new_tokens=tokens, max_new_tokens=tokens,
            do_sample=False, pad_token_id=0, **extra,
        )  # fmt: skip

    variants = {
        "(a) Hugging Face module, our attention and cache": Stepper(adapter, rows, context, tokens),
        "(a) as one CUDA graph": Captured(adapter, rows, context, tokens),
        "(b) our decoder": Stepper(ours, rows, context, tokens),
        "(b) as one CUDA graph": Captured(ours, rows, context, tokens),
    }
    for stepper in variants.values():
        if isinstance(stepper, Captured):
            stepper.capture()
        stepper.run()
        stepper.reset()

    prefill = min(timed(lambda: theirs(prompts[:, :-1], logits_to_keep=1)) for _ in range(3))
    seconds: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        for name, stepper in variants.items():
            stepper.reset()
            seconds.setdefault(name, []).append(timed(stepper.run))
        seconds.setdefault("peer: generate, dynamic cache", []).append(timed(generate) - prefill)
        seconds.setdefault("peer: generate, static cache", []).append(
            timed(lambda: generate(cache_implementation="static", disable_compile=True)) - prefill
        )
    weights = sum(parameter.numel() for parameter in ours.parameters()) * 2
    cached = 2 * rows * (context + tokens // 2) * config.num_key_value_heads * 128 * config.num_hidden_layers * 2
    bandwidth = copy_bandwidth()
    roofline = rows * bandwidth / (weights + cached)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16")
    print(
        f"{rows} rows, context {context}, {tokens} new tokens; the peer's prefill ({prefill * 1e3:.0f} ms) is left out"
    )
    print(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s, roofline {roofline:,.0f} tokens/s")
    peer = min(statistics.median(values) for name, values in seconds.items() if name.startswith("peer"))
    for name, values in seconds.items():
        middle = statistics.median(values)
        rate, spread = rows * tokens / middle, (max(values) - min(values)) / middle
        share = f"{rate / roofline:>4.0%} of roofline, spread {spread:.0%}"
        print(f"  {name:<50} {rate:>9,.0f} tokens/s  {peer / middle:>5.2f}x best peer  {share}")


if __name__ == "__main__":
    main()
