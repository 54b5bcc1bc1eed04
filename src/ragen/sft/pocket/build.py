"""`ragen pocket build`: make the embedded model from nothing, the same bits every time.

    build(Path("weights"))                # the shipped recipe
    build(Path("weights"), steps=20)      # a look at it

Conversations (`demonstrations.py`) in batches of about `BATCH_TOKENS`, each seen once; cross-entropy on what the player
said; AdamW with a short warm-up and a cosine.
"""

import time
from collections.abc import Callable, Iterator
from itertools import count, islice
from math import cos, pi
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2Config

from ragen.model.attention import Packed
from ragen.model.decoder import Decoder, Shape, to_huggingface
from ragen.model.pocket.load import SEED, blank
from ragen.model.pocket.tokenizer import make_tokenizer
from ragen.sft.pocket.demonstrations import TASKS, demonstrations
from ragen.types import TokenSequence

STEPS = 750
BATCH_TOKENS = 6_000
LEARNING_RATE = 2e-3
WARM_UP_STEPS = 50
FINAL_RATE = 0.1  # of the learning rate
WEIGHT_DECAY = 0.01
MAX_GRAD_NORM = 1.0
NUM_THREADS = 2
MAX_POSITIONS = 2048
SECONDS_PER_STEP = 0.45  # on two idle cores, for the estimate in `describe`
POOL = 256  # conversations that are drawn together and sorted by length, so that batches need little padding


def build(
    output: Path, steps: int = STEPS, seed: int = SEED, say: Callable[[str], None] = print, every: int = 50
) -> None:
    """Train the model and write its folder."""
    started = time.perf_counter()
    threads_before = torch.get_num_threads()
    torch.set_num_threads(NUM_THREADS)  # the order of sums, hence the last bits, depends on it
    try:
        tokenizer = make_tokenizer()
        decoder = train(tokenizer, steps, seed, say, every)
    finally:
        torch.set_num_threads(threads_before)
    save(decoder, tokenizer, output)
    say(f"{output}: {num_parameters(decoder):,} parameters, {time.perf_counter() - started:.0f} s")


def train(tokenizer: PreTrainedTokenizerFast, steps: int, seed: int, say: Callable[[str], None], every: int) -> Decoder:
    """The half-trained model. `steps` is also the length of the schedule."""
    decoder = blank(len(tokenizer), seed)
    matrices = [weight for weight in decoder.parameters() if weight.dim() == 2]
    others = [weight for weight in decoder.parameters() if weight.dim() != 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}],
        lr=LEARNING_RATE,
        betas=(0.9, 0.98),
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, steps))
    started, num_tokens, losses = time.perf_counter(), 0, []
    for step, batch in enumerate(islice(batches(tokenizer, seed), steps), start=1):
        loss = reply_loss(decoder, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(decoder.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        num_tokens += sum(len(sequence.ids) for sequence in batch)
        losses.append(loss.item())
        if step % every == 0 or step == steps:
            elapsed = time.perf_counter() - started
            say(
                f"step {step}/{steps} - loss {sum(losses) / len(losses):.3f} - {num_tokens / 1e6:.1f}M tokens - "
                f"{num_tokens / elapsed:,.0f} tokens/s - {elapsed / step * (steps - step):.0f} s left"
            )
            losses.clear()
    return decoder


def reply_loss(decoder: Decoder, batch: list[TokenSequence]) -> Tensor:
    """The mean cross-entropy of the tokens that the player said."""
    ids = torch.tensor([index for sequence in batch for index in sequence.ids])
    said = torch.tensor([flag for sequence in batch for flag in sequence.sampled])
    attend = Packed([len(sequence.ids) for sequence in batch])
    [rows] = said.nonzero(as_tuple=True)
    hidden = decoder.hidden(ids, attend.positions, attend)
    return F.cross_entropy(decoder.logits(hidden[rows - 1]), ids[rows])


def batches(tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[list[TokenSequence]]:
    """Conversations of all tasks, each once, in batches of similar length."""
    random = Random(f"pocket/order/{seed}")
    streams = {name: demonstrations(tokenizer, task, count()) for name, task in TASKS.items()}
    shares = [task.share for task in TASKS.values()]
    while True:
        names = random.choices(list(streams), weights=shares, k=POOL)
        pool = [sequence for name in names for sequence in next(streams[name]).sequences()]
        pool.sort(key=lambda sequence: len(sequence.ids))
        cut = list(_cut(pool))
        random.shuffle(cut)
        yield from cut


def _cut(pool: list[TokenSequence]) -> Iterator[list[TokenSequence]]:
    batch: list[TokenSequence] = []
    num_tokens = 0
    for sequence in pool:
        batch.append(sequence)
        num_tokens += len(sequence.ids)
        if num_tokens >= BATCH_TOKENS:
            yield batch
            batch, num_tokens = [], 0
    if batch:
        yield batch


def _rate(step: int, steps: int) -> float:
    warm = min(1.0, (step + 1) / WARM_UP_STEPS)
    return warm * (FINAL_RATE + (1 - FINAL_RATE) * 0.5 * (1 + cos(pi * step / steps)))


def save(decoder: Decoder, tokenizer: PreTrainedTokenizerFast, output: Path) -> None:
    """Write what `transformers` opens as a Qwen2 model: weights, config, tokenizer."""
    output.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.contiguous() for name, weight in to_huggingface(decoder).items()}
    file = output / "model.safetensors"
    save_file(weights, file, metadata={"format": "pt"})
    file.chmod(0o644)  # it is written for its owner alone, but is shipped to everyone
    config(decoder.shape, tokenizer).save_pretrained(output)
    tokenizer.save_pretrained(output)


def config(shape: Shape, tokenizer: PreTrainedTokenizerFast) -> Qwen2Config:
    """The shape as `transformers` describes it."""
    return Qwen2Config(  # type: ignore[call-arg]  # head_dim is one of its **kwargs
        architectures=["Qwen2ForCausalLM"],
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        rms_norm_eps=shape.norm_eps,
        tie_word_embeddings=shape.tied_embeddings,
        max_position_embeddings=MAX_POSITIONS,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        dtype="float32",
    )


def num_parameters(decoder: Decoder) -> int:
    return sum(weight.numel() for weight in decoder.parameters())


def describe(steps: int = STEPS) -> str:
    """The recipe as text; nothing is computed."""
    decoder = blank(len(make_tokenizer()))
    form = decoder.shape
    lines = [
        f"shape: {num_parameters(decoder):,} parameters, {form.num_layers} layers of width {form.hidden_size}, "
        f"{form.num_heads} heads ({form.num_kv_heads} for keys and values), {form.vocab_size} tokens; Qwen2",
        f"training: {steps} steps of about {BATCH_TOKENS:,} tokens, AdamW, learning rate {LEARNING_RATE:g}, "
        f"about {steps * SECONDS_PER_STEP / 60:.0f} minutes on two cores",
        "conversations, levels of the split sft, none that shows the start of a validation level:",
    ]
    for task in TASKS.values():
        skill, habit = task.manners.skill, task.manners.habit
        lines.append(
            f"  {task.share:4.0%} {task.tag}: {skill:.0%} of the turns as the solver plays, {habit:.0%} by habit, "
            f"{1 - skill - habit:.0%} at random"
        )
    return "\n".join(lines)
