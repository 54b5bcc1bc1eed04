"""The success of random and of perfect play in a setting, with a limit on the work: a plan should take seconds.

    baselines = baselines_within_budget(env, range(123, 635), "val", budget)
    baselines.random, baselines.optimal, baselines.num_levels     # numbers, or the reason if it was too much work

The work is estimated from the number of states and answers, so the result does not depend on the clock. If all levels
are too much work, it solves fewer; if even a few are too much, it returns the reason.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, repeat
from operator import mul

from ragen.env.base import Environment, State
from ragen.env.failure import EnvironmentFailed, call
from ragen.env.solve import (
    Baselines,
    Budget,
    NoExactAnswer,
    hidden_information,
    mean_success,
    optimal_success,
    outcomes,
    random_success,
)

MAX_LEVELS = 2_048
MAX_WORK = 8_000_000  # additions: a few seconds
MIN_LEVELS = 8  # a mean over fewer is noise
LIMIT = 120.0  # seconds, for an environment that hangs
MAX_STATES = 20_000  # explored for the estimate
WORK_OF_ONE_STEP = 300  # if an environment computes random play itself


def baselines_within_budget(env: Environment, seeds: Sequence[int], split: str, budget: Budget) -> Baselines:
    """The success of random and of perfect play, averaged over as many levels as the limit on work allows.

    Where the environment fails on a level, both are unknown, with the reason.
    """
    where = f"{type(env).__name__}, {split} levels from {seeds[0]}"
    try:
        return call(partial(_baselines, env, seeds, split, budget), where, LIMIT)
    except EnvironmentFailed as failure:
        return Baselines(str(failure), str(failure), 0)


def _baselines(env: Environment, seeds: Sequence[int], split: str, budget: Budget) -> Baselines:
    first = env.reset(seeds[0], split)
    try:
        works = {random_success: _random_work(env, first, budget), optimal_success: _optimal_work(env, first, budget)}
    except NoExactAnswer as error:
        return Baselines(str(error), str(error), 0)
    limit = MAX_WORK // min(len(seeds), MIN_LEVELS)
    feasible = [work for work in works.values() if work <= limit]
    num_levels = min(len(seeds), MAX_LEVELS, *(MAX_WORK // max(work, 1) for work in feasible))
    states = [env.reset(seed, split) for seed in seeds[:num_levels]]
    random, optimal = (
        mean_success(env, states, budget, solve) if work <= limit else _reason(env, first, budget)
        for solve, work in works.items()
    )
    return Baselines(random, hidden_information(env, states) or optimal, num_levels)


def _random_work(env: Environment, state: State, budget: Budget) -> int:
    if env.random_success(state, 1) is not NotImplemented:
        return budget.total * WORK_OF_ONE_STEP
    return budget.total * _explore(env, state, budget.total).num_branches


def _optimal_work(env: Environment, state: State, budget: Budget) -> int:
    if env.shortest_plan(state) is not NotImplemented:
        return 0
    game = _explore(env, state, budget.total)
    if not game.has_chance:
        return game.num_branches
    horizons = budget.actions + 1 if budget.actions < budget.turns * budget.actions_per_turn else 1
    return _num_answers(game.num_actions, budget) * game.num_states * budget.turns * horizons


def _num_answers(num_actions: int, budget: Budget) -> int:
    """The action sequences that one turn allows."""
    depth = min(budget.actions_per_turn, budget.actions, 64)  # more than 2^64 answers are too many anyway
    return sum(accumulate(repeat(num_actions, depth), mul))


def _reason(env: Environment, state: State, budget: Budget) -> str:
    game = _explore(env, state, budget.total)
    if game.has_chance and _num_answers(game.num_actions, budget) > budget.total:
        depth = min(budget.actions_per_turn, budget.actions)
        return f"{game.num_actions} actions, {depth} at a time, make too many answers to compare in a game of chance"
    return f"{budget.total} actions are too many to explore"


@dataclass(frozen=True)
class _Game:
    num_states: int
    num_branches: int
    num_actions: int  # in one state, at most
    has_chance: bool


def _explore(env: Environment, start: State, depth: int) -> _Game:
    """The part of a game that `depth` actions can reach."""
    seen, frontier = {start}, [start]
    num_branches = num_actions = 0
    has_chance = False
    while frontier and depth > 0:
        depth -= 1
        following = []
        for state in frontier:
            actions = list(env.action_names(state))
            num_actions = max(num_actions, len(actions))
            for action in actions:
                branches = outcomes(env, state, action)
                num_branches += len(branches)
                has_chance |= len(branches) > 1
                for _, transition in branches:
                    if not transition.done and transition.state not in seen:
                        seen.add(transition.state)
                        following.append(transition.state)
            if len(seen) > MAX_STATES:
                raise NoExactAnswer(
                    f"{type(env).__name__} has more than {MAX_STATES:,} reachable states, too many to explore"
                )
        frontier = following
    return _Game(len(seen), num_branches, num_actions, has_chance)
