"""Every tensor function of `ragen.algo` on one made-up batch: what it gives must not depend on the device."""

import torch

from ragen.algo import kl, loss, reward
from ragen.algo.advantage import ESTIMATORS, AdvantageSettings, ShapeSettings, shape_advantages
from ragen.algo.experience import Experience, number_turns


def batch(device):
    """Inputs by name; drawn on the CPU, so that they are the same everywhere."""
    generator = torch.Generator("cpu").manual_seed(0)
    counts_U = torch.tensor([3, 1, 4, 2, 2, 5, 1, 1, 6], device="cpu")
    episode_U = torch.tensor([0, 0, 1, 1, 2, 3, 4, 4, 5], device="cpu")
    turn_U = torch.tensor([0, 1, 0, 1, 0, 0, 0, 1, 0], device="cpu")
    drawn = {
        name: torch.randn(int(counts_U.sum()), generator=generator, dtype=torch.float64, device="cpu")
        for name in ("values_T", "new_T", "old_T", "ref_T")
    }
    drawn |= {
        name: torch.randn(25, 7, generator=generator, dtype=torch.float64, device="cpu").log_softmax(-1)
        for name in ("policy_T_V", "ref_T_V")
    }
    drawn |= {
        "episode_T": episode_U.repeat_interleave(counts_U),
        "turn_T": turn_U.repeat_interleave(counts_U),
        "group_E": torch.tensor([4, 4, 4, -1, -1, 9], device="cpu"),
        "tag_E": torch.tensor([0, 0, 0, 0, 0, 1], device="cpu"),
        "scores_E": torch.tensor([1.0, 2.0, 4.0, 0.0, -3.0, 5.0], dtype=torch.float64, device="cpu"),
        "scores_U": torch.tensor([0.0, 1.0, 0.5, 1.5, 4.0, 0.0, -2.0, -1.0, 5.0], dtype=torch.float64, device="cpu"),
        "num_tokens_S": torch.tensor([4, 0, 6, 2, 5, 2, 6], device="cpu"),
    }
    return {name: value.to(device) for name, value in drawn.items()}


def everything(given):
    """The results of all functions, by name, as tensors."""
    results = {}
    rewards_T = reward.token_rewards(given["scores_U"], number_turns(given["episode_T"], given["turn_T"]))
    made = Experience(rewards_T, given["episode_T"], given["turn_T"], given["group_E"], given["values_T"])
    for bi_level in (False, True):
        settings = AdvantageSettings(norm_by_std=True, gamma=0.9, lam=0.8, bi_level=bi_level, high_level_gamma=0.7)
        for name, estimator in ESTIMATORS.items():
            estimate = estimator(made, settings)
            results[f"{name} {bi_level}"] = estimate.advantages_T
            if estimate.returns_T is not None:
                results[f"{name} {bi_level} returns"] = estimate.returns_T
    shape = ShapeSettings("grpo", soft_reweight=True, loss_scaling="sqrt", length_weight=True, zero_task=False)
    results["shape"], _ = shape_advantages(ESTIMATORS["grpo"](made, settings), made, shape, 0.5)
    for grouping in reward.GROUPINGS:
        for method in ("identity", *reward.METHODS):
            results[f"{grouping} {method}"] = reward.normalize_scores(
                given["scores_E"], given["group_E"], given["tag_E"], grouping, method
            )
    full_T = results["full"] = kl.full_kl(given["policy_T_V"], given["ref_T_V"])
    for kind in kl.KINDS:
        for suffix in ("", "+"):
            results[kind + suffix] = kl.kl_of_tokens(kind + suffix, given["new_T"], given["ref_T"], full_T)
    control = kl.KlController("adaptive", 0.3, target=0.1, horizon=100)
    results["paid"] = kl.pay_kl(made, results["k3"], control)[0].rewards_T
    for mode in loss.AGGREGATIONS:
        results[mode] = loss.token_weights(given["num_tokens_S"], mode, torch.float64)
    results["policy"], diagnostics = loss.policy_terms(
        given["new_T"], given["old_T"], results["gae True"], 0.2, 0.28, 3.0
    )
    weights_T = results["token-mean"]
    sums = loss.policy_sums(results["policy"], diagnostics, full_T, weights_T, weights_T)
    term, clipped_T = loss.value_term(given["new_T"], given["values_T"], results["gae False returns"], 0.5)
    sums |= loss.kl_sums(results["k1"], weights_T)
    sums |= loss.value_sums(term, clipped_T, given["new_T"], weights_T, weights_T)
    terms = [loss.entropy_term(full_T, 0.1), loss.kl_term(results["k2"], 0.1), term]
    return results | sums | {"loss": loss.weighted_sum(terms, weights_T)}
