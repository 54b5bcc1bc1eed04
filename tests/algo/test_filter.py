"""The rollout filter: worked examples, and plain loops with exact fractions as a second opinion."""

import math
import re
from fractions import Fraction

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from ragen.algo.filter import (
    METRICS,
    REASONS,
    STRATEGIES,
    VALUES,
    FilterRule,
    filter_metrics,
    group_score,
    in_group_metrics,
    select,
)


def rule(value, prob_mode="linear", largest=True, include_zero=True, selection_eps=0.01):
    return FilterRule("top_p", value, largest, include_zero, prob_mode, selection_eps)


def by(strategy, value, largest=True, include_zero=True):
    return FilterRule(strategy, value, largest, include_zero, "linear", 0.01)


def kept(scores, chosen_rule):
    verdicts = select(scores, chosen_rule)
    assert len(verdicts) == len(scores)
    return [index for index, verdict in enumerate(verdicts) if verdict.keep]


def reasons(scores, chosen_rule):
    return [verdict.reason for verdict in select(scores, chosen_rule)]


# By hand: linear ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scores", "value", "options", "expected"),
    [
        ([4, 3, 2, 1], 0.6, {}, [0, 1]),  # 5.99: 4 + 3 = 7
        ([3, 1, 1, 0], 0.9, {"include_zero": False}, [0, 1, 2]),  # 4.49: 3 + 1 + 1 = 5
        ([10, 1], 0.9, {}, [0]),  # 9.89: 10
        ([1, 10], 0.9, {}, [1]),
        ([1, 2, 3, 4], 0.6, {"largest": False}, [0, 1, 2]),  # 5.99: 1 + 2 + 3 = 6
        ([9, 1], 0.9, {}, [0]),  # 8.99: without the eps rounding would decide
        ([9, 1], 0.9, {"selection_eps": -0.001}, [0, 1]),  # 9.001: 9 is not enough
        ([9, 1], 0.9, {"selection_eps": 0.0}, [0]),  # 9: reached is enough
        ([2, 2, 2], 0.5, {}, [0, 1]),  # 2.99; at a tie the earlier group
    ],
)
def test_linear_by_hand(scores, value, options, expected):
    assert kept(scores, rule(value, **options)) == expected


def test_linear_negative_scores_lower_the_threshold_and_are_never_taken():
    assert kept([5, -3, 4], rule(0.9)) == [0, 2]  # 0.9 * 6 - 0.01 = 5.39: 5 + 4
    assert kept([5, -3, 4], rule(0.8)) == [0]  # 4.79: 5
    assert kept([5, 4], rule(0.8)) == [0, 1]  # 7.19
    assert kept([2, -3], rule(0.9)) == []  # 0.9 * -1 < 0


@pytest.mark.parametrize(
    ("scores", "options", "expected"),
    [
        ([4, 3, 2, 1], {}, ["kept", "kept", "outside top-p mass", "outside top-p mass"]),
        ([0, 0], {}, ["too little mass"] * 2),
        ([0, 0], {"include_zero": False}, ["zero score"] * 2),
        ([0, 5, 3, 1e-10, -1e-10, 1.1e-10], {"include_zero": False}, ["zero score", "kept", "outside top-p mass"]
         + ["zero score"] * 2 + ["outside top-p mass"]),
        ([0.006, 0.006], {}, ["too little mass"] * 2),  # 0.6 * 0.012 = 0.0072 <= 0.01
        ([0.009, 0.009], {}, ["kept", "outside top-p mass"]),  # 0.0108 - 0.01 = 0.0008
        ([0, 1, 2], {"largest": False}, ["threshold not reached"] * 3),  # the zero comes first and ends the walk
        ([0, 1, 2], {"largest": False, "include_zero": False}, ["zero score", "kept", "kept"]),  # 1.79: 1 + 2
        ([-1, 3, 3], {"largest": False}, ["threshold not reached"] * 3),
        ([4, 3], {"selection_eps": -3.0}, ["threshold not reached"] * 2),  # 7.2: not even all of them
        ([], {}, []),
    ],
)  # fmt: skip
def test_linear_reasons_by_hand(scores, options, expected):
    assert reasons(scores, rule(0.6, **options)) == expected


# By hand: softmax ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scores", "value", "options", "expected"),
    [
        # exp of log 6, log 3, log 1 is 6, 3, 1: shares 0.6, 0.3, 0.1.
        ([math.log(3), math.log(6), 0.0], 0.59, {}, [1]),
        ([math.log(3), math.log(6), 0.0], 0.61, {}, [0, 1]),
        ([math.log(3), math.log(6), 0.0], 0.89, {}, [0, 1]),
        ([math.log(3), math.log(6), 0.0], 0.91, {}, [0, 1, 2]),
        # Of the negatives: 1/6, 1/3, 1, so shares 1/9, 2/9, 6/9 and the last is best.
        ([math.log(3), math.log(6), 0.0], 0.66, {"largest": False}, [2]),
        ([math.log(3), math.log(6), 0.0], 0.68, {"largest": False}, [0, 2]),
        ([math.log(3), math.log(6), 0.0], 0.90, {"largest": False}, [0, 1, 2]),
        # Zero is a score like others, unless it is excluded: then shares are 2/3 and 1/3.
        ([math.log(3), math.log(6), 0.0], 0.66, {"include_zero": False}, [1]),
        ([math.log(3), math.log(6), 0.0], 0.99, {"include_zero": False}, [0, 1]),
        ([0.0, 0.0, 0.0, 0.0], 0.5, {}, [0, 1]),
        ([0.0, 0.0, 0.0, 0.0], 0.51, {}, [0, 1, 2]),
        ([0.3] * 10, 0.9, {}, list(range(9))),  # normalised in floats, nine tenths would sum to a little less than 0.9
        ([-5.0, -900.0], 0.9, {}, [0]),
        ([1e300, -1e300, 1e300], 0.9, {}, [0, 2]),  # no overflow
        ([7.0], 0.001, {}, [0]),
        ([0.0], 0.5, {"include_zero": False}, []),
        ([], 0.5, {}, []),
    ],
)
def test_softmax_by_hand(scores, value, options, expected):
    assert kept(scores, rule(value, "softmax", **options)) == expected


def test_softmax_reasons():
    assert reasons([5.0, 0.0, 1.0], rule(0.5, "softmax", include_zero=False)) == [
        "kept",
        "zero score",
        "outside top-p mass",
    ]


# By hand: top_k, top_f, top_k_abs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["top_k", "top_f"])
@pytest.mark.parametrize(
    ("scores", "value", "options", "expected"),
    [
        ([4, 3, 2, 1], 0.5, {}, [0, 1]),
        ([1, 2, 3, 4], 0.5, {}, [2, 3]),
        ([1, 2, 3, 4], 0.5, {"largest": False}, [0, 1]),
        ([4, 3, 2, 1], 0.74, {}, [0, 1]),  # 2.96
        ([4, 3, 2, 1], 0.75, {}, [0, 1, 2]),
        ([4, 3, 2, 1], 0.1, {}, [0]),  # 0.4: at least one
        ([4, 3, 2, 1], 1.0, {}, [0, 1, 2, 3]),
        ([2, 2, 2, 2], 0.5, {}, [0, 1]),  # at a tie the earlier groups
        ([2, 2, 2, 2], 0.5, {"largest": False}, [0, 1]),
        ([0, 0, 0, 0], 0.5, {}, [0, 1]),  # zeros are scores like others
        ([0, 0, 0, 0], 0.5, {"include_zero": False}, []),
        ([0, 0, 5, 3], 0.75, {"include_zero": False}, [2, 3]),  # 3 of 4 groups, and 2 are there
        ([0, 0, 5, 3, 1, 0], 0.5, {"include_zero": False}, [2, 3, 4]),  # of all six groups, not of the three candidates
        ([0, -1, 5], 0.5, {"largest": False, "include_zero": False}, [1]),
        ([-1, -2, -3], 0.5, {}, [0]),  # 1.5
        ([7], 0.01, {}, [0]),
        ([], 0.5, {}, []),
    ],
)
def test_top_k_by_hand(strategy, scores, value, options, expected):
    assert kept(scores, by(strategy, value, **options)) == expected


@pytest.mark.parametrize(
    ("value", "num_groups", "num_kept"), [(0.29, 100, 29), (0.58, 50, 29), (0.6, 8, 4), (0.7, 10, 7)]
)
def test_top_k_counts_as_one_does_on_paper(value, num_groups, num_kept):
    # In floats 0.29 * 100 is a little less than 29.
    assert len(kept([1.0] * num_groups, by("top_k", value))) == num_kept


@pytest.mark.parametrize(
    ("scores", "value", "options", "expected"),
    [
        ([4, 1, 3, 2], 2, {}, [0, 2]),
        ([4, 1, 3, 2], 2.0, {"largest": False}, [1, 3]),
        ([4, 1], 9, {}, [0, 1]),
        ([2, 2, 2], 1, {}, [0]),
        ([0, 0, 0], 2, {}, [0, 1]),
        ([0, 0, 0], 2, {"include_zero": False}, []),
        ([0, 3, 0], 2, {"include_zero": False}, [1]),
        ([], 2, {}, []),
    ],
)
def test_top_k_abs_by_hand(scores, value, options, expected):
    assert kept(scores, by("top_k_abs", value, **options)) == expected


# By hand: min_p -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scores", "value", "options", "expected"),
    [
        ([4, 3, 2, 1], 0.75, {}, [0, 1]),  # at least 3
        ([4, 3, 2, 1], 0.76, {}, [0]),
        ([4, 3, 2, 1], 1.0, {}, [0]),
        ([4, 3, 2, 1], 0.0, {}, [0, 1, 2, 3]),
        ([4, 0, -1], 0.0, {}, [0, 1]),  # at least 0
        ([3, 0.3 - 1e-11, 0.299], 0.1, {}, [0, 1]),  # rounding does not decide
        ([0, 0, 0], 0.5, {}, [0, 1, 2]),
        ([0, 0, -1], 0.5, {}, [0, 1]),
        ([0, 0, 0], 0.5, {"include_zero": False}, []),
        ([0, 4, 1], 0.5, {"include_zero": False}, [1]),
        ([-1, -2, -1, -1.5], 0.5, {}, [0, 2]),  # at least -0.5 would drop even the best
        ([4, 3, 2, 1], 0.5, {"largest": False}, [2, 3]),  # at most 1 / 0.5
        ([4, 3, 2, 1], 0.25, {"largest": False}, [0, 1, 2, 3]),
        ([4, 3, 2, 1], 1.0, {"largest": False}, [3]),
        ([4, 3, 2, 1], 0.0, {"largest": False}, [0, 1, 2, 3]),
        ([2, 0, 1, 0], 0.5, {"largest": False}, [1, 3]),  # nothing but 0 is near 0
        ([2, 0, 1, 0], 0.0, {"largest": False}, [0, 1, 2, 3]),
        ([2, 0, 1, 0], 0.5, {"largest": False, "include_zero": False}, [0, 2]),
        ([-2, -2, -1, 3], 0.5, {"largest": False}, [0, 1]),
        ([-2, -2, -1, 3], 0.0, {"largest": False}, [0, 1]),
        ([], 0.5, {}, []),
        ([], 0.5, {"largest": False}, []),
    ],
)
def test_min_p_by_hand(scores, value, options, expected):
    assert kept(scores, by("min_p", value, **options)) == expected


def test_reasons_of_the_other_strategies():
    scores = [5.0, 0.0, 1.0]
    for strategy, value in (("top_k", 0.4), ("top_f", 0.4), ("top_k_abs", 1)):
        assert reasons(scores, by(strategy, value, include_zero=False)) == ["kept", "zero score", "outside top-k"]
    assert reasons(scores, by("min_p", 0.9, include_zero=False)) == ["kept", "zero score", "too far from the best"]


# All ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "value", "message"),
    [
        ("top_p", 0.0, "share above 0"),
        ("top_p", math.nan, "share above 0"),
        ("top_k", 8, r"keeps a fraction .* use top_k_abs"),
        ("top_f", 1.01, r"keeps a fraction .* use top_k_abs"),
        ("top_k", 0, "fraction"),
        ("top_k_abs", 0.5, r"keeps a whole number .* use top_k"),
        ("top_k_abs", 0, "whole number"),
        ("top_k_abs", math.inf, "whole number"),
        ("min_p", 1.1, "between 0 and 1"),
        ("min_p", -0.1, "between 0 and 1"),
    ],
)
def test_impossible_values_are_refused(strategy, value, message):
    with pytest.raises(AssertionError):
        by(strategy, value)
    assert re.search(message, VALUES[strategy][1]), "what the user is shown by ragen.config"


def test_every_strategy_says_which_values_it_takes():
    assert VALUES.keys() == STRATEGIES.keys()


@pytest.mark.parametrize("strategy", ["top_k", "top_f", "top_k_abs", "min_p"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_the_other_strategies_refuse_bad_scores_too(strategy, bad):
    with pytest.raises(ValueError, match="finite"):
        select([1.0, bad], by(strategy, 1))


@pytest.mark.parametrize("prob_mode", ["linear", "softmax"])
@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("value", [1.0, 1.5])
def test_p_of_one_keeps_the_whole_pool(prob_mode, largest, value):
    scores = [0.0, 2.0, -1.0, 1e-11]
    assert kept(scores, rule(value, prob_mode, largest)) == [0, 1, 2, 3]
    assert kept([0.0, 0.0], rule(value, prob_mode, largest)) == [0, 1]
    assert reasons(scores, rule(value, prob_mode, largest, include_zero=False)) == [
        "zero score",
        "kept",
        "kept",
        "zero score",
    ]


@pytest.mark.parametrize("prob_mode", ["linear", "softmax"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_no_number_is_refused(prob_mode, bad):
    with pytest.raises(ValueError, match="finite"):
        select([1.0, bad], rule(0.9, prob_mode))


def test_unknown_choices_are_refused():
    with pytest.raises(AssertionError, match="best"):
        FilterRule("best", 0.9, True, True, "linear", 0.01)
    with pytest.raises(AssertionError, match="cubic"):
        FilterRule("top_p", 0.9, True, True, "cubic", 0.01)
    with pytest.raises(AssertionError, match="luck"):
        group_score("luck", [1.0])


# A second opinion ---------------------------------------------------------------------------------------------------


def naive_linear(scores, p, eps, largest):
    """Exact: fractions of the floats. Gives the indices kept and how close the decision was."""
    exact = [Fraction(score) for score in scores]
    threshold = Fraction(p) * sum(exact) - Fraction(eps)
    taken, running, margin = [], Fraction(0), abs(threshold)
    while True:
        margin = min(margin, abs(running - threshold))
        if running >= threshold:
            return set(taken), margin
        left = [index for index in range(len(exact)) if index not in taken]
        if not left:
            return set(), margin
        best = left[0]
        for index in left[1:]:
            if exact[index] > exact[best] if largest else exact[index] < exact[best]:
                best = index
        if exact[best] <= 0:
            return set(), margin
        taken.append(best)
        running += exact[best]


def naive_softmax(scores, p, largest):
    signed = [score if largest else -score for score in scores]
    top = max(signed)
    shares = [math.exp(value - top) for value in signed]
    shares = [share / math.fsum(shares) for share in shares]
    ranked = sorted(range(len(scores)), key=lambda index: (-signed[index], index))
    for count in range(1, len(ranked) + 1):
        mass = math.fsum(shares[index] for index in ranked[:count])
        if count == len(ranked) or abs(mass - p) < 1e-9 or mass >= p:
            return set(ranked[:count]), abs(mass - p) if count < len(ranked) else 1.0
    raise AssertionError


some_score = st.one_of(
    st.sampled_from([0.0, 1.0, 0.5, -1.0, 1e-10, -1e-10, 2e-10]),
    st.floats(-3, 10, allow_nan=False, width=32),
    st.floats(0, 2, allow_nan=False),
    st.floats(-1e12, 1e12),
)
some_scores = st.lists(some_score, max_size=12)
some_p = st.one_of(st.sampled_from([0.25, 0.5, 0.9, 0.95]), st.floats(0.001, 0.999))
both = st.booleans()
some_any_rule = st.one_of(
    st.tuples(st.sampled_from(["top_k", "top_f", "min_p"]), some_p),
    st.tuples(st.just("top_k_abs"), st.integers(1, 9)),
)


def naive_best(scores, count, largest):
    """Take the best, again and again."""
    left, taken = list(range(len(scores))), set()
    while left and len(taken) < count:
        best = left[0]
        for index in left[1:]:
            if scores[index] > scores[best] if largest else scores[index] < scores[best]:
                best = index
        left.remove(best)
        taken.add(best)
    return taken


def naive_near(scores, p, largest):
    """Exact. Gives the indices kept and how close the decision was."""
    exact, share = [Fraction(score) for score in scores], Fraction(p)
    best = max(exact) if largest else min(exact)
    taken, margin = set(), Fraction(1)
    for index, score in enumerate(exact):
        if best < 0:
            near, distance = score == best, abs(score - best)
        elif largest:
            near, distance = score >= share * best, abs(score - share * best)
        else:  # score <= best / share
            near, distance = score * share <= best, abs(score * share - best)
        taken |= {index} if near else set()
        if score != best and distance > 0:
            margin = min(margin, distance)
    return taken, margin


def pool_of(scores, include_zero):
    return [index for index, score in enumerate(scores) if include_zero or abs(score) > 1e-10]


@given(some_scores, some_p, both, both)
@example([0.0, 0.0, 0.0], 0.9, True, True)
@example([0.4], 0.9, True, True)
@example([0.5, 0.5, 0.5, 0.5], 0.5, True, False)
@example([1e12, 1e12, 1.0], 0.999, True, True)
def test_linear_against_plain_loops(scores, p, largest, include_zero):
    pool = pool_of(scores, include_zero)
    expected, margin = naive_linear([scores[index] for index in pool], p, 0.01, largest)
    assume(margin > 1e-12 * (1 + sum(map(abs, scores))))  # not where rounding decides
    assert set(kept(scores, rule(p, "linear", largest, include_zero))) == {pool[index] for index in expected}


@given(some_scores, some_p, both, both)
@example([0.0, 0.0, 0.0], 0.9, True, True)
@example([-2.0], 0.9, False, True)
def test_softmax_against_plain_loops(scores, p, largest, include_zero):
    pool = pool_of(scores, include_zero)
    expected, margin = naive_softmax([scores[index] for index in pool], p, largest) if pool else (set(), 1.0)
    assume(margin > 1e-9)
    assert set(kept(scores, rule(p, "softmax", largest, include_zero))) == {pool[index] for index in expected}


@given(some_scores, some_p, both, both)
@example([1.0] * 10, 0.3, True, True)
def test_top_k_against_plain_loops(scores, p, largest, include_zero):
    share = Fraction(p).limit_denominator(10**6)  # as it is written: 0.29, not the float next to it
    assume(abs(share * len(scores) - round(share * len(scores))) == 0 or abs(p * len(scores) % 1 - 0.5) < 0.4999)
    pool = pool_of(scores, include_zero)
    for strategy, value, count in (
        ("top_k", p, max(1, math.floor(share * len(scores)))),
        ("top_f", p, max(1, math.floor(share * len(scores)))),
        ("top_k_abs", 1 + int(10 * p), 1 + int(10 * p)),
    ):
        expected = {pool[index] for index in naive_best([scores[index] for index in pool], count, largest)}
        assert set(kept(scores, by(strategy, value, largest, include_zero))) == expected


@given(some_scores, st.one_of(some_p, st.sampled_from([0.0, 1.0])), both, both)
@example([0.0, 0.0], 0.5, False, True)
@example([-1.0, -1.0, -0.5], 0.5, True, True)
def test_min_p_against_plain_loops(scores, p, largest, include_zero):
    pool = pool_of(scores, include_zero)
    expected, margin = naive_near([scores[index] for index in pool], p, largest) if pool else (set(), 1)
    assume(margin > 3e-10 + 1e-12 * sum(map(abs, scores)))  # not where the tolerance decides
    assert set(kept(scores, by("min_p", p, largest, include_zero))) == {pool[index] for index in expected}


@given(some_scores, both, both, some_any_rule)
def test_the_best_candidate_is_kept_by_all_but_linear_top_p(scores, largest, include_zero, chosen):
    strategy, value = chosen
    pool = pool_of(scores, include_zero)
    now = kept(scores, by(strategy, value, largest, include_zero))
    assert set(now) <= set(pool)
    if pool:
        assert (max if largest else min)(scores[index] for index in pool) in [scores[index] for index in now]


@given(some_scores, some_p, both, both)
def test_softmax_keeps_at_least_one_and_more_with_a_higher_p(scores, p, largest, include_zero):
    sizes = []
    previous = set()
    for value in (p / 2, p, (1 + p) / 2, 1.0):
        now = set(kept(scores, rule(value, "softmax", largest, include_zero)))
        assert previous <= now
        previous = now
        sizes.append(len(now))
    pool = pool_of(scores, include_zero)
    assert previous == set(pool)
    assert (sizes[0] > 0) == (len(pool) > 0)


@given(st.lists(st.floats(0.001, 1e9), min_size=1, max_size=40), both)
@example([0.1] * 100, True)  # added one by one 9.99999999999998, which falls short of 10
def test_linear_with_positive_scores_reaches_its_threshold_even_close_to_one(scores, largest):
    # Where total and running sum are rounded differently, this would now and then drop everything.
    p = math.nextafter(1.0, 0.0)
    assert kept(scores, rule(p, "linear", largest, selection_eps=0.0))


@given(some_scores, some_p, both, both, st.sampled_from(["linear", "softmax"]), st.randoms(use_true_random=False))
def test_the_order_of_groups_does_not_matter(scores, p, largest, include_zero, prob_mode, random):
    shuffled = random.sample(scores, len(scores))
    chosen_rule = rule(p, prob_mode, largest, include_zero)
    # Which of two equal groups is kept does depend on the order, so compare the scores.
    first = sorted(scores[index] for index in kept(scores, chosen_rule))
    second = sorted(shuffled[index] for index in kept(shuffled, chosen_rule))
    assert first == second


@given(some_scores, both, both, some_any_rule, st.randoms(use_true_random=False))
def test_the_order_does_not_matter_to_the_other_strategies(scores, largest, include_zero, chosen, random):
    shuffled = random.sample(scores, len(scores))
    chosen_rule = by(*chosen, largest, include_zero)
    assert sorted(scores[index] for index in kept(scores, chosen_rule)) == sorted(
        shuffled[index] for index in kept(shuffled, chosen_rule)
    )


@given(some_scores, some_p, both, both, st.sampled_from(["linear", "softmax"]))
def test_every_verdict_agrees_with_its_reason(scores, p, largest, include_zero, prob_mode):
    for score, verdict in zip(scores, select(scores, rule(p, prob_mode, largest, include_zero)), strict=True):
        assert verdict.keep == (verdict.reason == "kept")
        assert verdict.reason in REASONS
        assert (verdict.reason == "zero score") == (not include_zero and abs(score) <= 1e-10)


# Scores and metrics -------------------------------------------------------------------------------------------------


def test_reward_variance_is_the_sample_standard_deviation():
    assert group_score("reward_variance", [1.0, 2.0, 3.0]) == 1.0
    assert group_score("reward_variance", [0.0, 4.0]) == pytest.approx(math.sqrt(8))
    assert group_score("reward_variance", [5.0]) == 0.0
    assert METRICS["reward_std"] is METRICS["reward_variance"]


@pytest.mark.parametrize("value", [0.1, 100.1, 1e8 + 0.1, -10.9])
def test_equal_rewards_have_exactly_no_variance(value):
    assert group_score("reward_variance", [value] * 3) == 0.0


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=16))
def test_reward_variance_against_plain_loops(values):
    exact = [Fraction(value) for value in values]
    mean = sum(exact) / len(exact)
    variance = sum((value - mean) ** 2 for value in exact) / (len(exact) - 1)
    assert group_score("reward_std", values) == pytest.approx(math.sqrt(variance), rel=1e-9)


@pytest.mark.parametrize(
    ("metric", "quantity", "score"),
    [
        ("reward_variance", "reward", 2.0),
        ("reward_std", "reward", 2.0),
        ("reward", "reward", 3.0),
        ("reward_sum", "reward", 9.0),
        ("entropy", "entropy", 3.0),
        ("entropy_variance", "entropy", 2.0),
        ("entropy_std", "entropy", 2.0),
        ("length", "length", 3.0),
    ],
)
def test_metrics_of_a_group_by_hand(metric, quantity, score):
    assert METRICS[metric].quantity == quantity
    assert group_score(metric, [1.0, 3.0, 5.0]) == score  # squares 4 + 0 + 4 over 2
    alone = 0.0 if metric.endswith(("_variance", "_std")) else 7.0
    assert group_score(metric, [7.0]) == alone


@pytest.mark.parametrize(("metric", "quantity"), [("entropy_std", "entropy"), ("length", "length")])
def test_reported_names_follow_the_quantity(metric, quantity):
    values = [[1.0, 3.0], [2.0, 2.0]]
    scores = [group_score(metric, group) for group in values]
    metrics = filter_metrics(metric, values, scores, select(scores, by("top_k_abs", 1)))
    names = {name.removeprefix("rollout/") for name in metrics if "in_group" in name}
    assert names == {
        f"{prefix}_{infix}{name}"
        for prefix in ("in_group", "chosen_in_group")
        for infix, names in (("", ("std", "max", "mean")), (f"{quantity}_", ("std", "max", "mean", "sum")))
        for name in names
    }
    assert metrics[f"rollout/in_group_{quantity}_max"] == metrics["rollout/in_group_max"] == 2.5
    # Rewards beside it, whatever the filter looked at.
    beside = in_group_metrics("reward", [[0.0, 8.0], [1.0, 1.0]], select(scores, by("top_k_abs", 1)))
    assert beside["rollout/chosen_in_group_reward_sum"] == 8.0 and beside["rollout/in_group_reward_sum"] == 5.0


REWARDS = [[1.0, 3.0], [2.0, 2.0], [0.0, 4.0]]  # std sqrt(2), 0, sqrt(8); max 3, 2, 4; mean 2, 2, 2; sum 4, 4, 4


def test_metrics_by_hand():
    scores = [group_score("reward_variance", rewards) for rewards in REWARDS]
    verdicts = select(scores, rule(0.5, include_zero=False))  # 0.5 * 4.243 - 0.01 = 2.11: the last one alone
    root = math.sqrt(2)
    assert filter_metrics("reward_variance", REWARDS, scores, verdicts) == pytest.approx(
        {
            "rollout/in_group_std": root,
            "rollout/in_group_max": 3.0,
            "rollout/in_group_mean": 2.0,
            "rollout/in_group_reward_std": root,
            "rollout/in_group_reward_max": 3.0,
            "rollout/in_group_reward_mean": 2.0,
            "rollout/in_group_reward_sum": 4.0,
            "rollout/chosen_in_group_std": 2 * root,
            "rollout/chosen_in_group_max": 4.0,
            "rollout/chosen_in_group_mean": 2.0,
            "rollout/chosen_in_group_reward_std": 2 * root,
            "rollout/chosen_in_group_reward_max": 4.0,
            "rollout/chosen_in_group_reward_mean": 2.0,
            "rollout/chosen_in_group_reward_sum": 4.0,
            "rollout/filter_kept_count": 1.0,
            "rollout/filter_kept_ratio": 1 / 3,
            "rollout/filter_zero_count": 1.0,
            "rollout/filter_reason/kept": 1.0,
            "rollout/filter_reason/zero_score": 1.0,
            "rollout/filter_reason/outside_top_p_mass": 1.0,
            "rollout/filter_reason/outside_top_k": 0.0,
            "rollout/filter_reason/too_far_from_the_best": 0.0,
            "rollout/filter_reason/too_little_mass": 0.0,
            "rollout/filter_reason/threshold_not_reached": 0.0,
        }
    )


@pytest.mark.parametrize("rewards", [[], [[1.0, 1.0], [2.0]]])
def test_metrics_of_an_empty_selection_are_zero_and_have_all_names(rewards):
    scores = [group_score("reward_variance", values) for values in rewards]
    metrics = filter_metrics("reward_variance", rewards, scores, select(scores, rule(0.9)))
    full = filter_metrics("reward_variance", REWARDS, [1.0] * 3, select([1.0] * 3, rule(1.0)))
    assert metrics.keys() == full.keys()
    assert all(value == 0.0 for name, value in metrics.items() if "chosen" in name or "kept" in name)
    assert metrics["rollout/filter_zero_count"] == len(rewards)  # counted whether or not zeros may stay
    assert metrics["rollout/filter_reason/too_little_mass"] == len(rewards)


@given(some_scores, some_p, both, both)
def test_counts_add_up(scores, p, include_zero, largest):
    verdicts = select(scores, rule(p, "linear", largest, include_zero))
    metrics = filter_metrics("reward_variance", [[score] for score in scores], scores, verdicts)
    assert sum(value for name, value in metrics.items() if "/filter_reason/" in name) == len(scores)
    assert metrics["rollout/filter_kept_count"] == metrics["rollout/filter_reason/kept"]
