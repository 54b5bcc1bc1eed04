"""Single entry point for logging: the console, the run folder, W&B and TensorBoard.

    with run_logger(config, decision) as log:
        with log.phase("rollout", total=128):
            log.advance(16)
        log.step(10, metrics)
        report = log.ended("finished", step=10)

Of several workers only the first logs; the others have a `NullLogger`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any

from ragen.config.schema import Config
from ragen.diagnose.health import Health
from ragen.env.registry import make
from ragen.report.run_report import write_report
from ragen.report.verdict import read_verdict
from ragen.run.console import PlainConsole, make_console
from ragen.run.filter_words import filter_words
from ragen.run.next_steps import last_lines
from ragen.run.sinks import Sink, make_sinks
from ragen.store import json_lines
from ragen.store.episodes import episode_record
from ragen.store.fsync import write_whole
from ragen.store.resume import Decision
from ragen.store.run_folder import RunFolder, ending
from ragen.types import Group

GROUP_TABLE = "group_rv_table.jsonl"
GRADIENT_TABLE = "grad_group_rv_table.jsonl"
RESUMABLE = ("interrupted", "preempted", "environment_failed")  # how a run stops that the same command resumes


class NullLogger:
    """Shows and stores nothing."""

    def phase(self, name: str, total: int | None = None) -> AbstractContextManager[None]:
        return nullcontext()

    def advance(self, num: int = 1) -> None: ...
    def note(self, text: str) -> None: ...
    def error(self, text: str) -> None: ...
    def step(self, step: int, metrics: dict[str, float]) -> None: ...
    def validation(self, step: int, metrics: dict[str, float]) -> None: ...
    def episodes(self, step: int, split: str, groups: Sequence[Group]) -> None: ...
    def failures(self, records: Sequence[dict[str, Any]]) -> None: ...
    def group_table(self, step: int, rows: Sequence[tuple[int, float, bool]]) -> None: ...
    def gradient_table(self, step: int, rows: Sequence[dict[str, Any]]) -> None: ...
    def ended(self, status: str, step: int, rule: str | None = None, explanation: str = "") -> Path | None: ...


class RunLogger(NullLogger):
    def __init__(self, config: Config, folder: RunFolder, console: PlainConsole, sinks: Sequence[Sink]):
        self.config, self.folder, self.console, self.sinks = config, folder, console, sinks
        self.health = Health.of(folder.read_metrics().rows)  # a resumed run has a past
        self.status = "failed"  # until something better is known

    def phase(self, name: str, total: int | None = None) -> AbstractContextManager[None]:
        return self.console.phase(name, total)

    def advance(self, num: int = 1) -> None:
        self.console.advance(num)

    def note(self, text: str) -> None:
        self.console.note(text)

    def error(self, text: str) -> None:
        self.console.error(text)

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """On disk first: what the console shows is already stored."""
        warnings = self.health.add(step, metrics)
        if self.health.last_step == step:
            metrics = metrics | self.health.metrics()
        self.folder.append_metrics(step, metrics)
        self.console.step(step, metrics)
        for warning in warnings:
            self.console.note(f"step {step}: warning: {warning.title}: {warning.text}. {warning.advice[0]}")
        for sink in self.sinks:
            sink.log(step, metrics)

    def validation(self, step: int, metrics: dict[str, float]) -> None:
        self.console.validation(step, metrics)

    def episodes(self, step: int, split: str, groups: Sequence[Group]) -> None:
        """Into the run folder and, if the config names one, into a second directory as plain JSON lines."""
        self.folder.write_episodes(step, split, groups)
        played = [group.episodes[0] for group in groups if group.episodes]
        if split in ("train", "val") and played:
            shown = played[step % len(played)]  # another one at each step, good or bad
            self.console.episode(episode_record(shown, step), self._symbols(shown.tag))
        trainer = self.config.trainer
        elsewhere = {"train": trainer.rollout_data_dir, "val": trainer.validation_data_dir}.get(split)
        if elsewhere:
            records = [episode_record(episode, step) for group in groups for episode in group.episodes]
            text = "".join(f"{json.dumps(record)}\n" for record in records)
            write_whole(Path(elsewhere) / f"{step}.jsonl", text.encode())

    @cache  # noqa: B019 a run has one logger
    def _symbols(self, tag: str) -> Mapping[str, str]:
        """What the characters of a board stand for."""
        return make(self.config.custom_envs[tag]).symbols()

    def failures(self, records: Sequence[dict[str, Any]]) -> None:
        """Groups that an environment did not let finish."""
        json_lines.append(self.folder.failures_path, *records)

    def group_table(self, step: int, rows: Sequence[tuple[int, float, bool]]) -> None:
        """The spread of each group. In W&B it is one table that grows."""
        records = [{"step": step, "group_id": group, "reward_std": std, "selected": kept} for group, std, kept in rows]
        path = self.folder.append_table(GROUP_TABLE, records)
        if self.sinks:
            self._pass_on(step, "rollout/group_rv_table", json_lines.read(path).records)

    def gradient_table(self, step: int, rows: Sequence[dict[str, Any]]) -> None:
        """Which groups a gradient analysis found in which bucket."""
        self.folder.append_table(GRADIENT_TABLE, ({"step": step} | row for row in rows))
        for prefix, bucket in dict.fromkeys((row["prefix"], row["bucket"]) for row in rows):
            found = [row for row in rows if (row["prefix"], row["bucket"]) == (prefix, bucket)]
            table = [{key: row[key] for key in ("bucket", "group_id", "reward_std")} for row in found]
            self._pass_on(step, f"{prefix}/{bucket}/group_rv_table", table)

    def _pass_on(self, step: int, name: str, table: Sequence[dict[str, Any]]) -> None:
        for sink in self.sinks:
            sink.table(step, name, table)

    def ended(self, status: str, step: int, rule: str | None = None, explanation: str = "") -> Path | None:
        """Write the report and how the run ended. One that can be resumed has not ended."""
        self.status = status
        if rule is not None:
            self.console.stopped(rule, explanation)
        if status in RESUMABLE:
            report = write_report(self.folder)
        else:
            report = write_report(self.folder, ending(status, step, rule, explanation))
            self.folder.write_finished(status, step, rule, explanation)  # last: a run killed before this line resumes
        self.console.note(f"verdict: {read_verdict(self.folder).health.headline}")
        self.console.close(last_lines(self.config, self.folder.path, report))
        return report


@contextmanager
def run_logger(config: Config, decision: Decision) -> Iterator[RunLogger]:
    """The logger of a run in a folder that this process owns."""
    folder, total = decision.folder, config.trainer.total_training_steps
    title = f"{config.trainer.experiment_name} · {config.model_path}"
    first = decision.first_step - 1
    options: dict[str, Any] = {"all_metrics": config.trainer.console_metrics == "all"}
    if config.rl_or_sft == "rl":
        rollout = config.actor_rollout_ref.rollout
        options["describe_filter"] = partial(
            filter_words, metric=rollout.rollout_filter_metric, largest=rollout.rollout_filter_type == "largest"
        )
    with make_console(total, config.trainer.logger, folder.path, title=title, first_step=first, **options) as console:
        folder.write_config(config)
        for name in (GROUP_TABLE, GRADIENT_TABLE):
            json_lines.rewind(folder.path / name, lambda record: record["step"] <= first)
        logger = RunLogger(config, folder, console, make_sinks(config, folder, first_step=first, say=console.note))
        try:
            yield logger
        finally:
            for sink in logger.sinks:
                sink.close(logger.status)
