"""An episode as the live panel shows it: board and reply of one turn after the other, then how it ended.

    view = EpisodeView(record, env.symbols())              # a record of `store.episodes.episode_record`
    view.lines(seconds=3.2, width=56, height=9)            # what to draw that long after the episode was chosen
    view.lines(None, width=56, height=9)                   # its end

The reply stands beside a small board and below a wide one. All text from environment and model is made harmless.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from ragen.board import board_rows, coloured
from ragen.format import harmless
from ragen.report.replay import ENDINGS, reply_spans

SECONDS_A_SCENE = 1.5
LAST_SCENES = 2  # how many scenes long the end is shown
LEAST_REPLY_WIDTH = 22
REPLY_LINES = 5
LEAST_HEIGHT = 6  # a heading, and something to see
GAP = 3
LOOKS = {"think": "italic dim", "answer": "bold", "soft": "dim", "": ""}
_WRAPPER = Console(width=80, no_color=True)


@dataclass(frozen=True)
class Scene:
    heading: str
    board: str
    reply: Text


class EpisodeView:
    def __init__(self, record: Mapping[str, Any], symbols: Mapping[str, str]):
        self.symbols = symbols
        self.scenes = list(_scenes(record))
        self._drawn: dict[tuple[int, int], list[list[Text]]] = {}

    def lines(self, seconds: float | None, width: int, height: int) -> list[Text]:
        """At most `height` lines of at most `width` cells; the same number at any time. Empty if there is no room."""
        if height < LEAST_HEIGHT or width < LEAST_REPLY_WIDTH:
            return []
        if (width, height) not in self._drawn:
            drawn = [self._draw(scene, width, height) for scene in self.scenes]
            tallest = max(map(len, drawn))
            self._drawn = {(width, height): [[*lines, *[Text()] * (tallest - len(lines))] for lines in drawn]}
        drawn = self._drawn[width, height]
        if seconds is None:
            return drawn[-1]
        index = int(seconds / SECONDS_A_SCENE) % (len(drawn) + LAST_SCENES - 1)
        return drawn[min(index, len(drawn) - 1)]

    def _draw(self, scene: Scene, width: int, height: int) -> list[Text]:
        rows = [coloured(line, self.symbols) for line in board_rows(scene.board, self.symbols)]
        board_width, height = max(map(_width, rows)), height - 1
        room = width - board_width - GAP
        if room >= LEAST_REPLY_WIDTH:
            reply = _tail(scene.reply, room, min(height, max(REPLY_LINES, len(rows))))
            body = list(_beside(_head(rows, height), reply, board_width + GAP))
        else:
            reply = _tail(scene.reply, width, min(REPLY_LINES, height // 2))
            wrapped = [line for row in rows for line in row.wrap(_WRAPPER, width)]
            body = [*_head(wrapped, height - len(reply)), *reply]
        lines = [Text(scene.heading, "dim"), *body]
        for line in lines:
            line.truncate(width, overflow="ellipsis")
        return lines


def _scenes(record: Mapping[str, Any]) -> Iterator[Scene]:
    turns = record["turns"]
    where = f"step {record['step']} · {_shown(record['tag'])} level {record['seed']}"
    for number, turn in enumerate(turns, start=1):
        reply = _reply(turn["reply_text"])
        if not turn["num_valid"]:
            reply.append("\nno valid action", "bold red")
        yield Scene(f"turn {number} of {len(turns)} · {where}", _shown(turn["state_text"]), reply)
    won = record["success"]
    ending = Text(ENDINGS.get(record["ended_by"], _shown(record["ended_by"])), "bold green" if won else "bold red")
    ending.append(f"\nreward {record['reward'] + record['penalty']:+.2f}", "not bold default")
    board = record.get("final_text") or (turns[-1]["state_text"] if turns else "")
    yield Scene(f"end · {where}", _shown(board), ending)


def _reply(text: str) -> Text:
    """Thought and answer without their tags; what is in neither as it was written."""
    parts = [(_shown(span.text).strip(), span.look) for span in reply_spans(text)]
    written = [Text(f"→ {words}" if look == "answer" else words, LOOKS[look]) for words, look in parts if words]
    return Text("\n").join(written)


def _shown(text: str) -> str:
    return harmless(str(text)).expandtabs(4)


def _width(line: Text) -> int:
    return cell_len(line.plain)


def _head(lines: list[Text], num: int) -> list[Text]:
    return lines if len(lines) <= num else [*lines[: num - 1], Text("…", "dim")]


def _tail(text: Text, width: int, num: int) -> list[Text]:
    """The end of a long reply: that is where its answer is."""
    lines = list(text.wrap(_WRAPPER, width))
    return lines if len(lines) <= num else [Text("…", "dim"), *lines[len(lines) - num + 1 :]]


def _beside(left: list[Text], right: list[Text], column: int) -> Iterator[Text]:
    for index in range(max(len(left), len(right))):
        line = left[index].copy() if index < len(left) else Text()
        if index < len(right):
            line.append(" " * (column - _width(line))).append_text(right[index])
        yield line
