"""Two bandits with a safe and a risky arm: one pull, and the arm's name is the only hint.

    env = Bandit(Bandit.Config(split="train"))
    state = env.reset(seed=0)                     # e.g. Librarian (safe) and Investor (risky)
    env.step(state, action=1, noise=0.1)          # pulls the first listed arm

`Bandit` draws its arms from a list of name pairs; `TwoArmedBandit` is the older one with fixed names and normally
distributed points. In both, success means pulling the arm with the higher mean, regardless of the payout.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import ClassVar, NamedTuple

from ragen.env.base import Action, Environment, Tag, Transition, match_action, split_index
from ragen.env.grid import check_choice
from ragen.prng import bits

# (safe, risky)
NAME_PAIRS = {
    "train": (
        ("Teacher", "Trader"),
        ("Nurse", "StartupFounder"),
        ("Librarian", "Investor"),
        ("Accountant", "StockBroker"),
        ("Engineer", "RealEstateAgent"),
        ("Pharmacist", "Musician"),
        ("Clerk", "Freelancer"),
        ("Technician", "Youtuber"),
        ("Planner", "Artist"),
        ("Postman", "Pilot"),
        ("Banker", "VentureCapitalist"),
        ("Gardener", "Cryptominer"),
    ),
    "test": (
        ("Receptionist", "Explorer"),
        ("Archivist", "Filmmaker"),
        ("Bookkeeper", "Consultant"),
        ("SocialWorker", "Photographer"),
        ("Mechanic", "GameDesigner"),
        ("Secretary", "Entrepreneur"),
        ("Cashier", "DataScientist"),
        ("CivilServant", "StartupAccelerator"),
    ),
}

LOW_RISK = NormalDist(0.2, 0.1)
HIGH_RISK_USUAL = NormalDist(0.1, 0.1)
HIGH_RISK_LUCKY = NormalDist(1.0, 0.1)
HIGH_RISK_USUAL_CHANCE = 0.75
SMALLEST_NOISE = 2.0**-54  # the normal quantile of 0 is minus infinity

TASK = (
    "You are playing a bandit with two arms and one pull. Each arm pays points from a hidden distribution; one of them "
    "pays more on average. The name of an arm hints at how it pays: steadily and little, or rarely and much. Think "
    "about what the names stand for, then pull the arm that you expect to pay more on average, by answering with its "
    "name.\nYour reward is the points that the pull pays."
)


class BanditState(NamedTuple):
    """Two arms, whether the safe one is listed first, and the pull, once made."""

    safe: str
    risky: str
    safe_first: bool
    pulled: str | None = None
    points: float = 0.0


def _render(state: BanditState) -> str:
    if state.pulled is not None:
        return f"You pulled {state.pulled} and got {state.points:.2f} points."
    first, second = (state.safe, state.risky) if state.safe_first else (state.risky, state.safe)
    return f"The two arms are {first} and {second}. Which one do you pull?"


def _pull(state: BanditState, arm: str, points: float, success: bool) -> Transition:
    if state.pulled is not None:
        raise ValueError(f"the episode is over: {state.pulled} was already pulled")
    return Transition(state._replace(pulled=arm, points=points), points, done=True, success=success)


@dataclass(frozen=True)
class BanditConfig:
    """The settings of `Bandit`. `split` chooses the list of names, not the random stream."""

    split: str = "train"
    action_space_start: int = 1
    lo_arm_score: float = 0.1
    hi_arm_loscore: float = 0.0
    hi_arm_hiscore: float = 1.0
    hi_arm_hiscore_prob: float = 0.25

    def __post_init__(self):
        check_choice("split", self.split, NAME_PAIRS)
        if not 0 <= self.hi_arm_hiscore_prob <= 1:
            raise ValueError(f"hi_arm_hiscore_prob={self.hi_arm_hiscore_prob}: a chance is between 0 and 1")
        if self.risky_mean == self.lo_arm_score:
            raise ValueError(f"both arms pay {self.lo_arm_score} on average: neither is better")

    @property
    def risky_mean(self) -> float:
        """The mean payout of the risky arm."""
        lucky = self.hi_arm_hiscore_prob
        return lucky * self.hi_arm_hiscore + (1 - lucky) * self.hi_arm_loscore

    @property
    def risky_is_better(self) -> bool:
        """Whether the risky arm is the right one to pull."""
        return self.risky_mean > self.lo_arm_score


class Bandit(Environment):
    """The safe arm always pays `lo_arm_score`; the risky one pays its high score rarely and its low score otherwise."""

    Config = BanditConfig
    TAGS: ClassVar[dict[str, Tag]] = {
        "Bandit": Tag(env_type="bandit", max_actions_per_traj=1, max_tokens=100, env_config={"split": "train"}),
        "BanditTest": Tag(env_type="bandit", max_actions_per_traj=1, max_tokens=100, env_config={"split": "test"}),
    }

    def reset(self, seed: int, split: str = "train") -> BanditState:
        """A pair of names and the order in which they appear."""
        split_index(split)  # refuses an unknown split
        pairs = NAME_PAIRS[self.config.split]
        pool, safe_first = divmod(bits("bandit", split, seed), 2)
        safe, risky = pairs[pool % len(pairs)]
        return BanditState(safe, risky, bool(safe_first))

    def step(self, state: BanditState, action: Action, noise: float = 0.0) -> Transition:
        """Pull an arm, which ends the episode."""
        names = self.action_names(state)
        if action not in names:
            raise ValueError(f"action {action!r}: this bandit has {names}")
        config = self.config
        if names[action] == state.safe:
            return _pull(state, state.safe, config.lo_arm_score, not config.risky_is_better)
        lucky = noise < config.hi_arm_hiscore_prob
        points = config.hi_arm_hiscore if lucky else config.hi_arm_loscore
        return _pull(state, state.risky, points, config.risky_is_better)

    def chances(self, state: BanditState, action: Action) -> Sequence[tuple[float, float]]:
        """One outcome of the safe arm; high or low for the risky one."""
        lucky = self.config.hi_arm_hiscore_prob
        if self.action_names(state)[action] == state.safe or lucky == 1:
            return ((1.0, 0.0),)
        return ((lucky, 0.0), (1 - lucky, (1 + lucky) / 2)) if lucky > 0 else ((1.0, 0.5),)

    def render(self, state: BanditState) -> str:
        """The two names; after the pull, what it paid."""
        return _render(state)

    def task(self) -> str:
        """The rules. The names are in the observation, since they differ from level to level."""
        return TASK

    def action_names(self, state: BanditState) -> dict[Action, str]:
        """The arms in the order listed."""
        first = self.config.action_space_start
        names = (state.safe, state.risky) if state.safe_first else (state.risky, state.safe)
        return {first: names[0], first + 1: names[1]}


@dataclass(frozen=True)
class TwoArmedBanditConfig:
    """The names of the arms; the `val` names, if given, apply to every split but `train`."""

    low_risk_name: str = "phoenix"
    high_risk_name: str = "dragon"
    low_risk_val_name: str | None = None
    high_risk_val_name: str | None = None

    def __post_init__(self):
        for split in ("train", "val"):
            low, high = self.names(split)
            if not low.strip() or not high.strip() or low.casefold() == high.casefold():
                raise ValueError(f"{low!r} and {high!r}: the two arms need different names")

    def names(self, split: str) -> tuple[str, str]:
        """The low-risk and the high-risk name for a split."""
        low, high = self.low_risk_name, self.high_risk_name
        if split == "train":
            return low, high
        return self.low_risk_val_name or low, self.high_risk_val_name or high


class TwoArmedBandit(Environment):
    """Action 1 is the low-risk arm, N(0.2, 0.1); action 2 pays N(0.1, 0.1) three times out of four, else N(1, 0.1)."""

    Config = TwoArmedBanditConfig
    TAGS: ClassVar[dict[str, Tag]] = {
        "TwoArmedBandit": Tag(env_type="two_armed_bandit", max_actions_per_traj=1, max_tokens=None, end_on_invalid=True)
    }

    BETTER_ARM = 2  # its mean is 0.75 * 0.1 + 0.25 * 1 = 0.325, against 0.2

    def reset(self, seed: int, split: str = "train") -> BanditState:
        """The names of the split, in a random order."""
        split_index(split)  # refuses an unknown split
        safe, risky = self.config.names(split)
        return BanditState(safe, risky, bool(bits("two_armed_bandit", split, seed) & 1))

    def step(self, state: BanditState, action: Action, noise: float = 0.0) -> Transition:
        """Pull an arm, which ends the episode; `noise` is the quantile of the payout."""
        noise = max(noise, SMALLEST_NOISE)
        if action == 1:
            return _pull(state, state.safe, LOW_RISK.inv_cdf(noise), success=self.BETTER_ARM == 1)
        if action != 2:
            raise ValueError(f"action {action!r}: this bandit has {self.action_names(state)}")
        if noise < HIGH_RISK_USUAL_CHANCE:
            points = HIGH_RISK_USUAL.inv_cdf(noise / HIGH_RISK_USUAL_CHANCE)
        else:
            lucky_noise = (noise - HIGH_RISK_USUAL_CHANCE) / (1 - HIGH_RISK_USUAL_CHANCE)
            points = HIGH_RISK_LUCKY.inv_cdf(max(lucky_noise, SMALLEST_NOISE))
        return _pull(state, state.risky, points, success=self.BETTER_ARM == 2)

    def chances(self, state: BanditState, action: Action) -> None:
        """The points are continuous, so the outcomes cannot be listed."""
        return None

    def shortest_plan(self, state: BanditState) -> tuple[int, ...] | None:
        """Pull the better arm."""
        return None if state.pulled is not None else (self.BETTER_ARM,)

    def random_success(self, state: BanditState, num_actions: int) -> float:
        """One of the two arms is better."""
        return 0.5 if num_actions > 0 and state.pulled is None else 0.0

    def render(self, state: BanditState) -> str:
        """The two names; after the pull, what it paid."""
        return _render(state)

    def task(self) -> str:
        """The rules. The names are in the observation, since they differ from split to split."""
        return TASK

    def action_names(self, state: BanditState) -> dict[Action, str]:
        """The arms in the order listed; each arm keeps its number."""
        names: dict[Action, str] = {1: state.safe, 2: state.risky}
        return names if state.safe_first else dict(reversed(names.items()))

    def parse_action(self, state: BanditState, text: str) -> Action | None:
        """The arm with this name or number."""
        return match_action(self.action_names(state), text, accept_numbers=True)
