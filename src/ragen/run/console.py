"""The live view of a run.

    with make_console(total_steps=120, logger_names=["console"], run_folder="checkpoints/ragen/test") as console:
        with console.phase("rollout", total=128):
            console.advance(16)                      # episodes that have ended
        console.validation(10, summary)              # `val-env/…` metrics, as soon as they are known
        console.episode(record, symbols)             # one that was just played, to watch
        console.step(10, metrics | summary)          # everything that was measured in the step
        console.stopped("low_validation_success", "below 1 % in 5 validations")      # where a rule ended the run
        console.close(["report: …"])                 # optional: the last lines

On a terminal it is a panel that stays in place, as wide as the terminal; in it an episode just played is shown,
turn by turn. Elsewhere (a pipe, a log file, a dumb terminal, or `trainer.logger` without `console`) it is exactly one
line a step, `step:10 - actor/entropy:0.4123 - …`, for people who grep: the metrics that people follow, or with
`trainer.console_metrics=all` all of them. The first and the last printed line name the run folder, in both. Errors go
to stderr, and so does a line now and then while a phase takes long; a rule that ends a run is not an error: its line
stands among the others.
"""

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from typing import Any, TextIO

from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ragen.format import compact, duration, harmless, percent, short, sparkline
from ragen.run.episode_view import EpisodeView
from ragen.run.filter_words import filter_words
from ragen.run.step_line import short_step_line, step_line
from ragen.run.validation_view import VALIDATION, ShownValidation, Summary, number
from ragen.terminal import Screen

REFRESH_PER_SECOND = 4
SILENCE = 20.0  # seconds after which a phase without a panel says how far it is
SPARK_STEPS = 200  # training steps that the small curve shows, at most
MAX_TAGS = 4
LABEL_WIDTH = 11
WIDE = 100  # columns from which the episode stands beside the numbers, not below them
BORDER = 4  # columns of the panel's frame
BETWEEN = " │ "
FILTER_LINES = ((115, 1), (60, 2), (42, 3), (-math.inf, 4))  # columns -> lines that what the filter did needs


def make_console(
    total_steps: int,
    logger_names: Collection[str],
    run_folder: str | PathLike[str],
    *,
    title: str = "",
    first_step: int = 0,
    all_metrics: bool = False,
    describe_filter: Callable[[Summary], str] = filter_words,
    screen: RichConsole | None = None,
) -> "PlainConsole | LiveConsole":
    """The view that suits where the output goes. `first_step`: steps that a resumed run already has behind it;
    `describe_filter` says in words what the filter did, from the metrics of a step."""
    screen = screen or Screen()
    if "console" in logger_names and screen.is_terminal and not screen.is_dumb_terminal:
        return LiveConsole(total_steps, str(run_folder), title, first_step, screen, describe_filter=describe_filter)
    return PlainConsole(str(run_folder), all_metrics=all_metrics)


class _Phase:
    """Counts, and says now and then how far it is."""

    def __init__(self, name: str, total: int | None):
        self.name, self.total, self.num_done = name, total, 0
        self.began = self.told = time.monotonic()

    def advance(self, num: int) -> str:
        """A line, if the last one was long ago; else nothing."""
        self.num_done += num
        now = time.monotonic()
        if self.total is None or now - self.told < SILENCE or self.num_done >= self.total:
            return ""
        self.told = now
        return f"{self.name}: {self.num_done} of {self.total}, {duration(now - self.began)}"


class PlainConsole:
    """One line a step; on stderr, a line now and then while a step takes long."""

    def __init__(self, run_folder: str, out: TextIO | None = None, all_metrics: bool = False):
        self._folder = run_folder
        self._line = step_line if all_metrics else short_step_line
        self._out = out
        self._last_line = f"run folder: {run_folder}"
        self._phases: list[_Phase] = []  # within each other

    def __enter__(self) -> "PlainConsole":
        self.note(f"run folder: {self._folder}")
        return self

    def __exit__(self, *exception: object) -> None:
        self.note(self._last_line)

    @contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[None]:
        self._phases.append(_Phase(name, total))
        try:
            yield
        finally:
            self._phases.pop()

    def advance(self, num: int = 1) -> None:
        if self._phases and (line := self._phases[-1].advance(num)):
            self.error(line)  # not among the lines of steps

    def validation(self, step: int, summary: Summary) -> None: ...  # its values are part of the step's metrics
    def episode(self, record: Mapping[str, Any], symbols: Mapping[str, str]) -> None: ...

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.note(self._line(step, metrics))

    def stopped(self, rule: str, explanation: str) -> None:
        self.note(stopped_line(rule, explanation))

    def note(self, text: str) -> None:
        print(harmless(text), file=self._out or sys.stdout, flush=True)

    def error(self, text: str) -> None:
        print(harmless(text), file=sys.stderr, flush=True)

    def close(self, last_lines: Iterable[str]) -> None:
        """What to print at the end, instead of the run folder."""
        self._last_line = "\n".join(last_lines)


class LiveConsole(PlainConsole):
    """A panel that stays in place, and a line above it for each validation and note."""

    def __init__(
        self,
        total_steps: int,
        run_folder: str,
        title: str,
        first_step: int,
        screen: RichConsole,
        clock: Callable[[], float] = time.monotonic,
        describe_filter: Callable[[Summary], str] = filter_words,
    ):
        super().__init__(run_folder)
        self._screen = screen
        self._title = title
        self._total = total_steps
        self._clock = clock
        self._describe_filter = describe_filter
        self._episode: EpisodeView | None = None
        self._episode_time = clock()
        self._first = self._step = first_step
        self._first_time = self._step_time = clock()
        self._phase: tuple[str, int | None] | None = None
        self._phase_done = 0
        self._metrics: dict[str, Any] = {}
        self._is_stopped = False  # by a rule
        self._is_over = False
        self._successes: deque[float] = deque(maxlen=SPARK_STEPS)
        self._validations: dict[str, ShownValidation] = {}
        self._live = Live(
            get_renderable=self.render,
            console=screen,
            refresh_per_second=REFRESH_PER_SECOND,
            # A redirected stderr must stay where its owner wants it.
            redirect_stderr=sys.stderr.isatty(),
        )

    def __enter__(self) -> "LiveConsole":
        self.note(f"run folder: {self._folder}")
        self._first_time = self._step_time = self._clock()
        self._live.start(refresh=True)
        return self

    def __exit__(self, *exception: object) -> None:
        self._phase, self._is_over = None, True
        self._live.stop()
        self.note(self._last_line)

    @contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[None]:
        before = self._phase, self._phase_done
        self._phase, self._phase_done = (name, total), 0
        try:
            yield
        finally:
            self._phase, self._phase_done = before

    def advance(self, num: int = 1) -> None:
        self._phase_done += num

    def validation(self, step: int, summary: Summary) -> None:
        tags = _tags(summary, VALIDATION)
        for tag in tags:
            now = ShownValidation(step, tag, summary)
            now.start = self._validations[tag].start if tag in self._validations else now.success
            self._validations[tag] = now
            self._screen.print(now.line(named=len(tags) > 1))

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._step, self._step_time = max(step, self._step), self._clock()
        if step <= self._first:
            self._first_time = self._step_time  # what came before the first step says nothing about the others
        self._metrics.update(metrics)
        success = _train_success(metrics)
        if success is not None and math.isfinite(success):
            self._successes.append(success)

    def episode(self, record: Mapping[str, Any], symbols: Mapping[str, str]) -> None:
        """Show this episode from its start."""
        self._episode, self._episode_time = EpisodeView(record, symbols), self._clock()

    def stopped(self, rule: str, explanation: str) -> None:
        """A rule has ended the run."""
        self._is_stopped = True
        self._screen.print(Text(stopped_line(rule, explanation), "bold red"), soft_wrap=True)

    def note(self, text: str) -> None:
        self._screen.print(Text(text), soft_wrap=True)

    # --- what is drawn ------------------------------------------------------------------------------------------

    def seconds_left(self) -> float | None:
        """From the mean time of the steps so far, validations among them."""
        done = self._step - self._first
        if done <= 0:
            return None
        per_step = (self._step_time - self._first_time) / done
        since = self._clock() - self._step_time
        return max(0.0, per_step * (self._total - self._step) - since)

    def render(self) -> Panel:
        width = self._screen.width
        inside, height = width - BORDER, self._screen.height - 3  # the frame, and the line of the cursor
        content = self._side_by_side(inside, height) if width >= WIDE else self._stacked(inside, height)
        title = Text(self._title, "bold") if self._title else None
        return Panel(content, title=title, title_align="left", width=width)

    def _stacked(self, inside: int, height: int) -> RenderableType:
        numbers = self._numbers(inside)
        episode = self._playing(inside, height - len(numbers) - 1)
        return Group(*numbers, *([Text("─" * inside, "bright_black"), *episode] if episode else []))

    def _side_by_side(self, inside: int, height: int) -> RenderableType:
        right = min(inside * 2 // 5, 90)
        left = inside - right - len(BETWEEN)
        numbers, episode = self._numbers(left), self._playing(right, height)
        if not episode:
            return Group(*self._numbers(inside))
        table = Table.grid(padding=0)
        for size in (left, len(BETWEEN), right):
            table.add_column(width=size, no_wrap=True)
        line = Text("\n".join([BETWEEN] * max(len(numbers), len(episode))), "bright_black")
        table.add_row(Group(*numbers), line, Group(*episode))
        return table

    def _numbers(self, inside: int) -> list[RenderableType]:
        """Each is one line, but for the two bars."""
        step, phase = self._bars(inside)
        return [
            step, phase, self._success(inside), *self._gauges(inside), *self._filter(inside), *self._health(inside)
        ]  # fmt: skip

    def _playing(self, width: int, height: int) -> list[Text]:
        if self._episode is None:
            return []
        seconds = None if self._is_over else self._clock() - self._episode_time
        return self._episode.lines(seconds, width, height)

    def _bars(self, inside: int) -> tuple[Table, Table]:
        left = self.seconds_left()
        if self._is_stopped:
            remaining = Text("stopped early", "bold red")
        elif self._step >= self._total:
            remaining = Text("done")
        else:
            remaining = Text("" if left is None else f"{duration(left)} left")
        bar = ProgressBar(total=max(1, self._total), completed=self._step)
        step = _bar_line(Text(f"step {self._step}/{self._total}", "bold"), bar, remaining, inside)
        name, total = self._phase or ("", None)
        count = "" if not name else f"{self._phase_done}/{total}" if total else "…"
        bar = ProgressBar(total=total, completed=self._phase_done, style="bar.back", complete_style="cyan")
        return step, _bar_line(Text(name, "cyan"), bar if name and total else Text(), Text(count, "dim"), inside)

    def _success(self, inside: int) -> Text:
        text = _label("success")
        if not self._successes:
            return text.append("no training step yet", "dim")
        text.append(f"{percent(self._successes[-1])}", "bold").append(" train  ", "dim")
        room = max(1, inside - len(text))
        return text.append(sparkline(list(self._successes)[-room:]), "cyan")

    def _gauges(self, inside: int) -> Iterator[Text]:
        shown, room = list(self._validations.values())[:MAX_TAGS], inside - LABEL_WIDTH
        for value in shown:
            name = value.tag if len(self._validations) > 1 else "validation"
            yield _label(name).append_text(value.text(room))
            yield _label("").append_text(value.gauge(max(10, room)))
            yield _label("").append_text(value.legend(room))
        if len(self._validations) > len(shown):
            yield _label("").append(f"and {len(self._validations) - len(shown)} more environments", "dim")

    def _filter(self, inside: int) -> list[Text]:
        """How many groups were worth an update, and why the others were not. Always as many lines as may be needed."""
        room = inside - LABEL_WIDTH
        words = Text(self._describe_filter(self._metrics))
        if words.plain.startswith(("kept none", "kept no ")):
            words.stylize("bold red", 0, len(words.plain.partition(";")[0]))
        num_lines = next(num for least, num in FILTER_LINES if room >= least)
        wrapped = list(words.wrap(self._screen, max(1, room)))
        if len(wrapped) > num_lines:
            wrapped = wrapped[:num_lines]
            wrapped[-1].truncate(room - 1)
            wrapped[-1].append("…")
        shown = [*wrapped, *[Text()] * (num_lines - len(wrapped))]
        return [_label("filter" if index == 0 else "").append_text(line) for index, line in enumerate(shown)]

    def _health(self, inside: int) -> Iterator[Text]:
        speed = number(self._metrics, "perf/tokens_per_s")
        shown = {"reward": "train/reward", "spread": "rollout/in_group_reward_std", "entropy": "actor/entropy"}
        cells = [(name, short(number(self._metrics, key))) for name, key in shown.items()]
        cells.append(("tokens/s", "–" if speed is None else compact(speed)))
        each = 2 if inside < 72 else 4
        for start in range(0, len(cells), each):
            text = _line()
            for name, value in cells[start : start + each]:
                text.append(f"{name:<{9 if len(text) else LABEL_WIDTH}}", "dim").append(f"{value:<9}")
            text.rstrip()
            yield text


# --- metrics ------------------------------------------------------------------------------------------------------


def _tags(metrics: Mapping[str, Any], prefix: str) -> list[str]:
    names = [key.removeprefix(prefix).rpartition("/") for key in metrics if key.startswith(prefix)]
    return list(dict.fromkeys(tag for tag, _, name in names if name == "success"))


def _train_success(metrics: Mapping[str, Any]) -> float | None:
    found = [number(metrics, f"train/{tag}/success") for tag in _tags(metrics, "train/")]
    values = [value for value in found if value is not None]
    return sum(values) / len(values) if values else None


# --- text ---------------------------------------------------------------------------------------------------------


def stopped_line(rule: str, explanation: str) -> str:
    return f"stopped early by the rule {rule}: {' '.join(explanation.split())}".removesuffix(": ")


def _bar_line(name: Text, bar: RenderableType, value: Text, width: int) -> Table:
    table = Table.grid(padding=(0, 1), expand=False)
    table.width = width
    table.add_column(no_wrap=True, min_width=LABEL_WIDTH - 1)
    table.add_column(ratio=1)
    table.add_column(justify="right", no_wrap=True)
    table.add_row(name, bar, value)
    return table


def _line() -> Text:
    """A line of the panel: what does not fit is cut, so that no panel grows by a line."""
    return Text(no_wrap=True, overflow="ellipsis")


def _label(name: str) -> Text:
    return _line().append(f"{name[: LABEL_WIDTH - 1]:<{LABEL_WIDTH}}", "dim")
