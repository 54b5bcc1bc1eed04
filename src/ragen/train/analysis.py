"""Gradient analysis within a run: which groups, under which targets, and the metrics that come of it.

    batch = training_batch(step, played, targets, learner, clock)     # the step's own groups, where those are analysed
    metrics = analyse_step(step, batch, rollouts, clock)                # {} at steps that are not

What is differentiated are the terms of `update.actor_terms`, at the weights as they are; nothing is changed. The groups
are those of the training step, or a batch of their own if `gradient_analysis_env_groups` and `_group_size` ask for
another shape: other levels of the training split and other draws, through the same filter, scoring and shaping.
With `gradient_analysis_log_prefilter` a twin looks at all groups as if there were no filter. Groups that both look at
are computed once; only where the advantages of a group differ (whitened over another set, or scaled by the kept share)
does its task term need a second backward pass, never a second forward pass.

The metrics are in docs/metrics.md. A term is there if it has a coefficient.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from ragen.algo.loss import token_weights
from ragen.config import derive
from ragen.config.schema import Config
from ragen.diagnose.gradients import ALL, BUCKETINGS, BucketGradient, Buckets, Sums, TermLoss, by_spread, sweep
from ragen.distributed.workers import ALONE, Workers
from ragen.model.decoder import TrainableModel
from ragen.model.packing import Sample, pack, samples_of
from ragen.model.scoring import micro_batches
from ragen.prng import Coordinate
from ragen.protocols import LanguageModel
from ragen.rollout.collect import GroupRequest
from ragen.run.clock import Clock
from ragen.train.learner import Learner, TokenScores
from ragen.train.levels import SPLIT
from ragen.train.rollouts import Rollouts
from ragen.train.targets import Played, Selection, kept_scores, normalized
from ragen.train.update import TASK, Targets, actor_terms, max_sampled, task_term, term_names
from ragen.types import Group

EXITED = "trainer/exited_after_gradient_analysis"
AFTER, BEFORE = "grad_norm", "grad_norm_prefilter"  # the filter
META, META_BEFORE = "grad_analysis", "grad_analysis_prefilter"
LOSS_NAMES = {TASK: "policy"}  # where a loss has another name than its term
FIRST_SEED = 1_000_000_000  # beyond `seed.train`: no training step gets that far

BucketRow = dict[str, Any]  # {"prefix": "grad_norm", "bucket": "bucket_1", "group_id": 3, "reward_std": 0.5}


# --- which groups -------------------------------------------------------------------------------------------------


def requests(config: Config, step: int) -> list[GroupRequest]:
    """The levels of an analysis with a separate batch. With `data.train_data_num` they are training levels."""
    envs, pool = config.es_manager.train, config.data.train_data_num
    num_groups, size = derive.analysis_shape(config)
    counts = derive.in_proportion(num_groups, envs.env_configs.n_groups)
    tags = [tag for tag, count in zip(envs.env_configs.tags, counts, strict=True) for _ in range(count)]
    indices = range((step - 1) * num_groups, step * num_groups)
    seeds = [config.seed.train + (index % pool if pool else FIRST_SEED + index) for index in indices]
    levels = enumerate(zip(tags, seeds, strict=True))
    return [GroupRequest(tag, seed, SPLIT, group, size) for group, (tag, seed) in levels]


def draws(config: Config, step: int) -> tuple[Coordinate, ...]:
    """Different from those of training."""
    return "gradient analysis", config.seed.train, step


@dataclass(frozen=True)
class Batch:
    """Played groups with what the loss aims at."""

    groups: Sequence[Group]
    selection: Selection
    kept: Targets | None  # for the samples of the kept groups, if there are any
    everything: Targets | None  # for those of all groups, as if there were no filter; None if there is no twin


def training_batch(step: int, played: Played, targets: Targets | None, learner: Learner, clock: Clock) -> Batch | None:
    """The training step's own batch, if it is the one to analyse now."""
    if not derive.is_analysis_step(learner.config, step) or derive.has_analysis_batch(learner.config):
        return None
    with clock("gradient_analysis"):
        return make_batch(played, learner, targets)


def analyse_step(step: int, batch: Batch | None, rollouts: Rollouts, clock: Clock) -> dict[str, float]:
    """Where the gradient comes from, at the steps that are analysed. Nothing that trains is changed."""
    config, learner, log = rollouts.config, rollouts.learner, rollouts.log
    if not derive.is_analysis_step(config, step):
        return {}
    failures: dict[str, float] = {}
    with clock("gradient_analysis"):
        if batch is None:
            groups, failures = rollouts.play(requests(config, step), draws(config, step), "analysis rollout", step)
            rollouts.make_room()
            batch = make_batch(rollouts.select(groups), learner)
        with log.phase("gradient analysis", total=num_samples(batch, learner.workers)):
            metrics, rows = analyse(batch, config, learner.model, learner.workers, learner.reference, log.advance)
    log.gradient_table(step, rows)
    metrics |= {f"{META}/{name}": count for name, count in failures.items()}
    return metrics | ({EXITED: 1.0} if exits_after(config, step) else {})


def exits_after(config: Config, step: int) -> bool:
    """Whether the run ends with the analysis of this step."""
    return config.trainer.exit_after_gradient_analysis and derive.is_analysis_step(config, step)


def make_batch(played: Played, learner: Learner, kept: Targets | None = None) -> Batch:
    """`kept` are targets that are there already. Nothing is computed twice, and no twin that is not asked for."""
    groups, selection, config = played.groups, played.selection, learner.config
    clock = Clock()  # the step's own counts all of it as analysis
    control = replace(learner.kl_control)  # measuring must not change the controller
    if kept is None and selection.kept:
        token_scores, scores = learner.score(samples_of(selection.kept), clock), kept_scores(played, config)
        ratio = selection.kept_ratio
        kept, _ = learner.make_targets(selection.kept, scores, token_scores, ratio, control, clock)
    everything = None
    if config.trainer.gradient_analysis_log_prefilter:
        token_scores = _token_scores_of_all(played, kept, learner, clock)
        scores = normalized(played.scores, groups, config)
        everything, _ = learner.make_targets(groups, scores, token_scores, 1.0, control, clock)
    return Batch(groups, selection, kept, everything)


def _token_scores_of_all(played: Played, kept: Targets | None, learner: Learner, clock: Clock) -> TokenScores:
    """Those of the kept groups are known; the others are computed."""
    groups, selection = played.groups, played.selection
    removed = [place for place in range(len(groups)) if place not in set(selection.places)]
    parts: list[tuple[list[int], Targets | TokenScores]] = [] if kept is None else [(selection.places, kept)]
    if removed:
        parts.append((removed, learner.score(samples_of([groups[place] for place in removed]), clock)))
    sizes = [len(samples_of([group])) for group in groups]

    def joined(name: str) -> list[Tensor] | None:
        if any(getattr(part, name) is None for _, part in parts):
            return None
        by_place: dict[int, list[Tensor]] = {}
        for places, part in parts:
            by_place |= cut(getattr(part, name), places, sizes)
        return [tensor for place in range(len(groups)) for tensor in by_place[place]]

    old_log_probs = joined("old_log_probs")
    assert old_log_probs is not None
    return TokenScores(old_log_probs, joined("reference"), joined("values"))


def cut(of_samples: Sequence[Tensor], places: Sequence[int], sizes: Sequence[int]) -> dict[int, list[Tensor]]:
    """Split values of consecutive samples by group."""
    rest = iter(of_samples)
    return {place: list(islice(rest, sizes[place])) for place in places}


def num_samples(batch: Batch, workers: Workers = ALONE) -> int:
    """How many samples this worker goes through."""
    return sum(len(samples_of([batch.groups[place]])) for place in workers.mine(_order(batch)))


def _order(batch: Batch) -> list[int]:
    """The groups that are looked at, by the spread of their rewards."""
    stds_G = [std for _, std, _ in batch.selection.table]
    looked_at = range(len(batch.groups)) if batch.everything is not None else set(batch.selection.places)
    return [place for place in by_spread(stds_G) if place in looked_at]


# --- the sweep ----------------------------------------------------------------------------------------------------


def analyse(
    batch: Batch,
    config: Config,
    model: TrainableModel,
    workers: Workers = ALONE,
    reference: LanguageModel | None = None,
    on_samples: Callable[[int], None] = lambda count: None,
) -> tuple[dict[str, float], list[BucketRow]]:
    """All metrics, the same for every worker, and which groups were in which bucket."""
    samples_G = [samples_of([group]) for group in batch.groups]
    targets = _targets_by_group(batch, [len(samples) for samples in samples_G])
    stds_G = [std for _, std, _ in batch.selection.table]
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    counts_G = [count_of(samples, config.actor_rollout_ref.actor.loss_agg_mode) for samples in samples_G]
    sums = {
        prefix: Sums(buckets_of(stds_G, list(of_group), config), counts_G, term_names(config), parameters, workers)
        for prefix, of_group in targets.items()
    }
    passes = _Passes(samples_G, targets, config, model, workers, reference, on_samples)
    sweep(parameters, _order(batch), sums, passes, workers)
    metrics = _describe(batch, samples_G, config)
    for prefix, part in sums.items():
        metrics |= _bucket_metrics(prefix, part, stds_G, samples_G, passes.coefficients) | _comparisons(prefix, part)
    if AFTER in sums and ALL in sums[AFTER].measured:  # those of `all`, among the actor's
        measured = sums[AFTER].measured[ALL]
        metrics |= {f"actor/grad_norm/{term}": norm for term, norm in measured.norms.items()}
        metrics |= {f"actor/{name}": value for name, value in _losses(measured, passes.coefficients).items()}
    rows = [row for prefix, part in sums.items() for row in _rows(prefix, part.buckets, batch.selection)]
    return workers.agree(metrics), rows


def _targets_by_group(batch: Batch, sizes: Sequence[int]) -> dict[str, dict[int, Targets]]:
    """Before and after the filter, the targets of each group that counts there."""
    found = {}
    for prefix, targets, places in (
        (AFTER, batch.kept, batch.selection.places),
        (BEFORE, batch.everything, range(len(batch.groups))),
    ):
        if targets is not None:
            advantages, old = (cut(part, places, sizes) for part in (targets.advantages, targets.old_log_probs))
            reference = {} if targets.reference is None else cut(targets.reference, places, sizes)
            found[prefix] = {place: Targets(advantages[place], old[place], reference.get(place)) for place in places}
    return found


def buckets_of(stds_G: Sequence[float], places: Sequence[int], config: Config) -> Buckets:
    """Some of the groups, by their places among all."""
    rollout = config.actor_rollout_ref.rollout
    found = BUCKETINGS[rollout.gradient_analysis_bucket_mode](
        [stds_G[place] for place in places], rollout.gradient_analysis_num_buckets
    )
    return {name: [places[index] for index in indices] for name, indices in found.items()}


def count_of(samples: Sequence[Sample], aggregation: str) -> int:
    """What the weights of these samples are divided by: tokens for a mean over tokens, else sequences."""
    num_tokens_S = [sample.num_sampled for sample in samples]
    return sum(num_tokens_S) if aggregation == "token-mean" else sum(num > 0 for num in num_tokens_S)


@dataclass
class _Passes:
    """The losses of a group, micro-batch by micro-batch: one forward pass each."""

    samples_G: Sequence[Sequence[Sample]]
    targets: Mapping[str, Mapping[int, Targets]]
    config: Config
    model: LanguageModel
    workers: Workers
    reference: LanguageModel | None
    on_samples: Callable[[int], None]
    coefficients: dict[str, float] = field(default_factory=dict)  # of the terms that were seen

    def __call__(self, place: int) -> Iterator[list[TermLoss]]:
        actor, samples = self.config.actor_rollout_ref.actor, self.samples_G[place]
        counts = torch.tensor([sample.num_sampled for sample in samples])
        weights = token_weights(counts, actor.loss_agg_mode, norm_length=max_sampled(self.config))
        weights_S = weights.split(counts.tolist())
        lengths = [len(sample.sequence.ids) for sample in samples]
        for micro in micro_batches(lengths, actor.ppo_micro_batch_size_per_gpu, self.workers.device):
            weights_T = torch.cat([weights_S[index] for index in micro]).to(self.workers.device)
            yield self._losses(place, micro, weights_T)
            self.on_samples(len(micro))

    def _losses(self, place: int, micro: Sequence[int], weights_T: Tensor) -> list[TermLoss]:
        (first, targets), *others = self._distinct(place)
        packed = pack([self.samples_G[place][index].sequence for index in micro], self.workers.device)
        scored, terms, _ = actor_terms(self.model, packed, micro, targets, self.config, self.reference)
        self.coefficients = {term.name: term.coefficient for term in terms}
        everyone = first + tuple(name for names, _ in others for name in names)
        parts = [(term, first if term.name == TASK else everyone) for term in terms]
        for names, theirs in others:
            parts.append((task_term(scored.log_probs, packed, micro, theirs, self.config)[0], names))
        return [
            TermLoss(term.name, term.weighted(weights_T), (weights_T * term.per_token).sum().detach(), into)
            for term, into in parts
        ]

    def _distinct(self, place: int) -> list[tuple[tuple[str, ...], Targets]]:
        """The group's targets, those with equal advantages together: nothing else in them can differ."""
        found: list[tuple[tuple[str, ...], Targets]] = []
        for name, of_group in self.targets.items():
            if place not in of_group:
                continue
            mine = of_group[place]
            for number, (names, theirs) in enumerate(found):
                if all(map(torch.equal, mine.advantages, theirs.advantages)):
                    found[number] = ((*names, name), theirs)
                    break
            else:
                found.append(((name,), mine))
        return found


# --- metrics ------------------------------------------------------------------------------------------------------


def _describe(batch: Batch, samples_G: Sequence[Sequence[Sample]], config: Config) -> dict[str, float]:
    """Which batch was analysed."""
    num_groups, size = derive.analysis_shape(config)
    num_samples = sum(map(len, samples_G))
    own = derive.has_analysis_batch(config)
    metrics = {
        "uses_training_batch": float(not own),
        "source_env_groups": float(num_groups),
        "source_group_size": float(size),
        "source_batch_size": float(num_samples),
        "adjusted_batch_size": float(sum(len(samples_G[place]) for place in batch.selection.places)),
        "empty_after_filter": float(not batch.selection.kept),
    }
    metrics |= batch.selection.metrics if own else {}
    metrics = {f"{META}/{name}": value for name, value in metrics.items()}
    if batch.everything is not None:
        metrics |= {f"{META_BEFORE}/{name}_batch_size": float(num_samples) for name in ("source", "adjusted")}
    return metrics


def _bucket_metrics(
    prefix: str,
    sums: Sums,
    stds_G: Sequence[float],
    samples_G: Sequence[Sequence[Sample]],
    coefficients: Mapping[str, float],
) -> dict[str, float]:
    places_of = sums.buckets | {ALL: list(sums.bucket_of)}
    num_samples = sum(len(samples_G[place]) for place in sums.bucket_of)
    metrics: dict[str, float] = {}
    for bucket, measured in sums.measured.items():
        samples = [sample for place in places_of[bucket] for sample in samples_G[place]]
        num_tokens = sum(sample.num_sampled for sample in samples)
        stds = [stds_G[place] for place in places_of[bucket]]
        found = {
            "sample_count": float(len(samples)),
            "sample_pct": 100 * len(samples) / num_samples,
            "reward_std_mean": fmean(stds),
            "reward_std_min": min(stds),
            "reward_std_max": max(stds),
            "group_rv_count": float(len(stds)),
        }
        found |= measured.norms
        found |= {f"per_sample/{term}": norm / len(samples) for term, norm in measured.norms.items()}
        found |= {f"per_token/{term}": norm / num_tokens for term, norm in measured.norms.items()}
        found |= _losses(measured, coefficients)
        metrics |= {f"{prefix}/{bucket}/{name}": value for name, value in found.items()}
    return metrics


def _losses(measured: BucketGradient, coefficients: Mapping[str, float]) -> dict[str, float]:
    losses = {f"loss/{LOSS_NAMES.get(term, term)}": value for term, value in measured.losses.items()}
    return losses | {"loss/total": sum(coefficients[term] * value for term, value in measured.losses.items())}


def _comparisons(prefix: str, sums: Sums) -> dict[str, float]:
    """How buckets and terms pull with or against each other, and whether groups pull together."""
    cosines, ratios = (prefix.replace(AFTER, name) for name in ("grad_cos", "grad_snr"))
    metrics = {f"{cosines}/{TASK}/{left}/{right}": value for (left, right), value in sums.between.items()}
    for bucket, measured in sums.measured.items():
        metrics |= {f"{cosines}/{bucket}/{left}_{right}": value for (left, right), value in measured.cosines.items()}
        metrics[f"{ratios}/{bucket}/num_groups"] = float(measured.num_groups)
        if measured.snr is not None:
            metrics[f"{ratios}/{bucket}/{TASK}"] = measured.snr
    return metrics


def _rows(prefix: str, buckets: Buckets, selection: Selection) -> list[BucketRow]:
    rows = [(bucket, *selection.table[place]) for bucket, places in buckets.items() for place in places]
    return [
        {"prefix": prefix, "bucket": bucket, "group_id": group, "reward_std": std} for bucket, group, std, _ in rows
    ]
