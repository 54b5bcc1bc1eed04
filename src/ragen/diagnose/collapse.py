"""Collapse metrics: does the reasoning still depend on the prompt, and is it still varied?

    watch = CollapseWatch(config, tokenizer, workers, note=print)
    metrics = watch.measure(step, groups, model, clock)              # {} unless the step is due
    metrics["collapse_first_turn_sample/mi_seq_estimate"]            # I(X;Z) in nats, at most log N
    regime(metrics, first)                                           # Regime("template collapse", …)

X is everything before a reasoning Z, and Z the sampled tokens before those that spell `</think>`; nothing is tokenised
again. L[i][j] = log p(z_i | x_j), the likelihood of each reasoning after each prompt, gives the entropy of Z given X,
their mutual information, and how often the likeliest prompt is the reasoning's own. Each measurement takes two samples
of a step's pairs: of first turns, whose prompts are the levels, and of all turns, episode by episode.

Low entropy alone misses template collapse: text that varies, but ignores the prompt. All metrics are explained in
docs/reference_collapse_metrics.md. All but `CollapseWatch` is pure, and nothing here imports torch.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import TYPE_CHECKING

from ragen.agent.parse import TAGS
from ragen.config.schema import Config
from ragen.errors import RunFailed
from ragen.prng import Coordinate, bits, uniform
from ragen.protocols import LanguageModel, Tokenizer
from ragen.types import Group

if TYPE_CHECKING:
    from ragen.distributed.workers import Workers

FIRST_TURN, TRAJECTORY = "collapse_first_turn_sample", "collapse_trajectory_sample"
THINK_END = "</think>"
TAIL_TOKENS = 12  # </think> has 8 characters, so at most 8 tokens
TOP = (2, 4, 8)  # retrieval_accuracy@k

Ids = tuple[int, ...]
Matrix = Sequence[Sequence[float]]  # a row for each reasoning, a column for each prompt
Turns = Sequence[Sequence["Pair | None"]]  # of each episode; None for a turn without a reasoning
Stopwatch = Callable[[str], AbstractContextManager[None]]


# --- the pairs of a step ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """A reasoning and everything before it. `group` and `episode` are indices in the step."""

    prompt: Ids
    reasoning: Ids
    group: int
    episode: int


def thinking_counter(tokenizer: Tokenizer) -> Callable[[Sequence[int]], int]:
    """A function from the ids of a reply to the number of them that are its reasoning; 0 if it has none.

    A token with the first character of `</think>` belongs to the tag, even if other text precedes it in the same
    token: its probability is also that of the tag. Blanks, special tokens and tags alone are not a reasoning.
    """

    @cache
    def may_end_tag(id_: int) -> bool:
        return THINK_END[-1] in tokenizer.decode([id_], skip_special_tokens=False)

    def has_tag(ids: Sequence[int]) -> bool:
        return THINK_END in tokenizer.decode(list(ids), skip_special_tokens=False)

    def count(reply_ids: Sequence[int]) -> int:
        stops = (index + 1 for index, id_ in enumerate(reply_ids) if may_end_tag(id_))
        stop = next((stop for stop in stops if has_tag(reply_ids[max(0, stop - TAIL_TOKENS) : stop])), None)
        if stop is None:
            return 0
        start = next(start for start in reversed(range(stop)) if has_tag(reply_ids[start:stop]))
        text = tokenizer.decode(list(reply_ids[:start]), skip_special_tokens=True)
        for tag in TAGS:
            text = text.replace(tag, "")
        return start if text.strip() else 0

    return count


def pairs_of(groups: Sequence[Group], num_thinking: Callable[[Sequence[int]], int]) -> list[list[Pair | None]]:
    """The pairs of each episode, turn by turn."""
    episodes = [(number, episode) for number, group in enumerate(groups) for episode in group.episodes]
    found: list[list[Pair | None]] = []
    for index, (group, episode) in enumerate(episodes):
        turns: list[Pair | None] = []
        for sequence in episode.sequences():
            for start, stop in sequence.reply_spans:
                count = num_thinking(sequence.ids[start:stop])
                pair = Pair(sequence.ids[:start], sequence.ids[start : start + count], group, index)
                turns.append(pair if count else None)
        found.append(turns)
    return found


def counts(pairs_E: Turns) -> dict[str, float]:
    """How many turns have a reasoning."""
    turns = [pair for episode in pairs_E for pair in episode]
    firsts = [episode[0] for episode in pairs_E if episode]
    num_valid, num_first = len(turns) - turns.count(None), len(firsts) - firsts.count(None)
    return {
        "collapse/valid_thinking_rate": num_valid / max(1, len(turns)),
        "collapse/first_turn_num_total": float(len(firsts)),
        "collapse/first_turn_num_valid": float(num_first),
        "collapse/first_turn_valid_rate": num_first / max(1, len(firsts)),
    }


# --- sampling -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Samples:
    """Pairs, the prompts to score every reasoning after, and the index of each reasoning's own prompt."""

    pairs: tuple[Pair, ...]
    prompts: tuple[Ids, ...]
    own: tuple[int, ...]


def first_turns(pairs_E: Turns, num_samples: int | str, draws: Sequence[Coordinate]) -> Samples:
    """First turns without replacement. One prompt per group, even if two groups have the same."""
    firsts = [episode[0] for episode in pairs_E if episode and episode[0] is not None]
    num = _number(num_samples, len(firsts))
    by_chance = sorted(range(len(firsts)), key=lambda index: bits(FIRST_TURN, *draws, index, num_bits=64))
    pairs = tuple(firsts[index] for index in sorted(by_chance[:num]))
    prompts: dict[int, Ids] = {}
    for pair in pairs:
        assert prompts.setdefault(pair.group, pair.prompt) == pair.prompt, "members of a group share their first prompt"
    column = {group: index for index, group in enumerate(prompts)}
    return Samples(pairs, tuple(prompts.values()), tuple(column[pair.group] for pair in pairs))


def trajectory_uniform(pairs_E: Turns, num_samples: int | str, draws: Sequence[Coordinate]) -> Samples:
    """Draw an episode, then one of its turns with a reasoning (if it has any), with replacement; a prompt for each."""
    drawn = []
    for draw in range(_number(num_samples, sum(map(len, pairs_E)))):
        episode = pairs_E[int(uniform(TRAJECTORY, *draws, draw, "episode") * len(pairs_E))]
        valid = [pair for pair in episode if pair is not None]
        if valid:
            drawn.append(valid[int(uniform(TRAJECTORY, *draws, draw, "turn") * len(valid))])
    return Samples(tuple(drawn), tuple(pair.prompt for pair in drawn), tuple(range(len(drawn))))


def _number(num_samples: int | str, num_there: int) -> int:
    return num_there if num_samples == "all" else min(int(num_samples), num_there)


# --- metrics ------------------------------------------------------------------------------------------------------


def metrics_of(
    log_probs: Matrix, samples: Samples, std_eps: float, ema_decay: float, before: Mapping[str, float]
) -> dict[str, float]:
    """All metrics of one sample. `log_probs` are sums over tokens; `before` holds the moving averages so far."""
    if not all(math.isfinite(value) for row in log_probs for value in row):
        raise ValueError("a log-prob is not finite")
    lengths = [len(pair.reasoning) for pair in samples.pairs]
    per_token = [[value / length for value in row] for row, length in zip(log_probs, lengths, strict=True)]
    metrics: dict[str, float] = {"mi_upper_bound": math.log(len(samples.prompts))}
    for matrix, seq in ((per_token, ""), (log_probs, "_seq")):
        matched = [row[own] for row, own in zip(matrix, samples.own, strict=True)]
        marginal = [log_mean_exp(row) for row in matrix]
        gains = [value - other for value, other in zip(matched, marginal, strict=True)]
        std, ema = _spread(marginal), f"marginal_std_ema{seq}"
        moved = ema_decay * before[ema] + (1 - ema_decay) * std if ema in before else std
        metrics |= {
            f"mi{seq}_estimate": fmean(gains),
            f"conditional_entropy{seq}_est": -fmean(matched),
            f"reasoning_entropy{seq}_est": -fmean(marginal),
            f"marginal_std{seq}": std,
            f"mi_zscore{seq}": fmean(gains) / (std + std_eps) if std + std_eps > 0 else 0.0,
            ema: moved,
            f"mi_zscore_ema{seq}": fmean(gains) / (moved + std_eps) if moved + std_eps > 0 else 0.0,
        }
        if not seq:
            metrics |= {"matched_log_prob_mean": fmean(matched), "marginal_log_prob_mean": fmean(marginal)}
        elif len({pair.episode for pair in samples.pairs}) > 1:
            metrics["mi_seq_stderr"] = standard_error(gains, [pair.episode for pair in samples.pairs])
    return metrics | retrieval(per_token, samples)


def log_mean_exp(values: Sequence[float]) -> float:
    top = max(values)
    return top + math.log(fmean(math.exp(value - top) for value in values))


def standard_error(values: Sequence[float], clusters: Sequence[int]) -> float:
    """Of the mean of `values`; values of one cluster are not independent. Needs at least two clusters."""
    mean, sums = fmean(values), dict.fromkeys(clusters, 0.0)
    for value, cluster in zip(values, clusters, strict=True):
        sums[cluster] += value - mean
    return math.sqrt(sum(total**2 for total in sums.values()) * len(sums) / (len(sums) - 1)) / len(values)


def retrieval(matrix: Matrix, samples: Samples) -> dict[str, float]:
    """How often a reasoning's own prompt, or an equal one, is among the k prompts that make it likeliest."""
    num = len(samples.prompts)
    copies = [samples.prompts.count(samples.prompts[own]) for own in samples.own]
    chance = fmean(copies) / num
    metrics = {}
    for k, at in ((1, ""), *((k, f"@{k}") for k in TOP)):
        rows = zip(matrix, samples.own, copies, strict=True)
        hit_rate = fmean(_chance_in_top(row, own, copied, min(k, num)) for row, own, copied in rows)
        metrics[f"retrieval_accuracy{at}"] = hit_rate
        metrics[f"retrieval_chance_level{at}"] = min(1.0, chance * k)
        metrics[f"retrieval_above_chance{at}"] = hit_rate - min(1.0, chance * k)
    return metrics


def _chance_in_top(row: Sequence[float], own: int, num_copies: int, k: int) -> float:
    """1 or 0, unless prompts tie exactly: then the chance that a copy of its own is among the first k."""
    num_better = sum(value > row[own] for value in row)
    num_tied = row.count(row[own])
    num_left = min(max(0, k - num_better), num_tied)
    return 1 - math.comb(num_tied - num_copies, num_left) / math.comb(num_tied, num_left)


def _spread(values: Sequence[float]) -> float:
    """Population standard deviation."""
    mean = fmean(values)
    return math.sqrt(fmean((value - mean) ** 2 for value in values))


# --- four regimes -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RegimeThresholds:
    """Below these, H(Z|X) and I(X;Z) count as low, relative to the start of the run."""

    entropy_share: float = 0.25  # of the entropy of a token at the first measurement
    information_share: float = 0.25  # of the information at the first measurement
    bound_share: float = 0.1  # of log N, the most that can be measured
    num_stderr: float = 2.0  # an information closer to its threshold than this many standard errors is unclear


@dataclass(frozen=True)
class Regime:
    """`diverse`, `compressed`, `template collapse` or `low-entropy collapse`, with the numbers behind it."""

    name: str
    entropy: float  # H(Z|X), nats per token
    entropy_threshold: float
    information: float  # I(X;Z), nats per reasoning
    information_threshold: float
    information_stderr: float
    is_clear: bool  # the information is further from its threshold than noise explains


THRESHOLDS = RegimeThresholds()
REGIMES = {  # (entropy is low, information is low)
    (False, False): "diverse",
    (True, False): "compressed",
    (False, True): "template collapse",
    (True, True): "low-entropy collapse",
}


def regime(
    metrics: Mapping[str, float], first: Mapping[str, float] | None = None, thresholds: RegimeThresholds = THRESHOLDS
) -> Regime | None:
    """The regime of a step's metrics, None if the step was not measured.

    `first` are the metrics of the run's first measurement; None: this is the first. It uses first turns if both have
    them, else trajectories.
    """
    first = metrics if first is None else first
    shown = [label for label in (FIRST_TURN, TRAJECTORY) if f"{label}/mi_seq_estimate" in metrics.keys() & first.keys()]
    if not shown:
        return None
    label = shown[0]
    entropy, start_entropy = (m[f"{label}/conditional_entropy_est"] for m in (metrics, first))
    information, start_information = (m[f"{label}/mi_seq_estimate"] for m in (metrics, first))
    stderr = metrics.get(f"{label}/mi_seq_stderr", math.inf)
    entropy_threshold = thresholds.entropy_share * start_entropy
    information_threshold = max(
        thresholds.bound_share * metrics[f"{label}/mi_upper_bound"], thresholds.information_share * start_information
    )
    name = REGIMES[entropy < entropy_threshold, information < information_threshold]
    is_clear = abs(information - information_threshold) > thresholds.num_stderr * stderr
    return Regime(name, entropy, entropy_threshold, information, information_threshold, stderr, is_clear)


# --- in a run -----------------------------------------------------------------------------------------------------


class CollapseWatch:
    """Measures at step 1 and every `compute_freq` steps, and keeps the moving averages.

    Errors here do not end a run: it logs each one once and skips the metrics.
    """

    def __init__(self, config: Config, tokenizer: Tokenizer, workers: "Workers", note: Callable[[str], None]):
        self.config, self.workers, self.note = config, workers, note
        self.num_thinking = thinking_counter(tokenizer)
        self.averages: dict[str, dict[str, float]] = {}  # by label
        self.logged: set[str] = set()
        detection = config.collapse_detection
        self.is_on = detection.compute_freq > 0 and (detection.first_turn_enabled or detection.multi_turn_enabled)
        reason = why_impossible(config)
        if self.is_on and reason:
            self.is_on = False
            note(f"collapse metrics are off: {reason}")

    def is_due(self, step: int) -> bool:
        return self.is_on and (step == 1 or step % self.config.collapse_detection.compute_freq == 0)

    def measure(self, step: int, groups: Sequence[Group], model: LanguageModel, clock: Stopwatch) -> dict[str, float]:
        """The metrics of all groups of a step that is due; all workers take part and get the same."""
        if not self.is_due(step):
            return {}
        detection = self.config.collapse_detection
        metrics: dict[str, float] = {}
        with clock("collapse_metrics"), self._survived(step, "collapse"):
            pairs_E = pairs_of(groups, self.num_thinking)
            metrics |= counts(pairs_E)
            if detection.first_turn_enabled:
                with clock("collapse_first_turn_step"), self._survived(step, FIRST_TURN):
                    metrics |= self._measure(step, FIRST_TURN, first_turns, pairs_E, model)
            if detection.multi_turn_enabled:
                with clock("collapse_multi_turn_step"), self._survived(step, TRAJECTORY):
                    metrics |= self._measure(step, TRAJECTORY, trajectory_uniform, pairs_E, model)
        return metrics

    def _measure(
        self, step: int, label: str, take: Callable[..., Samples], pairs_E: Turns, model: LanguageModel
    ) -> dict[str, float]:
        from ragen.diagnose.cross_score import cross_log_probs

        detection, rollout = self.config.collapse_detection, self.config.actor_rollout_ref.rollout
        samples = take(pairs_E, detection.num_samples, (self.config.seed.train, step))
        if len(samples.prompts) < 2:
            raise ValueError(f"needs two prompts with a reasoning, found {len(samples.prompts)}")
        reasonings, max_pairs = [pair.reasoning for pair in samples.pairs], detection.micro_batch_size
        log_probs = cross_log_probs(model, samples.prompts, reasonings, rollout.temperature, max_pairs, self.workers)
        before = self.averages.get(label, {})
        metrics = metrics_of(log_probs, samples, detection.std_eps, detection.ema_decay, before)
        self.averages[label] = {name: value for name, value in metrics.items() if name.startswith("marginal_std_ema")}
        return {f"{label}/{name}": value for name, value in metrics.items()}

    @contextmanager
    def _survived(self, step: int, what: str) -> Iterator[None]:
        try:
            yield
        except RunFailed:
            raise  # the other workers are gone
        except Exception as error:
            problem = f"{what}/* skipped: {str(error) or type(error).__name__}"
            if problem not in self.logged:
                self.logged.add(problem)
                self.note(f"step {step}, and whenever this happens again: {problem}")

    def state(self) -> dict[str, dict[str, float]]:
        """For a checkpoint, as JSON."""
        return {label: dict(averages) for label, averages in self.averages.items()}

    def restore(self, state: Mapping[str, Mapping[str, float]]) -> None:
        self.averages = {label: dict(averages) for label, averages in state.items()}


def why_impossible(config: Config) -> str:
    """Why a run has no reasonings to measure; empty if it has."""
    agent = config.agent_proxy
    if not agent.enable_think:
        return "with agent_proxy.enable_think=False there is no reasoning"
    if agent.context_window_mode != "full":
        return f"agent_proxy.context_window_mode={agent.context_window_mode}; they need full"
    return ""
