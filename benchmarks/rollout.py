"""Multi-turn rollouts on the CPU: our engine against `transformers.generate`, turn by turn, in one run.

    python benchmarks/rollout.py                              # pocket, 8 groups x 16
    python benchmarks/rollout.py --model smollm2 --groups 2 --size 8

The Sokoban workload: every row of a group starts from the group's prompt, five turns; a turn adds the tokens of the
next user message. Reply lengths are forced equal (`--reply` tokens, no stop), so that both sides compute the same
tokens. The peer runs the whole batch turn by turn, with the settings that were tried for it: the history prefilled anew
each turn (what a loop around `generate` does), and its cache carried over from turn to turn (possible here because all
rows have equal lengths). The ratio is against the faster one. Sampling at temperature 1 on both sides.
"""

import argparse
import statistics
import time

import torch
from gpu.conversations import NO_SUCH_TOKEN, Scripted
from transformers import AutoModelForCausalLM, DynamicCache

from ragen.agent.chat_template import ChatTemplate
from ragen.config.compose import resolve
from ragen.engine.base import Sampling
from ragen.engine.native.engine import NativeEngine
from ragen.model.load import find_model, load_model
from ragen.rollout.collect import World


def workload(tokenizer, groups: int, turns: int) -> list[list[tuple[int, ...]]]:
    """For each group the tokens in front of each reply, cut to the shortest group's: all rows are equally long."""
    style = ["agent_proxy.prompt_style=terse", "es_manager.train.env_configs.tags=[SimpleSokoban]"]
    config = resolve(style, environ={}).config
    chat = ChatTemplate(tokenizer)
    world = World.make(config, "SimpleSokoban", chat)
    made = []
    for seed in range(groups):
        state = world.env.reset(seed)
        prefix = world.view.prompt.reply_prefix()
        texts = [world.view.prompt.turn_text(turn + 1, state, 10 - 2 * turn, False) for turn in range(turns)]
        opening = chat.opening_ids(world.view.system_text, texts[0], prefix)
        deltas = [chat.closing_ids() + chat.delta_ids(f"reward -0.2\n{text}", prefix) for text in texts[1:]]
        made.append([opening, *deltas])
    shortest = [min(len(prompts[turn]) for prompts in made) for turn in range(turns)]
    return [[tuple(ids[-shortest[turn] :]) for turn, ids in enumerate(prompts)] for prompts in made]


def run_ours(engine: NativeEngine, prompts: list[list[tuple[int, ...]]], size: int, reply: int) -> float:
    rows = [Scripted(group, 1000 * index + member) for index, group in enumerate(prompts) for member in range(size)]
    sampling = Sampling(1.0, 1.0, -1, greedy=False, max_tokens=reply, stop_at_answer=False)
    started = time.perf_counter()
    engine.run(rows, sampling)
    seconds = time.perf_counter() - started
    assert all(len(answer.ids) == reply for row in rows for answer in row.replies)
    return seconds


@torch.no_grad()
def run_peer(model, prompts: list[list[tuple[int, ...]]], size: int, reply: int, keep_cache: bool) -> float:
    started = time.perf_counter()
    ids = torch.empty(len(prompts) * size, 0, dtype=torch.int64)
    cache = DynamicCache() if keep_cache else None
    for turn in range(len(prompts[0])):
        given = torch.tensor([group[turn] for group in prompts for _ in range(size)])
        ids = torch.cat([ids, given], dim=1)
        ids = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            min_new_tokens=reply,
            max_new_tokens=reply,
            pad_token_id=0,
            past_key_values=cache,
        )
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pocket")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--size", type=int, default=16)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--reply", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(2)
    loaded = load_model(find_model(options.model), "cpu")
    peer = AutoModelForCausalLM.from_pretrained(loaded.source.folder, dtype=torch.float32).eval()
    engine = NativeEngine(loaded.model, loaded.tokenizer, NO_SUCH_TOKEN)
    engine.stop.cut_ids = set()
    prompts = workload(loaded.tokenizer, options.groups, options.turns)
    lengths = [len(ids) for ids in prompts[0]]
    num_rows = options.groups * options.size
    num_tokens = num_rows * options.turns * options.reply
    print(f"{options.model}: {num_rows} rows ({options.groups} groups x {options.size}), {options.turns} turns")
    print(f"prompts of {lengths} tokens, replies of {options.reply}; two threads, {options.rounds} interleaved rounds")
    runs = {
        "ours": lambda: run_ours(engine, prompts, options.size, options.reply),
        "peer: generate, history prefilled anew": lambda: run_peer(peer, prompts, options.size, options.reply, False),
        "peer: generate, cache kept across turns": lambda: run_peer(peer, prompts, options.size, options.reply, True),
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for action in runs.values():
        action()
    for _ in range(options.rounds):
        for name, action in runs.items():
            seconds[name].append(action())
    ours = statistics.median(seconds["ours"])
    for name, values in seconds.items():
        middle = statistics.median(values)
        print(f"  {name:<42} {num_tokens / middle:>8,.0f} sampled tokens/s   ours is {middle / ours:.2f} times faster")
    best = min(statistics.median(values) for name, values in seconds.items() if name != "ours")
    print(f"ratio against the peer's best: {best / ours:.2f}")


if __name__ == "__main__":
    main()
