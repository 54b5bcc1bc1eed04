"""Baselines of a level set: the exact success of random and of perfect play, to judge a score against.

    env = Sokoban(Sokoban.Config(num_boxes=1))
    budget = Budget(turns=5, actions_per_turn=2, actions=10)
    baselines(env, range(123, 635), "val", budget)      # Baselines(random=0.195, optimal=1.0, num_levels=512)
    best_actions(env, env.reset(123, "val"), budget)    # a perfect agent's next answer

This works on any environment whose `chances` lists the outcomes of a step, and calls the same `step` as play does. An
environment may provide a faster way (`Environment.shortest_plan`, `Environment.random_success`). A baseline that is
unknown is a text with the reason: any text is an action, outcomes cannot be listed, part of the state is hidden.

A perfect agent sees what ours sees: in a turn it commits to several actions at once, without seeing what the first ones
did. On slippery ground that costs success, and the optimum includes that cost.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

from ragen.env.base import Action, Environment, State, Transition
from ragen.env.failure import call, level

MAX_SEQUENCES = 20_000  # action sequences of one turn to compare; more would take too long
MAX_STATES = 1_000_000  # states a search may visit
TIE = 1e-12  # smaller differences are rounding

Solver = Callable[[Environment, State, "Budget"], float]
Values = dict[int | None, list[float]]  # actions left (None: enough for every turn) -> the value of each state


class NoExactAnswer(ValueError):
    """A game that is too large, or does not list its outcomes."""


@dataclass(frozen=True)
class Budget:
    """How much an agent may do in an episode."""

    turns: int
    actions_per_turn: int
    actions: int

    def __post_init__(self):
        if min(self.turns, self.actions_per_turn, self.actions) < 1:
            raise ValueError(f"{self}: every part must be at least 1")

    @property
    def total(self) -> int:
        """The number of actions that can actually be taken."""
        return min(self.actions, self.turns * self.actions_per_turn)


@dataclass(frozen=True)
class Baselines:
    """Mean success over a set of levels, or why it is unknown."""

    random: float | str
    optimal: float | str
    num_levels: int


def baselines(
    env: Environment, seeds: Iterable[int], split: str, budget: Budget, limit: float | None = None
) -> Baselines:
    """The success of random and of perfect play, averaged over the levels of these seeds.

    `limit` is in seconds, for each level. Raises `EnvironmentFailed` with the level on which the environment failed.
    """
    name = type(env).__name__
    states: list[State] = []
    levels: dict[State, str] = {}  # the first seed of each, for messages
    for seed in seeds:
        states.append(call(partial(env.reset, seed, split), level(name, seed, split), limit))
        levels.setdefault(states[-1], level(name, seed, split))
    if not states:
        raise ValueError("no seeds: a baseline needs at least one level")

    def mean_of(solve: Solver) -> float | str:
        def guarded(env: Environment, state: State, budget: Budget) -> float:
            return call(partial(solve, env, state, budget), levels[state], limit, (NoExactAnswer,))

        return mean_success(env, states, budget, guarded)

    hidden = call(partial(hidden_information, env, states), f"{name}, {split} levels", limit)
    return Baselines(mean_of(random_success), hidden or mean_of(optimal_success), len(states))


def mean_success(env: Environment, states: Sequence[State], budget: Budget, solve: Solver) -> float | str:
    """The mean over these starting states, or why it is unknown."""
    # Seeds can share a level (4x4 lakes often do), and equal states have equal futures: solve each once.
    try:
        values = {state: solve(env, state, budget) for state in set(states)}
    except NoExactAnswer as error:
        return str(error)
    return sum(values[state] for state in states) / len(states)


def hidden_information(env: Environment, states: Iterable[State] = ()) -> str:
    """Why the best play is unknown in a game that hides part of its state; empty where the agent sees all of it.

    A search knows the whole state: it would play a hidden-information game with open cards. Such a game says so
    (`Environment.HIDDEN_INFORMATION`), or is found by two levels that look alike and are not equal.
    """
    if env.HIDDEN_INFORMATION:
        return f"{type(env).__name__} hides part of its state from the agent"
    seen: dict[tuple[str, ...], State] = {}
    for state in states:
        look = (env.render(state), *env.action_names(state).values())
        if seen.setdefault(look, state) != state:
            return f"{type(env).__name__} has different levels that look alike: part of the state is hidden"
    return ""


def overlap(env: Environment, seeds_a: Iterable[int], split_a: str, seeds_b: Iterable[int], split_b: str) -> float:
    """The share of the distinct starting states of `b` that also occur in `a`."""
    states_a = {env.reset(seed, split_a) for seed in seeds_a}
    states_b = {env.reset(seed, split_b) for seed in seeds_b}
    if not states_b:
        raise ValueError("no seeds in b: nothing to compare")
    return len(states_a & states_b) / len(states_b)


def random_success(env: Environment, state: State, budget: Budget) -> float:
    """The chance that uniformly random actions win within the budget, from the distribution over states."""
    known = env.random_success(state, budget.total)
    if known is not NotImplemented:
        return known
    _check_actions(env, state)
    distribution = {state: 1.0}
    won = 0.0
    for _ in range(budget.total):
        following: dict[State, float] = {}
        for current, weight in distribution.items():
            actions = list(env.action_names(current))
            for action in actions:
                for chance, transition in outcomes(env, current, action):
                    share = weight * chance / len(actions)
                    if transition.success:
                        won += share
                    elif not transition.done:
                        following[transition.state] = following.get(transition.state, 0.0) + share
        distribution = following
    return won


def optimal_success(env: Environment, state: State, budget: Budget) -> float:
    """The best success rate that any agent can reach from this state within the budget."""
    return _solve_turn(env, state, budget)[0]


def best_actions(env: Environment, state: State, budget: Budget) -> tuple[Action, ...]:
    """A perfect agent's next turn, the shortest one. If nothing can win, any action."""
    return _solve_turn(env, state, budget)[1]


def shortest_plan(env: Environment, state: State, max_states: int = MAX_STATES) -> tuple[Action, ...] | None:
    """The shortest sequence of actions that wins a game without chance, or None."""
    known = env.shortest_plan(state)
    if known is NotImplemented:
        _check_actions(env, state)
    return _search_plan(env, state, None, max_states) if known is NotImplemented else known


def optimal_length(env: Environment, state: State, max_states: int = MAX_STATES) -> int | None:
    """How many actions perfect play needs. None in a game of chance, and for a level that cannot be won."""
    if any(len(env.chances(state, action) or ()) != 1 for action in env.action_names(state)):
        return None
    plan = shortest_plan(env, state, max_states)
    return None if plan is None else len(plan)


def outcomes(env: Environment, state: State, action: Action) -> list[tuple[float, Transition]]:
    """The (chance, transition) pairs of one action."""
    chances = env.chances(state, action)
    if chances is None:
        raise NoExactAnswer(
            f"{type(env).__name__} cannot list the outcomes of {action!r}, so there is no exact baseline: "
            "override Environment.shortest_plan and Environment.random_success"
        )
    return [(chance, env.step(state, action, noise)) for chance, noise in chances]


def _search_plan(
    env: Environment, state: State, depth: int | None, max_states: int = MAX_STATES
) -> tuple[Action, ...] | None:
    """Breadth-first search for a certain win; raises on games of chance."""
    frontier: dict[State, tuple[Action, ...]] = {state: ()}
    seen = {state}
    num_steps = 0
    while frontier and (depth is None or num_steps < depth):
        num_steps += 1
        following = {}
        for current, plan in frontier.items():
            for action in env.action_names(current):
                branches = outcomes(env, current, action)
                if len(branches) > 1:
                    raise NoExactAnswer(f"{type(env).__name__} is a game of chance: it has no certain plan")
                transition = branches[0][1]
                if transition.success:
                    return (*plan, action)
                if not transition.done and transition.state not in seen:
                    seen.add(transition.state)
                    following[transition.state] = (*plan, action)
        _check_size(env, len(seen), max_states)
        frontier = following
    return None


def _check_actions(env: Environment, state: State) -> None:
    if not env.action_names(state):
        raise NoExactAnswer(f"any text is an action in {type(env).__name__}, and texts cannot all be tried")


def _check_size(env: Environment, num_states: int, max_states: int = MAX_STATES) -> None:
    if num_states > max_states:
        raise NoExactAnswer(f"{type(env).__name__}: more than {max_states} states, too many for an exact answer")


def _solve_turn(env: Environment, state: State, budget: Budget) -> tuple[float, tuple[Action, ...]]:
    """The optimal success and the actions of the next turn."""
    plan = env.shortest_plan(state)
    if plan is NotImplemented:
        _check_actions(env, state)
        model = _Model(env, state, budget.total)
        if not model.is_certain:
            return _iterate_values(model, budget)
        plan = _search_plan(env, state, budget.total)
    if plan is None or len(plan) > budget.total:
        return 0.0, (plan or tuple(env.action_names(state))[:1])[: budget.actions_per_turn]
    return 1.0, plan[: budget.actions_per_turn]


class _Model:
    """The states within a budget's reach, as lists: branches[state][action] = [(chance, next state), …].

    States are numbered in the order found, the first is the one passed in; one more number stands for a won game. A
    lost game is worth nothing, so its branch is omitted.
    """

    def __init__(self, env: Environment, state: State, depth: int):
        self.branches: list[list[list[tuple[float, int]]]] = []
        self.actions: list[list[Action]] = []
        numbers = {state: 0}
        frontier = [state]
        wins: list[tuple[list[tuple[float, int]], float]] = []
        for _ in range(depth):
            following = []
            for current in frontier:
                self.actions.append(list(env.action_names(current)))
                self.branches.append([])
                for action in self.actions[-1]:
                    branches: list[tuple[float, int]] = []
                    for chance, transition in outcomes(env, current, action):
                        if transition.success:
                            wins.append((branches, chance))
                        if transition.done:
                            continue
                        if transition.state not in numbers:
                            numbers[transition.state] = len(numbers)
                            following.append(transition.state)
                        branches.append((chance, numbers[transition.state]))
                    self.branches[-1].append(branches)
            frontier = following
            _check_size(env, len(numbers))
        self.num_states = len(numbers)
        for branches, chance in wins:
            branches.append((chance, self.num_states))
        self.is_certain = all(
            len(branches) <= 1 and all(chance == 1.0 for chance, _ in branches)
            for state_branches in self.branches
            for branches in state_branches
        )


def _iterate_values(model: _Model, budget: Budget) -> tuple[float, tuple[Action, ...]]:
    """Finite-horizon value iteration over whole turns, with (turns left, actions left) as the horizon."""
    num_actions = max(map(len, model.branches), default=0)
    depth = min(budget.actions_per_turn, budget.actions)
    if num_actions**depth > MAX_SEQUENCES:
        raise NoExactAnswer(
            f"{num_actions} actions, {depth} at a time, make {num_actions**depth} answers to compare in a game of "
            f"chance; the limit is {MAX_SEQUENCES}. Lower actions_per_turn"
        )
    # If the action limit never binds, the number of actions left does not matter, and one horizon is enough.
    binds = budget.actions < budget.turns * budget.actions_per_turn
    horizons = range(budget.actions + 1) if binds else (None,)
    values = dict.fromkeys(horizons, [0.0] * model.num_states + [1.0])
    for _ in range(budget.turns - 1):
        values = {left: _back_up(model, values, depth, left) for left in horizons}
    return _best_turn(model, values, depth, budget.actions if binds else None)


def _sequence_values(model: _Model, values: list[float], length: int) -> dict[tuple[int, ...], list[float]]:
    """The value of each action sequence of this length in every state, if nothing is seen in between."""
    worth: dict[tuple[int, ...], list[float]] = {(): values}
    num_actions = max(map(len, model.branches), default=0)
    for _ in range(length):
        worth = {
            (action, *sequence): [
                sum(chance * after[following] for chance, following in branches[action])
                if action < len(branches)
                else 0.0
                for branches in model.branches
            ]
            + [0.0] * (model.num_states - len(model.branches))
            + [1.0]
            for action, (sequence, after) in product(range(num_actions), worth.items())
        }
    return worth


def _candidates(
    model: _Model, values: Values, depth: int, left: int | None
) -> Iterator[tuple[tuple[int, ...], list[float]]]:
    """Every answer within the actions left, shortest first, with its value in every state."""
    for length in range(1, (depth if left is None else min(depth, left)) + 1):
        after = values[None if left is None else left - length]
        yield from _sequence_values(model, after, length).items()


def _back_up(model: _Model, values: Values, depth: int, left: int | None) -> list[float]:
    """The value of every state with one more turn."""
    best = [0.0] * model.num_states + [1.0]
    for _, worth in _candidates(model, values, depth, left):
        best = list(map(max, best, worth))
    return best


def _best_turn(model: _Model, values: Values, depth: int, left: int | None) -> tuple[float, tuple[Action, ...]]:
    """The best answer in the first state, and its value."""
    best = -1.0
    answer: tuple[int, ...] = ()
    for sequence, worth in _candidates(model, values, depth, left):
        if worth[0] > best + TIE:
            best, answer = worth[0], sequence
    return best, tuple(model.actions[0][action] for action in answer)
