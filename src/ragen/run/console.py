"""The live view of a run.

    with make_console(total_steps=120, logger_names=["console"], run_folder="checkpoints/ragen/test") as console:
        with console.phase("rollout", total=128):
            console.advance(16)                      # episodes that have ended
        console.validation(10, summary)              # `val-env/…` metrics, as soon as they are known
        console.step(10, metrics | summary)          # everything that was measured in the step
        console.stopped("low_validation_success", "below 1 % in 5 validations")      # where a rule ended the run
        console.close(report=path)                   # optional: what the last line names

On a terminal it is a panel that stays in place. Elsewhere (a pipe, a log file, a dumb terminal, or `trainer.logger`
without `console`) it is exactly one line a step, `step:10 - actor/entropy:0.4123 - …`, for people who grep. The first
and the last printed line name the run folder, in both. Errors go to stderr; a rule that ends a run is not an error:
its line stands among the others.
"""

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
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
from ragen.run.sinks import numbers
from ragen.terminal import Screen

Summary = Mapping[str, Any]

VALIDATION = "val-env/"
REFRESH_PER_SECOND = 4
SPARK_STEPS = 60  # training steps that the small curve shows, at most
MAX_TAGS = 4
MAX_WIDTH = 100
LABEL_WIDTH = 11
FILTER_REASON = "rollout/filter_reason/"


def make_console(
    total_steps: int,
    logger_names: Collection[str],
    run_folder: str | PathLike[str],
    *,
    title: str = "",
    first_step: int = 0,
    screen: RichConsole | None = None,
) -> "PlainConsole | LiveConsole":
    """The view that suits where the output goes. `first_step`: steps that a resumed run already has behind it."""
    screen = screen or Screen()
    if "console" in logger_names and screen.is_terminal and not screen.is_dumb_terminal:
        return LiveConsole(total_steps, str(run_folder), title, first_step, screen)
    return PlainConsole(str(run_folder))


class PlainConsole:
    """One line a step."""

    def __init__(self, run_folder: str, out: TextIO | None = None):
        self._folder = run_folder
        self._out = out
        self._last_line = f"run folder: {run_folder}"

    def __enter__(self) -> "PlainConsole":
        self.note(f"run folder: {self._folder}")
        return self

    def __exit__(self, *exception: object) -> None:
        self.note(self._last_line)

    @contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[None]:
        yield

    def advance(self, num: int = 1) -> None: ...
    def validation(self, step: int, summary: Summary) -> None: ...  # its values are part of the step's metrics

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.note(step_line(step, metrics))

    def stopped(self, rule: str, explanation: str) -> None:
        self.note(stopped_line(rule, explanation))

    def note(self, text: str) -> None:
        print(harmless(text), file=self._out or sys.stdout, flush=True)

    def error(self, text: str) -> None:
        print(harmless(text), file=sys.stderr, flush=True)

    def close(self, report: str | PathLike[str] | None = None) -> None:
        """Name the report in the last line."""
        if report is not None:
            self._last_line = f"report: {report}"


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
    ):
        super().__init__(run_folder)
        self._screen = screen
        self._title = title
        self._total = total_steps
        self._clock = clock
        self._first = self._step = first_step
        self._first_time = self._step_time = clock()
        self._phase: tuple[str, int | None] | None = None
        self._phase_done = 0
        self._metrics: dict[str, Any] = {}
        self._is_stopped = False
        self._successes: deque[float] = deque(maxlen=SPARK_STEPS)
        self._validations: dict[str, _Validation] = {}
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
        self._phase = None
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
            now = _Validation(step, tag, summary)
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
        width = min(self._screen.width, MAX_WIDTH)
        inside = width - 4
        parts: list[RenderableType] = [
            self._bars(), Text(), self._success(inside), *self._gauges(inside), self._filter(), *self._health(inside)
        ]  # fmt: skip
        title = Text(self._title, "bold") if self._title else None
        return Panel(Group(*parts), title=title, title_align="left", width=width)

    def _bars(self) -> Table:
        table = Table.grid(padding=(0, 1), expand=True)
        table.add_column(no_wrap=True)
        table.add_column(ratio=1)
        table.add_column(justify="right", no_wrap=True)
        left = self.seconds_left()
        if self._is_stopped:
            remaining = Text("stopped early", "bold red")
        elif self._step >= self._total:
            remaining = Text("done")
        else:
            remaining = Text("" if left is None else f"{duration(left)} left")
        bar = ProgressBar(total=max(1, self._total), completed=self._step)
        table.add_row(Text(f"step {self._step}/{self._total}", "bold"), bar, remaining)
        name, total = self._phase or ("", None)
        count = "" if not name else f"{self._phase_done}/{total}" if total else "…"
        bar = ProgressBar(total=total, completed=self._phase_done, style="bar.back", complete_style="cyan")
        table.add_row(Text(name, "cyan"), bar if name and total else Text(), Text(count, "dim"))
        return table

    def _success(self, inside: int) -> Text:
        text = _label("success")
        if not self._successes:
            return text.append("no training step yet", "dim")
        text.append(f"{percent(self._successes[-1])}", "bold").append(" train  ", "dim")
        room = max(1, min(20, inside - len(text)))
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

    def _filter(self) -> Text:
        """How many groups were worth an update, and why the others were not."""
        values, text = self._metrics, _label("filter")
        kept, ratio = _number(values, "rollout/filter_kept_count"), _number(values, "rollout/filter_kept_ratio")
        if kept is not None:
            of = f"/{round(kept / ratio)}" if ratio else ""
            text.append(f"kept {kept:.0f}{of}", "bold red" if kept == 0 else "")
        else:
            text.append("kept –" if ratio is None else f"kept {percent(ratio)}")
        empty = _number(values, "rollout/consecutive_empty_after_filter_steps") or 0
        if empty > 1:
            text.append(f", empty for {empty:.0f} steps", "bold red")
        for count, reason in _dropped(values):
            text.append(f" · {count:.0f} {reason}", "dim")
        return text

    def _health(self, inside: int) -> Iterator[Text]:
        speed = _number(self._metrics, "perf/tokens_per_s")
        shown = {"reward": "train/reward", "spread": "rollout/in_group_reward_std", "entropy": "actor/entropy"}
        cells = [(name, short(_number(self._metrics, key))) for name, key in shown.items()]
        cells.append(("tokens/s", "–" if speed is None else compact(speed)))
        each = 2 if inside < 72 else 4
        for start in range(0, len(cells), each):
            text = _line()
            for name, value in cells[start : start + each]:
                text.append(f"{name:<{9 if len(text) else LABEL_WIDTH}}", "dim").append(f"{value:<9}")
            text.rstrip()
            yield text


class _Validation:
    """The last validation of one environment."""

    def __init__(self, step: int, tag: str, summary: Summary):
        def read(name: str) -> float | None:
            return _number(summary, f"{VALIDATION}{tag}/{name}")

        self.step, self.tag = step, tag
        self.success = read("success")
        self.low, self.high = read("success_low"), read("success_high")
        self.greedy = read("greedy_success")
        self.random, self.optimal = read("random"), read("optimal")
        self.start: float | None = None  # the success of the first validation

    def interval(self) -> str:
        if self.low is None or self.high is None:
            return ""
        return f" [{100 * self.low:.1f}, {100 * self.high:.1f}]"

    def text(self, room: int) -> Text:
        text = Text(percent(self.success), "bold green").append(self.interval())
        step = f" step {self.step}"
        return text.append(step if len(text) + len(step) <= room else f" @{self.step}", "dim")

    def legend(self, room: int) -> Text:
        full, brief = Text(style="dim"), Text(style="dim")
        for symbol, name, value in (("r", "random", self.random), ("o", "optimal", self.optimal)):
            if value is not None:
                full.append(symbol, "bold yellow").append(f" {name} {percent(value)}  ")
                brief.append(symbol, "bold yellow").append(f" {percent(value)}  ")
        full.rstrip()
        brief.rstrip()
        return full if len(full) <= room else brief

    def gauge(self, width: int) -> Text:
        """Success on a line from 0 to 100 %: ● now, ━ its interval, ○ at the start, r random and o optimal play."""
        cells: list[tuple[str, str]] = [("─", "bright_black")] * width

        def place(value: float | None) -> int | None:
            return None if value is None or not math.isfinite(value) else round(min(1.0, max(0.0, value)) * (width - 1))

        low, high = place(self.low), place(self.high)
        if low is not None and high is not None:
            cells[low : high + 1] = [("━", "green")] * (high + 1 - low)
        marks = (
            (self.random, "r", "bold yellow"),
            (self.optimal, "o", "bold yellow"),
            (self.start, "○", "green"),
            (self.success, "●", "bold green"),
        )
        for value, symbol, style in marks:
            position = place(value)
            if position is not None:
                cells[position] = (symbol, style)
        return Text.assemble(*cells)

    def line(self, named: bool) -> Text:
        """What stays in the scroll-back."""
        text = Text(f"step {self.step:>4}  ", "dim").append(f"{self.tag if named else 'validation'} ", "not dim")
        text.append(percent(self.success), "not dim bold").append(self.interval())
        if self.greedy is not None:
            text.append(f"  greedy {percent(self.greedy)}", "dim")
        return text


# --- metrics ------------------------------------------------------------------------------------------------------


def step_line(step: int, metrics: Mapping[str, Any]) -> str:
    """`step:10 - actor/entropy:0.4123 - …`: numbers only, one line, whatever a metric is called."""
    return " - ".join([f"step:{step}", *(f"{key}:{short(value)}" for key, value in numbers(metrics).items())])


def _tags(metrics: Mapping[str, Any], prefix: str) -> list[str]:
    names = [key.removeprefix(prefix).rpartition("/") for key in metrics if key.startswith(prefix)]
    return list(dict.fromkeys(tag for tag, _, name in names if name == "success"))


def _train_success(metrics: Mapping[str, Any]) -> float | None:
    found = [_number(metrics, f"train/{tag}/success") for tag in _tags(metrics, "train/")]
    values = [value for value in found if value is not None]
    return sum(values) / len(values) if values else None


def _number(metrics: Mapping[str, Any], key: str) -> float | None:
    value = metrics.get(key)
    return None if value is None else float(value)


def _dropped(metrics: Mapping[str, Any]) -> list[tuple[float, str]]:
    """Why groups were dropped, and how many for each reason, the most frequent first."""
    counts = [(_number(metrics, key) or 0, key.removeprefix(FILTER_REASON)) for key in metrics if FILTER_REASON in key]
    reasons = [(count, name.replace("_", " ")) for count, name in counts if count and name != "kept"]
    return sorted(reasons, key=lambda reason: -reason[0])


# --- text ---------------------------------------------------------------------------------------------------------


def stopped_line(rule: str, explanation: str) -> str:
    return f"stopped early by the rule {rule}: {' '.join(explanation.split())}".removesuffix(": ")


def _line() -> Text:
    """A line of the panel: what does not fit is cut, so that no panel grows by a line."""
    return Text(no_wrap=True, overflow="ellipsis")


def _label(name: str) -> Text:
    return _line().append(f"{name[: LABEL_WIDTH - 1]:<{LABEL_WIDTH}}", "dim")
