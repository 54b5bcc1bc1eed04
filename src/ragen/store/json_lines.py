"""JSON lines: one object a line. A process killed while it writes leaves at most half a line, which is ignored.

JSON has no NaN: `encode` stores non-finite numbers as the strings "nan", "inf" and "-inf", and `decode` reads them.

append(path, {"step": 21}, {"step": 22})                # on disk when this returns, or WriteFailed
records, skipped = read(path)                           # objects, and notes on lines that are not
rewind(path, lambda record: record["step"] <= 20)       # a resumed run writes the rest again
write(path, records)                                    # the whole file, at once
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ragen.store.fsync import append_lines, sync, write_whole
from ragen.store.reading import read_bytes

Record = dict[str, Any]
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class Lines(NamedTuple):
    records: list[Record]
    skipped: list[str]  # what is wrong with each line that was skipped


def append(path: Path, *records: Mapping[str, Any]) -> None:
    """Add whole lines, or raise `WriteFailed` and leave the file as it was."""
    append_lines(path, "".join(f"{json.dumps(record)}\n" for record in records).encode())


def read(path: Path, is_valid: Callable[[Record], bool] = lambda record: True) -> Lines:
    """The valid objects of a file; none if it does not exist."""
    found = Lines([], [])
    *whole, torn = (read_bytes(path) or b"").split(b"\n")
    for number, line in enumerate(whole, start=1):
        record = parsed(line)
        if record is not None and is_valid(record):
            found.records.append(record)
        elif line.strip():
            found.skipped.append(_not_valid(number, path))
    if torn:
        found.skipped.append(f"the last line of {path.name} is torn (the process was killed): skipped")
    return found


def rewind(
    path: Path, is_kept: Callable[[Record], bool], is_last: Callable[[Record], bool] = lambda record: False
) -> list[str]:
    """Keep the lines with `is_kept`, up to the first one with `is_last`, byte for byte. Invalid lines are removed.

    Returns a note on each whole line that was not valid: what it held is lost.
    """
    content = read_bytes(path)
    if content is None:
        return []
    kept, notes = [], []
    for number, line in enumerate(content.splitlines(keepends=True), start=1):
        record = parsed(line) if line.endswith(b"\n") else None
        if record is None:
            notes += [_not_valid(number, path)] if line.endswith(b"\n") and line.strip() else []
        elif is_kept(record):
            kept.append(line)
            if is_last(record):
                break
    whole = b"".join(kept)
    if not content.startswith(whole):
        write_whole(path, whole)
    elif len(whole) < len(content):
        os.truncate(path, len(whole))  # needs no space: a run resumes on a full disk
        sync(path)
    return notes


def write(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Replace a file. Text is readable as it is, not escaped; lone surrogates become question marks."""
    text = "".join(f"{json.dumps(record, ensure_ascii=False)}\n" for record in records)
    write_whole(path, text.encode("utf-8", errors="replace"))


def _not_valid(number: int, path: Path) -> str:
    return f"line {number} of {path.name} is not valid: skipped"


def parsed(line: bytes) -> Record | None:
    """The object in a line; None if it holds none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def encode(name: str, value: Any) -> Any:
    """A number of any library, or text, as JSON can hold it. `name` is for the message."""
    if hasattr(value, "item"):  # numpy and torch scalars
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{name}={value!r}: a number or text can be stored, not a {type(value).__name__}")


def decode(value: Any) -> Any:
    return _NON_FINITE.get(value, value) if isinstance(value, str) else value
