"""The likelihood of every reasoning after every prompt: the matrix log p(z_i | x_j).

    log_probs = cross_log_probs(model, prompts, reasonings, temperature=1.0, max_pairs=128, workers=workers)
    log_probs[2][0]                    # summed over the tokens of reasonings[2], after prompts[0]

A prompt is computed once, and all reasonings use its keys and values: a pass holds some prompts, then reasonings that
see their prompt and themselves (`CrossAttend`). Equal prompts and equal reasonings are computed once. The last token of
a reasoning predicts nothing that is needed, so it is skipped. With P tokens in all prompts and Z in all reasonings the
cost is at most P + (number of prompts) x Z tokens. The prefix that prompts share (the system text) is computed for
each: with 64 reasonings per prompt that is a few percent of the work. If tokens of a model see more of a prompt than
its keys and values, or only the last of them, every pair is a sequence and nothing is shared.

A pass has at most `max_pairs` pairs of prompt and reasoning, and on a CPU at most CPU_TOKENS tokens. The passes do not
depend on the number of workers: workers share them, and all get all numbers. On a GPU no pass waits for the one before:
sums stay on the device until all passes are launched.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ragen.distributed.workers import ALONE, Workers
from ragen.model.attention import Layout, Packed, grouping_options, sent
from ragen.model.pointwise import has_kernels
from ragen.model.policy import MAX_CHUNK_LOGITS
from ragen.model.scoring import CPU_TOKENS, micro_batches
from ragen.model.vocabulary import token_scores
from ragen.protocols import LanguageModel

Ids = tuple[int, ...]


class ScoringFailed(RuntimeError):
    """A worker could not compute its share. All workers raise it, with the first one's message."""


def cross_log_probs(
    model: LanguageModel,
    prompts: Sequence[Ids],
    reasonings: Sequence[Ids],
    temperature: float,
    max_pairs: int,
    workers: Workers = ALONE,
) -> list[list[float]]:
    """log p of each reasoning (a row) after each prompt (a column), in nats, summed over its tokens."""
    assert all(prompts) and all(reasonings), "a prompt and a reasoning have at least one token"
    columns, rows = list(dict.fromkeys(prompts)), list(dict.fromkeys(reasonings))
    blocks = _blocks(columns, rows, max_pairs, workers.device)
    mine = [_outcome(model, block, rows, temperature, max_pairs, workers.device) for block in workers.mine(blocks)]
    by_column: list[list[float]] = []
    for outcome in workers.gather([part if isinstance(part, str) else part.cpu() for part in mine]):
        if isinstance(outcome, str):
            raise ScoringFailed(outcome)
        by_column += outcome.tolist()
    column_of = {ids: index for index, ids in enumerate(columns)}
    row_of = {ids: index for index, ids in enumerate(rows)}
    return [[by_column[column_of[prompt]][row_of[ids]] for prompt in prompts] for ids in reasonings]


def _blocks(columns: Sequence[Ids], rows: Sequence[Ids], max_pairs: int, device: torch.device) -> list[list[Ids]]:
    """Prompts to compute together: as many as leave room for all reasonings in one pass, at least one."""
    num_reasoning_tokens = sum(map(len, rows))
    max_tokens = CPU_TOKENS if device.type == "cpu" else torch.inf
    blocks: list[list[Ids]] = []
    num_tokens = 0
    for prompt in columns:
        num_tokens += len(prompt) + num_reasoning_tokens
        if not blocks or (len(blocks[-1]) + 1) * len(rows) > max_pairs or num_tokens > max_tokens:
            blocks.append([])
            num_tokens = len(prompt) + num_reasoning_tokens
        blocks[-1].append(prompt)
    return blocks


def _outcome(
    model: LanguageModel, prompts: list[Ids], rows: list[Ids], temperature: float, max_pairs: int, device: torch.device
) -> Tensor | str:
    """The columns of a block, or an error message: the other workers wait for an answer in any case."""
    try:
        return _columns(model, prompts, rows, temperature, max_pairs, device)
    except Exception as error:
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error):
            return f"out of memory; lower collapse_detection.micro_batch_size, now {max_pairs}"
        return f"{type(error).__name__}: {error}"


@torch.no_grad()
def _columns(
    model: LanguageModel, prompts: list[Ids], rows: list[Ids], temperature: float, max_pairs: int, device: torch.device
) -> Tensor:
    """log p of every row after each of these prompts: [prompts, rows], in float64, on the device."""
    longest = max(map(len, prompts)) + max(map(len, rows))
    if not model.is_cacheable or (model.window is not None and model.window < longest):
        return _columns_of_whole_pairs(model, prompts, rows, temperature, max_pairs, device)
    held: Held = {}
    sums = torch.zeros(len(prompts), len(rows), dtype=torch.float64, device=device)
    # A block leaves room for all rows, or it has one prompt and the rows take several passes.
    batches = micro_batches([len(row) for row in rows], max(1, max_pairs // len(prompts)), device)
    for number, indices in enumerate(batches):
        chunk = [rows[index] for index in indices]
        attend = CrossAttend(held, [len(prompt) for prompt in prompts], [len(row) - 1 for row in chunk], device)
        fed, targets = (
            _ids(id_ for row in chunk for id_ in row[part]).repeat(len(prompts))
            for part in (slice(None, -1), slice(1, None))
        )
        ids = torch.cat([_ids(id_ for prompt in prompts for id_ in prompt), fed]) if number == 0 else fed
        wanted = torch.arange(len(ids) - attend.num_reasoning_tokens, len(ids), device=device)
        if number == 0:
            wanted = torch.cat([attend.prompt_ends, wanted])
        hidden = model.hidden(sent(ids, device), attend.positions, attend, wanted)
        if number == 0:
            after_prompts = _log_softmax(model.logits(hidden[: len(prompts)]), temperature)
            sums += after_prompts[:, sent(_ids(row[0] for row in rows), device)].double()
            hidden = hidden[len(prompts) :]
        log_probs = _log_probs(model, hidden, sent(targets, device), temperature)
        sums[:, sent(_ids(indices), device)] += attend.sum_by_pair(log_probs).view(len(prompts), len(chunk))
    return sums


def _ids(ids: Iterable[int]) -> Tensor:
    return torch.tensor(list(ids), dtype=torch.int64)


def _columns_of_whole_pairs(
    model: LanguageModel, prompts: list[Ids], rows: list[Ids], temperature: float, max_pairs: int, device: torch.device
) -> Tensor:
    """The same, without anything shared."""
    pairs = [(prompt, row) for prompt in prompts for row in rows]
    sums = torch.zeros(len(pairs), dtype=torch.float64, device=device)
    for indices in micro_batches([len(prompt) + len(row) - 1 for prompt, row in pairs], max_pairs, device):
        chunk = [pairs[index] for index in indices]
        attend = Packed([len(prompt) + len(row) - 1 for prompt, row in chunk], device)
        ids = torch.tensor([id_ for prompt, row in chunk for id_ in (*prompt, *row[:-1])], device=device)
        first = torch.tensor([len(prompt) - 1 for prompt, _ in chunk], device=device)  # it predicts the row's first
        wanted = (attend.positions >= first[attend.sequences]).nonzero()[:, 0]
        targets = torch.tensor([id_ for _, row in chunk for id_ in row], device=device)
        hidden = model.hidden(ids, attend.positions, attend, wanted)
        log_probs = _log_probs(model, hidden, targets, temperature).double()
        sums[indices] = torch.stack([part.sum() for part in log_probs.split([len(row) for _, row in chunk])])
    return sums.view(len(prompts), len(rows))


def _log_probs(model: LanguageModel, hidden: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """log p of the targets, in chunks: the logits of a whole pass are never in memory."""
    weight = model.head_weight if len(hidden) and has_kernels(hidden) else None
    if weight is not None:
        return token_scores(hidden, weight, targets, temperature)[0]
    parts = [hidden.new_zeros(0, dtype=torch.float32)]
    size = max(1, MAX_CHUNK_LOGITS // model.shape.vocab_size)
    for part, wanted in zip(hidden.split(size), targets.split(size), strict=True):
        if len(wanted):
            log_probs = _log_softmax(model.logits(part), temperature)
            parts.append(log_probs.gather(-1, wanted[:, None])[:, 0])
    return torch.cat(parts)


def _log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """In float32. At temperature 1 the logits are read only once, which saves time on a GPU."""
    scaled = logits if temperature == 1 else logits.float() / temperature
    return torch.log_softmax(scaled, dim=-1, dtype=torch.float32)


# --- attention ----------------------------------------------------------------------------------------------------

Held = dict[int, tuple[Tensor, Tensor]]  # layer -> keys and values of the prompts of a block


class CrossAttend:
    """Reasonings that see their prompt and themselves; the `attend` of one pass.

    The input is the prompts, unless they are already `held`; then the same reasonings for each prompt. A reasoning's
    output mixes two: attention to the prompt, computed for all reasonings at once, and to itself, weighted by the mass
    of the scores.
    """

    def __init__(
        self, held: Held, prompt_lengths: Sequence[int], reasoning_lengths: Sequence[int], device: torch.device
    ):
        self.held = held
        self.prompt_lengths, self.num_pairs = list(prompt_lengths), len(prompt_lengths) * len(reasoning_lengths)
        self.prompts = None if held else Packed(prompt_lengths, device)
        self.prompt_starts = sent(torch.tensor([0, *accumulate(prompt_lengths)], dtype=torch.int32), device)
        self.prompt_ends = self.prompt_starts[1:].long() - 1
        self.num_prompt_tokens = 0 if held else sum(prompt_lengths)
        self.num_by_prompt = sum(reasoning_lengths)
        self.num_reasoning_tokens = self.num_by_prompt * len(prompt_lengths)
        self.asking_starts = (
            torch.arange(len(prompt_lengths) + 1, dtype=torch.int32, device=device) * self.num_by_prompt
        )
        lengths = [length for _ in prompt_lengths for length in reasoning_lengths]
        self.own = _Own(lengths, device)
        shifts = sent(torch.tensor(prompt_lengths).repeat_interleave(self.num_by_prompt), device)
        behind = shifts + self.own.positions
        self.positions = behind if self.prompts is None else torch.cat([self.prompts.positions, behind])

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, window: int | None = None) -> Tensor:
        """No sequence is longer than the `window`."""
        start, mixed = self.num_prompt_tokens, torch.empty_like(query)
        if self.prompts is not None:
            self.held[layer] = (key[:start].clone(), value[:start].clone())
            mixed[:start] = self.prompts(layer, query[:start], key[:start], value[:start])
        if self.num_reasoning_tokens:
            of_prompt, mass_of_prompt = self._of_prompt(query[start:], *self.held[layer])
            of_itself, mass_of_itself = self.own(query[start:], key[start:], value[start:])
            share = torch.sigmoid(mass_of_prompt - mass_of_itself).to(query.dtype)
            torch.lerp(of_itself, of_prompt, share[..., None], out=mixed[start:])
        return mixed

    def sum_by_pair(self, values_T: Tensor) -> Tensor:
        """Sums over the tokens of each pair, in double precision and always in the same order."""
        padded = values_T.new_zeros(self.num_pairs, self.own.longest, dtype=torch.float64)
        padded[self.own.sequences, self.own.positions] = values_T.double()
        return padded.sum(dim=1)

    def _of_prompt(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Attention to the prompt, and the log of the summed scores."""
        if query.is_cuda:
            extents = (self.asking_starts, self.prompt_starts, self.num_by_prompt, max(self.prompt_lengths))
            return _on_cuda(query, key, value, extents, (-1, -1))
        num_kv_heads = key.shape[1]
        repeat = query.shape[1] // num_kv_heads
        # Query heads that share a key head become more queries to it, so no key is repeated.
        asked = query.unflatten(1, (num_kv_heads, repeat)).transpose(1, 2).flatten(0, 1)
        num_asked = [self.num_by_prompt * repeat] * len(self.prompt_lengths)
        mixed, mass = _full(asked, key, value, num_asked, self.prompt_lengths)
        mixed = mixed.unflatten(0, (-1, repeat)).transpose(1, 2).flatten(1, 2)
        return mixed, mass.unflatten(0, (-1, repeat)).transpose(1, 2).flatten(1, 2)


class _Own(Layout):
    """Causal attention within each of several packed sequences, of which some may be empty; also returns the mass."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if query.is_cuda:
            return _on_cuda(query, key, value, (self.starts, self.starts, self.longest, self.longest), (-1, 0))
        repeat = query.shape[1] // key.shape[1]
        if repeat > 1:
            key, value = key.repeat_interleave(repeat, dim=1), value.repeat_interleave(repeat, dim=1)
        # Right-padded: causality keeps real tokens from attending to padding.
        mixed, mass = _flash(self.pad(query), self.pad(key), self.pad(value), is_causal=True)
        return self.unpad(mixed), self.unpad(mass)


def _full(
    query: Tensor, key: Tensor, value: Tensor, num_queries: Sequence[int], num_keys: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Every query sees all keys of its part."""
    parts = zip(query.split(num_queries), key.split(num_keys), value.split(num_keys), strict=True)
    found = [_flash(*(part.transpose(0, 1)[None] for part in three)) for three in parts]
    mixed = torch.cat([mixed[0].transpose(0, 1) for mixed, _ in found])
    return mixed, torch.cat([mass[0].transpose(0, 1) for _, mass in found])


def _flash(query: Tensor, key: Tensor, value: Tensor, is_causal: bool = False) -> tuple[Tensor, Tensor]:
    """What `scaled_dot_product_attention` calls on a CPU; this one also returns the mass ([…, heads, T])."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, is_causal=is_causal)


def _on_cuda(
    query: Tensor, key: Tensor, value: Tensor, extents: tuple[Any, ...], window: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """`extents`: starts of the queries and of the keys, and the longest of each. Query heads may share key heads."""
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    options = {"window_size": window, "return_aux": AuxRequest(lse=True), **grouping_options()}
    mixed, mass = varlen_attn(query, key, value, *extents, **options)
    return mixed, mass if mass.shape == mixed.shape[:2] else mass.transpose(0, 1)
