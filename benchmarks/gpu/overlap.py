"""Would prefilling later turns beside decoding pay? A burst and a prefill, one after the other and on two streams.

    python benchmarks/gpu/overlap.py                   # random:Qwen2.5-3B; a minute
    python benchmarks/gpu/overlap.py --shape tiny      # to try it on a CPU, where nothing runs beside anything

Decoding reads weights, prefilling multiplies. Ragged replies put a prefill of a few prompts between most bursts, and
all rows wait for it. Each part has slots of its own here, so the numbers are of speed alone.
"""

import argparse
from contextlib import nullcontext

import torch
from measuring import DEVICE, SHAPES, machine, milliseconds, random_decoder

from ragen.engine.base import Sampling
from ragen.engine.native.eager import Inputs
from ragen.engine.native.graphs import GraphRows

BURST, CONTEXT = 8, 800


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="3B")
    parser.add_argument("--rows", type=int, nargs="+", default=[128, 64, 16])
    parser.add_argument("--prompts", type=int, nargs="+", default=[1, 4, 8], help="of 155 tokens, prefilled together")
    options = parser.parse_args()
    is_gpu = DEVICE.type == "cuda"
    decoder = random_decoder(SHAPES[options.shape], torch.bfloat16 if is_gpu else torch.float32).eval()
    print(f"{machine()}; {options.shape}, bursts of {BURST} tokens at context {CONTEXT}", flush=True)
    decoding, filling = (GraphRows(decoder, has_triton=is_gpu, capture=is_gpu) for _ in range(2))
    side = torch.cuda.Stream() if is_gpu else None
    sampling = Sampling(1.0, 1.0, -1, False, 100, False)
    for rows, count in ((decoding, max(options.rows)), (filling, max(options.prompts))):
        rows.begin(sampling)
        rows.add(count)
        rows.reserve(CONTEXT + 200)

    @torch.no_grad()
    def burst(num_rows: int) -> None:
        inputs = Inputs([CONTEXT] * num_rows, [5] * num_rows, list(range(num_rows)), [0] * num_rows)
        decoding.burst(inputs, BURST, lambda logits, draws: sampling)

    @torch.no_grad()
    def fill(num_prompts: int) -> None:
        filling.fill(range(num_prompts), [CONTEXT] * num_prompts, [[7] * 155] * num_prompts)

    def both(num_rows: int, num_prompts: int) -> None:
        if side is not None:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side) if side is not None else nullcontext():
            fill(num_prompts)
        burst(num_rows)
        if side is not None:
            torch.cuda.current_stream().wait_stream(side)

    for num_rows in options.rows:
        for num_prompts in options.prompts:
            alone = milliseconds(lambda n=num_rows: burst(n)), milliseconds(lambda n=num_prompts: fill(n))
            together = milliseconds(lambda r=num_rows, n=num_prompts: both(r, n))
            print(
                f"  {num_rows:3} rows {alone[0]:6.2f} ms, {num_prompts} prompts {alone[1]:6.2f} ms, on two streams "
                f"{together:6.2f} ms: {1 - together / sum(alone):.0%} saved",
                flush=True,
            )


if __name__ == "__main__":
    main()
