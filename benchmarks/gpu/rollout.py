"""Multi-turn rollouts on one GPU: our engine against `transformers.generate`, turn by turn, in one run.

    python benchmarks/gpu/rollout.py             # random:Qwen2.5-3B, 8 x 16 episodes, 5 turns of 100 tokens

The Sokoban workload: the members of a group start from the same prompt; a turn adds the next user message. Lengths of
replies are forced: all equal, then ragged (log-normal, same mean). The peer runs the whole batch turn by turn with
equal lengths, its cache kept from turn to turn, which only equal lengths allow. Last, the episodes of a training step
of `_2_sokoban` are played as in the trainer: environments, chat template and parsing included.
"""

import argparse
import cProfile
import pstats
from collections.abc import Callable
from typing import Any

import torch
from conversations import NO_SUCH_TOKEN, EveryToken, Scripted
from measuring import machine, seconds, their_model

from ragen.agent.chat_template import ChatTemplate
from ragen.config.compose import resolve
from ragen.engine.base import Sampling
from ragen.engine.forced_length import ForcedLength
from ragen.engine.native.engine import NativeEngine
from ragen.model.load import find_model, load_model
from ragen.rollout.collect import World, collect
from ragen.train.levels import UniformLevels, slots
from ragen.train.rollouts import train_sampling


def prompts_of(groups: int, turns: int, opening: int, shared: int, delta: int) -> list[list[tuple[int, ...]]]:
    generator = torch.Generator().manual_seed(0)

    def some(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(2, 600, (count,), generator=generator).tolist())

    system = some(shared)
    return [[system + some(opening - shared), *(some(delta) for _ in range(turns - 1))] for _ in range(groups)]


def timed(action: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    results = []
    return seconds(lambda: results.append(action(*arguments))), results[0]


engines: dict[int, NativeEngine] = {}


def play(loaded, step: int, reply: int) -> int:
    """The episodes of a training step of `_2_sokoban`, as the trainer plays them; returns the sampled tokens."""
    config = resolve([f"actor_rollout_ref.rollout.forced_reply_tokens={reply}"], "_2_sokoban", environ={}).config
    chat = ChatTemplate(loaded.tokenizer)
    worlds = {tag: World.make(config, tag, chat) for tag in config.es_manager.train.env_configs.tags}
    if reply not in engines:  # slots and graphs stay from step to step
        engines[reply] = NativeEngine(loaded.model, loaded.tokenizer, chat.end_of_turn_id)
    groups = collect(
        engines[reply],
        worlds,
        UniformLevels(config).choose(slots(config, step)),
        train_sampling(config),
        ("benchmark", step),
    )
    return sum(len(turn.reply_ids) for group in groups for episode in group.episodes for turn in episode.turns)


def conversations(prompts: list[list[tuple[int, ...]]], size: int, seed: int) -> list[Scripted]:
    return [
        Scripted(group, (seed << 20) + 1000 * index + member)
        for index, group in enumerate(prompts)
        for member in range(size)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random:Qwen2.5-3B")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--size", type=int, default=16)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--reply", type=int, default=100)
    parser.add_argument("--opening", type=int, default=543, help="tokens of the first prompt")
    parser.add_argument("--shared", type=int, default=380, help="of these, the same in all groups")
    parser.add_argument("--delta", type=int, default=155, help="tokens of the later prompts")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--profile", action="store_true", help="print where the host's time goes")
    options = parser.parse_args()

    print(machine())
    loaded = load_model(find_model(options.model))
    engine = NativeEngine(loaded.model, EveryToken(loaded.model.shape.vocab_size), NO_SUCH_TOKEN)
    prompts = prompts_of(options.groups, options.turns, options.opening, options.shared, options.delta)
    num_rows = options.groups * options.size
    print(f"{options.model}: {num_rows} episodes, {options.turns} turns, {engine.way.text}")
    rates = {}
    for name, is_ragged in (("equal", False), ("ragged", True)):
        sampling = Sampling(1.0, 1.0, -1, False, 1 << 30, False, ForcedLength(options.reply, is_ragged))
        for number in range(options.rounds):
            rows = conversations(prompts, options.size, number)
            took, run = timed(engine.run, rows, sampling)
            num_tokens = sum(len(reply.ids) for row in rows for reply in row.replies)
            rates[name] = num_tokens / took
            told = f"{run.prefilled:,} tokens prefilled, {1 - run.kept / run.decoded:.0%} of the decoded discarded"
            print(f"  {name}: {took:6.2f} s, {num_tokens:,} tokens, {rates[name]:>7,.0f} tokens/s, {told}", flush=True)
        if options.profile:
            profiled = cProfile.Profile()
            profiled.runcall(engine.run, conversations(prompts, options.size, 77), sampling)
            pstats.Stats(profiled).sort_stats("tottime").print_stats(14)
    print(f"  ragged against equal: {rates['ragged'] / rates['equal']:.0%}")
    slots, peak = engine._graph_rows.slots.num_bytes / 2**30, torch.cuda.max_memory_allocated() / 2**30
    print(f"  cache {slots:.1f} GiB, peak {peak:.1f} GiB")
    for number in range(options.rounds):
        took, num_tokens = timed(play, loaded, number + 1, options.reply)
        print(f"  played episodes of _2_sokoban: {took:.2f} s, {num_tokens / took:,.0f} tokens/s", flush=True)
    if not options.no_peer:
        took = peer(loaded, prompts, options)
        ours = num_rows * options.turns * options.reply / rates["equal"]
        print(f"  peer: generate turn by turn, cache kept: {took:.1f} s; ratio {took / ours:.1f}")


def peer(loaded, prompts: list[list[tuple[int, ...]]], options) -> float:
    from transformers import DynamicCache

    theirs = their_model(loaded)

    @torch.no_grad()
    def rollout(turns: int) -> None:
        ids = torch.empty(options.groups * options.size, 0, dtype=torch.int64, device="cuda")
        cache = DynamicCache()
        for turn in range(turns):
            given = torch.tensor([group[turn] for group in prompts for _ in range(options.size)], device="cuda")
            ids = torch.cat([ids, given], dim=1)
            ids = theirs.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                min_new_tokens=options.reply, max_new_tokens=options.reply, pad_token_id=0, eos_token_id=None,
                past_key_values=cache,
            )  # fmt: skip

    rollout(1)
    return seconds(lambda: rollout(options.turns))


if __name__ == "__main__":
    main()
