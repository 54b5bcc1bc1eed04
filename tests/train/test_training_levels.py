"""Which levels a step plays: seeds that advance with the step, and others for further groups."""

from ragen.config.compose import resolve
from ragen.train.levels import UniformLevels, further_slots, slots

RESAMPLE = "actor_rollout_ref.rollout.rollout_filter_resample"


def configured(*words):
    return resolve(["model_path=pocket", "es_manager.train.env_groups=8", *words], "base", environ={}).config


def seeds(config, asked):
    return [request.seed for request in UniformLevels(config).choose(asked)]


def test_levels_advance_with_the_step_and_come_round():
    config = configured("data.train_data_num=20")
    assert seeds(config, slots(config, 1)) == list(range(10000, 10008))
    assert seeds(config, slots(config, 3)) == [*range(10016, 10020), *range(10000, 10004)]
    assert {request.size for request in UniformLevels(config).choose(slots(config, 1))} == {8}


def test_no_further_level_is_played_twice_or_in_another_step():
    config = configured(f"{RESAMPLE}=True", f"{RESAMPLE}_rounds=2")
    tags = ["SimpleSokoban"] * 8
    played = []
    for step in range(1, 40):
        asked = [*slots(config, step), *further_slots(config, step, 8, tags), *further_slots(config, step, 16, tags)]
        assert [slot.group for slot in asked] == list(range(24))
        played += seeds(config, asked)
    assert len(set(played)) == len(played)


def test_further_levels_come_round_too():
    config = configured("data.train_data_num=5", f"{RESAMPLE}=True")
    assert set(seeds(config, further_slots(config, 7, 8, ["SimpleSokoban"] * 8))) == set(range(10000, 10005))
