"""Episodes to look at, turn by turn: which of the many are worth it, and what a page shows of each.

    for exhibit in choose(before, after):
        view(exhibit, {"SimpleSokoban": env.symbols()})      # for the macro `exhibit` of episode.html.jinja

Where the first and the last validation played the same level, the two are side by side.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from ragen.format import counted

Record = Mapping[str, Any]  # a line of an episode file, see `store.episodes.episode_record`
Symbols = Mapping[str, str]  # of a board: character -> what it stands for

MAX_REPLY_CHARACTERS = 3000
MAX_BOARD_CHARACTERS = 2000

# (won before, won after) -> what this shows, and how many are shown.
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


class Exhibit(NamedTuple):
    """One level to look at: one episode, or the same level before and after."""

    kind: str
    episodes: Sequence[Record]


class Span(NamedTuple):
    """Text of one look (a CSS class), between the marks that open and close it."""

    text: str
    look: str = ""
    opening: str = ""
    closing: str = ""


def choose(before: Sequence[Record], after: Sequence[Record]) -> list[Exhibit]:
    """A few levels that show the change; without shared levels, wins and losses of each validation."""
    old, new = ({(item["tag"], item["seed"]): item for item in reversed(episodes)} for episodes in (before, after))
    shared = sorted(old.keys() & new.keys())
    exhibits = []
    for outcome, (kind, number) in KINDS.items():
        levels = [key for key in shared if (old[key]["success"], new[key]["success"]) == outcome]
        exhibits += [Exhibit(kind, (old[key], new[key])) for key in levels[:number]]
    if shared:
        return exhibits
    for episodes, success in product((before, after), (True, False)):
        found = [item for item in episodes if item["success"] == success]
        exhibits += [Exhibit("solved" if success else "not solved", (item,)) for item in found[:2]]
    return exhibits


def view(exhibit: Exhibit, symbols_of_tag: Mapping[str, Symbols]) -> dict[str, Any]:
    """What a page shows of an exhibit."""
    first = exhibit.episodes[0]
    return {
        "title": f"{first['tag']} level {first['seed']}",
        "kind": exhibit.kind,
        "episodes": [_episode(record, symbols_of_tag.get(record["tag"], {})) for record in exhibit.episodes],
    }


def _episode(record: Record, symbols: Symbols) -> dict[str, Any]:
    actions, turns = counted(record["num_actions"], "action"), counted(len(record["turns"]), "turn")
    return {
        "title": record.get("title") or f"step {record['step']}",
        "tone": "good" if record["success"] else "bad",
        "ending": ENDINGS.get(record["ended_by"], record["ended_by"]),
        "summary": f"reward {record['reward'] + record['penalty']:+.2f} · {actions} in {turns}",
        "turns": [
            {
                "board": _board(turn["state_text"], symbols),
                "reply": reply_spans(turn["reply_text"]),
                "outcome": _outcome(turn),
            }
            for turn in record["turns"]
        ],
        "end": _board(record["final_text"], symbols) if record.get("final_text") else None,
    }


def _outcome(turn: Record) -> list[Span]:
    listed, valid, executed = turn["num_listed"], turn["num_valid"], len(turn["actions"])
    if not valid:
        spans = [Span("no valid action", "bad")]
    elif valid < listed:
        spans = [Span(f"{valid} of {listed} actions valid", "bad")]
    else:
        spans = [Span(counted(valid, "valid action"))]
    if executed < valid:
        spans.append(Span(f"{executed} executed"))
    if turn["num_effective"] < executed:
        spans.append(Span(f"{executed - turn['num_effective']} moved nothing"))
    if turn["stopped_by"] == "length":
        spans.append(Span("reply cut off", "bad"))
    spans.append(Span(f"reward {turn['reward']:+.2f}"))
    if turn["penalty"]:
        spans.append(Span(f"penalty {turn['penalty']:+.2f}", "bad"))
    return spans


def reply_spans(text: str) -> list[Span]:
    """The reply as it was written, with its think and answer blocks marked."""
    shown, num_hidden = text[:MAX_REPLY_CHARACTERS], len(text) - MAX_REPLY_CHARACTERS
    spans, position = [], 0
    for match in _BLOCKS.finditer(shown):
        opening, content, closing = match.groups()[:3] if match[1] else match.groups()[3:]
        look = "think" if match[1] else "answer"
        spans += [Span(shown[position : match.start()]), Span(content, look, opening, closing)]
        position = match.end()
    spans.append(Span(shown[position:]))
    if num_hidden > 0:
        spans += [Span(" "), Span(f"… and {num_hidden} more characters", "soft")]
    return spans


def _board(text: str, symbols: Symbols) -> dict[str, Any]:
    """An observation. If some lines consist of symbols, they are the board, and the whole text is shown on hover."""
    text = text if len(text) <= MAX_BOARD_CHARACTERS else f"{text[:MAX_BOARD_CHARACTERS]}…"
    lines = ["".join(line.split()) for line in text.split("\n")]
    rows = [line for line in lines if line and all(cell in symbols for cell in line)]
    drawn = [[Span(cell, css_class(symbols[cell])) for cell in row] for row in rows] if len(rows) > 1 else []
    return {"text": text, "rows": drawn}


def symbol_keys(symbols: Mapping[str, Symbols]) -> list[list[tuple[Span, str]]]:
    """What the characters of each kind of board stand for."""
    kinds = dict.fromkeys(tuple(known.items()) for known in symbols.values() if known)
    return [[(Span(cell, css_class(meaning)), meaning) for cell, meaning in kind] for kind in kinds]


def css_class(meaning: str) -> str:
    return "c-" + re.sub(r"[^a-z]+", "-", meaning.lower())
