"""The choices that the schema offers are those that the code has. The schema spells out what it cannot import."""

import pytest

from ragen.agent.prompt import STYLES
from ragen.agent.window import WINDOWS
from ragen.algo import advantage, kl, loss, reward
from ragen.checkpoint.save import CONTENTS
from ragen.config.keys import FIELDS

AT_HOME = {
    "algorithm.adv_estimator": advantage.ESTIMATORS,
    "algorithm.kl_penalty": [*kl.KINDS, *(f"{kind}+" for kind in kl.KINDS)],
    "actor_rollout_ref.actor.kl_loss_type": [*kl.KINDS, *(f"{kind}+" for kind in kl.KINDS)],
    "actor_rollout_ref.actor.loss_agg_mode": loss.AGGREGATIONS,
    "actor_rollout_ref.actor.filter_loss_scaling": advantage.LOSS_SCALINGS,
    "agent_proxy.reward_normalization.grouping": reward.GROUPINGS,
    "agent_proxy.reward_normalization.method": ["identity", *reward.METHODS],
    "agent_proxy.context_window_mode": WINDOWS,
    "agent_proxy.prompt_style": STYLES,
    "actor_rollout_ref.actor.checkpoint.save_contents": CONTENTS,
    "critic.checkpoint.save_contents": CONTENTS,
}


@pytest.mark.parametrize("key", AT_HOME)
def test_the_schema_offers_what_there_is(key):
    offered = FIELDS[key][0].metadata["choices"]
    assert sorted(offered) == sorted(AT_HOME[key])
