"""The conformance kit: does an environment follow the contract of `base.py`?

    check_environment(MyEnvironment())      # raises ContractError with what is wrong

It plays a few levels at random and tries every action in each state. An error names the seed, the split and the action.
It checks nothing about the game itself, only what the rest of the system relies on: states are values, steps are pure
functions, chances are correct, and action names parse.
"""

import base64
import hashlib
import math
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from ragen.env.base import SPLITS, Action, Environment, State, Transition
from ragen.env.failure import EnvironmentFailed, call
from ragen.prng import uniform

NUM_NOISES = 200  # evenly spaced noises that an action's listed outcomes are compared with
CHANCE_TOLERANCE = 0.05
NONSENSE = ("", "   ", "no such action exists", "-1")


class ContractError(AssertionError):
    """An environment breaks the contract."""


def check_environment(
    env: Environment,
    seeds: Iterable[int] = range(6),
    splits: Sequence[str] = SPLITS,
    num_steps: int = 8,
    sample_actions: Callable[[State], Sequence[Action]] | None = None,
    fresh_process: bool = True,
) -> None:
    """Raise ContractError at the first violation.

    `sample_actions` returns actions to try if any text is an action; `fresh_process` also replays the levels in a new
    interpreter with another hash seed, if the class can be imported.
    """
    seeds = tuple(seeds)
    kit = _Kit(env, sample_actions)
    _name_level(kit.check_texts, type(env).__name__)
    for split in splits:
        for seed in seeds:
            _name_level(partial(kit.check_level, seed, split, num_steps), f"seed {seed}, split {split!r}")
    if fresh_process and _is_importable(type(env)):
        _check_fresh_process(env, seeds, splits)


def _name_level(check: Callable[[], None], where: str) -> None:
    """Run a check; what the environment itself raises is a violation on this level."""
    try:
        call(check, where, passes=(ContractError,))
    except EnvironmentFailed as failure:
        raise ContractError(str(failure)) from failure


def levels_digest(env: Environment, seeds: Iterable[int], splits: Iterable[str]) -> str:
    """A hash of the first observations and first steps of levels, equal in every process."""
    digest = hashlib.sha256()
    for split in splits:
        for seed in seeds:
            state = env.reset(seed, split)
            digest.update(env.render(state).encode())
            for action in env.action_names(state):
                transition = env.step(state, action, 0.5)
                digest.update(f"{action!r} {transition[1:]!r} {env.render(transition.state)}".encode())
    return digest.hexdigest()


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ContractError(message)


class _Kit:
    """The checks, with the environment and a twin: a second instance that must behave the same."""

    def __init__(self, env: Environment, sample_actions: Callable[[State], Sequence[Action]] | None):
        self.env = env
        self.twin = type(env)(env.config)
        self.sample_actions = sample_actions

    def check_texts(self) -> None:
        for method in ("task", "legend"):
            text = getattr(self.env, method)()
            _require(isinstance(text, str), f"{method}() must be a str, got {type(text).__name__}")
        _require(bool(self.env.task().strip()), "task() must describe the game, got an empty text")

    def check_level(self, seed: int, split: str, num_steps: int) -> None:
        where = f"seed {seed}, split {split!r}"
        state = self.env.reset(seed, split)
        _check_value(state, where)
        _require(self.env.reset(seed, split) == state, f"{where}: a second reset returns a different state")
        _require(self.twin.reset(seed, split) == state, f"{where}: another instance with the same settings differs")
        _require(
            self.twin.render(self.twin.reset(seed, split)) == self.env.render(state),
            f"{where}: the first observation differs between two instances",
        )
        for step in range(num_steps):
            self.check_state(state, f"{where}, step {step}")
            actions = self.actions(state)
            action = actions[int(uniform("check", seed, split, step, "action") * len(actions))]
            transition = self.env.step(state, action, uniform("check", seed, split, step, "noise"))
            state = transition.state
            if transition.done:
                self.check_render(state, f"{where}, step {step}, after the end")
                break
        _require(self.env.reset(seed, split) == self.twin.reset(seed, split), f"{where}: playing changed the level")

    def actions(self, state: State) -> Sequence[Action]:
        if self.sample_actions is not None:
            return self.sample_actions(state)
        return list(self.env.action_names(state))

    def check_state(self, state: State, where: str) -> None:
        _check_value(state, where)
        self.check_render(state, where)
        self.check_names(state, where)
        actions = self.actions(state)
        _require(len(actions) > 0, f"{where}: there is no action to try; pass sample_actions if any text is an action")
        for action in actions:
            self.check_step(state, action, f"{where}, action {action!r}")

    def check_render(self, state: State, where: str) -> None:
        text = self.env.render(state)
        _require(isinstance(text, str), f"{where}: render must return a str, got {type(text).__name__}")
        _require(bool(text.strip()), f"{where}: render returns an empty text")
        _require(self.env.render(state) == text, f"{where}: rendering the same state twice returns different texts")

    def check_names(self, state: State, where: str) -> None:
        names = self.env.action_names(state)
        folded = [name.strip().casefold() for name in names.values()]
        _require(all(folded), f"{where}: an action has an empty name: {names}")
        _require(len(set(folded)) == len(folded), f"{where}: two actions have the same name: {names}")
        for action, name in names.items():
            for said in (name, name.upper(), name.lower(), f"  {name} "):
                parsed = self.env.parse_action(state, said)
                _require(parsed == action, f"{where}: {said!r} must parse as action {action!r}, got {parsed!r}")
        if names:
            for said in NONSENSE:
                parsed = self.env.parse_action(state, said)
                _require(parsed is None, f"{where}: {said!r} is not an action, but parses as {parsed!r}")

    def check_step(self, state: State, action: Action, where: str) -> None:
        before = pickle.dumps(state)
        noise = uniform("check", where)
        transition = self.env.step(state, action, noise)
        _require(pickle.dumps(state) == before, f"{where}: step changed its input state")
        _check_transition(transition, state, where)
        _check_value(transition.state, f"{where}, the state after it")
        _require(
            self.env.step(state, action, noise) == transition,
            f"{where}: the same state, action and noise {noise} give a different transition the second time",
        )
        _require(
            self.twin.step(state, action, noise) == transition,
            f"{where}: another instance with the same settings steps differently: data is stored outside the state",
        )
        self.check_chances(state, action, where)

    def check_chances(self, state: State, action: Action, where: str) -> None:
        chances = self.env.chances(state, action)
        if chances is None:
            return
        listed: dict[Transition, float] = {}
        for chance, noise in chances:
            _require(0 < chance <= 1, f"{where}: chances lists the probability {chance}")
            _require(0 <= noise < 1, f"{where}: chances lists the noise {noise}, noises are in [0, 1)")
            outcome = self.env.step(state, action, noise)
            listed[outcome] = listed.get(outcome, 0.0) + chance
        total = sum(listed.values())
        _require(math.isclose(total, 1, abs_tol=1e-9), f"{where}: the listed probabilities add up to {total}, not 1")
        shares = dict.fromkeys(listed, 0.0)
        for index in range(NUM_NOISES):
            noise = (index + 0.5) / NUM_NOISES
            outcome = self.env.step(state, action, noise)
            _require(outcome in shares, f"{where}: chances does not list the outcome of noise {noise}: {outcome}")
            shares[outcome] += 1 / NUM_NOISES
        for outcome, chance in listed.items():
            _require(
                abs(shares[outcome] - chance) < CHANCE_TOLERANCE,
                f"{where}: chances gives probability {chance:.3f} to {outcome}, "
                f"but evenly spaced noises lead to it in {shares[outcome]:.3f} of the cases",
            )


def _check_value(state: State, where: str) -> None:
    """A state is a value: hashable, immutable, picklable."""
    try:
        code = hash(state)
    except TypeError as error:
        raise ContractError(f"{where}: the state is not hashable ({error})") from error
    for name in (*getattr(state, "__dict__", ()), *getattr(type(state), "__slots__", ())):
        try:
            setattr(state, name, getattr(state, name))
        except AttributeError:
            continue
        raise ContractError(f"{where}: the state can be changed (.{name} can be set); freeze it, or use a NamedTuple")
    try:
        copy = pickle.loads(pickle.dumps(state))
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ContractError(f"{where}: the state cannot be pickled ({error})") from error
    _require(copy == state, f"{where}: a pickled copy of the state is not equal to it")
    _require(hash(copy) == code, f"{where}: equal states have different hashes")


def _check_transition(transition: Any, state: State, where: str) -> None:
    kind = type(transition).__name__
    _require(isinstance(transition, Transition), f"{where}: step must return a Transition, got {kind}")
    reward = transition.reward
    is_number = isinstance(reward, float) and math.isfinite(reward)
    _require(is_number, f"{where}: the reward must be a finite float, got {reward!r}")
    for name in ("done", "success", "effective", "out_of_steps"):
        value = getattr(transition, name)
        _require(isinstance(value, bool), f"{where}: {name} must be a bool, got {value!r}")
    _require(transition.done or not transition.success, f"{where}: success without done; a won game is over")
    _require(transition.done or not transition.out_of_steps, f"{where}: out_of_steps without done")
    _require(
        not (transition.out_of_steps and transition.success), f"{where}: a game is either won or out of steps, not both"
    )
    _require(
        transition.state != state or not transition.effective,
        f"{where}: the state did not change, so the action was not effective",
    )


# --- the same levels in another process -------------------------------------------------------------------------

_FRESH_PROCESS = """
import base64, pickle, sys
from ragen.env.check import levels_digest
cls, config, seeds, splits = pickle.loads(base64.b64decode(sys.stdin.read()))
print(levels_digest(cls(config), seeds, splits))
"""


def _is_importable(cls: type) -> bool:
    return cls.__module__ != "__main__" and "<locals>" not in cls.__qualname__


def _check_fresh_process(env: Environment, seeds: Sequence[int], splits: Sequence[str]) -> None:
    """String hashes differ between processes: a level that depends on them is not reproducible."""
    expected = levels_digest(env, seeds, splits)
    message = base64.b64encode(pickle.dumps((type(env), env.config, seeds, tuple(splits)))).decode()
    for hash_seed in ("1", "2"):
        surroundings = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        run = subprocess.run(
            [sys.executable, "-c", _FRESH_PROCESS], input=message, env=surroundings, capture_output=True, text=True
        )
        if run.returncode != 0:
            raise ContractError(f"{type(env).__name__} does not run in a fresh process:\n{run.stderr}")
        _require(
            run.stdout.strip() == expected,
            f"levels {list(seeds)} of {list(splits)} differ in a fresh process: do not use hash(), "
            "set order, the clock or a global random state; use ragen.prng",
        )
