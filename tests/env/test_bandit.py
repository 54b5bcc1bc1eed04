"""The two bandits: who pays what, what counts as success, and what the agent reads."""

from collections import Counter
from statistics import mean, stdev

import pytest

from ragen.env.bandit import NAME_PAIRS, Bandit, TwoArmedBandit
from ragen.env.registry import catalogue, make
from ragen.prng import uniform

EVEN_NOISES = [(index + 0.5) / 4000 for index in range(4000)]


def arm(env, state, name):
    return next(action for action, listed in env.action_names(state).items() if listed == name)


def test_payouts_of_the_bandit():
    env = Bandit()
    state = env.reset(0)
    safe, risky = arm(env, state, state.safe), arm(env, state, state.risky)
    assert {env.step(state, safe, noise).reward for noise in EVEN_NOISES} == {0.1}
    assert Counter(env.step(state, risky, noise).reward for noise in EVEN_NOISES) == {1.0: 1000, 0.0: 3000}
    assert env.chances(state, safe) == ((1.0, 0.0),)
    assert [chance for chance, _ in env.chances(state, risky)] == [0.25, 0.75]


def test_success_is_the_arm_with_the_higher_mean_whatever_it_paid():
    env = Bandit()
    state = env.reset(0)
    unlucky = env.step(state, arm(env, state, state.risky), 0.9)
    assert unlucky.reward == 0.0 and unlucky.success and unlucky.done
    assert not env.step(state, arm(env, state, state.safe), 0.0).success
    # With better pay for the safe arm, the right answer is the other one.
    turned = Bandit(Bandit.Config(lo_arm_score=0.5))
    assert turned.step(state, arm(turned, state, state.safe), 0.0).success
    assert not turned.step(state, arm(turned, state, state.risky), 0.0).success


def test_names_and_their_order_come_from_the_seed_alone():
    env = Bandit()
    states = [env.reset(seed) for seed in range(2000)]
    assert {(state.safe, state.risky) for state in states} == set(NAME_PAIRS["train"])
    assert 0.45 < mean(state.safe_first for state in states) < 0.55
    assert env.reset(7) == Bandit().reset(7)
    test_names = {(state.safe, state.risky) for state in map(Bandit(Bandit.Config(split="test")).reset, range(500))}
    assert test_names == set(NAME_PAIRS["test"])
    assert (len(NAME_PAIRS["train"]), len(NAME_PAIRS["test"])) == (12, 8)


def test_listed_order_is_action_order_and_the_text_names_both():
    env = Bandit(Bandit.Config(action_space_start=0))
    for seed in range(20):
        state = env.reset(seed)
        names = env.action_names(state)
        text = env.render(state)
        assert list(names) == [0, 1]
        assert text.index(names[0]) < text.index(names[1])
        assert env.parse_action(state, names[1].upper()) == 1
        assert env.parse_action(state, "1") is None


def test_the_text_after_a_pull_tells_arm_and_points_and_there_is_no_second_pull():
    env = Bandit()
    state = env.reset(0)
    after = env.step(state, arm(env, state, state.risky), 0.1).state
    assert state.risky in env.render(after) and "1.00" in env.render(after) and state.safe not in env.render(after)
    with pytest.raises(ValueError, match="over"):
        env.step(after, 1, 0.1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"split": "val"}, "'train'"),
        ({"hi_arm_hiscore_prob": 2.0}, "between 0 and 1"),
        ({"lo_arm_score": 0.25}, "neither"),
    ],
)
def test_impossible_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Bandit(Bandit.Config(**changes))


def test_payouts_of_the_two_armed_bandit():
    env = TwoArmedBandit()
    state = env.reset(0)
    low = [env.step(state, 1, noise).reward for noise in EVEN_NOISES]
    high = [env.step(state, 2, noise).reward for noise in EVEN_NOISES]
    assert mean(low) == pytest.approx(0.2, abs=0.002) and stdev(low) == pytest.approx(0.1, abs=0.002)
    assert mean(high) == pytest.approx(0.325, abs=0.002) and stdev(high) == pytest.approx(0.40, abs=0.01)
    assert sum(points > 0.55 for points in high) == pytest.approx(1000, abs=2)
    random_low = [env.step(state, 1, uniform("low", index)).reward for index in range(2000)]
    random_high = [env.step(state, 2, uniform("high", index)).reward for index in range(2000)]
    beaten = mean(ours > theirs for ours, theirs in zip(random_low, random_high, strict=True))
    assert beaten == pytest.approx(0.57, abs=0.03)


@pytest.mark.parametrize("action", [1, 2])
@pytest.mark.parametrize("noise", [0.0, 2.0**-53, 0.75 - 2.0**-53, 0.75, 1 - 2.0**-53])
def test_the_edges_of_the_noise_pay_something_finite(action, noise):
    env = TwoArmedBandit()
    assert -2 < env.step(env.reset(0), action, noise).reward < 3


def test_success_in_the_two_armed_bandit_is_the_high_risk_arm():
    env = TwoArmedBandit()
    state = env.reset(0)
    assert env.step(state, 2, 0.01).success and not env.step(state, 1, 0.99).success
    assert env.shortest_plan(state) == (2,) and env.random_success(state, 1) == 0.5
    assert env.chances(state, 1) is None
    with pytest.raises(ValueError, match="3"):
        env.step(state, 3)


def test_names_by_split():
    env = TwoArmedBandit(TwoArmedBandit.Config("engineer", "teacher", "librarian", "trader"))
    assert env.reset(0, "train")[:2] == ("engineer", "teacher")
    assert env.reset(0, "val")[:2] == env.reset(0, "test")[:2] == ("librarian", "trader")
    same = TwoArmedBandit()
    assert same.reset(0, "train")[:2] == same.reset(0, "val")[:2] == ("phoenix", "dragon")
    assert len({same.reset(seed).safe_first for seed in range(20)}) == 2
    with pytest.raises(ValueError, match="different names"):
        TwoArmedBandit.Config("a", "A")


def test_numbers_stay_with_the_arms_however_they_are_listed():
    env = TwoArmedBandit()
    for seed in range(10):
        state = env.reset(seed)
        assert [env.parse_action(state, text) for text in ("1", "2", "PHOENIX", "dragon", "3")] == [1, 2, 1, 2, None]
        assert list(env.action_names(state)) == ([1, 2] if state.safe_first else [2, 1])


def test_tags_are_those_of_the_catalogue():
    tags = catalogue()
    assert make(tags["Bandit"]).config.split == "train" and make(tags["BanditTest"]).config.split == "test"
    assert all(tags[name].max_actions_per_traj == 1 for name in ("Bandit", "BanditTest", "TwoArmedBandit"))
    assert tags["TwoArmedBandit"].end_on_invalid and not tags["Bandit"].end_on_invalid
