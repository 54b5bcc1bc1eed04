"""Which tokens are reasoning, which pairs are taken, and what the matrix says: by hand, and against naive twins."""

import itertools
import math
import random
import subprocess
import sys
from collections import Counter

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from made_up_pairs import groups_of, samples_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ragen.diagnose.collapse import (
    FIRST_TURN,
    TRAJECTORY,
    RegimeThresholds,
    counts,
    first_turns,
    log_mean_exp,
    metrics_of,
    pairs_of,
    regime,
    retrieval,
    standard_error,
    thinking_counter,
    trajectory_uniform,
)
from ragen.model.pocket.tokenizer import make_tokenizer

# --- thinking spans -----------------------------------------------------------------------------------------------


class Pieces:
    """A tokenizer of which only the text of each token is known."""

    def __init__(self, *pieces):
        self.pieces = pieces

    def decode(self, ids, skip_special_tokens=False):
        return "".join("" if skip_special_tokens and self.pieces[id_] == "<|end|>" else self.pieces[id_] for id_ in ids)

    def ids(self, *pieces):
        return [self.pieces.index(piece) for piece in pieces]


PIECES = Pieces(
    "a", " ", "\n", "", "<|end|>", "<think>", "</think>", "</", "think", ">", "<", "/", "t", "hin", "k", ".</", " <",
    "k>", "><", ">\n", "k><answer>", "é", "<answer>", "x</think>y", "</think",
)  # fmt: skip


def naive_count(ids, tokenizer):
    """By characters: the token that the tag's first character lies in."""
    owners = [place for place, id_ in enumerate(ids) for _ in tokenizer.pieces[id_]]
    text = "".join(tokenizer.pieces[id_] for id_ in ids)
    at = text.find("</think>")
    if at < 0:
        return 0
    before = "".join(tokenizer.pieces[id_] for id_ in ids[: owners[at]])
    for literal in ("<|end|>", "<think>", "</think>", "<answer>", "</answer>"):
        before = before.replace(literal, "")
    return owners[at] if before.strip() else 0


@given(st.lists(st.integers(0, len(PIECES.pieces) - 1), max_size=14))
@example(PIECES.ids("a", "</", "think", ">", "a"))
@example(PIECES.ids("a", ".</", "think", "><"))  # other text before the tag, in its first token
@example(PIECES.ids(".</", "think", ">"))  # and nothing before that
@example(PIECES.ids("a", "<", "</", "t", "hin", "k><answer>"))  # a false start
@example(PIECES.ids("a", "", "<", "/", "", "t", "hin", "", "k", ">"))
@example(PIECES.ids("a", "x</think>y", "</think>"))
@example(PIECES.ids(" ", "\n", "</think>"))
@settings(max_examples=200)
def test_the_reasoning_ends_at_the_token_that_begins_the_tag(ids):
    assert thinking_counter(PIECES)(ids) == naive_count(ids, PIECES)


@pytest.mark.parametrize(
    ("text", "reasoning"),
    [
        ("push Left</think><answer>Up</answer>", "push Left"),
        ("</think><answer>Up</answer>", ""),
        ("  \n</think><answer>Up</answer>", ""),
        ("<think></think><answer>Up</answer>", ""),
        ("<|end|></think>", ""),
        ("push Left", ""),
        ("the é \N{PILE OF POO} goes</think></think>", "the é \N{PILE OF POO} goes"),
        ("a </thin </think>", "a </thin "),
    ],
)
def test_spans_of_pocket(text, reasoning):
    tokenizer = make_tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids[: thinking_counter(tokenizer)(ids)]) == reasoning


def byte_level(*merges):
    """Bytes, and these merges, which may go across anything."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*letters, *("".join(merge) for merge in merges)])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize(
    ("merges", "tokens", "reasoning"),
    [
        ([], [*"Up.</think><a"], "Up."),
        ([(".", "<"), (".<", "/")], ["U", "p", ".</", *"think><a"], "Up"),
        ([("<", "/"), ("t", "h"), (">", "<")], [*"Up.", "</", "th", *"ink", "><", "a"], "Up."),
        ([("k", ">"), ("k>", "<"), ("k><", "a")], [*"Up.</thin", "k><a"], "Up."),
    ],
)
def test_spans_where_merges_go_across_the_edges_of_the_tag(merges, tokens, reasoning):
    tokenizer = byte_level(*merges)
    ids = tokenizer.encode("Up.</think><a")
    assert tokenizer.convert_ids_to_tokens(ids) == tokens
    assert tokenizer.decode(ids[: thinking_counter(tokenizer)(ids)]) == reasoning


def test_a_character_cut_in_two_before_the_tag():
    tokenizer = byte_level()
    ids = tokenizer.encode("é</think>")[1:]  # the second byte alone
    assert thinking_counter(tokenizer)(ids) == 1


def test_pairs_take_everything_before_the_reasoning():
    think = Pieces("a", "b", "c", "</think>")
    groups = groups_of([[[((0, 1), (0, 2, 3, 1)), ((2,), (3, 0)), ((1, 1), (1, 3))]], [[((2, 2), (0,))]]])
    (first, none, third), (cut,) = pairs_of(groups, thinking_counter(think))
    assert (first.prompt, first.reasoning, first.group, first.episode) == ((0, 1), (0, 2), 0, 0)
    assert none is None and cut is None
    assert third.prompt == (0, 1, 0, 2, 3, 1, 2, 3, 0, 1, 1) and third.reasoning == (1,)
    assert counts([[first, none, third], [cut]]) == {
        "collapse/valid_thinking_rate": 0.5,
        "collapse/first_turn_num_total": 2.0,
        "collapse/first_turn_num_valid": 1.0,
        "collapse/first_turn_valid_rate": 0.5,
    }


# --- which are taken ----------------------------------------------------------------------------------------------


def played(num_groups, size, num_turns, is_valid=lambda group, member, turn: True):
    """Pairs in which token 9 ends the thinking, and every reasoning is another."""
    tree = [
        [
            [
                ((7, group), (10 + member, 20 + turn, *((9,) if is_valid(group, member, turn) else ())))
                for turn in range(num_turns)
            ]
            for member in range(size)
        ]
        for group in range(num_groups)
    ]
    return pairs_of(groups_of(tree), lambda ids: 2 if ids[-1] == 9 else 0)


def test_first_turns_without_replacement_and_a_prompt_for_each_group():
    pairs = played(4, 6, 2, lambda group, member, turn: turn > 0 or member != 5)
    taken = first_turns(pairs, 7, (0, 1))
    assert len(taken.pairs) == len({pair.episode for pair in taken.pairs}) == 7
    assert all(pair.reasoning[1] == 20 and pair.reasoning[0] != 15 for pair in taken.pairs)
    assert [taken.prompts[own] for own in taken.own] == [pair.prompt for pair in taken.pairs]
    assert sorted(taken.prompts) == sorted({pair.prompt for pair in taken.pairs})
    everyone = first_turns(pairs, "all", (0, 1))
    assert len(everyone.pairs) == 20 and everyone.prompts == ((7, 0), (7, 1), (7, 2), (7, 3))
    assert first_turns(pairs, 64, (0, 2)) == everyone


def test_equal_prompts_of_two_groups_are_two_columns():
    tree = [[[((5,), (1, 9))]], [[((5,), (2, 9))]]]
    taken = first_turns(pairs_of(groups_of(tree), lambda ids: 1), "all", ())
    assert taken.prompts == ((5,), (5,)) and taken.own == (0, 1)


def test_first_prompts_of_one_group_differ_never():
    tree = [[[((5,), (1, 9))], [((6,), (2, 9))]]]
    with pytest.raises(AssertionError, match="share their first prompt"):
        first_turns(pairs_of(groups_of(tree), lambda ids: 1), "all", ())


def test_trajectories_with_replacement_and_each_draw_its_own_column():
    pairs = played(3, 4, 5, lambda group, member, turn: member != 3 and turn != 2)
    taken = trajectory_uniform(pairs, 40, (0, 1))
    assert 0 < len(taken.pairs) < 40, "an episode without reasoning is a draw that is left out"
    assert taken.prompts == tuple(pair.prompt for pair in taken.pairs) and taken.own == tuple(range(len(taken.pairs)))
    assert {pair.reasoning[1] for pair in taken.pairs} == {20, 21, 23, 24}
    assert trajectory_uniform(pairs, 40, (0, 2)) != taken
    assert len(trajectory_uniform(played(3, 4, 5), "all", ()).pairs) == 60
    assert len(trajectory_uniform(played(1, 1, 5), 64, ()).pairs) == 5


def test_draws_are_uniform_over_episodes_then_turns():
    """Four episodes, of which one has five turns and the others one."""
    tree = [[[((1,), (index, 9))] for index in range(3)] + [[((1,), (3, 9))] * 5]]
    pairs = pairs_of(groups_of(tree), lambda ids: 1)
    drawn = Counter(pair.episode for step in range(250) for pair in trajectory_uniform(pairs, 8, (0, step)).pairs)
    assert sum(drawn.values()) == 2000
    assert all(abs(drawn[index] - 500) < 100 for index in range(4)), drawn  # five standard deviations


# --- the matrix ---------------------------------------------------------------------------------------------------


def test_metrics_by_hand():
    """Two prompts, two reasonings of two tokens: each has probability 1/2 after its own and 1/8 after the other's."""
    half, eighth = math.log(1 / 2), math.log(1 / 8)
    samples = samples_of(own=[0, 1], lengths=[2, 2], prompts=[0, 1])
    got = metrics_of([[half, eighth], [eighth, half]], samples, 1e-3, 0.9, {})
    marginal = math.log((1 / 2 + 1 / 8) / 2)
    per_token = math.log((math.sqrt(1 / 2) + math.sqrt(1 / 8)) / 2)
    assert got["mi_seq_estimate"] == pytest.approx(math.log(1.6)) == pytest.approx(half - marginal)
    assert got["mi_estimate"] == pytest.approx(half / 2 - per_token)
    assert got["mi_upper_bound"] == math.log(2)
    assert got["conditional_entropy_seq_est"] == pytest.approx(math.log(2))
    assert (
        got["conditional_entropy_est"] == pytest.approx(math.log(2) / 2) == pytest.approx(-got["matched_log_prob_mean"])
    )
    assert got["reasoning_entropy_seq_est"] == pytest.approx(-marginal)
    assert got["reasoning_entropy_est"] == pytest.approx(-per_token) == pytest.approx(-got["marginal_log_prob_mean"])
    assert got["marginal_std"] == got["marginal_std_seq"] == 0
    assert got["mi_zscore_seq"] == pytest.approx(math.log(1.6) / 1e-3)
    assert got["mi_seq_stderr"] == 0
    assert (got["retrieval_accuracy"], got["retrieval_chance_level"], got["retrieval_above_chance"]) == (1, 0.5, 0.5)
    assert (got["retrieval_accuracy@8"], got["retrieval_chance_level@8"], got["retrieval_above_chance@8"]) == (1, 1, 0)


def test_moving_averages_start_at_the_first_value():
    samples = samples_of(own=[0, 1], lengths=[1, 1], prompts=[0, 1])
    wide, narrow = [[-1.0, -1.0], [-3.0, -3.0]], [[-1.0, -1.0], [-1.5, -1.5]]
    first = metrics_of(wide, samples, 0.001, 0.9, {})
    assert first["marginal_std_ema"] == first["marginal_std"] == pytest.approx(1.0)
    second = metrics_of(narrow, samples, 0.001, 0.9, first)
    assert second["marginal_std_seq"] == pytest.approx(0.25)
    assert second["marginal_std_ema"] == second["marginal_std_ema_seq"] == pytest.approx(0.9 * 1.0 + 0.1 * 0.25)
    own = metrics_of(
        [[-1.0, -2.0], [-2.5, -1.5]], samples, 0.001, 0.5, {"marginal_std_ema": 3.0, "marginal_std_ema_seq": 1.0}
    )
    assert own["marginal_std_ema"] == pytest.approx((3.0 + own["marginal_std"]) / 2)
    assert own["mi_zscore_ema"] == pytest.approx(own["mi_estimate"] / (own["marginal_std_ema"] + 0.001))
    assert own["mi_zscore_ema_seq"] == pytest.approx(own["mi_seq_estimate"] / (own["marginal_std_ema_seq"] + 0.001))


def test_what_is_not_finite_is_refused():
    samples = samples_of(own=[0, 1], lengths=[1, 1], prompts=[0, 1])
    with pytest.raises(ValueError, match="not finite"):
        metrics_of([[-1.0, math.nan], [-1.0, -1.0]], samples, 1e-3, 0.9, {})


def test_without_any_spread_and_eps_there_is_no_zscore():
    got = metrics_of([[-1.0, -1.0]] * 2, samples_of([0, 1], [1, 1], [0, 1]), 0.0, 0.9, {})
    assert got["mi_zscore"] == got["mi_zscore_ema_seq"] == 0


def test_one_episode_alone_has_no_standard_error():
    samples = samples_of(own=[0, 1], lengths=[1, 1], prompts=[0, 1], episodes=[3, 3])
    assert "mi_seq_stderr" not in metrics_of([[-1.0, -2.0], [-1.0, -2.0]], samples, 1e-3, 0.9, {})


@st.composite
def matrices(draw):
    """(log-probs, own columns, lengths, names of the prompts, episodes): equal prompts have equal columns."""
    names = draw(st.lists(st.integers(0, 3), min_size=2, max_size=7))
    num_rows = draw(st.integers(2, 7))
    # Few values, so that there are ties.
    number = st.one_of(st.integers(-6, -1).map(float), st.floats(-80, -0.01))
    columns = {name: draw(st.lists(number, min_size=num_rows, max_size=num_rows)) for name in set(names)}
    matrix = [[columns[name][row] for name in names] for row in range(num_rows)]
    own = draw(st.lists(st.integers(0, len(names) - 1), min_size=num_rows, max_size=num_rows))
    lengths = draw(st.lists(st.integers(1, 5), min_size=num_rows, max_size=num_rows))
    episodes = draw(st.lists(st.integers(0, 9), min_size=num_rows, max_size=num_rows))
    return matrix, own, lengths, names, episodes


def with_torch(matrix, own, lengths):
    """All but retrieval and averages, as the formulas are written."""
    summed = torch.tensor(matrix, dtype=torch.float64)
    found = {"mi_upper_bound": math.log(summed.shape[1])}
    for seq, scores in (("_seq", summed), ("", summed / torch.tensor(lengths)[:, None])):
        matched = scores[torch.arange(len(own)), own]
        marginal = torch.logsumexp(scores, dim=1) - math.log(scores.shape[1])
        std = marginal.std(correction=0)
        found |= {
            f"mi{seq}_estimate": (matched - marginal).mean(),
            f"conditional_entropy{seq}_est": -matched.mean(),
            f"reasoning_entropy{seq}_est": -marginal.mean(),
            f"marginal_std{seq}": std,
            f"mi_zscore{seq}": ((matched - marginal) / (std + 1e-3)).mean(),
            f"marginal_std_ema{seq}": std,
            f"mi_zscore_ema{seq}": ((matched - marginal) / (std + 1e-3)).mean(),
        }
    found |= {"matched_log_prob_mean": matched.mean(), "marginal_log_prob_mean": marginal.mean()}
    return {name: float(value) for name, value in found.items()}


@given(matrices())
@settings(max_examples=80)
def test_metrics_equal_the_formulas(made):
    matrix, own, lengths, names, episodes = made
    got = metrics_of(matrix, samples_of(own, lengths, names, episodes), 1e-3, 0.9, {})
    wanted = with_torch(matrix, own, lengths)
    rest = {name: value for name, value in got.items() if not name.startswith(("retrieval", "mi_seq_stderr"))}
    assert rest == pytest.approx(wanted, rel=1e-9, abs=1e-9)
    assert got["mi_seq_estimate"] <= got["mi_upper_bound"] + 1e-9
    assert got["mi_estimate"] <= got["mi_upper_bound"] + 1e-9


@given(matrices(), st.randoms(use_true_random=False))
@settings(max_examples=50)
def test_the_order_of_prompts_and_reasonings_does_not_matter(made, chance):
    matrix, own, lengths, names, episodes = made
    got = metrics_of(matrix, samples_of(own, lengths, names, episodes), 1e-3, 0.9, {})
    rows, columns = list(range(len(own))), list(range(len(names)))
    chance.shuffle(rows)
    chance.shuffle(columns)
    again = samples_of(
        [columns.index(own[row]) for row in rows],
        [lengths[row] for row in rows],
        [names[column] for column in columns],
        [episodes[row] for row in rows],
    )
    turned = metrics_of([[matrix[row][column] for column in columns] for row in rows], again, 1e-3, 0.9, {})
    assert turned == pytest.approx(got, rel=1e-9, abs=1e-9)


@given(st.lists(st.floats(-500, -0.1), min_size=1, max_size=9))
def test_equal_columns_carry_no_information(row):
    matrix = [[value] * 4 for value in row]
    got = metrics_of(matrix, samples_of([0] * len(row), [2] * len(row), [1, 1, 1, 1]), 1e-3, 0.9, {})
    assert got["mi_seq_estimate"] == pytest.approx(0, abs=1e-9) and got["mi_estimate"] == pytest.approx(0, abs=1e-9)
    assert got["retrieval_above_chance"] == 0


def test_log_mean_exp_neither_overflows_nor_underflows():
    assert log_mean_exp([-1e4, -1e4 + math.log(3)]) == pytest.approx(-1e4 + math.log(2))


# --- retrieval ----------------------------------------------------------------------------------------------------


def test_retrieval_by_hand():
    """Three prompts, of which the last two have equal tokens. The third reasoning likes the first prompt best."""
    samples = samples_of(own=[0, 1, 2], lengths=[1, 1, 1], prompts=[5, 6, 6])
    got = retrieval([[-1.0, -2.0, -2.0], [-3.0, -2.0, -2.0], [-1.0, -2.0, -2.0]], samples)
    assert got["retrieval_accuracy"] == pytest.approx(2 / 3)
    assert got["retrieval_accuracy@2"] == 1
    assert got["retrieval_chance_level"] == pytest.approx((1 + 2 + 2) / 3 / 3)
    assert got["retrieval_chance_level@2"] == 1
    assert got["retrieval_above_chance"] == pytest.approx(2 / 3 - 5 / 9)


@given(matrices())
@settings(max_examples=60)
def test_ties_are_broken_by_chance(made):
    """Against every choice of the tied prompts that could make up the first k."""
    matrix, own, lengths, names, _ = made
    got = retrieval(matrix, samples_of(own, lengths, names))
    for k, at in ((1, ""), (2, "@2"), (4, "@4"), (8, "@8")):
        hits = []
        for row, mine in zip(matrix, own, strict=True):
            better = [column for column in range(len(names)) if row[column] > row[mine]]
            tied = [column for column in range(len(names)) if row[column] == row[mine]]
            choices = list(itertools.combinations(tied, min(max(0, k - len(better)), len(tied))))
            won = [any(names[column] == names[mine] for column in (*better, *choice)[:k]) for choice in choices]
            hits.append(sum(won) / len(won))
        assert got[f"retrieval_accuracy{at}"] == pytest.approx(sum(hits) / len(hits)), k


# --- the standard error -------------------------------------------------------------------------------------------


def test_standard_error_by_hand():
    assert standard_error([1.0, 2.0, 3.0, 6.0], [0, 1, 2, 3]) == pytest.approx(math.sqrt(14 / 3) / 2)
    # Each drawn twice: as much as is known from two.
    assert (
        standard_error([1.0, 1.0, 3.0, 3.0], [0, 0, 1, 1])
        == pytest.approx(1.0)
        == pytest.approx(standard_error([1.0, 3.0], [0, 1]))
    )


def test_the_standard_error_is_that_of_repeated_samples():
    chance = random.Random(1)
    tables = [[chance.gauss(0, 2) for _ in range(50)] for _ in range(400)]
    means = [sum(table) / 50 for table in tables]
    spread = torch.tensor(means).std().item()
    told = sum(standard_error(table, range(50)) for table in tables) / 400
    assert told == pytest.approx(spread, rel=0.15)


# --- regimes ------------------------------------------------------------------------------------------------------


def measured(entropy, information, stderr=0.01, bound=2.0, label=FIRST_TURN):
    names = ("conditional_entropy_est", "mi_seq_estimate", "mi_seq_stderr", "mi_upper_bound")
    return {f"{label}/{name}": value for name, value in zip(names, (entropy, information, stderr, bound), strict=True)}


START = measured(1.0, 1.6)


@pytest.mark.parametrize(
    ("entropy", "information", "name"),
    [
        (0.9, 1.5, "diverse"),
        (0.2, 1.5, "compressed"),
        (0.9, 0.3, "template collapse"),
        (0.2, 0.1, "low-entropy collapse"),
        (1.9, -0.02, "template collapse"),
    ],
)
def test_the_four_regimes(entropy, information, name):
    found = regime(measured(entropy, information), START)
    assert (found.name, found.entropy, found.information) == (name, entropy, information)
    assert (found.entropy_threshold, found.information_threshold) == (0.25, 0.4)
    assert found.is_clear


def test_a_run_may_start_as_a_template():
    found = regime(measured(0.9, 0.15))
    assert (found.name, found.information_threshold, found.is_clear) == ("template collapse", 0.2, True)
    assert regime(measured(0.9, 0.25)).name == "diverse"


def test_near_the_threshold_noise_decides():
    assert not regime(measured(0.9, 0.35, stderr=0.04), START).is_clear
    assert regime(measured(0.9, 0.35, stderr=0.02), START).is_clear
    without = {name: value for name, value in measured(0.9, 0.1).items() if "stderr" not in name}
    assert not regime(without, START).is_clear


def test_thresholds_can_be_others():
    strict = RegimeThresholds(entropy_share=0.95, information_share=0.99)
    assert regime(measured(0.9, 1.5), START, strict).name == "low-entropy collapse"


def test_trajectories_where_there_are_no_first_turns():
    first = measured(1.0, 1.6, label=TRAJECTORY)
    assert regime(measured(0.2, 1.5, label=TRAJECTORY), first).name == "compressed"
    assert regime(measured(0.2, 1.5, label=TRAJECTORY), START) is None
    assert regime({"actor/entropy": 1.0}) is None and regime({}, START) is None


def test_reading_regimes_needs_no_torch():
    code = "import sys, ragen.diagnose.collapse; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
