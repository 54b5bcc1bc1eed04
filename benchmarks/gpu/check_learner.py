"""Whether the learner's kernels compute what plain torch computes, on this GPU; a minute. Run it first.

    python benchmarks/gpu/check_learner.py

Fused forward passes must equal torch's operations bit for bit; gradients are compared with float64 and must not be
worse than those of plain operations. Exit status 1 if anything is off.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from measuring import DEVICE, SHAPES, machine, milliseconds, random_decoder, relative

from ragen.config.schema import Optimizer
from ragen.model import attention, decoder, pointwise, policy
from ragen.model.attention import Packed
from ragen.train.optimizer import MasterAdamW

FAILURES = []


def check(name: str, passed: bool, detail: object = "") -> None:
    print(f"{'ok' if passed else 'FAILED':7} {name}  {detail}", flush=True)
    FAILURES.extend([] if passed else [name])


def plain(x: torch.Tensor) -> bool:
    return False


class Plain:
    """Plain operations instead of kernels."""

    def __enter__(self):
        self.before = pointwise.has_kernels
        pointwise.has_kernels = policy.has_kernels = plain

    def __exit__(self, *ignored):
        pointwise.has_kernels = policy.has_kernels = self.before


def check_pointwise() -> None:
    torch.manual_seed(0)
    heads = torch.randn(1000, 20, 128, device=DEVICE).bfloat16()
    gate_up = (3 * torch.randn(1000, 2 * 11008, device=DEVICE)).bfloat16()
    gains = 1 + torch.randn(2, 128, device=DEVICE).bfloat16()  # of queries and keys
    angles = torch.rand(1000, 1, 64, device=DEVICE) * 6
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    found = {}
    for name, kind, use_plain in (
        ("exact", torch.float64, True),
        ("plain", torch.bfloat16, True),
        ("ours", torch.bfloat16, False),
    ):
        given = [part.to(kind, copy=True).requires_grad_() for part in (heads, gate_up, *gains)]
        before = pointwise.has_kernels
        if use_plain:
            pointwise.has_kernels = plain
        outputs = (
            *pointwise.split_heads(given[0], cos.to(kind), sin.to(kind), (16, 2, 2)),
            pointwise.swiglu(given[1]),
            pointwise.norm_heads(given[0], given[2], given[3], (16, 2, 2), 1e-6),
        )
        pointwise.has_kernels = before
        torch.manual_seed(1)
        outer = [torch.randn(part.shape, device=DEVICE).bfloat16().to(kind) for part in outputs]
        torch.autograd.backward(outputs, outer)
        found[name] = [*(part.detach() for part in outputs), *(part.grad for part in given)]
    names = ("query", "key", "value", "swiglu", "normed heads", "gradient of heads", "gradient of gate and up",
             "gradient of the queries' norm", "gradient of the keys' norm")  # fmt: skip
    for number, name in enumerate(names):
        ours, torchs, exact = (found[who][number] for who in ("ours", "plain", "exact"))
        equal, errors = torch.equal(ours, torchs), [relative(part, exact) for part in (ours, torchs)]
        is_forward = number < 5
        passed = (
            (ours - torchs).abs().max() <= 0.01 * torchs.abs().max() if is_forward else errors[0] <= 1.1 * errors[1]
        )
        check(name, bool(passed), f"equal bits: {equal}; error {errors[0]:.1e}, plain {errors[1]:.1e}")


def gradients(model, packed_rows: torch.Tensor, ids: torch.Tensor, attend: Packed) -> dict[str, torch.Tensor]:
    hidden = model.hidden(ids, attend.positions, attend, packed_rows)
    packed = type("Given", (), {"targets": ids[packed_rows + 1]})
    if pointwise.has_kernels(hidden):
        parts = policy.token_scores(hidden, model.head_weight, packed.targets, 0.9, 100 * model.shape.vocab_size)
    else:
        parts = policy._score_rows(model, hidden, packed.targets, 0.9, None, None)[:2]
    torch.manual_seed(2)
    outer = torch.randn(2, len(packed_rows), device=DEVICE)
    outer[1] *= 0.1
    weights = dict(model.named_parameters())
    return dict(zip(weights, torch.autograd.grad(parts, [*weights.values()], [*outer]), strict=True))


def check_decoder() -> None:
    """Small models: kernels in bf16 against plain operations in bf16, both against float32 on the CPU."""
    plain_shape = decoder.Shape(5000, 256, 688, 4, 8, 2, 64, 1e6, 1e-6, True, True)
    check_gradients("decoder", plain_shape)
    check_gradients("decoder with norms of queries and keys", replace(plain_shape, qk_norm=True, qkv_bias=False))
    check_gradients("decoder with a window of 50 tokens", replace(plain_shape, window=50))


def check_gradients(what: str, shape: decoder.Shape) -> None:
    lengths = [130, 70, 200, 33]
    torch.manual_seed(0)
    ids = torch.randint(5000, (sum(lengths),))
    rows = torch.arange(10, 120)
    model = random_decoder(shape)
    found = {}
    with Plain():
        exact = random_decoder(shape).to("cpu", torch.float64)
        hidden = exact.hidden(ids, Packed(lengths).positions, Packed(lengths), rows)
        log_probs = torch.log_softmax(exact.logits(hidden) / 0.9, -1)
        parts = (log_probs.gather(-1, ids[rows + 1][:, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1))
        torch.manual_seed(2)
        outer = torch.randn(2, len(rows), device=DEVICE).cpu().double()
        outer[1] *= 0.1
        weights = dict(exact.named_parameters())
        found["exact"] = dict(zip(weights, torch.autograd.grad(parts, [*weights.values()], [*outer]), strict=True))
    attend = Packed(lengths, DEVICE)
    given = (rows.to(DEVICE), ids.to(DEVICE), attend)
    with Plain():
        found["plain"] = gradients(model, *given)
    found["ours"] = gradients(model, *given)
    model.gradient_checkpointing = True
    before, decoder.layers_to_recompute = decoder.layers_to_recompute, lambda *ignored: 2
    found["two layers recomputed"] = gradients(model, *given)
    decoder.layers_to_recompute = before
    total = {
        name: relative(
            torch.cat([part.double().cpu().flatten() for part in parts.values()]),
            torch.cat([part.double().cpu().flatten() for part in found["exact"].values()]),
        )
        for name, parts in found.items()
    }
    detail = ", ".join(f"{name} {error:.2e}" for name, error in total.items() if name != "exact")
    check(f"{what}: gradients against float64", total["ours"] <= 1.1 * total["plain"], detail)
    check(f"{what}: recomputing two layers", total["two layers recomputed"] <= 1.1 * total["plain"])


def check_depth() -> None:
    """All 36 layers of a 3B shape: each kernel alone and all together, against float32. In bf16 errors add up."""
    shape, attend = SHAPES["3B"], Packed([600, 400], DEVICE)
    torch.manual_seed(5)
    ids, rows = torch.randint(shape.vocab_size, (1000,), device=DEVICE), torch.arange(100, 450, device=DEVICE)
    outer, names = torch.randn(350, device=DEVICE) / 350, ("norm", "add_norm", "split_heads", "swiglu")
    whole = {name: getattr(pointwise, name) for name in names}

    def gradients(model, kernels, attention) -> list[torch.Tensor]:
        for name in names:
            setattr(decoder, name, whole[name] if name in kernels else in_plain(whole[name]))
        hidden = model.hidden(ids, attend.positions, attention, rows)
        if "head" in kernels:
            log_probs = policy.token_scores(hidden, model.head_weight, ids[rows + 1], 1.0)[0]
        else:
            log_probs = policy._score_rows(model, hidden, ids[rows + 1], 1.0, None, None)[0]
        return [part.float() for part in torch.autograd.grad((log_probs * outer).sum(), [*model.parameters()])]

    def norm(parts) -> float:
        return float(torch.stack([part.norm() for part in parts]).norm())

    model = random_decoder(shape)
    for weight in model.parameters():
        weight.data = weight.data.float()
    exact = gradients(model, (), lambda layer, *heads: attend._padded(*heads))
    del model
    model, errors = random_decoder(shape), {}
    for kernels in ((), ("norm", "add_norm"), ("split_heads",), ("swiglu",), ("head",), (*names, "head")):
        found = gradients(model, kernels, attend)
        errors[kernels] = norm([part - wanted for part, wanted in zip(found, exact, strict=True)]) / norm(exact)
    detail = ", ".join(f"{'+'.join(kernels) or 'plain'} {error:.4f}" for kernels, error in errors.items())
    check("gradient of 36 layers against float32", max(errors.values()) <= 1.05 * errors[()], detail)


def in_plain(function: Callable) -> Callable:
    def run(*given):
        with Plain():
            return function(*given)

    return run


def check_grouped_queries() -> None:
    """Whether the variable-length kernel of this torch takes fewer keys than queries, and how fast that is."""
    from torch.nn.attention.varlen import varlen_attn

    print(f"options for grouped queries: {attention.grouping_options()}")
    torch.manual_seed(0)
    lengths = [1500] * 5 + [692]
    attend = Packed(lengths, DEVICE)
    heads = torch.randn(sum(lengths), 20, 128, device=DEVICE).bfloat16()
    outer = torch.randn(sum(lengths), 16, 128, device=DEVICE).bfloat16()

    def repeated(query, key, value):
        key, value = (part.repeat_interleave(8, dim=1) for part in (key, value))
        return varlen_attn(query, key, value, attend.starts, attend.starts, 1500, 1500, window_size=(-1, 0))

    def grouped(query, key, value):
        return attend(0, query, key, value)

    found = {}
    for name, attention_of in (("repeated", repeated), ("grouped", grouped)):
        parts = [part.detach().requires_grad_() for part in heads.split((16, 2, 2), dim=1)]
        try:
            mixed = attention_of(*parts)
            found[name] = (mixed.detach(), *torch.autograd.grad(mixed, parts, outer))
        except (RuntimeError, ValueError, TypeError) as error:
            print(f"{name}: {type(error).__name__}: {str(error)[:200]}")
            continue
        both = both_ways(lambda given, attend_to=attention_of: attend_to(*given), parts, outer)
        print(f"{name}: {both:.3f} ms forward and backward, 8,192 tokens")
    if len(found) == 2:
        errors = [relative(*pair) for pair in zip(found["grouped"], found["repeated"], strict=True)]
        print("grouped against repeated:", [f"{error:.1e}" for error in errors])


def check_optimizer() -> None:
    """Fused against torch's loop on the CPU: 20 steps with bf16 weights, each of three micro-batches."""
    torch.manual_seed(0)
    start = torch.randn(1000, 300)
    settings = Optimizer(lr=1e-3, weight_decay=0.01)
    weights = [torch.nn.Parameter(start.to(device, torch.bfloat16)) for device in ("cpu", DEVICE)]
    optimizers = [MasterAdamW([weight], settings, 100) for weight in weights]
    for step in range(20):
        for weight, optimizer in zip(weights, optimizers, strict=True):
            optimizer.prepare()
            for micro in range(3):
                torch.manual_seed(100 * step + micro)
                (weight * torch.randn(1000, 300).to(weight)).sum().backward()
            optimizer.step(1.0, optimizer.norm())
    error = relative(*(one.masters[0].detach().cpu() - start for one in reversed(optimizers)))
    fused = optimizers[1].adamw.param_groups[0]["fused"]
    check("fused AdamW against the CPU", error < 1e-4, f"{error:.1e}, fused: {fused}")


def both_ways(compute: Callable, given: Sequence[torch.Tensor], outer: torch.Tensor) -> float:
    """Milliseconds forward and backward."""
    return milliseconds(lambda: torch.autograd.grad(compute(given), given, outer))


def time_pointwise() -> None:
    """Of 8,192 tokens of Qwen2.5-3B, forward and backward."""
    sizes = {"norm": (8192, 2048), "heads": (8192, 20, 128), "swiglu": (8192, 22016)}
    given = {name: torch.randn(size, device=DEVICE).bfloat16().requires_grad_() for name, size in sizes.items()}
    weight = torch.ones(2048, device=DEVICE).bfloat16()
    cos = torch.rand(8192, 1, 64, device=DEVICE).bfloat16()
    ways = {
        "norm": lambda parts: pointwise.norm(*parts, weight, 1e-6),
        "heads": lambda parts: torch.cat(pointwise.split_heads(*parts, cos, cos, (16, 2, 2)), 1),
        "swiglu": lambda parts: pointwise.swiglu(*parts),
    }
    for name, compute in ways.items():
        outer = torch.randn_like(compute([given[name]]))
        ours = both_ways(compute, [given[name]], outer)
        with Plain():
            print(f"{name}: {ours:.3f} ms, plain {both_ways(compute, [given[name]], outer):.3f}")


if __name__ == "__main__":
    print(machine())
    check_pointwise()
    check_decoder()
    check_depth()
    check_optimizer()
    check_grouped_queries()
    time_pointwise()
    sys.exit(1 if FAILURES else 0)
