"""Does the GPU sampler compute what it should? Run first; about a minute.

    python benchmarks/gpu/check.py

1. Logits of the captured step against the same model op by op and in float32, at several row counts and lengths.
2. Random conversations (ragged prompts and replies, early ends, more conversations than slots, slots used again with
   garbage in them) on the GPU against the CPU engine, both in float32: the same ids, so no episode sees another's.
3. The same draws with graphs on and off, bit for bit: the same kernels compute the same logits.
4. Against the plain operations logits differ by rounding, in bf16 visibly, and so do some replies. At the first token
   that differs, the draw is within rounding of the border between both tokens, by the CPU's float32 probabilities.
5. Families: norms of queries and keys, scaled positions, a window, captured Hugging Face modules, a hybrid.
Exits with status 1 if any of it fails.
"""

import random
import sys
from dataclasses import replace

import torch
from conversations import EveryToken, Scripted
from measuring import machine
from transformers import AutoConfig, AutoModelForCausalLM

from ragen.engine.base import Sampling
from ragen.engine.native.engine import NativeEngine
from ragen.engine.native.graphs import GraphRows
from ragen.engine.native.sampler import _restrict, signed, uniforms
from ragen.engine.native.slots import IDS, LENGTHS, Slots
from ragen.engine.native.way import Way
from ragen.model.attention import Packed
from ragen.model.decoder import Decoder, Shape
from ragen.model.huggingface import ATTENTION, HuggingFaceModel

SMALL = Shape(211, 256, 512, 3, 8, 2, 32, 10_000.0, 1e-6, qkv_bias=True, tied_embeddings=True)
MIDDLE = Shape(49152, 1024, 2816, 8, 16, 2, 64, 10_000.0, 1e-6, qkv_bias=True, tied_embeddings=True)
END = 1
LOGIT_TOLERANCE = 0.02  # relative error of bf16 logits against float32
# How far a draw may be from the range of the token that it gave, as a share of all mass.
EDGE_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}
failures = []


def expect(condition: bool, text: str) -> None:
    print(f"  {'ok  ' if condition else 'FAIL'} {text}", flush=True)
    if not condition:
        failures.append(text)


def make(shape: Shape, dtype: torch.dtype, device: str, gain: float) -> Decoder:
    generator = torch.Generator().manual_seed(0)
    decoder = Decoder(shape)
    with torch.no_grad():
        for name, weight in decoder.named_parameters():
            if weight.dim() == 2:
                weight.normal_(0, gain * weight.shape[1] ** -0.5, generator=generator)
            else:  # biases and norms
                weight.copy_((name.endswith("norm.weight")) + 0.1 * torch.randn(weight.shape, generator=generator))
            weight.data = weight.data.to(dtype)
    return decoder.to(device).eval()


# --- 1. logits ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def check_logits() -> None:
    decoders = {dtype: make(MIDDLE, dtype, "cuda", 0.5) for dtype in (torch.float32, torch.bfloat16)}
    randomness = random.Random(0)
    for num_rows in (1, 7, 64, 128):
        ids = [[randomness.randrange(MIDDLE.vocab_size) for _ in range(randomness.choice((1, 63, 64, 65, 400, 1100)))]
               for _ in range(num_rows)]  # fmt: skip
        found = {}
        for name, dtype, triton in (
            ("reference", torch.float32, False), ("plain", torch.bfloat16, False), ("kernels", torch.bfloat16, True),
            ("kernels, float32", torch.float32, True),
        ):  # fmt: skip
            slots = Slots(decoders[dtype], 0, triton)
            slots.add_rows(num_rows)
            slots.reserve(1200)
            slots.fill(range(num_rows), [0] * num_rows, ids)
            slots.state[LENGTHS] = torch.tensor([len(part) for part in ids])
            slots.state[IDS] = 17
            found[name] = slots.logits(num_rows, slots.cache.capacity).float()
        wanted = found.pop("reference")
        error = {name: float((got - wanted).norm() / wanted.norm()) for name, got in found.items()}
        told = ", ".join(f"{name} {value:.1e}" for name, value in error.items())
        good = error["kernels"] < max(LOGIT_TOLERANCE, 1.5 * error["plain"]) and error["kernels, float32"] < 1e-4
        expect(good, f"logits of {num_rows} rows, relative error: {told}")


# --- 2. conversations -----------------------------------------------------------------------------------------------


def conversations(seed: int, num: int) -> list[Scripted]:
    randomness = random.Random(seed)
    shared = tuple(randomness.randrange(2, SMALL.vocab_size) for _ in range(randomness.choice((0, 20, 150))))
    made = []
    for index in range(num):
        prompts = [
            tuple(randomness.randrange(2, SMALL.vocab_size) for _ in range(randomness.choice((1, 2, 9, 70, 200))))
            for _ in range(randomness.randrange(1, 5))
        ]
        made.append(Scripted([shared + prompts[0], *prompts[1:]], seed * 1000 + index))
    return made


def played(engine: NativeEngine, seed: int, num: int, sampling: Sampling) -> list[Scripted]:
    made = conversations(seed, num)
    engine.run(made, sampling)
    return made


@torch.no_grad()
def distance(cpu: Decoder, context: list[int], draw: float, sampling: Sampling, id_: int) -> float:
    """How far a draw is from the range of a token, by the CPU's probabilities; 0 within it."""
    attend = Packed([len(context)])
    logits = cpu.logits(cpu.hidden(torch.tensor(context), attend.positions, attend)[-1:]).double()
    if sampling.greedy:
        probs = torch.softmax(logits, dim=-1)[0]
        return float(probs.max() - probs[id_])
    probs = _restrict(torch.softmax(logits / sampling.temperature, dim=-1), sampling)[0]
    edges = torch.cat([torch.zeros(1, dtype=probs.dtype), probs.cumsum(0)]) / probs.sum()
    return max(0.0, float(edges[id_]) - draw, draw - float(edges[id_ + 1]))


def first_difference(cpu: Decoder, left: Scripted, right: Scripted, sampling: Sampling) -> float | None:
    """None for equal conversations, else how far the first draw that differs is from both of its tokens."""
    context: list[int] = []
    for turn, (mine, other) in enumerate(zip(left.replies, right.replies, strict=True)):
        context += left.prompts[turn]
        for position, (a, b) in enumerate(zip(mine.ids, other.ids, strict=False)):
            if a != b:
                key = torch.tensor([signed(Scripted(left.prompts, left.key, left.replies[:turn]).prompt().draw_key)])
                draw = float(uniforms(key, torch.tensor([position])))
                return max(distance(cpu, [*context, *mine.ids[:position]], draw, sampling, id_) for id_ in (a, b))
        context += mine.ids
    return None


def check_conversations(cpu: Decoder, gpu: Decoder) -> None:
    tokenizer = EveryToken(SMALL.vocab_size)
    rows = GraphRows(gpu, has_triton=True)
    num_same = num_replies = 0
    worst = furthest = 0.0
    settings = [
        (64, 8, 1.0, 1.0, -1, False), (5, 4, 0.7, 1.0, -1, False), (17, 8, 1.0, 0.8, 20, False),
        (9, 3, 1.0, 1.0, -1, True),
    ]  # fmt: skip
    for seed, (max_rows, burst, temperature, top_p, top_k, greedy) in enumerate(settings * 3):
        sampling = Sampling(temperature, top_p, top_k, greedy, max_tokens=60, stop_at_answer=False)
        engine = NativeEngine(gpu, tokenizer, END, max_rows=max_rows, burst=burst)
        engine._graph_rows = rows  # the same slots and graphs for all of them
        for part in (*rows.slots.cache.keys, *rows.slots.cache.values):
            part.normal_(0, 100)
        ours = played(engine, seed, 40, sampling)
        theirs = played(NativeEngine(cpu, tokenizer, END), seed, 40, sampling)
        for left, right in zip(ours, theirs, strict=True):
            furthest = max(furthest, first_difference(cpu, left, right, sampling) or 0.0)
            for mine, other in zip(left.replies, right.replies, strict=True):
                num_replies += 1
                if mine.ids != other.ids:
                    break  # within rounding of an edge; what follows is another conversation
                num_same += 1
                worst = max(worst, *(abs(a - b) for a, b in zip(mine.log_probs, other.log_probs, strict=True)))
    expect(num_same > 0.99 * num_replies, f"{num_same} of {num_replies} replies are those of the CPU engine")
    expect(worst < 1e-3, f"their log-probs differ by at most {worst:.1e}")
    is_rounding = furthest < EDGE_TOLERANCE[torch.float32]
    expect(is_rounding, f"where ids differ, the draw is within {furthest:.1e} of the border")


# --- 3. graphs on and off -------------------------------------------------------------------------------------------


def check_replay(gpu: Decoder) -> None:
    tokenizer = EveryToken(SMALL.vocab_size)
    for greedy, top_p in ((False, 1.0), (False, 0.8), (True, 1.0)):
        sampling = Sampling(1.0, top_p, -1, greedy, max_tokens=60, stop_at_answer=False)
        replies = []
        for capture in (True, False):
            engine = NativeEngine(gpu, tokenizer, END, max_rows=24)
            engine._graph_rows = GraphRows(gpu, has_triton=True, capture=capture)
            replies.append([one.replies for one in played(engine, 99, 40, sampling)])
        expect(
            replies[0] == replies[1], f"graphs on and off draw the same, bit for bit (greedy {greedy}, top_p {top_p})"
        )
    engine = NativeEngine(gpu, tokenizer, END, max_rows=24)
    engine.way = Way(True, False, 8, "")
    sampling = Sampling(1.0, 1.0, -1, False, max_tokens=60, stop_at_answer=False)
    plain = [one.replies for one in played(engine, 99, 40, sampling)]
    kernels = [one.replies for one in played(NativeEngine(gpu, tokenizer, END, max_rows=24), 99, 40, sampling)]
    same = sum(
        a.ids == b.ids for left, right in zip(plain, kernels, strict=True) for a, b in zip(left, right, strict=True)
    )
    total = sum(map(len, plain))
    expect(same > 0.95 * total, f"without Triton {same} of {total} replies are the same")


# --- 4. rounding ----------------------------------------------------------------------------------------------------


def check_rounding(device: str = "cuda") -> None:
    """Graphs with kernels against one operation after the other."""
    tokenizer = EveryToken(SMALL.vocab_size)
    for dtype in (torch.float32, torch.bfloat16):
        model = make(SMALL, dtype, device, 1.5)
        cpu = make(SMALL, dtype, "cpu", 1.5).float()  # the same weights
        for greedy, top_p in ((False, 1.0), (False, 0.8), (True, 1.0)):
            sampling = Sampling(1.0, top_p, -1, greedy, max_tokens=60, stop_at_answer=False)
            plain = NativeEngine(model, tokenizer, END, max_rows=24)
            plain.way = Way(False, False, 8, "")
            engines = NativeEngine(model, tokenizer, END, max_rows=24), plain
            both = [played(engine, 7, 40, sampling) for engine in engines]
            found = [first_difference(cpu, left, right, sampling) for left, right in zip(*both, strict=True)]
            differing = [value for value in found if value is not None]
            furthest = max(differing, default=0.0)
            expect(
                furthest < EDGE_TOLERANCE[dtype],
                f"{str(dtype)[6:]}, greedy {greedy}, top_p {top_p}: {len(differing)} of {len(found)} conversations "
                f"differ from those of plain operations, at draws within {furthest:.1e} of the border",
            )


# --- 5. families ----------------------------------------------------------------------------------------------------

FAMILIES = {
    "Qwen3": replace(SMALL, qk_norm=True, qkv_bias=False),
    "yarn": replace(SMALL, scaled_frequencies=tuple(0.7**number for number in range(16)), rope_gain=1.2),
    "window": replace(SMALL, window=40),
}
SIZES = dict(
    vocab_size=SMALL.vocab_size, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=8,
    num_key_value_heads=2, head_dim=32, pad_token_id=0, bos_token_id=0, eos_token_id=END,
)  # fmt: skip
MODULES = {
    "olmo2": {},
    "olmo3": {"sliding_window": 40},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
}


def module_of(kind: str, changes: dict, dtype: torch.dtype, device: str) -> HuggingFaceModel:
    config = AutoConfig.for_model(kind, **SIZES | changes)
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).eval()
    with torch.no_grad():
        for weight in module.parameters():
            weight += 0.1 * torch.randn(weight.shape)
    return HuggingFaceModel(module.to(device, dtype)).check()


def check_families() -> None:
    for name, shape in FAMILIES.items():
        check_same_replies(name, *(make(shape, torch.float32, device, 1.5) for device in ("cpu", "cuda")))
    for kind, changes in MODULES.items():
        check_same_replies(kind, *(module_of(kind, changes, torch.float32, device) for device in ("cpu", "cuda")))
    check_hybrid()


def check_same_replies(name: str, cpu: Decoder | HuggingFaceModel, gpu: Decoder | HuggingFaceModel) -> None:
    sampling = Sampling(1.0, 1.0, -1, False, max_tokens=60, stop_at_answer=False)
    engines = [NativeEngine(model, EveryToken(SMALL.vocab_size), END, max_rows=9) for model in (cpu, gpu)]
    ours, theirs = ([one.replies for one in played(engine, 7, 30, sampling)] for engine in engines)
    pairs = [pair for left, right in zip(ours, theirs, strict=True) for pair in zip(left, right, strict=True)]
    same = sum(left.ids == right.ids for left, right in pairs)
    expect(
        same > 0.95 * len(pairs), f"{name}: {same} of {len(pairs)} replies are those of the CPU; {engines[1].way.text}"
    )


@torch.no_grad()
def check_hybrid() -> None:
    """Packed sequences on the GPU in bf16 against the CPU in float32."""
    changes = {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False}
    lengths = (70, 1, 200)
    ids = torch.randint(2, SMALL.vocab_size, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    found = []
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        model, attend = module_of("lfm2", changes, dtype, device), Packed(lengths, device)
        found.append(model.logits(model.hidden(ids.to(device), attend.positions, attend)).float().cpu())
        expect(not model.is_packable, f"a hybrid is recognised in {dtype}")
    error = float((found[1] - found[0]).norm() / found[0].norm())
    expect(error < 0.05, f"its packed logits in bf16, relative error: {error:.1e}")


def main() -> None:
    print(machine())
    check_logits()
    cpu, gpu = make(SMALL, torch.float32, "cpu", 1.5), make(SMALL, torch.float32, "cuda", 1.5)
    check_conversations(cpu, gpu)
    check_replay(gpu)
    check_rounding()
    check_families()
    sys.exit(f"{len(failures)} checks failed" if failures else 0)


if __name__ == "__main__":
    main()
