"""Fine-tuning data: solved levels as chat messages, in Parquet files that any trainer can read. No torch in here.

    lesson = Lesson.of(config)
    data = make_data(lesson, num_processes=4)          # Data(train=[…], test=[…], …)
    write_data(data, folder)                           # folder/train.parquet, folder/test.parquet
    read_rows(folder / "train.parquet")

A row is one answer: `prompt`, the messages before it (system, user, assistant, user …, exactly what a rollout shows),
and `response`. `extra_info` says where it belongs: a level (`index` is its seed), the number of its turn, and how many
turns the level took. Under the context mode `full` the last row of a level holds all its answers, the earlier ones as
messages of its prompt.

Sizes count levels of the split `sft`, from `sft.data_generation.seed` on, in order. Skipped are levels that cannot be
won within the limits of an episode, levels that validation or a later evaluation starts from (`RESERVED` levels of
`val` and of `test`), and, in the test rows, levels that training has seen. A bandit has only a handful of levels, so
the last two rules do not hold there; where evaluations play nearly all levels of a small board, only those of this run
are skipped. The result depends neither on the number of processes nor on their speed.
"""

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

from ragen.agent.episode import noise_stream
from ragen.agent.prompt import STYLES, PromptStyle
from ragen.agent.rules import AgentRules
from ragen.config import derive
from ragen.config.schema import Config
from ragen.env.base import State, Tag
from ragen.env.failure import call, level
from ragen.env.registry import make
from ragen.env.solve import NoExactAnswer
from ragen.errors import ConfigError
from ragen.extras import require
from ragen.sft.demonstrate import Played, Spoken, can_be_won, demonstrate, solver
from ragen.store.fsync import write_whole

SPLIT = "sft"
FILES = {"train": "train.parquet", "test": "test.parquet"}
CHUNK = 25  # levels that a process solves at a time
MIN_LEVELS = 8 * CHUNK  # for fewer, starting processes takes longer than it saves
PATIENCE = 2_000  # consecutive skipped levels before the settings are called impossible
RESERVED = 512  # levels of a split that an evaluation plays by default

AnswerRow = dict[str, Any]
Message = dict[str, str]


@dataclass(frozen=True)
class Lesson:
    """All that decides what is made."""

    tag_name: str
    tag: Tag
    rules: AgentRules
    reply_limit: int
    algo: str
    max_depth: int
    first_seed: int
    train_size: int
    test_size: int
    validation_tags: tuple[Tag, ...]
    validation_seeds: range
    evaluation_seeds: range  # of `val` and of `test`, whichever run plays them
    repeats: bool  # the game has so few levels that all of them occur everywhere

    @classmethod
    def of(cls, config: Config) -> "Lesson":
        settings, (name, tag) = config.sft.data_generation, derive.sft_tag(config)
        return cls(
            tag_name=name,
            tag=tag,
            rules=derive.rules(config),
            reply_limit=config.actor_rollout_ref.rollout.response_length,
            algo=settings.algo,
            max_depth=settings.bfs_max_depths,
            first_seed=settings.seed,
            train_size=settings.train_size,
            test_size=settings.test_size,
            validation_tags=tuple(config.custom_envs[tag] for tag in config.es_manager.val.env_configs.tags),
            validation_seeds=range(config.seed.val, config.seed.val + config.es_manager.val.env_groups),
            evaluation_seeds=range(config.seed.val, config.seed.val + RESERVED),
            repeats=derive.sft_env_type(config) in derive.BANDITS,
        )


@dataclass(frozen=True)
class Solved:
    """A level and its rows; none for a level that cannot be won."""

    seed: int
    start: State
    rows: tuple[AnswerRow, ...]

    @property
    def success(self) -> bool:
        return self.rows[-1]["extra_info"]["success"]


@dataclass(frozen=True)
class Data:
    """The rows, and how they came about."""

    train: list[AnswerRow]
    test: list[AnswerRow]
    num_skipped: int
    success: float  # of the solver, over all levels: below 1 in a game of chance
    shared: float  # of the levels that evaluations play, how many are also trained

    def sets(self) -> dict[str, list[AnswerRow]]:
        return {"train": self.train, "test": self.test}


def make_data(lesson: Lesson, num_processes: int = 1, on_levels: Callable[[int], None] = lambda count: None) -> Data:
    """Solve levels until both sets are full. `on_levels` receives the number of levels added."""
    own, played = _evaluation_starts(lesson)
    with _solving(lesson, num_processes, lesson.train_size + lesson.test_size) as levels:
        solved, num_skipped = _choose(lesson, levels, own, played - own, on_levels)
    train, test = solved[: lesson.train_size], solved[lesson.train_size :]
    success = sum(level.success for level in solved) / len(solved)
    shared = len(played & {level.start for level in train}) / len(played)
    return Data(_labelled(train, "train"), _labelled(test, "test"), num_skipped, success, shared)


def _choose(
    lesson: Lesson, levels: Iterator[Solved], own: set[State], others: set[State], on_levels: Callable[[int], None]
) -> tuple[list[Solved], int]:
    """The levels, and how many were skipped: always `own` starts, those of `others` while there are more levels."""
    solved: list[Solved] = []
    trained: set[State] = set()
    num_skipped = 0
    skipped: list[bool] = []  # one after the other: whether only for the sake of others
    while len(solved) < lesson.train_size + lesson.test_size:
        level, in_test = next(levels), len(solved) >= lesson.train_size
        is_taken = level.start in own or (in_test and level.start in trained)
        is_usable = bool(level.rows) and (lesson.repeats or not is_taken)
        if is_usable and (lesson.repeats or level.start not in others):
            if not in_test:
                trained.add(level.start)
            solved.append(level)
            on_levels(1)
            skipped = []
            continue
        num_skipped += 1
        skipped.append(is_usable)
        if len(skipped) == PATIENCE:
            if not any(skipped):
                raise _too_few(lesson, len(solved))
            others, skipped = set(), []
    return solved, num_skipped


def _labelled(levels: Sequence[Solved], split: str) -> list[AnswerRow]:
    rows = (row for level in levels for row in level.rows)
    return [row | {"extra_info": row["extra_info"] | {"split": split}} for row in rows]


def _evaluation_starts(lesson: Lesson) -> tuple[set[State], set[State]]:
    """Where the levels start that this run validates on, and those that any evaluation plays."""
    envs, splits = [make(tag) for tag in lesson.validation_tags], ("val", "test")
    own = {env.reset(seed, "val") for env in envs for seed in lesson.validation_seeds}
    return own, own | {env.reset(seed, split) for env in envs for split in splits for seed in lesson.evaluation_seeds}


def _too_few(lesson: Lesson, num_solved: int) -> ConfigError:
    return ConfigError(
        f"{lesson.tag_name}: {PATIENCE} levels one after the other cannot be won within {lesson.rules.max_turn} "
        f"turns of up to {lesson.rules.max_actions_per_turn} actions, or are in use already; {num_solved} of "
        f"{lesson.train_size + lesson.test_size} were found. Allow more turns (agent_proxy.max_turn), make the "
        f"levels easier or larger (sft.sokoban, sft.frozenlake), or ask for fewer"
    )


# --- solving ------------------------------------------------------------------------------------------------------


@contextmanager
def _solving(lesson: Lesson, num_processes: int, size: int) -> Iterator[Iterator[Solved]]:
    """The levels from the first seed on, without end and in order, solved here or by several processes."""
    chunks = (range(start, start + CHUNK) for start in count(lesson.first_seed, CHUNK))
    num_processes = 1 if size < MIN_LEVELS else min(num_processes, os.cpu_count() or 1)
    if num_processes == 1:
        yield (level for seeds in chunks for level in solve_levels(lesson, seeds))
        return
    # Started afresh: a fork of a process that has threads may hang. Ctrl-C is for the one that started them.
    context, ignore = multiprocessing.get_context("spawn"), (signal.SIGINT, signal.SIG_IGN)
    pool = ProcessPoolExecutor(num_processes, context, initializer=signal.signal, initargs=ignore)
    try:
        yield _in_order(pool, lesson, chunks, 2 * num_processes)
    finally:
        pool.shutdown(cancel_futures=True)


def _in_order(pool: ProcessPoolExecutor, lesson: Lesson, chunks: Iterator[range], num_waiting: int) -> Iterator[Solved]:
    waiting = deque(pool.submit(solve_levels, lesson, seeds) for seeds in islice(chunks, num_waiting))
    while True:
        yield from waiting.popleft().result()
        waiting.append(pool.submit(solve_levels, lesson, next(chunks)))


def solve_levels(lesson: Lesson, seeds: Iterable[int]) -> list[Solved]:
    """The levels of these seeds. What cannot be won has no rows."""
    env, tag, rules = make(lesson.tag), lesson.tag, lesson.rules
    prompt = STYLES[rules.prompt_style](env, tag, rules, lesson.reply_limit)

    def solve(seed: int) -> Solved:
        start = env.reset(seed, SPLIT)
        rows: tuple[AnswerRow, ...] = ()
        if can_be_won(env, tag, rules, start, lesson.max_depth):
            player = solver(env, tag, rules, lesson.max_depth)
            played = demonstrate(env, tag, rules, prompt, start, player, noise_stream(seed, 0, 0))
            rows = tuple(_rows(lesson, prompt, seed, played))
        return Solved(seed, start, rows)

    return [call(partial(solve, seed), level(lesson.tag_name, seed, SPLIT), passes=(NoExactAnswer,)) for seed in seeds]


def _rows(lesson: Lesson, prompt: PromptStyle, seed: int, played: Played) -> Iterator[AnswerRow]:
    for number, turn in enumerate(played.turns, start=1):
        yield {
            "data_source": f"ragen/{lesson.tag_name}",
            "prompt": messages_before(prompt, lesson.rules, played.turns[: number - 1], turn.turn_text),
            "response": turn.reply_text,
            "ability": lesson.algo,
            "extra_info": {
                "index": seed,
                "turn": number,
                "num_turns": len(played.turns),
                "success": played.final.success,
            },
        }


def messages_before(prompt: PromptStyle, rules: AgentRules, past: Sequence[Spoken], turn_text: str) -> list[Message]:
    """What a model is shown before its next answer, as chat messages: `ragen.agent.window` as text."""
    system = {"role": "system", "content": prompt.system_text()}
    shown = past if rules.context_window_mode == "full" else past[max(0, len(past) - rules.num_turns_in_view + 1) :]
    if rules.context_window_mode == "single_turn":
        return [system, {"role": "user", "content": prompt.summary_text(shown, len(past)) + turn_text}]
    texts = [*(turn.turn_text for turn in shown), turn_text]
    feedback = ["", *(prompt.feedback_text(turn.result.reward) for turn in shown)]
    users = [{"role": "user", "content": before + text} for before, text in zip(feedback, texts, strict=True)]
    replies = [{"role": "assistant", "content": turn.reply_text} for turn in shown]
    return [system, *(message for pair in zip(users, replies, strict=False) for message in pair), users[-1]]


# --- files --------------------------------------------------------------------------------------------------------


def write_data(data: Data, folder: Path, replace: bool = False) -> None:
    """Both files, each whole or not at all. Unless they may be replaced, files with other rows stay, with an error."""
    for name, rows in data.sets().items():
        path = folder / FILES[name]
        if replace or not path.exists():
            write_whole(path, _parquet(rows))
        elif read_rows(path) != rows:
            raise ConfigError(
                f"{path} holds other rows than this run's: set sft.data_generation.data_dir to another directory, "
                f"or move the file away"
            )


def _parquet(rows: Sequence[AnswerRow]) -> bytes:
    require("sft")
    import pyarrow as pa
    import pyarrow.parquet

    message = pa.struct([("role", pa.string()), ("content", pa.string())])
    place = [(name, pa.int64()) for name in ("index", "turn", "num_turns")]
    schema = pa.schema(
        [
            ("data_source", pa.string()),
            ("prompt", pa.list_(message)),
            ("response", pa.string()),
            ("ability", pa.string()),
            ("extra_info", pa.struct([*place, ("success", pa.bool_()), ("split", pa.string())])),
        ]
    )
    sink = pa.BufferOutputStream()
    pyarrow.parquet.write_table(pa.Table.from_pylist(list(rows), schema), sink)
    return sink.getvalue().to_pybytes()


def read_rows(path: Path) -> list[AnswerRow]:
    require("sft")
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise ConfigError(f"{path} is not a Parquet file ({str(error).splitlines()[0]}): move it away") from None
