"""Training levels where outcomes vary most (`es_manager.train.level_sampling=steered`).

    sampling = SteeredLevels(config, worlds, workers, log.note)
    requests = sampling.choose(slots(config, step))       # from eight candidates for each slot
    metrics = sampling.observe(groups)                    # what was drawn; the next step knows these groups

A level's difficulty is the length of its shortest solution. For each tag and difficulty `Difficulties` keeps a decayed
mean of the variance of rewards within groups: for rewards of 0 and 1 that is p (1 - p), largest where the policy wins
half of the time. A slot has eight consecutive candidates of the stream, and the chance of each is proportional to

    FLOOR + (1 - FLOOR) * (variance at its difficulty) / (variance over all difficulties)

so before the first group, and where nothing varies, all are equally likely. A difficulty that is rarely drawn is
forgotten: its estimate returns to the mean of all, and it is tried again.

Draws are hashes of the slot, and the sums are in the checkpoint: a resumed run plays the same levels. Only the training
split is steered. Tags whose levels have no certain shortest solution (games of chance, hidden information, any text as
an action, too many states to search) are drawn uniformly.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from statistics import fmean, variance
from typing import Any

from ragen.config.schema import Config
from ragen.distributed.workers import Workers
from ragen.env.failure import EnvironmentFailed, call, level
from ragen.env.solve import NoExactAnswer, hidden_information, optimal_length
from ragen.prng import uniform
from ragen.rollout.collect import GroupRequest, World
from ragen.rollout.summary import score_of
from ragen.statistics import length_bin
from ragen.train.levels import SPLIT, Slot, UniformLevels, request_of, seed_of
from ragen.types import Group

NUM_CANDIDATES = 8
FLOOR = 0.1  # the share of every weight that does not depend on what was seen
DECAY = 0.9  # of what was seen, each step: half of it counts after seven steps
PRIOR = 2.0  # groups: an estimate from few groups is drawn towards the mean of its tag
MAX_STATES = 20_000  # of a search for one solution, where the environment has no faster way

Length = int | None  # of the shortest solution; None: there is none, or it was not found


class Difficulties:
    """The variance of rewards within groups, by tag and length: decayed numbers of groups and sums of variances.

    >>> known = Difficulties()
    >>> known.observe([("Sokoban", 2, 0.25), ("Sokoban", 9, 0.0)])
    >>> known.weight("Sokoban", 2) > known.weight("Sokoban", 5) == 1.0 > known.weight("Sokoban", 9) > 0
    True
    """

    def __init__(self) -> None:
        self.sums: dict[str, dict[str, list[float]]] = {}  # tag -> length -> [groups, sum of variances]

    def observe(self, seen: Sequence[tuple[str, Length, float]]) -> None:
        """The (tag, length, variance) of the groups of one step."""
        for by_length in self.sums.values():
            for sums in by_length.values():
                sums[:] = [DECAY * value for value in sums]
        for tag, length, spread in seen:
            sums = self.sums.setdefault(tag, {}).setdefault(str(length), [0.0, 0.0])
            sums[0] += 1.0
            sums[1] += spread

    def weight(self, tag: str, length: Length) -> float:
        """How likely a level is to be drawn, relative to one of average variance."""
        by_length = self.sums.get(tag, {})
        total, spread = (sum(sums[part] for sums in by_length.values()) for part in (0, 1))
        if spread <= 0:
            return 1.0
        mean = spread / total
        here, spread_here = by_length.get(str(length), (0.0, 0.0))
        return FLOOR + (1 - FLOOR) * (spread_here + PRIOR * mean) / (here + PRIOR) / mean

    def state(self) -> dict[str, Any]:
        return {tag: {length: list(sums) for length, sums in of_tag.items()} for tag, of_tag in self.sums.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.sums = {tag: {length: list(sums) for length, sums in of_tag.items()} for tag, of_tag in state.items()}


class SteeredLevels:
    """Draws levels of the difficulties whose groups vary."""

    def __init__(self, config: Config, worlds: Mapping[str, World], workers: Workers, note: Callable[[str], None]):
        self.config, self.worlds, self.workers = config, worlds, workers
        self.uniform, self.difficulties = UniformLevels(config), Difficulties()
        self.known: dict[tuple[str, int], Length] = {}  # of levels that come round again
        self.steered: set[str] = set()
        for tag in dict.fromkeys(config.es_manager.train.env_configs.tags):
            if reason := workers.agree(self._why_unknown(tag)):
                note(f"es_manager.train.level_sampling=steered: levels of {tag} are drawn uniformly: {reason}")
            else:
                self.steered.add(tag)

    def choose(self, slots: Sequence[Slot]) -> list[GroupRequest]:
        candidates = {slot: self._candidates(slot.place) for slot in slots if slot.tag in self.steered}
        levels = dict.fromkeys((slot.tag, seed) for slot, seeds in candidates.items() for seed in seeds)
        lengths = self._lengths(list(levels))
        requests = {request.group: request for request in self.uniform.choose(slots)}
        for slot, seeds in candidates.items():
            weights = [self.difficulties.weight(slot.tag, lengths[slot.tag, seed]) for seed in seeds]
            seed = seeds[pick(weights, uniform("level", self.config.seed.train, slot.tag, slot.place))]
            requests[slot.group] = request_of(self.config, slot, seed)
        return list(requests.values())

    def observe(self, groups: Sequence[Group]) -> dict[str, float]:
        """Counts of the levels played, by length, for each tag that is steered."""
        steered = [group for group in groups if group.tag in self.steered]
        lengths = self._lengths(list(dict.fromkeys((group.tag, group.seed) for group in steered)))
        seen = [(group.tag, lengths[group.tag, group.seed], reward_variance(group)) for group in steered]
        self.difficulties.observe(seen)
        metrics: dict[str, float] = {}
        for tag in dict.fromkeys(tag for tag, _, _ in seen):
            of_tag = [length for found, length, _ in seen if found == tag]
            counts = Counter(map(length_bin, of_tag))
            metrics |= {f"train/{tag}/num_len_{name}": float(count) for name, count in counts.items()}
            if solved := [length for length in of_tag if length is not None]:
                metrics[f"train/{tag}/optimal_length"] = fmean(solved)
        return metrics

    def state(self) -> dict[str, Any]:
        return self.difficulties.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self.difficulties.restore(state)

    def _candidates(self, place: int) -> list[int]:
        return [seed_of(self.config, NUM_CANDIDATES * place + number) for number in range(NUM_CANDIDATES)]

    def _lengths(self, levels: Sequence[tuple[str, int]]) -> dict[tuple[str, int], Length]:
        """Of these levels. Each worker solves its share, and all get all of them."""
        unknown = [one for one in levels if one not in self.known]
        found = self.workers.gather([self._length(*one) for one in self.workers.mine(unknown)])
        lengths = self.known | dict(zip(unknown, found, strict=True))
        if self.config.data.train_data_num is not None:
            self.known = lengths
        return lengths

    def _length(self, tag: str, seed: int) -> Length:
        """A level that cannot be solved here is one more difficulty. If its environment failed, playing it says so."""
        try:
            return self._solve(tag, seed)
        except (NoExactAnswer, EnvironmentFailed):
            return None

    def _solve(self, tag: str, seed: int) -> Length:
        world = self.worlds[tag]
        solve = partial(_length_of, world, seed)
        return call(solve, level(tag, seed, SPLIT), world.time_limit, passes=(NoExactAnswer,))

    def _why_unknown(self, tag: str) -> str:
        """Why the levels of a tag have no known difficulty, from the first of them; empty if one of them has."""
        if hidden := hidden_information(self.worlds[tag].env):
            return hidden
        reason = "no certain shortest solution is known"
        for seed in self._candidates(0):
            try:
                if self._solve(tag, seed) is not None:
                    return ""
            except (NoExactAnswer, EnvironmentFailed) as error:
                reason = str(error)
        return reason


def pick(weights: Sequence[float], chance: float) -> int:
    """An index with a probability proportional to its weight; `chance` is in [0, 1)."""
    bounds = list(accumulate(weights))
    return next((index for index, bound in enumerate(bounds) if chance * bounds[-1] < bound), len(bounds) - 1)


def reward_variance(group: Group) -> float:
    """Of the rewards within a group, with n - 1; 0 for a single episode."""
    scores = [score_of(episode) for episode in group.episodes]
    return variance(scores) if len(scores) > 1 else 0.0


def _length_of(world: World, seed: int) -> Length:
    return optimal_length(world.env, world.env.reset(seed, SPLIT), MAX_STATES)
