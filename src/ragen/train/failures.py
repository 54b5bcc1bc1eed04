"""Environments that fail: a group is played again, then dropped whole, and past a share of failures the run stops.

    played, metrics = play_groups(requests, play, config, log, step, "train")
    # played: the groups that survived; metrics: empty, or {"failed_groups": 1.0, "failed/raised": 1.0, …}

`play(requests, attempt)` plays each request once and returns a `Group` or a `FailedGroup` for it, on all workers the
same. A dropped group counts nowhere: not as a reward of zero, not in the filter, not in any mean. It is stored with its
level, its replies and the reason. With more than `es_manager.max_failed_share` of the groups dropped, or all of them,
`TooManyFailures` is raised.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ragen.config.schema import Config
from ragen.env.failure import TooManyFailures
from ragen.format import counted
from ragen.prng import Coordinate
from ragen.rollout.collect import FailedGroup, GroupRequest, UnfinishedTurn
from ragen.run.run_logger import NullLogger
from ragen.store.json_lines import encode
from ragen.types import Group, Turn

Play = Callable[[Sequence[GroupRequest], int], list[Group | FailedGroup]]


class Before(NamedTuple):
    """The groups that a step has played already, and how many of them were dropped."""

    num_groups: int
    num_dropped: int


NOTHING_BEFORE = Before(0, 0)


def play_groups(
    requests: Sequence[GroupRequest],
    play: Play,
    config: Config,
    log: NullLogger,
    step: int,
    kind: str,
    before: Before = NOTHING_BEFORE,
) -> tuple[list[Group], dict[str, float]]:
    """The groups that the environment let finish, in order, and counts of the others, if there are any.

    `kind` names these groups in the file of failures: `train`, `val`, …; `before` counts earlier groups of the step.
    """
    retries = config.es_manager.env_retries
    outcomes: dict[GroupRequest, Group | FailedGroup] = {}
    waiting, num_retried = list(requests), 0
    for attempt in range(retries + 1):
        outcomes |= zip(waiting, play(waiting, attempt), strict=True)
        failed = [outcome for outcome in map(outcomes.__getitem__, waiting) if isinstance(outcome, FailedGroup)]
        if not failed:
            break
        is_last = attempt == retries
        log.failures([record_of(group, step, kind, attempt, dropped=is_last) for group in failed])
        _note(log, step, failed, attempt, is_last)
        waiting = [group.request for group in failed]
        if attempt == 0 and not is_last:
            num_retried = len(waiting)
    groups = [outcome for outcome in outcomes.values() if isinstance(outcome, Group)]
    dropped = [outcome for outcome in outcomes.values() if isinstance(outcome, FailedGroup)]
    _stop_past_share(dropped, before.num_dropped + len(dropped), before.num_groups + len(requests), config)
    return groups, _metrics(dropped, num_retried)


def draws_of(draws: tuple[Coordinate, ...], attempt: int) -> tuple[Coordinate, ...]:
    """The coordinates of an attempt: playing again gives other samples."""
    return (*draws, "again", attempt) if attempt else draws


def record_of(group: FailedGroup, step: int, kind: str, attempt: int, dropped: bool) -> dict[str, Any]:
    """One line of `failures.jsonl`. `member` and `turn` say where it failed; turn 0 is before the first prompt."""
    request, failure = group.request, group.failure
    return {
        "step": step,
        "kind": kind,
        "tag": request.tag,
        "split": request.split,
        "seed": request.seed,
        "group": request.group,
        "attempt": attempt + 1,
        "dropped": dropped,
        "reason": failure.reason,
        "member": group.member,
        "turn": group.turn,
        "detail": failure.detail,
        "traceback": failure.trace,
        "system_text": group.system_text,
        "episodes": [
            {"member": member, "turns": [_turn_record(turn) for turn in turns]}
            for member, turns in group.replies.items()
        ],
    }


def _turn_record(turn: Turn | UnfinishedTurn) -> dict[str, Any]:
    record: dict[str, Any] = {"turn_text": turn.turn_text, "reply_text": turn.reply_text}
    if isinstance(turn, Turn):
        record["actions"] = [str(action) for action in turn.result.actions]
        record["reward"] = encode("reward", turn.result.reward)
    return record


def _note(log: NullLogger, step: int, failed: Sequence[FailedGroup], attempt: int, is_last: bool) -> None:
    """One line, with the first of them."""
    done = f"dropped after {counted(attempt + 1, 'attempt')}" if is_last else "played again"
    more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
    log.note(f"step {step}: {counted(len(failed), 'group')} {done}: {failed[0].failure}{more}; see failures.jsonl")


def _stop_past_share(dropped: Sequence[FailedGroup], num_dropped: int, num_groups: int, config: Config) -> None:
    share = config.es_manager.max_failed_share
    if not dropped or (num_dropped <= share * num_groups and num_dropped < num_groups):
        return
    reasons = ", ".join(f"{count} {reason}" for reason, count in _reasons(dropped).items())
    raise TooManyFailures(
        f"the environment failed in {num_dropped} of {num_groups} groups ({reasons}), more than "
        f"es_manager.max_failed_share={share:g} allows. The first: {dropped[0].failure}"
        if num_dropped < num_groups
        else f"the environment failed in all {counted(num_groups, 'group')} ({reasons}). The first: "
        f"{dropped[0].failure}"
    )


def _metrics(dropped: Sequence[FailedGroup], num_retried: int) -> dict[str, float]:
    if not dropped and not num_retried:
        return {}
    counts = {"retried_groups": num_retried, "failed_groups": len(dropped)}
    counts |= {f"failed/{reason}": count for reason, count in _reasons(dropped).items()}
    return {name: float(count) for name, count in counts.items()}


def _reasons(dropped: Sequence[FailedGroup]) -> Counter[str]:
    return Counter(group.failure.reason for group in dropped)
