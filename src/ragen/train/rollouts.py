"""Playing: the groups of a training step, filtered and described, and validation, with the actor's own weights.

rollouts = Rollouts(config, learner, session)
played = rollouts.play_step(step, clock)         # groups, scores, which were kept, metrics
metrics = rollouts.validate(step, clock)
"""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import chain
from statistics import fmean

from ragen.agent.chat_template import ChatTemplate
from ragen.config.schema import Config
from ragen.diagnose.collapse import CollapseWatch
from ragen.engine.base import Sampling
from ragen.engine.forced_length import read_forced_length
from ragen.engine.native.engine import NativeEngine
from ragen.engine.native.slot_memory import MAX_ROWS
from ragen.model.packing import samples_of
from ragen.prng import Coordinate
from ragen.rollout.collect import FailedGroup, GroupRequest, World, collect
from ragen.rollout.summary import num_sampled, summarize
from ragen.run.clock import Clock
from ragen.run.memory_plan import MemoryPlan
from ragen.run.session import Session
from ragen.train.failures import NOTHING_BEFORE, Before, draws_of, play_groups
from ragen.train.learner import Learner
from ragen.train.levels import LevelSampling, Slot, UniformLevels, with_turns
from ragen.train.resampling import Rounds, play_rounds
from ragen.train.steering import SteeredLevels
from ragen.train.targets import Played, keep_groups, scores_of
from ragen.train.validation import Validator
from ragen.types import Group


class Rollouts:
    def __init__(self, config: Config, learner: Learner, session: Session, plan: MemoryPlan | None = None):
        self.config, self.learner, self.workers, self.log = config, learner, session.workers, session.log
        chat = ChatTemplate(learner.actor.tokenizer)
        rollout = config.actor_rollout_ref.rollout
        self.engine = NativeEngine(
            learner.model,
            learner.actor.tokenizer,
            chat.end_of_turn_id,
            max_rows=MAX_ROWS if plan is None else plan.num_slots,
            max_tokens=rollout.max_model_len,
            memory_share=rollout.gpu_memory_utilization,
        )
        self.keeps_slots = plan is None or plan.keeps_slots  # while the models are updated
        if self.engine.way.text:
            self.log.note(self.engine.way.text)
        tags = dict.fromkeys([*config.es_manager.train.env_configs.tags, *config.es_manager.val.env_configs.tags])
        self.worlds = {tag: World.make(config, tag, chat) for tag in tags}
        self.levels = self._level_sampling()
        self.validator = Validator(config, self.worlds, self.workers, self.log.note)
        self.collapse = CollapseWatch(config, learner.actor.tokenizer, self.workers, self.log.note)

    def _level_sampling(self) -> LevelSampling:
        if self.config.es_manager.train.level_sampling == "steered":
            return SteeredLevels(self.config, self.worlds, self.workers, self.log.note)
        return UniformLevels(self.config)

    def play_step(self, step: int, clock: Clock) -> tuple[Played, dict[str, float]]:
        """The groups of a training step, and everything that is known about them before an update."""
        with clock("gen"):
            rounds, failures = self._play_rounds(step)
        self.make_room()
        metrics = rounds.metrics() | self.levels.observe(rounds.played)
        with self.log.phase("collapse"):
            collapse = self.collapse.measure(step, rounds.played, self.learner.model, clock)
        with clock("filter"):
            played = self.select(rounds.batch)
        self.log.episodes(step, "train", rounds.played)
        if self.config.trainer.log_group_rv_table:
            self.log.group_table(step, played.selection.table)
        return played, _describe(played, rounds.played, clock) | metrics | collapse | failures

    def _play_rounds(self, step: int) -> tuple[Rounds, dict[str, float]]:
        """The groups of a step, and counts of those that failed."""
        draws, failures = ("train", self.config.seed.train, step), Counter[str]()
        num_groups = 0

        def play(slots: Sequence[Slot]) -> list[Group]:
            nonlocal num_groups
            before = Before(num_groups, int(failures["rollout/failed_groups"]))
            groups, counts = self.play(self.levels.choose(slots), draws, "rollout", step, before)
            num_groups += len(slots)
            failures.update(counts)
            return groups

        return play_rounds(self.config, step, play), dict(failures)

    def play(
        self,
        requests: Sequence[GroupRequest],
        draws: tuple[Coordinate, ...],
        phase: str,
        step: int,
        before: Before = NOTHING_BEFORE,
    ) -> tuple[list[Group], dict[str, float]]:
        """Groups of episodes, and counts of those that failed. Each worker plays its share, and all get all of them."""

        def play(requests: Sequence[GroupRequest], attempt: int) -> list[Group | FailedGroup]:
            mine, sampling, these = self.workers.mine(requests), train_sampling(self.config), draws_of(draws, attempt)
            with self.log.phase(phase, total=sum(request.size for request in mine)):
                played = collect(self.engine, self.worlds, mine, sampling, these, self.log.advance)
            return self.workers.gather(with_turns(played, self.config))

        groups, failures = play_groups(requests, play, self.config, self.log, step, str(draws[0]), before)
        return groups, {f"rollout/{name}": count for name, count in failures.items()}

    def make_room(self) -> None:
        """For what follows playing, where the memory plan says that it needs the slots' memory."""
        if not self.keeps_slots:
            self.engine.release()

    def select(self, groups: list[Group]) -> Played:
        """The filter, over groups as they were played."""
        scores, learner = scores_of(groups), self.learner
        entropies = partial(learner.scorer.mean_entropies, learner.model, groups)
        return Played(groups, scores, keep_groups(groups, scores, self.config, entropies))

    def validate(self, step: int, clock: Clock) -> dict[str, float]:
        return self.validator.validate(self.engine, self.log, step, clock)


def _describe(played: Played, groups: Sequence[Group], clock: Clock) -> dict[str, float]:
    """`groups` are all that were played."""
    selection = played.selection
    metrics = selection.metrics | {f"train/{name}": value for name, value in summarize(groups).items()}
    metrics["train/batch_size"] = float(len(samples_of(selection.kept)))
    metrics["rollout/empty_after_filter"] = float(not selection.kept)
    for name, reduce in (("mean", fmean), ("max", max), ("min", min)):
        metrics[f"critic/score/{name}"] = reduce(chain(*scores_of(groups)))
    episodes = [episode for group in groups for episode in group.episodes]
    metrics["perf/tokens_per_s"] = sum(map(num_sampled, episodes)) / clock.seconds["gen"]
    return metrics


def train_sampling(config: Config) -> Sampling:
    rollout = config.actor_rollout_ref.rollout
    return Sampling(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        greedy=False,
        max_tokens=rollout.response_length,
        stop_at_answer=rollout.stop_at_answer,
        forced_length=read_forced_length(rollout.forced_reply_tokens),
    )
