"""The next free name: `test-2` beside `test`, `x_2.jsonl` beside `x.jsonl`, `x.log.1` for an older `x.log`.

next_free(Path("models/sft"))                              # models/sft, or models/sft-2 if that exists
for path in numbered(Path("out/x.jsonl"), separator="_", before_suffix=True):     # x.jsonl, x_2.jsonl, x_3.jsonl, …
rotate(Path("logs/x.log"))                                 # becomes x.log.1, and x.log.1 becomes x.log.2
"""

import os
from collections.abc import Iterator
from itertools import count, islice, pairwise, takewhile
from pathlib import Path


def numbered(path: Path, start: int = 2, separator: str = "-", before_suffix: bool = False) -> Iterator[Path]:
    """The path itself, then its numbered siblings, without end."""
    yield path
    for number in count(start):
        ending = f"{separator}{number}"
        yield path.with_stem(path.stem + ending) if before_suffix else path.with_name(path.name + ending)


def next_free(path: Path, start: int = 2, separator: str = "-", before_suffix: bool = False) -> Path:
    """The first of `numbered` that does not exist."""
    return next(one for one in numbered(path, start, separator, before_suffix) if not one.exists())


def rotate(path: Path) -> None:
    """`x.log` becomes `x.log.1`; older ones move up by one."""
    there = list(takewhile(Path.exists, numbered(path, start=1, separator=".")))
    names = list(islice(numbered(path, start=1, separator="."), len(there) + 1))
    for old, new in reversed(list(pairwise(names))):
        os.replace(old, new)
