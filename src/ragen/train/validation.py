"""Validation: the fixed levels, with intervals, and between what random and perfect play reach.

    validator = Validator(config, worlds)
    metrics, groups = validator.run(engine)

Every validation plays the same levels with the same draws, sampled at validation temperature and once more greedily, so
that two validations of one run differ by the weights alone. Success is also given by the optimal length of the level:
repaired format or remembered levels do not look like learning there.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean

from ragen.config import derive
from ragen.config.schema import Config
from ragen.distributed.workers import ALONE, Workers
from ragen.engine.base import Engine, Sampling
from ragen.engine.forced_length import read_forced_length
from ragen.env.failure import EnvironmentFailed, call, level
from ragen.env.solve import NoExactAnswer, baselines, optimal_length
from ragen.rollout.collect import FailedGroup, GroupRequest, World, collect
from ragen.rollout.summary import summarize
from ragen.run.clock import Clock
from ragen.run.run_logger import NullLogger
from ragen.statistics import rate, success_by_length, wilson
from ragen.train.failures import draws_of, play_groups
from ragen.train.levels import tags_of_groups, with_turns
from ragen.types import Episode, Group

SPLIT = "val"
NO_LOG = NullLogger()


class Validator:
    def __init__(
        self,
        config: Config,
        worlds: dict[str, World],
        workers: Workers = ALONE,
        note: Callable[[str], None] = lambda text: None,
    ):
        self.config, self.worlds, self.workers = config, worlds, workers
        self.requests = requests(config)
        self.fixed: dict[str, float] = {}
        self.lengths: dict[tuple[str, int], int | None] = {}  # optimal ones
        for tag in dict.fromkeys(request.tag for request in self.requests):
            seeds = [request.seed for request in self.requests if request.tag == tag]
            try:
                fixed = self._baselines(tag, seeds)
                has_optimum = f"val-env/{tag}/optimal" in fixed
                lengths = [_optimal_length(worlds[tag], seed) if has_optimum else None for seed in seeds]
            except EnvironmentFailed as failure:
                note(f"random and optimal success of {tag} are unknown: {failure}")
                continue
            self.fixed |= fixed
            self.lengths |= {(tag, seed): length for seed, length in zip(seeds, lengths, strict=True)}

    def run(self, engine: Engine, log: NullLogger = NO_LOG, step: int = 0) -> tuple[dict[str, float], list[Group]]:
        """Metrics under `val-env/…`, and the sampled episodes."""
        groups, failures = self._play(engine, validation_sampling(self.config), log, step, SPLIT)
        metrics = {f"val-env/{name}": value for name, value in (summarize(groups) | failures).items()}
        metrics |= self.fixed | self._success(groups, "success")
        greedy, _ = self._play(engine, validation_sampling(self.config, greedy=True), log, step, f"{SPLIT}-greedy")
        return metrics | self._success(greedy, "greedy_success") | self._by_length(groups), groups

    def validate(self, engine: Engine, log: NullLogger, step: int, clock: Clock) -> dict[str, float]:
        """`run`, shown and stored as the validation after `step`."""
        with clock("testing"), log.phase("validation", total=self.num_episodes):
            metrics, groups = self.run(engine, log, step)
        log.episodes(step, "val", groups)
        log.validation(step, metrics)
        return metrics

    @property
    def num_episodes(self) -> int:
        samplings = (validation_sampling(self.config), validation_sampling(self.config, greedy=True))
        return sum(map(self.num_repetitions, samplings)) * sum(
            request.size for request in self.workers.mine(self.requests)
        )

    def _play(
        self, engine: Engine, sampling: Sampling, log: NullLogger, step: int, kind: str
    ) -> tuple[list[Group], dict[str, float]]:
        """The levels, `validation_steps` times, and counts of those that failed in one of them."""
        groups: list[Group] = []
        failures: Counter[str] = Counter()
        for repetition in range(self.num_repetitions(sampling)):
            play = partial(self._play_once, engine, sampling, log, repetition)
            played, counts = play_groups(self.requests, play, self.config, log, step, kind)
            groups += played
            failures.update(counts)
        return groups, dict(failures)

    def _play_once(
        self,
        engine: Engine,
        sampling: Sampling,
        log: NullLogger,
        repetition: int,
        requests: Sequence[GroupRequest],
        attempt: int,
    ) -> list[Group | FailedGroup]:
        """Each worker plays its share, and all get all of them."""
        limit = self.config.data.val_batch_size or len(requests)
        draws = draws_of(("val", self.config.seed.val, *([repetition] if repetition else [])), attempt)
        outcomes: list[Group | FailedGroup] = []
        for start in range(0, len(requests), limit):
            mine = self.workers.mine(requests[start : start + limit])
            played = collect(engine, self.worlds, mine, sampling, draws, log.advance)
            outcomes += self.workers.gather(with_turns(played, self.config))
        return outcomes

    def num_repetitions(self, sampling: Sampling) -> int:
        """Playing greedily again would give the same."""
        return 1 if sampling.greedy else max(1, self.config.trainer.validation_steps)

    def _success(self, groups: Sequence[Group], name: str) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for tag, episodes in _by_tag(groups).items():
            metrics[f"val-env/{tag}/{name}"] = sum(episode.final.success for episode in episodes) / len(episodes)
            metrics[f"val-env/{tag}/{name}_low"], metrics[f"val-env/{tag}/{name}_high"] = _interval(episodes)
        return metrics

    def _by_length(self, groups: Sequence[Group]) -> dict[str, float]:
        metrics = {}
        for tag, episodes in _by_tag(groups).items():
            pairs = [(self.lengths.get((tag, episode.seed)), episode.final.success) for episode in episodes]
            if all(length is None for length, _ in pairs):
                continue
            for name, found in success_by_length(pairs).items():
                metrics[f"val-env/{tag}/success_len_{name}"] = found.mean
                metrics[f"val-env/{tag}/num_len_{name}"] = found.num_trials
        return metrics

    def _baselines(self, tag: str, seeds: Sequence[int]) -> dict[str, float]:
        world, budget = self.worlds[tag], derive.budget(self.config, tag)
        reached = baselines(world.env, seeds, SPLIT, budget, world.time_limit)
        values = {"random": reached.random, "optimal": reached.optimal}
        return {f"val-env/{tag}/{name}": value for name, value in values.items() if not isinstance(value, str)}


def requests(config: Config) -> list[GroupRequest]:
    """The validation levels: seeds from `seed.val` on, tag by tag."""
    envs, first = config.es_manager.val, config.seed.val
    tags = enumerate(tags_of_groups(envs))
    return [GroupRequest(tag, first + index, SPLIT, index, envs.group_size) for index, tag in tags]


def validation_sampling(config: Config, greedy: bool = False) -> Sampling:
    rollout = config.actor_rollout_ref.rollout
    chosen = rollout.val_kwargs
    return Sampling(
        temperature=chosen.temperature or 1.0,
        top_p=chosen.top_p,
        top_k=chosen.top_k,
        greedy=greedy or not chosen.do_sample or chosen.temperature == 0,
        max_tokens=rollout.response_length,
        stop_at_answer=rollout.stop_at_answer,
        forced_length=read_forced_length(rollout.forced_reply_tokens),
    )


def _by_tag(groups: Sequence[Group]) -> dict[str, list[Episode]]:
    episodes: dict[str, list[Episode]] = {}
    for group in groups:
        episodes.setdefault(group.tag, []).extend(group.episodes)
    return episodes


def _interval(episodes: Sequence[Episode]) -> tuple[float, float]:
    """Of success. Samples of one level are alike: a level is one observation."""
    levels: dict[int, list[bool]] = {}
    for episode in episodes:
        levels.setdefault(episode.seed, []).append(episode.final.success)
    if len(levels) == len(episodes):
        return wilson(sum(episode.final.success for episode in episodes), len(episodes))
    estimate = rate([fmean(level) for level in levels.values()])
    assert estimate.low is not None and estimate.high is not None
    return estimate.low, estimate.high


def _optimal_length(world: World, seed: int) -> int | None:
    """How many actions perfect play needs, where that is one number: not in a game of chance."""

    def solve() -> int | None:
        return optimal_length(world.env, world.env.reset(seed, SPLIT))

    return call(solve, level(world.name, seed, SPLIT), world.time_limit, passes=(NoExactAnswer,))
