"""Episodes drawn turn by turn, and which of the many are worth a look.

Where the first and the last validation played the same level, the two stand side by side: what the agent did before,
what it does now.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ragen.report.charts import escape

Record = Mapping[str, Any]  # a line of an episode file, see `folder.episode_record`
Symbols = Mapping[str, str]  # of a board: character -> what it stands for

MAX_REPLY_CHARACTERS = 3000
MAX_BOARD_CHARACTERS = 2000

# (won before, won after) -> what this shows, and how many of it.
KINDS = {
    (False, True): ("learned", 3),
    (True, False): ("lost again", 1),
    (False, False): ("still not solved", 1),
    (True, True): ("solved from the start", 1),
}
ENDINGS = {
    "won": "solved",
    "lost": "lost",
    "max_actions": "out of actions",
    "max_turn": "out of turns",
    "invalid": "no valid action",
    "max_length": "context full",
    "": "unfinished",
}
_BLOCKS = re.compile(r"(<think>)(.*?)(</think>|(?=<answer>)|$)|(<answer>)(.*?)(</answer>|$)", re.DOTALL)


@dataclass(frozen=True)
class Exhibit:
    """One level to look at: one episode, or the same level before and after."""

    kind: str
    episodes: Sequence[Record]


def choose(before: Sequence[Record], after: Sequence[Record]) -> list[Exhibit]:
    """A few levels that show the change; without shared levels, wins and losses of each validation."""
    old, new = ({(item["tag"], item["seed"]): item for item in reversed(episodes)} for episodes in (before, after))
    exhibits = []
    shared = sorted(old.keys() & new.keys())
    for (won_before, won_after), (kind, number) in KINDS.items():
        levels = [key for key in shared if (old[key]["success"], new[key]["success"]) == (won_before, won_after)]
        exhibits += [Exhibit(kind, (old[key], new[key])) for key in levels[:number]]
    if not shared:
        for episodes in (before, after):
            for success, kind in ((True, "solved"), (False, "not solved")):
                found = [item for item in episodes if item["success"] == success]
                exhibits += [Exhibit(kind, (item,)) for item in found[:2]]
    return exhibits


def draw(exhibit: Exhibit, symbols_of_tag: Mapping[str, Symbols]) -> str:
    first = exhibit.episodes[0]
    sides = "".join(_episode(item, symbols_of_tag.get(item["tag"], {})) for item in exhibit.episodes)
    return (
        f'<article class="card level-pair"><h3>{escape(first["tag"])} level {escape(first["seed"])} '
        f'<span class="soft">{escape(exhibit.kind)}</span></h3><div class="sides">{sides}</div></article>'
    )


def _episode(record: Record, symbols: Symbols) -> str:
    tone = "good" if record["success"] else "bad"
    total = record["reward"] + record["penalty"]
    title = record.get("title") or f"step {record['step']}"
    parts = [
        f'<div class="top"><strong>{escape(title)}</strong>'
        f'<span class="badge {tone}">{escape(ENDINGS.get(record["ended_by"], record["ended_by"]))}</span>'
        f'<span class="soft">reward {total:+.2f} · {_count(record["num_actions"], "action")} in '
        f"{_count(len(record['turns']), 'turn')}</span></div>"
    ]
    parts += [_turn(turn, symbols) for turn in record["turns"]]
    if record.get("final_text"):
        board = _board(record["final_text"], symbols)
        parts.append(f'<div class="turn">{board}<div class="what soft small">at the end</div></div>')
    return f'<div class="episode">{"".join(parts)}</div>'


def _turn(turn: Record, symbols: Symbols) -> str:
    reply = f'<div class="reply">{reply_html(turn["reply_text"])}</div><div class="outcome">{_outcome(turn)}</div>'
    return f'<div class="turn">{_board(turn["state_text"], symbols)}<div class="what">{reply}</div></div>'


def _outcome(turn: Record) -> str:
    listed, valid, executed = turn["num_listed"], turn["num_valid"], len(turn["actions"])
    parts = []
    if not valid:
        parts.append('<span class="bad">no valid action</span>')
    elif valid < listed:
        parts.append(f'<span class="bad">{valid} of {listed} actions valid</span>')
    else:
        parts.append(f"{_count(valid, 'valid action')}")
    if executed < valid:
        parts.append(f"{executed} executed")
    if turn["num_effective"] < executed:
        parts.append(f"{executed - turn['num_effective']} moved nothing")
    if turn["stopped_by"] == "length":
        parts.append('<span class="bad">reply cut off</span>')
    parts.append(f"reward {turn['reward']:+.2f}")
    if turn["penalty"]:
        parts.append(f'<span class="bad">penalty {turn["penalty"]:+.2f}</span>')
    return " · ".join(parts)


def reply_html(text: str) -> str:
    """The reply as it was written, think and answer told apart by their looks."""
    shown, left_out = text[:MAX_REPLY_CHARACTERS], len(text) - MAX_REPLY_CHARACTERS
    parts, position = [], 0
    for match in _BLOCKS.finditer(shown):
        parts.append(escape(shown[position : match.start()]))
        kind = "think" if match[1] else "answer"
        opening, content, closing = match.groups()[:3] if match[1] else match.groups()[3:]
        marks = [f'<span class="mark">{escape(mark)}</span>' if mark else "" for mark in (opening, closing)]
        parts.append(f'<span class="{kind}">{marks[0]}{escape(content)}{marks[1]}</span>')
        position = match.end()
    parts.append(escape(shown[position:]))
    if left_out > 0:
        parts.append(f' <span class="soft">… and {left_out} more characters</span>')
    return "".join(parts)


def _board(text: str, symbols: Symbols) -> str:
    """An observation. Of one with a drawn board only that is shown, and the whole text when one points at it."""
    text = text if len(text) <= MAX_BOARD_CHARACTERS else f"{text[:MAX_BOARD_CHARACTERS]}…"
    rows = [cells for line in text.split("\n") if _is_row(cells := "".join(line.split()), symbols)]
    if len(rows) < 2:
        return f'<pre class="board">{escape(text.rstrip())}</pre>'
    drawn = "\n".join(
        "".join(f'<span class="{_css_class(symbols[cell])}">{escape(cell)}</span>' for cell in row) for row in rows
    )
    return f'<pre class="board drawn" title="{escape(text)}">{drawn}</pre>'


def symbol_key(symbols: Symbols) -> str:
    """What the characters of a board stand for."""
    return " · ".join(
        f'<code class="{_css_class(words)}">{escape(cell)}</code> {escape(words)}' for cell, words in symbols.items()
    )


def _is_row(cells: str, symbols: Symbols) -> bool:
    """A row of a drawn board is made of nothing but its symbols; in other lines a letter is a letter."""
    return bool(cells) and all(cell in symbols for cell in cells)


def _css_class(words: str) -> str:
    return "c-" + re.sub(r"[^a-z]+", "-", words.lower())


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
