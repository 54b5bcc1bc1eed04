"""A run on disk. `RunFolder` owns the layout; nobody else knows a file name.

    folder = RunFolder("checkpoints/ragen/test")
    with folder.owned():                                    # a second process is refused, naming this one
        folder.write_config(config)
        folder.append_metrics(1, {"actor/entropy": 0.41})
        folder.write_episodes(1, "val", groups)

    config.yaml                        the resolved tree
    metrics.jsonl                      one object a line: {"step": 1, "actor/entropy": 0.41, …}
    episodes/<split>-<step>.jsonl.gz   one episode a line, see `episode_record`
    report.html                        see `html.write_report`
    wandb-id, tensorboard/             what `sinks` keeps here
    finished.json                      how the run ended, see `write_finished`; absent while it goes on or if killed
    .owner                             process and host that write here

A file is written whole (temporary name, sync, rename) or appended by whole lines, so that a run killed at any moment
leaves files that can be read. JSON has no NaN: non-finite numbers are stored as the strings "nan", "inf" and "-inf".
"""

import fcntl
import gzip
import json
import math
import os
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ragen.config.tree import to_dict
from ragen.store.fsync import write_whole
from ragen.types import Episode, Group

LOG_PROB_DIGITS = 6
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times faster where it is there
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def ending(status: str, step: int, rule: str | None = None, explanation: str = "") -> dict[str, Any]:
    """What `finished.json` holds."""
    return {"status": status, "step": step, "rule": rule, "explanation": explanation}


class FolderInUse(ValueError):
    """Another process writes to this run folder."""


class EpisodeFile(NamedTuple):
    split: str
    step: int
    path: Path


@dataclass
class Metrics:
    """What `metrics.jsonl` holds: one row a step, in order of steps."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # lines that could not be read

    def series(self, key: str) -> list[tuple[int, float]]:
        """(step, value) wherever the metric was written; values may be NaN."""
        return [(row["step"], float(row[key])) for row in self.rows if _is_number(row.get(key))]

    def names(self) -> list[str]:
        """Every metric that occurs, in order of first appearance."""
        return [key for key in dict.fromkeys(key for row in self.rows for key in row) if key != "step"]

    def last_step(self) -> int | None:
        return self.rows[-1]["step"] if self.rows else None


class RunFolder:
    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self.config_path = self.path / "config.yaml"
        self.metrics_path = self.path / "metrics.jsonl"
        self.episodes_path = self.path / "episodes"
        self.report_path = self.path / "report.html"
        self.finished_path = self.path / "finished.json"
        self.owner_path = self.path / ".owner"
        self._tail_is_whole = False

    def __str__(self) -> str:
        return str(self.path)

    # --- one owner ----------------------------------------------------------------------------------------------

    @contextmanager
    def owned(self, key: str = "trainer.default_local_dir") -> Iterator["RunFolder"]:
        """Be the only process that writes here. The folder is made if it is not there; `key` chooses another one."""
        self.path.mkdir(parents=True, exist_ok=True)
        me = {"pid": os.getpid(), "host": socket.gethostname(), "started": _process_start(os.getpid())}
        with _locked_text(self.owner_path) as owner:
            if other := _live_owner(owner.read()):
                raise FolderInUse(
                    f"{self.path} belongs to process {other['pid']} on {other['host']}: wait for it, or choose another "
                    f"folder with {key}. If it is long gone, delete {self.owner_path}"
                )
            owner.write(json.dumps(me))
        for leftover in (*self.path.glob(".*.part"), *self.episodes_path.glob(".*.part")):
            _remove(leftover)  # of an owner that was killed while it wrote
        try:
            yield self
        finally:
            with _locked_text(self.owner_path) as owner:
                if _owner(owner.read()) == me:
                    owner.write("")

    def live_owner(self) -> dict[str, Any] | None:
        """The process that writes here now: its `pid` and `host`."""
        return _live_owner(self.owner_path.read_text(errors="replace")) if self.owner_path.exists() else None

    # --- config -------------------------------------------------------------------------------------------------

    def write_config(self, config: Any) -> None:
        text = yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True, width=120)
        write_whole(self.config_path, text.encode())

    def read_config(self) -> dict[str, Any]:
        """The stored tree; empty where there is none. `ragen.config.tree.build` makes a `Config` of it."""
        if not self.config_path.exists():
            return {}
        tree = yaml.load(self.config_path.read_text(encoding="utf-8"), _Loader)
        if not isinstance(tree, dict):
            raise ValueError(f"{self.config_path} does not hold a config tree")
        return tree

    # --- metrics ------------------------------------------------------------------------------------------------

    def append_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add one line. Numbers of any library are stored as plain ones, floats exactly."""
        row = {"step": step} | {key: _stored(key, value) for key, value in metrics.items() if key != "step"}
        line = json.dumps(row, allow_nan=False) + "\n"
        self.path.mkdir(parents=True, exist_ok=True)
        self._cut_torn_line()
        with open(self.metrics_path, "ab", buffering=0) as file:
            file.write(line.encode())
            os.fsync(file.fileno())

    def read_metrics(self) -> Metrics:
        """All rows that can be read. Lines of one step are one row; of a value written twice the later one stands."""
        if not self.metrics_path.exists():
            return Metrics()
        rows: dict[int, dict[str, Any]] = {}
        notes = []
        lines = self.metrics_path.read_bytes().split(b"\n")
        for number, line in enumerate(lines, start=1):
            row = _parsed_row(line)
            if row is not None and number < len(lines):
                rows.setdefault(row["step"], {}).update(row)
            elif number == len(lines) and line:
                notes.append(f"the last line of {self.metrics_path.name} is torn (the run was killed): ignored")
            elif line.strip():
                notes.append(f"line {number} of {self.metrics_path.name} cannot be read: ignored")
        return Metrics([rows[step] for step in sorted(rows)], notes)

    def rewind(self, step: int) -> None:
        """Forget what was recorded after the line of `step`: a resumed run writes it again."""
        if self.metrics_path.exists():
            kept = []
            for line in self.metrics_path.read_bytes().splitlines(keepends=True):
                row = _parsed_row(line) if line.endswith(b"\n") else None
                if row is not None and row["step"] <= step:
                    kept.append(line)
                    if row["step"] == step:
                        break  # a later line may speak of an earlier step: the success of what was merged at the end
            write_whole(self.metrics_path, b"".join(kept))
        for file in self.episode_files():
            if file.step > step:
                file.path.unlink()
        self.finished_path.unlink(missing_ok=True)

    def _cut_torn_line(self) -> None:
        """Half a line that a killed process left would swallow the next one."""
        if not self._tail_is_whole and self.metrics_path.exists():
            content = self.metrics_path.read_bytes()
            if not content.endswith(b"\n"):
                os.truncate(self.metrics_path, content.rfind(b"\n") + 1)
        self._tail_is_whole = True

    # --- episodes -----------------------------------------------------------------------------------------------

    def write_episodes(
        self, step: int, split: str, groups: Iterable[Group], render: Callable[[str, Any], str] | None = None
    ) -> Path:
        """Store whole groups. `split` names the set (`train`, `val`, `val-greedy`, …).

        `render(tag, state)` adds the observation after the last action, which no turn has shown.
        """
        self.episodes_path.mkdir(parents=True, exist_ok=True)
        path = self.episodes_path / f"{split}-{step:06d}.jsonl.gz"
        lines = [
            json.dumps(episode_record(episode, step, render), allow_nan=False, separators=(",", ":"))
            for group in groups
            for episode in group.episodes
        ]
        text = "".join(f"{line}\n" for line in lines)
        write_whole(path, gzip.compress(text.encode(), compresslevel=1, mtime=0))  # no clock: equal runs, equal files
        return path

    def episode_files(self, split: str | None = None) -> list[EpisodeFile]:
        """What is stored, by split and step."""
        found = []
        for path in self.episodes_path.glob("*-*.jsonl.gz"):
            name, _, step = path.name.removesuffix(".jsonl.gz").rpartition("-")
            if step.isdigit() and split in (None, name):
                found.append(EpisodeFile(name, int(step), path))
        return sorted(found)

    # --- the end ------------------------------------------------------------------------------------------------

    def write_finished(self, status: str, step: int, rule: str | None = None, explanation: str = "") -> None:
        """The last thing that a run writes: `status` is `finished`, or `early_stopped` by a rule at a step."""
        record = ending(status, step, rule, explanation)
        write_whole(self.finished_path, json.dumps(record, indent=1).encode())

    def read_finished(self) -> dict[str, Any] | None:
        """How the run ended; None for one that has not, `status` unknown where the record cannot be read."""
        if not self.finished_path.exists():
            return None
        try:
            record = json.loads(self.finished_path.read_bytes())
        except ValueError:
            record = None
        return record if isinstance(record, dict) and "status" in record else {"status": "unknown"}

    # --- report -------------------------------------------------------------------------------------------------

    def write_report(self, html: str) -> Path:
        self.path.mkdir(parents=True, exist_ok=True)
        write_whole(self.report_path, html.encode("utf-8", errors="replace"))
        return self.report_path


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


# --- episodes -----------------------------------------------------------------------------------------------------


def episode_record(episode: Episode, step: int, render: Callable[[str, Any], str] | None = None) -> dict[str, Any]:
    """One line of an episode file: enough to draw, replay, fork and train the episode again.

    `sequences` are what the learner read: all ids, the [start, stop) of each sampled reply, and the log-probs of the
    sampled tokens only, one after the other. The i-th reply span belongs to the i-th turn.
    """
    final = episode.final
    return {
        "step": step,
        "tag": episode.tag,
        "split": episode.split,
        "seed": episode.seed,
        "group": episode.group,
        "member": episode.member,
        "ended_by": final.ended_by,
        "success": final.success,
        "reward": _stored("reward", final.reward),
        "penalty": _stored("penalty", final.penalty),
        "num_actions": final.num_actions,
        "system_text": episode.system_text,
        "turns": [
            {
                "state_text": turn.state_text,
                "turn_text": turn.turn_text,
                "reply_text": turn.reply_text,
                "stopped_by": turn.stopped_by,
                "reward": _stored("reward", turn.result.reward),
                "penalty": _stored("penalty", turn.result.penalty),
                "actions": [
                    action if isinstance(action, (int, str)) else str(action) for action in turn.result.actions
                ],
                "num_listed": turn.result.num_listed,
                "num_valid": turn.result.num_valid,
                "num_effective": turn.result.num_effective,
            }
            for turn in episode.turns
        ],
        "final_text": "" if render is None else render(episode.tag, final.state),
        "sequences": [
            {
                "first_turn": sequence.first_turn,
                "ids": [int(token) for token in sequence.ids],
                "sampled": [list(span) for span in sequence.reply_spans],
                "log_probs": [
                    _stored("log_probs", round(float(value), LOG_PROB_DIGITS))
                    for start, stop in sequence.reply_spans
                    for value in sequence.log_probs[start:stop]
                ],
            }
            for sequence in episode.sequences()
        ],
    }


def read_episodes(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The records of one episode file, non-finite numbers as floats again."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [_with_floats(json.loads(line)) for line in file]


def _with_floats(record: dict[str, Any]) -> dict[str, Any]:
    for part in (record, *record["turns"]):
        part["reward"], part["penalty"] = _read(part["reward"]), _read(part["penalty"])
    for sequence in record["sequences"]:
        sequence["log_probs"] = [_read(value) for value in sequence["log_probs"]]
    return record


# --- numbers ------------------------------------------------------------------------------------------------------


def _stored(name: str, value: Any) -> Any:
    """A value as JSON can hold it."""
    if hasattr(value, "item"):  # numpy and torch scalars
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{name}={value!r}: a number or text can be stored, not a {type(value).__name__}")


def _read(value: Any) -> Any:
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _parsed_row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        return None
    return {key: _read(value) for key, value in row.items()}


# --- the owner ----------------------------------------------------------------------------------------------------


class _LockedText:
    def __init__(self, descriptor: int):
        self._descriptor = descriptor

    def read(self) -> str:
        return os.pread(self._descriptor, 4096, 0).decode(errors="replace")

    def write(self, text: str) -> None:
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, text.encode(), 0)


@contextmanager
def _locked_text(path: Path) -> Iterator[_LockedText]:
    """A small file under a short lock, so that of two processes that find a dead owner only one takes over."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield _LockedText(descriptor)
    finally:
        os.close(descriptor)  # unlocks


def _owner(text: str) -> dict[str, Any] | None:
    try:
        owner = json.loads(text)
    except ValueError:
        return None
    return owner if isinstance(owner, dict) and {"pid", "host", "started"} <= owner.keys() else None


def _live_owner(text: str) -> dict[str, Any] | None:
    """The owner that a file names, unless it is known to be dead. Nothing is known about other hosts."""
    owner = _owner(text)
    if owner is None:
        return None
    if owner["host"] != socket.gethostname():
        return owner
    try:
        os.kill(owner["pid"], 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        return owner  # somebody else's process
    # A number may be in use again: then the process under it began at another time.
    return owner if owner["started"] == _process_start(owner["pid"]) else None


def _process_start(pid: int) -> str:
    """When a process began, in clock ticks since boot; empty where the system does not tell."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    fields = text.rpartition(")")[2].split()
    return "dead" if fields[0] == "Z" else fields[19]  # a zombie only waits for its parent to notice
