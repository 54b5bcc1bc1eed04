"""Evaluation: every model plays the same levels in every setting; what it did is measured, compared and written.

    result = evaluate(EvaluationPlan(wanted, settings(wanted)))
    result.status, result.path, result.report            # "finished", results/eval/val_rollouts_….jsonl, ….html

An episode is written to a journal as soon as it ends. After an interruption the same command plays only what is
missing. Randomness has no state, so the results are those of an evaluation that was not interrupted.
"""

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cache, partial
from pathlib import Path
from typing import Any

from ragen.agent.chat_template import ChatTemplate
from ragen.config import derive, devices
from ragen.config.schema import Config
from ragen.config.tree import to_dict
from ragen.engine.base import Engine, Prompt, Sampled
from ragen.env.baseline_budget import Baselines, baselines_within_budget
from ragen.env.failure import EnvironmentFailed, call, level
from ragen.errors import ConfigError, RunFailed
from ragen.evaluate import output as files
from ragen.evaluate.api import CharacterChat, ServerEngine
from ragen.evaluate.client import Budget, Client, ServerGone
from ragen.evaluate.metrics import Measured, Outcome, measure, outcome_of
from ragen.evaluate.models import LocalModel, Model, ServerModel, max_positions
from ragen.evaluate.setting import LENGTH, Setting, Wanted
from ragen.format import counted, harmless
from ragen.rollout.collect import FailedGroup, GroupRequest, PlayedEpisode, World
from ragen.run.progress import progress
from ragen.store import json_lines
from ragen.store.journal import EpisodeKey, Journal
from ragen.train import validation
from ragen.train.failures import draws_of, record_of
from ragen.train.levels import with_turns
from ragen.types import Episode, Group

NO_LIMIT = 1 << 60
FAILURES = ".failures.jsonl"
MAX_ROWS = 256  # episodes in flight, unless data.val_batch_size is set

Note = Callable[[str], None]


@dataclass(frozen=True)
class ServerOptions:
    concurrency: int = 16
    patience_s: float = 600.0
    timeout_s: float = 600.0
    max_requests: int | None = None
    max_tokens: int | None = None
    prefill: bool = True


@dataclass(frozen=True)
class EvaluationPlan:
    """What to play, and how to store it."""

    wanted: Wanted
    settings: Sequence[Setting]
    server: ServerOptions = field(default_factory=ServerOptions)
    token_ids: bool = False
    fresh: bool = False
    page: bool = True  # write the report page
    replaces: bool = False  # overwrite another evaluation with the same name
    keep_journal: bool = False  # later evaluations with the same output.dir do not play these episodes again


@dataclass(frozen=True)
class ModelResult:
    """One model in one environment within one limit of turns: a row of the table."""

    model: str
    tag: str
    max_turn: int
    outcomes: tuple[Outcome, ...]
    measured: Measured | None
    asked: Mapping[int, int]  # level -> episodes that were asked for
    failures: dict[str, int]  # reason -> episodes
    reached: Baselines
    notes: tuple[str, ...] = ()
    against: str = ""  # the model to compare with; by default the first one

    @property
    def num_asked(self) -> int:
        return sum(self.asked.values())

    @property
    def num_failed(self) -> int:
        return sum(self.failures.values())

    @property
    def num_left(self) -> int:
        """Episodes that were not started or not finished because the budget was spent."""
        return self.num_asked - len(self.outcomes) - self.num_failed

    @property
    def is_whole(self) -> bool:
        return len(self.outcomes) == self.num_asked


@dataclass(frozen=True)
class Evaluation:
    # `finished`, `failed` (some episodes could not be played), `environment_failed` (too many of them, because of the
    # environment) or `stopped` (the budget was spent)
    status: str
    rows: list[ModelResult]
    path: Path
    report: Path | None


def evaluate(plan: EvaluationPlan, note: Note | None = None, now: datetime | None = None) -> Evaluation:
    """Play everything, write the lines and the report. On `ConfigError` and `RunFailed` the journal stays."""
    from ragen.evaluate.report import write_report
    from ragen.model.load import find_model

    note = note or (lambda text: print(harmless(text), file=sys.stderr, flush=True))
    output = plan.settings[0].config.output
    files.check_keys(output)
    path = files.output_path(output, now or datetime.now())
    for text in [*files.notes_on(output), *(text for setting in plan.settings for text in setting.notes)]:
        note(f"note: {text}")
    if plan.token_ids and not output.keep_batch_keys:
        output = replace(output, keep_batch_keys=list(files.BATCH_KEYS))
    with devices.visible(plan.settings[0].config.system.CUDA_VISIBLE_DEVICES):
        games = [_Game(model, setting, plan) for model in plan.wanted.models for setting in plan.settings]
        for game in games:  # every model that has to play is found before the first one plays
            if isinstance(game.model, LocalModel) and (plan.fresh or game.missing):
                find_model(game.model.name)
        if plan.fresh:  # all at once: if the first model is interrupted, nothing old comes back for the others
            for game in games:
                with game.journal.opened(fresh=True):
                    pass
        if not output.append_timestamp:
            played = [[game.journal.setting for game in games], to_dict(output), plan.page]
            evaluation = hashlib.sha256(json.dumps(played, sort_keys=True).encode()).hexdigest()
            path = files.claimed(path, evaluation, plan.replaces)
        budget = Budget(plan.server.max_requests, plan.server.max_tokens)
        for model in plan.wanted.models:
            _play_model(model, [game for game in games if game.model is model], plan, budget, note)
    labels = {model.name: model.label for model in plan.wanted.models if isinstance(model, LocalModel)}
    rows = [row for game in games for row in game.rows(labels.get(game.model.compared_with or "", ""))]
    path = files.created(path) if output.append_timestamp else path
    records = [(record, isinstance(game.model, LocalModel)) for game in games for record in game.records]
    lines = (
        files.kept(record | {"custom_id": f"traj_{number}"}, output, has_ids)
        for number, (record, has_ids) in enumerate(records)
    )
    json_lines.write(path, lines)
    report = write_report(path, rows, [game.examples() for game in games], plan.settings) if plan.page else None
    if plan.replaces and report is None:  # no page of an evaluation whose lines were replaced
        for ending in files.ENDINGS[1:]:
            path.with_suffix(ending).unlink(missing_ok=True)
    is_whole = all(row.is_whole for row in rows)
    if is_whole and not plan.keep_journal:
        for game in games:
            game.journal.remove()
    _write_failures(path.with_suffix(FAILURES), [record for game in games for record in game.failure_records()], note)
    status = "finished" if is_whole else "stopped" if any(row.num_left for row in rows) else "failed"
    if any(game.is_past_share for game in games):
        status = "environment_failed"
    return Evaluation(status, rows, path, report)


def _write_failures(path: Path, records: Sequence[dict[str, Any]], note: Note) -> None:
    """The episodes that an environment did not let finish, with what was said."""
    if records:
        json_lines.write(path, records)
        note(f"failed episodes: {path}")
    else:
        path.unlink(missing_ok=True)  # of an evaluation that this one replaces


class _Game:
    """One model in one setting: the episodes to play, and those played."""

    def __init__(self, model: Model, setting: Setting, plan: EvaluationPlan):
        self.model, self.setting, self.split = model, setting, plan.wanted.split
        setting_of = identity(model, setting, self.split, plan.server)
        self.journal = Journal(setting.config.output.dir, setting_of, files.RECORD)
        self.requests: dict[EpisodeKey, GroupRequest] = {
            (request.tag, request.seed, request.group, member): request
            for request in requests(setting.config, self.split)
            for member in range(request.size)
        }
        self.failures: dict[EpisodeKey, str] = {}
        self.environment_failures: dict[EpisodeKey, FailedGroup] = {}  # those of them that are the environment's
        if self.journal.path.exists():
            with self.journal.opened():  # to read what was played
                pass

    @property
    def missing(self) -> list[EpisodeKey]:
        return [key for key in self.requests if key not in self.journal.records]

    @property
    def records(self) -> list[dict[str, Any]]:
        return [self.journal.records[key] for key in self.requests if key in self.journal.records]

    @property
    def worlds(self) -> dict[str, World]:
        """To read episodes with; the tokenizer of the model is not needed for that."""
        return _worlds(self.setting.config, CharacterChat())

    def rows(self, against: str) -> Iterator[ModelResult]:
        label, turns, config = self.model.label, self.setting.max_turn, self.setting.config
        for tag, world in self.worlds.items():
            records = [record for record in self.records if record["metadata"]["tag"] == tag]
            outcomes = tuple(map(outcome_of, records))
            failures = Counter(reason for key, reason in self.failures.items() if key[0] == tag)
            asked = Counter(request.seed for request in self.requests.values() if request.tag == tag)
            reached = baselines_within_budget(world.env, list(asked), self.split, derive.budget(config, tag))
            measured, notes = measure(outcomes, asked), server_notes(records)
            yield ModelResult(label, tag, turns, outcomes, measured, asked, failures, reached, notes, against)

    def examples(self) -> list[Episode]:
        """Up to two levels won and two lost."""
        won, lost = ([record for record in self.records if record["success"] is end] for end in (True, False))
        worlds, episodes = self.worlds, []
        for record in won[:2] + lost[:2]:
            tag, seed = record["metadata"]["tag"], record["metadata"]["seed"]
            world = worlds[tag]
            replay = partial(files.episode_of, record, world)
            with suppress(EnvironmentFailed):  # it was played once, and does not have to work again
                episodes.append(call(replay, level(tag, seed, self.split), world.time_limit, (ConfigError,)))
        return episodes

    def failure_records(self) -> list[dict[str, Any]]:
        kind, attempt = f"{self.model.label}, {self.setting.max_turn} turns", self.setting.config.es_manager.env_retries
        return [record_of(group, 0, kind, attempt, dropped=True) for group in self.environment_failures.values()]

    @property
    def is_past_share(self) -> bool:
        """Whether the environment failed so often that the numbers say little."""
        num, share = len(self.environment_failures), self.setting.config.es_manager.max_failed_share
        return num > share * len(self.requests) or 0 < num == len(self.requests)


def server_notes(records: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """What the server did not support in these episodes, which may come from several processes."""
    counts = Counter(note for record in records for note in record.get("notes", ()))
    return tuple(
        note if count == len(records) else f"{note} in {count} of {len(records)} episodes"
        for note, count in counts.items()
    )


def requests(config: Config, split: str) -> list[GroupRequest]:
    """The levels: those of the validations of a training run, in any split."""
    return [replace(request, split=split) for request in validation.requests(config)]


def identity(model: Model, setting: Setting, split: str, server: ServerOptions) -> dict[str, Any]:
    """Everything that decides what an episode is: the same command finds its journal by it, another one does not."""
    config = setting.config
    tags = list(dict.fromkeys(config.es_manager.val.env_configs.tags))
    return {
        "model": model.fingerprint(),
        "split": split,
        "seed": config.seed.val,
        "levels": to_dict(config.es_manager.val),
        "format_penalty": config.es_manager.format_penalty,
        "agent": to_dict(config.agent_proxy),
        "environments": {tag: to_dict(config.custom_envs[tag]) for tag in tags},
        "sampling": validation.validation_sampling(config).recorded(),
        "max_model_len": config.actor_rollout_ref.rollout.max_model_len,
        "prefill": server.prefill,
    }


@dataclass
class Player:
    """A model that is ready to play: an engine for a setting, and its chat template."""

    model: Model
    chat: Any
    engine: Callable[[Config], Engine | ServerEngine]
    max_positions: int | None = None  # tokens that the model was made for, if known
    notes: Callable[[], list[str]] = lambda: []


def local_player(model: LocalModel, note: Note = lambda text: None) -> Player:
    """The model in this process."""
    from ragen.engine.native.engine import NativeEngine
    from ragen.model.load import find_model, load_model

    source = find_model(model.name)
    note(f"loading {model.label}")
    loaded = load_model(source, merge=False)
    chat = ChatTemplate(loaded.tokenizer)

    def make(config: Config) -> NativeEngine:
        return NativeEngine(loaded.model, loaded.tokenizer, chat.end_of_turn_id, max_rows=max_rows(config))

    return Player(model, chat, make, max_positions(loaded.source.model_folder))


def _server_player(model: ServerModel, options: ServerOptions, budget: Budget, note: Note) -> Player:
    client = Client(model.base, model.key, options.patience_s, options.timeout_s, budget, note)
    engine = ServerEngine(client, model.name, NO_LIMIT, options.concurrency, options.prefill)

    def set_limit(config: Config) -> ServerEngine:
        """One engine for all settings: what the server refused once it refuses again."""
        rollout = config.actor_rollout_ref.rollout
        engine.max_prompt_tokens = rollout.max_model_len - rollout.response_length
        return engine

    def notes() -> list[str]:
        return [f"no {feature}" for feature in ([] if options.prefill else ["prefill"]) + engine.was_refused]

    return Player(model, CharacterChat(), set_limit, notes=notes)


def worlds_of(player: Player, config: Config) -> dict[str, World]:
    """Every environment of a setting, ready to be played."""
    worlds = _worlds(config, player.chat)
    if isinstance(player.model, LocalModel):
        return worlds
    # Characters are not tokens: only the server knows how long a prompt is.
    return {tag: replace(world, view=replace(world.view, max_prompt_tokens=NO_LIMIT)) for tag, world in worlds.items()}


def _worlds(config: Config, chat: Any) -> dict[str, World]:
    return {tag: World.make(config, tag, chat) for tag in dict.fromkeys(config.es_manager.val.env_configs.tags)}


def max_rows(config: Config) -> int:
    """Episodes in flight: `data.val_batch_size` counts levels, as in training, each with all its samples."""
    levels = config.data.val_batch_size
    return MAX_ROWS if levels is None else levels * config.es_manager.val.group_size


@dataclass(kw_only=True)
class EvaluatedEpisode(PlayedEpisode):
    """An episode that reports its end. A server's engine can count its tokens, cut it off or let it fail."""

    on_end: Callable[["EvaluatedEpisode"], None]
    has_ended: bool = False
    server_failure: str = ""
    num_tokens: list[int | None] = field(default_factory=list)

    def prompt(self) -> Prompt | None:
        prompt = super().prompt()
        if prompt is None and self.failure is None and not self.has_ended:
            self.has_ended = True
            self.on_end(self)
        return prompt

    def take(self, reply: Sampled) -> None:
        if len(self.num_tokens) == len(self.turns):  # not counted by a server
            self.num_tokens.append(len(reply.ids))
        super().take(reply)

    def count(self, num_tokens: int | None) -> None:
        self.num_tokens.append(num_tokens)

    def cut(self) -> None:
        self.episode = replace(self.episode, ended_by="max_length")
        self.prompt()

    def fail(self, reason: str) -> None:
        self.server_failure = reason


def _play_model(model: Model, games: Sequence[_Game], plan: EvaluationPlan, budget: Budget, note: Note) -> None:
    """One model in every setting. Its weights are freed when this returns: the next model may need the memory."""

    @cache
    def player() -> Player:
        if isinstance(model, ServerModel):
            return _server_player(model, plan.server, budget, note)
        return local_player(model, note)

    for game in games:
        with game.journal.opened():
            num_done = len(game.records)
            for text in game.journal.notes:
                note(f"note: {text}; its episodes are played again")
            if num_done:
                note(f"{model.label}: {num_done} episodes are already in the journal")
            if game.missing:  # otherwise the model is not loaded
                with _memory_explained(game.setting.config):
                    _play(game, player(), num_done, note)


def _play(game: _Game, player: Player, num_done: int, note: Note) -> None:
    config, label, missing = game.setting.config, game.model.label, game.missing
    length, limit = config.actor_rollout_ref.rollout.max_model_len, player.max_positions
    if limit is not None and length > limit:
        note(f"note: {label} was made for {limit} tokens, and a conversation may take {length}: replies may degrade")
    engine = player.engine(config)
    if isinstance(engine, ServerEngine):
        engine.has_played = num_done > 0
    with progress(f"{label}, {game.setting.max_turn} turns", len(game.requests), "episodes") as advance:
        advance(num_done)
        for attempt in range(config.es_manager.env_retries + 1):
            episodes = _episodes(game, player, missing, attempt)
            try:
                engine.run(episodes, validation.validation_sampling(config), advance)
            except ServerGone as error:  # what was finished is reported all the same
                note(str(error))
                for episode in episodes:
                    episode.fail(episode.server_failure or str(error))
            _take_failures(game, missing, episodes)
            missing = list(game.environment_failures)
            if not missing:
                return
    first = next(iter(game.environment_failures.values())).failure
    note(f"{label}: the environment failed in {counted(len(missing), 'episode')}, which are not scored: {first}")


def _take_failures(game: _Game, keys: Sequence[EpisodeKey], episodes: Sequence[EvaluatedEpisode]) -> None:
    """Which of these episodes failed. They replace what an earlier attempt said about them."""
    for key, episode in zip(keys, episodes, strict=True):
        game.failures.pop(key, None)
        game.environment_failures.pop(key, None)
        if key in game.journal.records:
            continue
        if episode.failure is not None:
            game.failures[key] = f"the environment failed ({episode.failure.reason})"
            game.environment_failures[key] = FailedGroup.of(episode, [episode])
        elif episode.server_failure:
            game.failures[key] = episode.server_failure


def _episodes(game: _Game, player: Player, keys: Sequence[EpisodeKey], attempt: int) -> list[EvaluatedEpisode]:
    """The episodes to play; each is written to the journal when it ends."""
    config, max_turn = game.setting.config, game.setting.max_turn
    sampling = validation.validation_sampling(config).recorded()
    meta_info = {"model": game.model.label, "max_turn": max_turn, "split": game.split, "sampling": sampling}

    def on_end(key: EpisodeKey, episode: EvaluatedEpisode) -> None:
        ended = episode.finished()
        with_turns([Group(ended.tag, ended.seed, ended.split, ended.group, (ended,))], config)  # refuses one without
        record = files.record_of(ended, episode.world, "", meta_info, episode.num_tokens)
        game.journal.append(key, record | {"notes": player.notes()})

    worlds, draws = worlds_of(player, config), draws_of(("val", config.seed.val), attempt)
    return [
        EvaluatedEpisode(worlds[key[0]], game.requests[key], key[-1], draws, on_end=partial(on_end, key))
        for key in keys
    ]


@contextmanager
def _memory_explained(config: Config) -> Iterator[None]:
    """Where memory runs out, say what to lower."""
    import torch

    from ragen.run.memory import OutOfMemory, explained

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        with explained(config, device, Path(config.output.dir)):
            yield
    except OutOfMemory as error:
        taken, levels = str(error).partition(". Keys to lower")[0], max_rows(config) // config.es_manager.val.group_size
        advice = [f"{LENGTH} (now {config.actor_rollout_ref.rollout.max_model_len}) limits the tokens of each episode"]
        if levels > 1:
            advice.insert(0, f"play fewer levels at a time, now up to {levels}: data.val_batch_size={levels // 2}")
        raise RunFailed(f"{taken}. Lower this: {'; '.join(advice)}") from error
