"""Further levels in place of groups that do not vary (`rollout_filter_resample`), as DAPO does.

    rounds = play_rounds(config, step, play)      # play(slots) -> the groups that were played on them
    rounds.batch                                  # as many groups as the step has, those that vary first
    rounds.played                                 # all of them

A group varies if the spread of its rewards is above zero and at least a tenth of the largest of its tag in this step: a
spread of step penalties beside one of wins and losses says little. A step plays its levels, then as many further ones
as groups are missing, tag by tag, until enough groups vary or `rollout_filter_resample_rounds` further rounds are over.
So no group that varies is ever cut off. If too few vary, the first of the others fill the batch. The filter then looks
at the batch as it would look at a step without resampling: its strategies and values keep their meaning.

Without resampling the batch is what was played.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ragen.algo.filter import is_spread, sample_std
from ragen.config import derive
from ragen.config.schema import Config
from ragen.rollout.summary import score_of
from ragen.train.levels import Slot, further_slots, slots
from ragen.types import Group

Play = Callable[[Sequence[Slot]], list[Group]]


class Rounds(NamedTuple):
    """The groups of a step."""

    batch: list[Group]
    played: list[Group]
    num_rounds: int  # further ones
    further: list[Group]  # those of the further rounds
    num_varied: int  # of all played
    resamples: bool  # whether there may be further rounds

    def metrics(self) -> dict[str, float]:
        found = {
            "rollout/varied_ratio": self.num_varied / len(self.played),
            "train/rollout_attempts": 1.0 + self.num_rounds,
        }
        if self.resamples:
            found["rollout/resampled_groups"] = float(len(self.further))
            found["rollout/resampled_episodes"] = float(sum(len(group.episodes) for group in self.further))
        return found


def play_rounds(config: Config, step: int, play: Play) -> Rounds:
    """The groups of a step, and further ones until enough vary."""
    asked, max_rounds = slots(config, step), derive.num_further_rounds(config)
    wanted = Counter(slot.tag for slot in asked)
    first, further, num_asked, num_rounds = play(asked), list[Group](), len(asked), 0
    varied = varied_groups(first)
    while num_rounds < max_rounds and (missing := wanted - Counter(group.tag for group in varied)):
        asked = further_slots(config, step, num_asked, list(missing.elements()))
        further += play(asked)
        num_asked, num_rounds = num_asked + len(asked), num_rounds + 1
        varied = varied_groups(first + further)
    played = first + further
    batch = batch_of(played, varied, wanted) if max_rounds else played
    return Rounds(batch, played, num_rounds, further, len(varied), max_rounds > 0)


def varied_groups(groups: Sequence[Group]) -> list[Group]:
    """Those whose rewards differ enough to say which episode was better."""
    found = []
    for tag in dict.fromkeys(group.tag for group in groups):
        of_tag = [group for group in groups if group.tag == tag]
        stds = [sample_std([score_of(episode) for episode in group.episodes]) for group in of_tag]
        found += [group for group, std in zip(of_tag, stds, strict=True) if is_spread(std, max(stds))]
    return found


def batch_of(played: Sequence[Group], varied: Sequence[Group], wanted: Counter[str]) -> list[Group]:
    """For each tag as many groups as are wanted: those that vary, then the first of the others. In playing order."""
    numbers = {group.group for group in varied}
    chosen: set[int] = set()
    for tag, count in wanted.items():
        ranked = sorted((group.group not in numbers, group.group) for group in played if group.tag == tag)
        chosen |= {number for _, number in ranked[:count]}
    return [group for group in played if group.group in chosen]
