"""Gradient analysis: against transformers and plain autograd, by passes, and in whole runs of the embedded model."""

import functools
import json
import statistics

import pytest
import torch
from made_up_runs import make_checkpoint, make_run
from tiny import ACTOR, ROLLOUT, TINY
from transformers import Qwen2Config, Qwen2ForCausalLM
from without_clock import metrics_without_clock

from ragen.algo.kl import KlController
from ragen.config import derive
from ragen.config.compose import resolve
from ragen.config.schema import Optimizer
from ragen.errors import ConfigError
from ragen.model.decoder import Decoder, Shape, from_huggingface
from ragen.model.packing import samples_of
from ragen.run.sinks import Sink
from ragen.store.resume import decide
from ragen.store.run_folder import RunFolder
from ragen.train import analysis, trainer
from ragen.train.learner import TokenScores
from ragen.train.levels import UniformLevels, slots
from ragen.train.optimizer import MasterAdamW
from ragen.train.targets import Played, Selection
from ragen.train.update import Targets, update_actor
from ragen.types import Episode, EpisodeState, Group, Turn, TurnResult

VOCAB = 30
SCORES = [[0.0, 4.0, 1.0], [2.0, 2.0], [1.0, 0.0, 0.0], [3.0, 9.0], [0.5, 0.0, 1.0]]
LOSSES = {"task": "policy", "entropy": "entropy", "kl": "kl"}


@pytest.fixture(scope="module")
def models():
    torch.manual_seed(1)
    config = Qwen2Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    theirs = Qwen2ForCausalLM(config).eval()
    ours = Decoder(Shape.of(config))
    from_huggingface(ours, theirs.state_dict())
    return ours, theirs.double()


def made_up_groups(seed=0):
    """One or two turns, given and sampled stretches of random lengths."""
    generator = torch.Generator().manual_seed(seed)

    def number(low, high):
        return int(torch.randint(low, high, (1,), generator=generator))

    def turn(continues):
        given, reply = ([number(0, VOCAB) for _ in range(number(1, 6))] for _ in range(2))
        log_probs = [-3.4 + 0.1 * number(-3, 4) for _ in reply]
        result = TurnResult(*[0] * 6)
        return Turn(tuple(given), continues, tuple(reply), tuple(log_probs), "answer", "", "", "", result)

    return [
        Group("T", place, "train", place, tuple(
            Episode(
                "T", place, "train", place, member, "", tuple(turn(index > 0) for index in range(number(1, 3))),
                EpisodeState(None, reward=score),
            )
            for member, score in enumerate(scores)
        ))
        for place, scores in enumerate(SCORES)
    ]  # fmt: skip


def targets_of(groups, seed):
    """Random advantages; log-probs of the reference not far from the sampler's."""
    generator = torch.Generator().manual_seed(seed)
    samples = samples_of(groups)

    def random():
        return [torch.randn(sample.num_sampled, generator=generator) for sample in samples]

    old = [torch.tensor(sample.log_probs) for sample in samples]
    return Targets(random(), old, [part + 0.3 * noise for part, noise in zip(old, random(), strict=True)])


def some_of(targets, groups, places):
    """The targets of some of the groups."""
    kept = [number for number, sample in enumerate(samples_of(groups)) if sample.group in places]
    parts = (targets.advantages, targets.old_log_probs, targets.reference)
    return Targets(*([part[number] for number in kept] for part in parts))


def selection_of(groups, places):
    stds = [statistics.stdev(scores) for scores in SCORES]
    table = [(group.group, std, place in places) for place, (group, std) in enumerate(zip(groups, stds, strict=True))]
    return Selection(list(places), [groups[place] for place in places], {"rollout/filter_kept_count": 3.0}, table)


@functools.cache
def config_of(*words):
    base = [
        "es_manager.train.env_groups=5", "es_manager.train.group_size=3", "ppo_mini_batch_size=15",
        "micro_batch_size_per_gpu=2", f"{ACTOR}.entropy_coeff=0.05", f"{ACTOR}.use_kl_loss=True",
        f"{ACTOR}.kl_loss_coef=0.2", f"{ACTOR}.kl_loss_type=k2", f"{ROLLOUT}.temperature=0.8",
        f"{ROLLOUT}.gradient_analysis_num_buckets=2", f"{ROLLOUT}.response_length=7", "agent_proxy.max_turn=3",
    ]  # fmt: skip
    return resolve(["model_path=pocket", *base, *words], environ={}).config


# --- against the naive way ----------------------------------------------------------------------------------------


def naive_tokens(model, sequence, advantages, reference):
    """Task, entropy and KL loss of each sampled token."""
    ids, sampled = torch.tensor(sequence.ids), [place for place, flag in enumerate(sequence.sampled) if flag]
    log_probs = torch.log_softmax(model(ids[None]).logits[0] / 0.8, dim=-1)
    losses = {"task": [], "entropy": [], "kl": []}
    for place, advantage, ref in zip(sampled, advantages.double(), reference.double(), strict=True):
        row = log_probs[place - 1]
        chosen = row[ids[place]]
        ratio = (chosen - sequence.log_probs[place]).exp()
        loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.28))
        losses["task"].append(torch.minimum(loss, -advantage * 3.0) if advantage < 0 else loss)
        losses["entropy"].append(-(row.exp() * row).sum())
        losses["kl"].append(0.5 * (chosen - ref) ** 2)
    return losses


def naive_loss(model, groups, targets, places, mode, term):
    """A term on some of the groups, aggregated over them alone. `targets` are those of the samples of all groups."""
    numbered = [(number, sample) for number, sample in enumerate(samples_of(groups)) if sample.group in places]
    sequences = [
        torch.stack(naive_tokens(model, sample.sequence, targets.advantages[number], targets.reference[number])[term])
        for number, sample in numbered
    ]
    return {
        "token-mean": lambda: torch.cat(sequences).mean(),
        "seq-mean-token-mean": lambda: torch.stack([part.mean() for part in sequences]).mean(),
        "seq-mean-token-sum": lambda: torch.stack([part.sum() for part in sequences]).mean(),
        "seq-mean-token-sum-norm": lambda: torch.stack([part.sum() for part in sequences]).mean() / 21,
    }[mode]()


FACTORS = {"task": 1.0, "entropy": -0.05, "kl": 0.2}


def naive_gradient(model, groups, targets, places, mode, term):
    loss = naive_loss(model, groups, targets, places, mode, term)
    parts = torch.autograd.grad(FACTORS[term] * loss, list(model.parameters()))
    return torch.cat([part.flatten() for part in parts]), float(loss.detach())


def cosine(left, right):
    return float(left @ right / (left.norm() * right.norm()))


def naive_ratio(model, groups, targets, places, mode):
    """Each group's share in the gradient, times n, estimates it: their mean against its squared standard error."""
    samples = [sample for sample in samples_of(groups) if sample.group in places]

    def count(chosen):
        return sum(sample.num_sampled for sample in chosen) if mode == "token-mean" else len(chosen)

    estimates = []
    for place in places:
        share = count([sample for sample in samples if sample.group == place]) / count(samples)
        estimates.append(len(places) * share * naive_gradient(model, groups, targets, [place], mode, "task")[0])
    stacked = torch.stack(estimates)
    return float(stacked.mean(0).square().sum()) / (float(stacked.var(0).sum()) / len(places))


MODES = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
# By the spread of their scores: 1 (0), 4 (0.5), 2 (0.58), 0 (2.08), 3 (4.24).
KEPT = [0, 2, 3, 4]
KEPT_BUCKETS = {"bucket_1": [4, 2], "bucket_2": [0, 3], "all": KEPT}
ALL_BUCKETS = {"bucket_1": [1, 4], "bucket_2": [2, 0, 3], "all": [0, 1, 2, 3, 4]}


def close(value):
    return pytest.approx(value, rel=1e-5, abs=1e-7)


def assert_equal(metrics, prefix, model, groups, targets, buckets, mode):
    """Norms, losses and counts of every bucket; returns the gradients."""
    found = {}
    for name, places in buckets.items():
        chosen = [sample for sample in samples_of(groups) if sample.group in places]
        total, base = 0.0, f"{prefix}/{name}"
        for term, loss_name in LOSSES.items():
            gradient, loss = naive_gradient(model, groups, targets, places, mode, term)
            found[name, term], norm = gradient, float(gradient.norm())
            total += FACTORS[term] * loss
            assert metrics[f"{base}/{term}"] == close(norm), (name, term)
            assert metrics[f"{base}/per_sample/{term}"] == close(norm / len(chosen))
            assert metrics[f"{base}/per_token/{term}"] == close(norm / sum(one.num_sampled for one in chosen))
            assert metrics[f"{base}/loss/{loss_name}"] == close(loss)
        stds = [statistics.stdev(SCORES[place]) for place in places]
        assert metrics[f"{base}/loss/total"] == close(total)
        assert metrics[f"{base}/sample_count"] == len(chosen) and metrics[f"{base}/group_rv_count"] == len(places)
        assert metrics[f"{base}/reward_std_mean"] == close(statistics.fmean(stds))
        assert (metrics[f"{base}/reward_std_min"], metrics[f"{base}/reward_std_max"]) == close((min(stds), max(stds)))
    return found


@pytest.mark.parametrize("mode", MODES)
def test_everything_equals_each_bucket_and_term_alone(models, mode):
    ours, theirs = models
    groups, everything = made_up_groups(), targets_of(made_up_groups(), 7)
    batch = analysis.Batch(groups, selection_of(groups, KEPT), some_of(everything, groups, KEPT), None)
    metrics, rows = analysis.analyse(batch, config_of(f"{ACTOR}.loss_agg_mode={mode}"), ours)
    gradients = assert_equal(metrics, "grad_norm", theirs, groups, everything, KEPT_BUCKETS, mode)
    assert metrics["grad_cos/task/bucket_1/bucket_2"] == close(
        cosine(gradients["bucket_1", "task"], gradients["bucket_2", "task"])
    )
    for name, places in KEPT_BUCKETS.items():
        for left, right in (("task", "entropy"), ("task", "kl"), ("entropy", "kl")):
            wanted = cosine(gradients[name, left], gradients[name, right])
            assert metrics[f"grad_cos/{name}/{left}_{right}"] == pytest.approx(wanted, abs=1e-5)
        ratio = naive_ratio(theirs, groups, everything, places, mode)
        assert metrics[f"grad_snr/{name}/task"] == pytest.approx(ratio, rel=1e-5)
        assert metrics[f"grad_snr/{name}/num_groups"] == len(places)
    assert metrics["actor/grad_norm/kl"] == metrics["grad_norm/all/kl"]
    assert metrics["actor/loss/policy"] == metrics["grad_norm/all/loss/policy"]
    assert metrics["grad_norm/bucket_1/sample_pct"] == close(100 * 6 / 11)
    assert [(row["prefix"], row["bucket"], row["group_id"]) for row in rows] == [
        ("grad_norm", "bucket_1", 4), ("grad_norm", "bucket_1", 2),
        ("grad_norm", "bucket_2", 0), ("grad_norm", "bucket_2", 3),
    ]  # fmt: skip
    assert not any("_prefilter/" in name for name in metrics)


@pytest.mark.parametrize("same", [True, False])
def test_the_twin_equals_the_naive_way_whether_advantages_are_the_same_or_not(models, same):
    ours, theirs = models
    groups, everything = made_up_groups(), targets_of(made_up_groups(), 7)
    kept = everything
    if not same:
        kept = Targets(targets_of(groups, 8).advantages, everything.old_log_probs, everything.reference)
    batch = analysis.Batch(groups, selection_of(groups, KEPT), some_of(kept, groups, KEPT), everything)
    metrics, rows = analysis.analyse(batch, config_of(), ours)
    mode = config_of().actor_rollout_ref.actor.loss_agg_mode
    assert_equal(metrics, "grad_norm", theirs, groups, kept, KEPT_BUCKETS, mode)
    gradients = assert_equal(metrics, "grad_norm_prefilter", theirs, groups, everything, ALL_BUCKETS, mode)
    assert metrics["grad_cos_prefilter/task/bucket_1/bucket_2"] == pytest.approx(
        cosine(gradients["bucket_1", "task"], gradients["bucket_2", "task"]), abs=1e-5
    )
    for name, places in ALL_BUCKETS.items():
        ratio = naive_ratio(theirs, groups, everything, places, mode)
        assert metrics[f"grad_snr_prefilter/{name}/task"] == pytest.approx(ratio, rel=1e-5)
    assert metrics["grad_analysis_prefilter/source_batch_size"] == 13
    assert sum(row["prefix"] == "grad_norm_prefilter" for row in rows) == 5


def test_fixed_edges_and_a_filter_that_kept_nothing(models):
    ours, theirs = models
    groups, everything = made_up_groups(), targets_of(made_up_groups(), 7)
    config = config_of(f"{ROLLOUT}.gradient_analysis_bucket_mode=fixed_rv")
    metrics, rows = analysis.analyse(analysis.Batch(groups, selection_of(groups, []), None, everything), config, ours)
    buckets = {"bucket_1": [1, 2, 4], "bucket_3": [0], "bucket_5": [3]}
    mode = config.actor_rollout_ref.actor.loss_agg_mode
    assert_equal(metrics, "grad_norm_prefilter", theirs, groups, everything, buckets, mode)
    assert metrics["grad_analysis/empty_after_filter"] == 1 and metrics["grad_analysis/adjusted_batch_size"] == 0
    assert not any(name.startswith(("grad_norm/", "grad_cos/", "grad_snr/", "actor/")) for name in metrics)
    assert "grad_norm_prefilter/bucket_2/task" not in metrics and len(rows) == 5
    metrics, rows = analysis.analyse(analysis.Batch(groups, selection_of(groups, []), None, None), config, ours)
    assert not rows and all(name.startswith("grad_analysis/") for name in metrics)


def test_terms_without_a_coefficient_are_not_there(models):
    ours, _ = models
    groups = made_up_groups()
    config = config_of(f"{ACTOR}.entropy_coeff=0", f"{ACTOR}.use_kl_loss=False")
    batch = analysis.Batch(groups, selection_of(groups, KEPT), some_of(targets_of(groups, 7), groups, KEPT), None)
    metrics, _ = analysis.analyse(batch, config, ours)
    assert not any("entropy" in name or "kl" in name.split("/")[-1] for name in metrics)
    assert metrics["grad_norm/all/loss/total"] == metrics["grad_norm/all/loss/policy"]


# --- the training gradient ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_all_is_the_gradient_of_an_update_of_one_mini_batch(models, mode):
    """Its square is that of the sum of the terms: their squares, and twice their products."""
    ours, _ = models
    groups, config = made_up_groups(), config_of(f"{ACTOR}.loss_agg_mode={mode}")
    targets = some_of(targets_of(groups, 7), groups, KEPT)
    selection = selection_of(groups, KEPT)
    before = [parameter.detach().clone() for parameter in ours.parameters()]
    metrics, _ = analysis.analyse(analysis.Batch(groups, selection, targets, None), config, ours)
    assert all(map(torch.equal, before, ours.parameters())) and all(p.grad is None for p in ours.parameters())
    norms = {term: metrics[f"grad_norm/all/{term}"] for term in LOSSES}
    products = sum(
        norms[left] * norms[right] * metrics[f"grad_cos/all/{left}_{right}"]
        for left, right in (("task", "entropy"), ("task", "kl"), ("entropy", "kl"))
    )
    copied = Decoder(ours.shape)
    copied.load_state_dict(ours.state_dict())
    optimizer = MasterAdamW(copied.parameters(), Optimizer(), 10)
    updated = update_actor(copied, optimizer, samples_of(selection.kept), targets, config).metrics
    assert updated["actor/grad_norm"] ** 2 == close(sum(norm**2 for norm in norms.values()) + 2 * products)
    assert updated["actor/pg_loss"] == close(metrics["actor/loss/policy"])
    assert updated["actor/kl_loss"] == close(metrics["actor/loss/kl"])
    assert updated["actor/entropy_loss"] == close(metrics["actor/loss/entropy"])


# --- passes -------------------------------------------------------------------------------------------------------


class Counting:
    """A model that counts what goes through it, forwards and backwards."""

    def __init__(self, model):
        self.model, self.shape, self.num_forward, self.num_backward = model, model.shape, 0, 0

    def parameters(self):
        return self.model.parameters()

    def logits(self, hidden):
        return self.model.logits(hidden)

    def hidden(self, *given):
        self.num_forward += 1
        hidden = self.model.hidden(*given)
        hidden.register_hook(self.count)
        return hidden

    def count(self, gradient):
        self.num_backward += 1


def passes(model, config, kept, everything=None):
    groups, counting, seen = made_up_groups(), Counting(model), []
    batch = analysis.Batch(groups, selection_of(groups, KEPT), kept, everything)
    analysis.analyse(batch, config, counting, on_samples=seen.append)
    assert sum(seen) == analysis.num_samples(batch)
    return counting.num_forward, counting.num_backward


def test_one_forward_pass_and_one_backward_pass_for_each_term(models):
    """Kept are groups of 3, 3, 2 and 3: with two sequences in a pass, 2 + 2 + 1 + 2 passes; the fifth has one more."""
    ours, _ = models
    groups = made_up_groups()
    everything, other = targets_of(groups, 7), targets_of(groups, 8)
    kept = some_of(everything, groups, KEPT)
    assert passes(ours, config_of(), kept) == (7, 3 * 7)
    assert passes(ours, config_of(f"{ACTOR}.use_kl_loss=False"), kept) == (7, 2 * 7)
    assert passes(ours, config_of(f"{ACTOR}.use_kl_loss=False", f"{ACTOR}.entropy_coeff=0"), kept) == (7, 7)
    assert passes(ours, config_of(), kept, everything) == (8, 3 * 8)
    # Other advantages: the task term of the kept groups is differentiated a second time, from the same pass.
    assert passes(ours, config_of(), some_of(other, groups, KEPT), everything) == (8, 3 * 8 + 7)


def test_recomputed_activations_change_nothing(models, monkeypatch):
    """Gradient checkpointing of the layers, and the vocabulary in chunks: each backward pass recomputes its own."""
    ours, _ = models
    groups = made_up_groups()
    batch = analysis.Batch(groups, selection_of(groups, KEPT), some_of(targets_of(groups, 7), groups, KEPT), None)
    plain, _ = analysis.analyse(batch, config_of(), ours)
    monkeypatch.setattr("ragen.model.policy.MAX_CHUNK_LOGITS", 3 * VOCAB)
    monkeypatch.setattr(ours, "gradient_checkpointing", True)
    recomputed, _ = analysis.analyse(batch, config_of(), ours)
    assert recomputed == pytest.approx(plain, rel=1e-4, abs=1e-6)
    assert recomputed.keys() == plain.keys()


# --- a batch of its own -------------------------------------------------------------------------------------------


def test_its_levels_are_those_of_no_training_step():
    words = ["trainer.gradient_analysis_env_groups=12", "trainer.gradient_analysis_group_size=4"]
    config = resolve(["model_path=pocket", *words, "trainer.gradient_analysis_mode=True"], environ={}).config
    assert derive.has_analysis_batch(config) and derive.analysis_shape(config) == (12, 4)
    seen = {request.seed for step in range(1, 200) for request in UniformLevels(config).choose(slots(config, step))}
    steps = [analysis.requests(config, step) for step in (1, 51, 101)]
    seeds = [request.seed for requests in steps for request in requests]
    assert len(set(seeds)) == 36 and not seen & set(seeds)
    assert {request.split for request in steps[0]} == {"train"} and {request.size for request in steps[0]} == {4}
    assert [request.group for request in steps[1]] == list(range(12))
    assert analysis.draws(config, 51) != ("train", config.seed.train, 51)


def test_a_pool_of_levels_is_kept_to():
    words = ["trainer.gradient_analysis_env_groups=12", "data.train_data_num=20"]
    config = resolve(["model_path=pocket", *words], environ={}).config
    first = config.seed.train
    assert [request.seed for request in analysis.requests(config, 2)] == [
        *range(first + 12, first + 20),
        *range(first, first + 4),
    ]


def test_the_shape_of_training_is_its_own_batch():
    same = ["trainer.gradient_analysis_env_groups=5", "trainer.gradient_analysis_group_size=3"]
    assert not derive.has_analysis_batch(config_of(*same)) and not derive.has_analysis_batch(config_of())
    assert derive.analysis_shape(config_of("trainer.gradient_analysis_group_size=2")) == (5, 2)


def test_steps_that_are_analysed():
    config = resolve(["model_path=pocket", "trainer.gradient_analysis_mode=True"], environ={}).config
    assert [step for step in range(1, 102) if derive.is_analysis_step(config, step)] == [1, 51, 101]
    config.trainer.gradient_analysis_mode = False
    assert not derive.is_analysis_step(config, 1)


def test_nothing_is_looked_at_twice():
    """Of the kept everything is known; the models are only asked about the others, and the order is that of groups."""
    groups, asked = made_up_groups(), []
    targets = targets_of(groups, 7)
    kept = some_of(targets, groups, KEPT)

    class Models:
        config = config_of("trainer.gradient_analysis_log_prefilter=True")
        kl_control = KlController("fixed", 0.0, 0.1, 100)

        def score(self, samples, clock):
            asked.append([sample.group for sample in samples])
            removed = some_of(targets, groups, [1])
            return TokenScores(removed.old_log_probs, removed.reference, None)

        def make_targets(self, groups, scores, seen, kept_ratio, control, clock):
            assert kept_ratio == 1.0 and scores == SCORES and control is not self.kl_control
            assert all(map(torch.equal, seen.old_log_probs, targets.old_log_probs)) and seen.values is None
            assert all(map(torch.equal, seen.reference, targets.reference))
            return targets, {}

    batch = analysis.make_batch(Played(groups, SCORES, selection_of(groups, KEPT)), Models(), kept)
    assert asked == [[1, 1]] and batch.kept is kept and batch.everything is targets


# --- whole runs ---------------------------------------------------------------------------------------------------

RUN = [
    *TINY,
    "es_manager.train.env_groups=3",
    f"{ROLLOUT}.rollout_filter_strategy=top_k_abs",
    f"{ROLLOUT}.rollout_filter_value=2",
    f"{ACTOR}.entropy_coeff=0.01",
    "trainer.gradient_analysis_mode=True",
    "trainer.gradient_analysis_every=2",
    f"{ROLLOUT}.gradient_analysis_num_buckets=2",
]
OWN = ["trainer.gradient_analysis_env_groups=4", "trainer.gradient_analysis_log_prefilter=True"]
ONLY = ["trainer.gradient_analysis_only=True", "trainer.exit_after_gradient_analysis=True"]


def run(folder, *words):
    config = resolve([*RUN, *words, f"trainer.default_local_dir={folder}"], environ={}).config
    ended = trainer.train(config)
    return ended, RunFolder(ended.folder).read_metrics().rows


def without_analysis(row):
    aside = ("grad_", "timing_", "perf/", "actor/loss/", "actor/grad_norm/")
    return {name: value for name, value in row.items() if not name.startswith(aside)}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return run(
        tmp_path_factory.mktemp("analysed") / "run", *OWN, "trainer.total_training_steps=3", "trainer.save_freq=2"
    )


def test_a_run_is_analysed_every_so_many_steps_and_trains_as_without(trained, tmp_path):
    ended, rows = trained
    assert ended.status == "finished"
    assert ["grad_norm/all/task" in row for row in rows] == [True, False, True]
    assert rows[0]["grad_analysis/uses_training_batch"] == 0 and rows[0]["grad_analysis/source_env_groups"] == 4
    assert rows[0]["grad_analysis/source_batch_size"] == 12 and rows[0]["grad_analysis/adjusted_batch_size"] == 6
    assert rows[0]["grad_analysis/rollout/filter_kept_count"] == 2
    assert rows[0]["grad_norm_prefilter/all/sample_count"] == 12 and rows[0]["timing_s/gradient_analysis"] > 0
    table = [json.loads(line) for line in (ended.folder / "grad_group_rv_table.jsonl").read_text().splitlines()]
    assert {row["step"] for row in table} == {1, 3} and len(table) == 2 * (2 + 4)
    assert set(table[0]) == {"step", "prefix", "bucket", "group_id", "reward_std"}
    _, plain = run(tmp_path / "plain", "trainer.gradient_analysis_mode=False", "trainer.total_training_steps=3")
    assert list(map(without_analysis, rows)) == list(map(without_analysis, plain))


def test_the_groups_are_told_to_those_who_have_tables(tmp_path, monkeypatch):
    told = []
    sink = Sink("X", lambda *_: None, lambda _: None, pytest.fail, lambda *table: told.append(table))
    monkeypatch.setattr("ragen.run.run_logger.make_sinks", lambda *args, **options: [sink])
    run(tmp_path / "run", *OWN, "trainer.total_training_steps=2", "trainer.log_group_rv_table=True")
    names = [(step, name) for step, name, _ in told]
    assert names[0] == (1, "rollout/group_rv_table") and names[-1] == (2, "rollout/group_rv_table")
    assert {row["step"] for row in told[-1][2]} == {1, 2} and len(told[-1][2]) == 2 * 3, "one table that grows"
    buckets = {name: rows for step, name, rows in told[1:-1]}
    assert {name.split("/")[0] for name in buckets} == {"grad_norm", "grad_norm_prefilter"}
    assert sum(map(len, buckets.values())) == 2 + 4
    for name, rows in buckets.items():
        assert {row["bucket"] for row in rows} == {name.split("/")[1]} and name.endswith("/group_rv_table")
        assert set(rows[0]) == {"bucket", "group_id", "reward_std"}


def test_the_weights_after_each_analysed_step_are_kept(trained):
    ended, _ = trained
    held = {path.name: sorted(one.name for one in path.iterdir()) for path in ended.folder.glob("global_step_*")}
    assert sorted(held) == ["global_step_1", "global_step_2", "global_step_3"]
    assert held["global_step_1"] == ["actor", "manifest.json"]
    assert "actor_optimizer" in held["global_step_3"]
    assert (ended.folder / "latest_checkpointed_iteration.txt").read_text().strip() == "3"


@pytest.mark.parametrize("step", [1, 3])
def test_a_probe_looks_at_a_checkpoint_and_changes_nothing(trained, tmp_path, monkeypatch, step):
    """With and without the optimizer's state, and with a validation first."""
    folder = trained[0].folder
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}
    states = []
    fit = trainer.Probe.fit

    def watched(job, *given):
        for ending in (False, True):
            learner = job.learner
            optimizer = learner.actor_optimizer
            tensors = learner.model.state_dict() | optimizer.tensors(learner.model)
            states.append(
                ({name: tensor.clone() for name, tensor in tensors.items()}, optimizer.num_steps, optimizer.lr)
            )
            if not ending:
                ended = fit(job, *given)
        return ended

    monkeypatch.setattr(trainer.Probe, "fit", watched)
    origin = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder}/global_step_{step}"]
    words = [f"trainer.total_training_steps={step}", "trainer.val_before_train=True", f"{ACTOR}.use_kl_loss=True"]
    ended, rows = run(tmp_path / "probe", *OWN, *ONLY, *origin, *words, f"{ACTOR}.kl_loss_coef=0.1")
    assert ended.status == "finished" and [row["step"] for row in rows] == [step]
    assert ended.num_steps == step and ended.folder == tmp_path / "probe"
    row = rows[0]
    assert row["trainer/exited_after_gradient_analysis"] == row["trainer/gradient_analysis_only"] == 1
    assert row["actor/skipped_for_gradient_analysis_only"] == 1 and "actor/pg_loss" not in row
    assert "val-env/SimpleSokoban/success" in row and "grad_norm/all/kl" in row
    (weights, *numbers), (after, *numbers_after) = states
    assert weights.keys() == after.keys() and all(torch.equal(weights[name], after[name]) for name in weights)
    assert numbers == numbers_after
    assert before == {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in before}
    assert not list((tmp_path / "probe").glob("global_step_*"))


def test_a_run_that_exits_after_its_analysis_has_updated_the_critic_only(tmp_path):
    words = ["algorithm.adv_estimator=gae", "trainer.exit_after_gradient_analysis=True", "trainer.save_freq=1"]
    prefilter = "trainer.gradient_analysis_log_prefilter=True"
    ended, rows = run(tmp_path / "exits", *words, prefilter, "trainer.total_training_steps=3")
    assert (ended.status, ended.num_steps, len(rows)) == ("finished", 1, 1)
    assert rows[0]["trainer/exited_after_gradient_analysis"] == 1 and rows[0]["grad_analysis/uses_training_batch"] == 1
    assert "critic/vf_loss" in rows[0] and "actor/pg_loss" not in rows[0]
    assert rows[0]["grad_norm_prefilter/all/sample_count"] == 9 and rows[0]["grad_norm/all/sample_count"] == 6
    assert "grad_analysis/rollout/filter_kept_count" not in rows[0]  # they are those of the step
    assert not list(ended.folder.glob("global_step_*"))


def test_an_empty_step_still_probes_the_batch_that_is_its_own(tmp_path):
    """Nothing can be kept: before the filter there is still something to look at."""
    empty = [f"{ROLLOUT}.rollout_filter_strategy=top_p", f"{ROLLOUT}.rollout_filter_value=0.9"]
    empty += [f"{ROLLOUT}.rollout_filter_selection_eps=100000", "trainer.total_training_steps=1"]
    _, rows = run(tmp_path / "empty", *OWN, *ONLY, *empty)
    assert rows[0]["rollout/empty_after_filter"] == rows[0]["grad_analysis/empty_after_filter"] == 1
    assert "grad_norm_prefilter/all/task" in rows[0] and "grad_norm/all/task" not in rows[0]


def test_two_workers_find_what_one_does(nursery, tmp_path):
    words = ["train", *RUN, *OWN, *ONLY, "trainer.total_training_steps=1", f"{ACTOR}.use_kl_loss=True"]
    one, two = tmp_path / "one", tmp_path / "two"
    assert nursery.run(*words, f"trainer.default_local_dir={one}").status == 0
    environment = {"WORLD_SIZE": "2", "RAGEN_WORKERS": str(tmp_path)}
    children = [
        nursery.start(
            *words, f"trainer.default_local_dir={two}",
            environment=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]  # fmt: skip
    assert [child.end().status for child in children] == [0, 0]
    (left,), (right,) = map(metrics_without_clock, (one, two))
    assert left.keys() == right.keys() and "grad_norm/bucket_2/task" in left
    assert right == pytest.approx(left, abs=1e-5, rel=1e-4)
    tables = [(path / "grad_group_rv_table.jsonl").read_text() for path in (one, two)]
    assert tables[0] == tables[1]


# --- where a probe begins -----------------------------------------------------------------------------------------


def probing(base, path, *words):
    origin = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={path}"]
    words = ["trainer.gradient_analysis_mode=True", "trainer.gradient_analysis_only=True", *origin, *words]
    return resolve(["model_path=pocket", *words, f"trainer.default_local_dir={base}"], environ={}).config


def test_a_probe_begins_at_the_step_of_its_checkpoint(tmp_path):
    path = make_checkpoint(tmp_path / "run", 51, ["model"], tracked=False)
    decision = decide(probing(tmp_path / "probe", path))
    assert (decision.folder.path, decision.checkpoint, decision.first_step) == (tmp_path / "probe", path, 51)
    assert "analyses step 51 of" in decision.reason and "optimizer" not in decision.reason
    assert decide(probing(tmp_path / "run", path)).folder.path == tmp_path / "run-2"  # never in that of its checkpoint


def test_a_probe_without_a_step_to_analyse_is_refused(tmp_path):
    path = make_checkpoint(tmp_path / "run", 100)
    with pytest.raises(ConfigError, match=r"every=50: .* steps 1, 51, 101, .* within 100 … 100; set .*every=1"):
        decide(probing(tmp_path / "probe", path, "trainer.total_training_steps=100"))
    with pytest.raises(ConfigError, match=r"total_training_steps=99: .* at step 100.*; set .*total_training_steps=100"):
        decide(probing(tmp_path / "probe", path, "trainer.total_training_steps=99"))
    assert decide(probing(tmp_path / "probe", path, "trainer.total_training_steps=101")).first_step == 100


def test_a_checkpoint_that_is_not_there_names_those_that_are(tmp_path):
    for step in (1, 101):
        make_checkpoint(tmp_path / "run", step)
    with pytest.raises(ConfigError, match=r"global_step_51: not found\. .*run has global_step_1, global_step_101"):
        decide(probing(tmp_path / "probe", tmp_path / "run" / "global_step_51"))


def test_a_run_goes_on_from_what_holds_its_optimizer(tmp_path):
    """Checkpoints to be probed are passed over, also where nothing says which is the latest."""
    words = ["model_path=pocket", "trainer.total_training_steps=10", f"trainer.default_local_dir={tmp_path / 'run'}"]
    config = resolve(words, environ={}).config
    make_run(tmp_path / "run", config, range(8), [4])
    make_checkpoint(tmp_path / "run", 6, ["model"], tracked=False)
    assert decide(config).first_step == 5
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").unlink()
    assert decide(config).first_step == 5


def test_groups_of_one_that_the_filter_would_drop_are_refused():
    words = ["trainer.gradient_analysis_mode=True", "trainer.gradient_analysis_group_size=1"]
    drops = [f"{ROLLOUT}.rollout_filter_metric=reward_variance", f"{ROLLOUT}.rollout_filter_include_zero=False"]
    with pytest.raises(ConfigError, match=r"gradient_analysis_group_size=1: .* nothing would be left to analyse"):
        resolve(["model_path=pocket", *words, *drops], environ={})


def test_a_rule_that_stops_a_run_at_a_step_to_analyse_is_told(tmp_path):
    """The filter keeps nothing, so nothing is analysed: the run is stopped, not finished by the analysis."""
    nothing = ["strategy=top_p", "value=0.9", "metric=length", "selection_eps=100000", "empty_stop_steps=1"]
    nothing = [f"{ROLLOUT}.rollout_filter_{setting}" for setting in nothing]
    ended, rows = run(tmp_path / "run", *nothing, "trainer.exit_after_gradient_analysis=True")
    assert (ended.status, ended.rule) == ("early_stopped", "empty_filtered_steps")
    assert "trainer/exited_after_gradient_analysis" not in rows[-1]
