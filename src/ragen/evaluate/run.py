"""Evaluation: every model plays the same levels, in every setting; what it did is measured, compared and written.

    result = evaluate(Plan(wanted, settings(wanted)))
    result.status, result.path, result.report            # "finished", results/eval/val_rollouts_….jsonl, ….html

An episode is written to a journal as soon as it ends. The same command, after an interruption, plays only what is
missing; randomness has no state, so that nothing shows of where it stopped.
"""

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from ragen.agent.template import ChatTemplate
from ragen.config import derive, devices
from ragen.config.schema import Config
from ragen.config.tree import to_dict
from ragen.engine.base import Engine, Prompt, Sampled
from ragen.env.baseline_budget import Baselines as Reached
from ragen.env.baseline_budget import baselines_within_budget as reach
from ragen.errors import RunFailed
from ragen.evaluate import output as files
from ragen.evaluate.api import CharacterChat, ServerEngine
from ragen.evaluate.client import Budget, Client, ServerGone
from ragen.evaluate.metrics import Measured, Outcome, measure, outcome_of
from ragen.evaluate.models import LocalModel, Model, ServerModel, max_positions
from ragen.evaluate.progress import Progress
from ragen.evaluate.setting import LENGTH, Setting, Wanted
from ragen.rollout.collect import GroupRequest, PlayedEpisode, World
from ragen.store.journal import Journal, Place
from ragen.train.levels import tags_of_groups, with_turns
from ragen.train.validation import validation_sampling
from ragen.types import Episode, Group

NO_LIMIT = 1 << 60
MAX_ROWS = 256  # episodes in flight, where data.val_batch_size does not say


@dataclass(frozen=True)
class ServerOptions:
    concurrency: int = 16
    patience_s: float = 600.0
    timeout_s: float = 600.0
    max_requests: int | None = None
    max_tokens: int | None = None
    prefill: bool = True


@dataclass(frozen=True)
class Plan:
    """What is to be done."""

    wanted: Wanted
    settings: Sequence[Setting]
    server: ServerOptions = field(default_factory=ServerOptions)
    token_ids: bool = False
    fresh: bool = False
    page: bool = True  # write the report page
    replaces: bool = False  # another evaluation under the same name is written over
    keep_journal: bool = False  # what was played is not played again by another evaluation with the same output.dir


@dataclass(frozen=True)
class Row:
    """One model in one environment within one limit of turns."""

    model: str
    tag: str
    max_turn: int
    outcomes: tuple[Outcome, ...]
    measured: Measured | None
    asked: Mapping[int, int]  # level -> episodes that there should be
    failures: dict[str, int]  # reason -> episodes
    reached: Reached
    notes: tuple[str, ...] = ()
    against: str = ""  # the model that it is compared with; without it the first one

    @property
    def num_asked(self) -> int:
        return sum(self.asked.values())

    @property
    def num_failed(self) -> int:
        return sum(self.failures.values())

    @property
    def num_left(self) -> int:
        """Episodes that were never begun or finished: the budget was spent."""
        return self.num_asked - len(self.outcomes) - self.num_failed

    @property
    def is_whole(self) -> bool:
        return len(self.outcomes) == self.num_asked


@dataclass(frozen=True)
class Evaluation:
    status: str  # `finished`, `failed` with episodes that could not be played, or `stopped` by the budget
    rows: list[Row]
    path: Path
    report: Path | None


def evaluate(plan: Plan, note: Callable[[str], None] | None = None, now: datetime | None = None) -> Evaluation:
    """Play everything, write the lines and the report. Raises `ConfigError` and `RunFailed`; the journal stays."""
    from ragen.evaluate.table import write_report

    note = note or (lambda text: print(text, file=sys.stderr, flush=True))
    config = plan.settings[0].config
    files.check_keys(config.output)
    path = files.output_path(config.output, now or datetime.now())
    for text in [*files.notes_on(config.output), *(text for setting in plan.settings for text in setting.notes)]:
        note(f"note: {text}")
    settings = [_with_token_ids(setting, plan.token_ids) for setting in plan.settings]
    played: list[_Played] = []
    budget = Budget(plan.server.max_requests, plan.server.max_tokens)
    with devices.visible(config.system.CUDA_VISIBLE_DEVICES):
        _find_all(settings, plan)
        if plan.fresh:
            _forget(settings, plan)
        if not config.output.append_timestamp:
            path = files.claimed(path, _evaluation(settings, plan), plan.replaces)
        for model in plan.wanted.models:
            played += _play_all(model, settings, plan, budget, note)
    labels = {model.name: model.label for model in plan.wanted.models if isinstance(model, LocalModel)}
    against = {model.label: labels.get(model.compared_with, "") for model in plan.wanted.models}
    rows = [replace(row, against=against[row.model]) for item in played for row in item.rows]
    path = files.created(path) if config.output.append_timestamp else path
    files.write_lines(path, _numbered(played, settings[0].config.output))
    report = write_report(path, rows, [item.examples for item in played], settings) if plan.page else None
    if plan.replaces and report is None:
        files.remove_report(path)
    is_whole = all(row.is_whole for row in rows)
    if is_whole and not plan.keep_journal:
        for item in played:
            item.journal.remove()
    status = "finished" if is_whole else "stopped" if any(row.num_left for row in rows) else "failed"
    return Evaluation(status, rows, path, report)


def _play_all(
    model: Model, settings: Sequence[Setting], plan: Plan, budget: Budget, note: Callable[[str], None]
) -> list["_Played"]:
    """One model in every setting. Its weights are gone when this returns: the next one may need the room."""
    if isinstance(model, ServerModel):
        player = _server_player(model, plan.server, budget, note)
        return [_play(player, setting, plan, note) for setting in settings]
    if _is_all_played(model, settings, plan):
        player = Player(model, CharacterChat(), _no_engine, has_ids=True)
        return [_play(player, setting, plan, note) for setting in settings]
    with _memory_explained(settings[0].config):
        player = local_player(model, note)
        return [_play(player, setting, plan, note) for setting in settings]


def _find_all(settings: Sequence[Setting], plan: Plan) -> None:
    """Every model is found before the first one plays."""
    from ragen.model.load import find_model

    for model in plan.wanted.models:
        if isinstance(model, LocalModel) and (plan.fresh or not _is_all_played(model, settings, plan)):
            find_model(model.name)


def _forget(settings: Sequence[Setting], plan: Plan) -> None:
    """All at once: if the first model is interrupted, nothing older comes back for the others."""
    for model in plan.wanted.models:
        for setting in settings:
            with _journal(model, setting, plan).opened(fresh=True):
                pass


def _is_all_played(model: Model, settings: Sequence[Setting], plan: Plan) -> bool:
    """Whether the model need not be loaded."""
    return all(_is_played(model, setting, plan) for setting in settings)


def _is_played(model: Model, setting: Setting, plan: Plan) -> bool:
    """Whether the journal holds every episode."""
    journal = _journal(model, setting, plan)
    if not journal.path.exists():
        return False
    with journal.opened():
        return all(
            (request.tag, request.seed, request.group, member) in journal.records
            for request in requests(setting.config, plan.wanted.split)
            for member in range(request.size)
        )


def _no_engine(config: Config) -> Engine:
    raise AssertionError("everything was in the journal, and nothing is left to play")


@contextmanager
def _memory_explained(config: Config) -> Iterator[None]:
    """What does not fit into memory ends with what to lower."""
    import torch

    from ragen.run.memory import OutOfMemory, explained

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        with explained(config, device, Path(config.output.dir)):
            yield
    except OutOfMemory as error:
        taken, levels = str(error).partition(". Keys to lower")[0], max_rows(config) // config.es_manager.val.group_size
        fewer = (
            f"play fewer levels at a time, now up to {levels}: data.val_batch_size={levels // 2}" if levels > 1 else ""
        )
        length = f"{LENGTH} (now {config.actor_rollout_ref.rollout.max_model_len}) is what each of them may take"
        raise RunFailed(f"{taken}. Lower this: {'; '.join(filter(None, [fewer, length]))}") from error


def max_rows(config: Config) -> int:
    """Episodes in flight: `data.val_batch_size` counts levels, here as in training, each with all its samples."""
    levels = config.data.val_batch_size
    return MAX_ROWS if levels is None else levels * config.es_manager.val.group_size


def _with_token_ids(setting: Setting, wanted: bool) -> Setting:
    if not wanted or setting.config.output.keep_batch_keys:
        return setting
    output = replace(setting.config.output, keep_batch_keys=list(files.BATCH_KEYS))
    return replace(setting, config=replace(setting.config, output=output))


def _numbered(played: Sequence["_Played"], output: Any) -> Iterator[dict[str, Any]]:
    records = [(record, item.has_ids) for item in played for record in item.records]
    for number, (record, has_ids) in enumerate(records):
        yield files.kept(record | {"custom_id": f"traj_{number}"}, output, has_ids)


# --- who plays ----------------------------------------------------------------------------------------------------


@dataclass
class Player:
    """A model made ready: an engine for a setting, and how its conversations are put into tokens."""

    model: Model
    chat: Any
    engine: Callable[[Config], Engine]
    has_ids: bool
    max_positions: int | None = None  # tokens that the model was made for, where that is known
    notes: Callable[[], list[str]] = lambda: []


def local_player(model: LocalModel, note: Callable[[str], None] = lambda text: None) -> Player:
    """The model in this process."""
    from ragen.engine.native.engine import NativeEngine
    from ragen.model.load import find_model, load_model

    source = find_model(model.name)
    note(f"loading {model.label}")
    loaded = load_model(source, merge=False)
    chat = ChatTemplate(loaded.tokenizer)

    def make(config: Config) -> NativeEngine:
        return NativeEngine(loaded.model, loaded.tokenizer, chat.end_of_turn_id, max_rows=max_rows(config))

    return Player(model, chat, make, has_ids=True, max_positions=max_positions(loaded.source.model_folder))


def _server_player(model: ServerModel, options: ServerOptions, budget: Budget, note: Callable[[str], None]) -> Player:
    client = Client(model.base, model.key, options.patience_s, options.timeout_s, budget, note)
    engines: list[ServerEngine] = []

    def make(config: Config) -> ServerEngine:
        rollout = config.actor_rollout_ref.rollout
        limit = rollout.max_model_len - rollout.response_length
        before = engines[-1] if engines else None
        engine = ServerEngine(client, model.name, limit, options.concurrency, options.prefill)
        if before is not None:  # what the server refused once it refuses again
            engine.learn_from(before)
        engines.append(engine)
        return engine

    def notes() -> list[str]:
        refused = dict.fromkeys(word for engine in engines for word in engine.was_refused)
        told = [f"no {word}" for word in refused]
        return told if options.prefill else ["no prefill", *told]

    return Player(model, CharacterChat(), make, has_ids=False, notes=notes)


# --- playing ------------------------------------------------------------------------------------------------------


class EvaluatedEpisode(PlayedEpisode):
    """An episode that tells when it has ended, and that may fail."""

    def __init__(self, world: World, request: GroupRequest, member: int, draws: tuple, on_end: Callable[..., None]):
        super().__init__(world, request, member, draws)
        self.on_end, self.has_told = on_end, False
        self.failure = ""
        self.num_tokens: list[int | None] = []

    @property
    def place(self) -> Place:
        return (self.request.tag, self.request.seed, self.request.group, self.member)

    def prompt(self) -> Prompt | None:
        prompt = super().prompt()
        if prompt is None and not self.has_told:
            self.has_told = True
            self.on_end(self)
        return prompt

    def take(self, reply: Sampled) -> None:
        if len(self.num_tokens) == len(self.turns):  # no server has counted
            self.num_tokens.append(len(reply.ids))
        super().take(reply)

    # --- what a server's engine says besides ---------------------------------------------------------------------

    def count(self, num_tokens: int | None) -> None:
        self.num_tokens.append(num_tokens)

    def cut(self) -> None:
        self.episode = replace(self.episode, ended_by="max_length")
        self.prompt()

    def fail(self, reason: str) -> None:
        self.failure = reason


@dataclass
class _Played:
    """What one model did in one setting."""

    rows: list[Row]
    records: list[dict[str, Any]]
    examples: list[Episode]
    journal: Journal
    has_ids: bool


def _play(player: Player, setting: Setting, plan: Plan, note: Callable[[str], None]) -> _Played:
    config, split = setting.config, plan.wanted.split
    worlds = worlds_of(player, config)
    meta_info = _meta_info(player.model, setting, split)
    journal = _journal(player.model, setting, plan)
    asked = requests(config, split)
    length = config.actor_rollout_ref.rollout.max_model_len
    if player.max_positions is not None and length > player.max_positions:
        note(
            f"note: {player.model.label} was made for {player.max_positions} tokens, and a conversation may take "
            f"{length}: beyond them it may make no sense"
        )
    with journal.opened() as open_journal:

        def on_end(episode: EvaluatedEpisode) -> None:
            ended = episode.finished()
            _check_turns(ended, config)
            record = files.record_of(ended, worlds[ended.tag], "", meta_info, episode.num_tokens)
            open_journal.append(episode.place, record | {"notes": player.notes()})

        draws = ("val", config.seed.val)
        all_of_them = [
            EvaluatedEpisode(worlds[request.tag], request, member, draws, on_end)
            for request in asked
            for member in range(request.size)
        ]
        missing = [episode for episode in all_of_them if episode.place not in open_journal.records]
        if len(missing) < len(all_of_them):
            note(f"{player.model.label}: {len(all_of_them) - len(missing)} episodes are in the journal already")
        with Progress(f"{player.model.label}, {setting.max_turn} turns", len(all_of_them)) as progress:
            progress.advance(len(all_of_them) - len(missing))
            if missing:
                engine = player.engine(config)
                if isinstance(engine, ServerEngine):
                    engine.has_played = len(missing) < len(all_of_them)
                try:
                    engine.run(missing, validation_sampling(config), progress.advance)
                except ServerGone as error:  # what was finished is told all the same
                    note(str(error))
                    for episode in missing:
                        episode.fail(episode.failure or str(error))
    return _played(player, setting, split, worlds, journal, all_of_them)


def _played(
    player: Player,
    setting: Setting,
    split: str,
    worlds: Mapping[str, World],
    journal: Journal,
    episodes: Sequence[EvaluatedEpisode],
) -> _Played:
    finished = dict(journal.records)
    records = [finished[episode.place] for episode in episodes if episode.place in finished]
    rows = []
    for tag, world in worlds.items():
        of_tag = [episode for episode in episodes if episode.request.tag == tag]
        of_row = [record for record in records if record["metadata"]["tag"] == tag]
        outcomes = tuple(map(outcome_of, of_row))
        failures = Counter(episode.failure for episode in of_tag if episode.failure and episode.place not in finished)
        asked = Counter(episode.request.seed for episode in of_tag)
        reached = reach(world.env, list(asked), split, derive.budget(setting.config, tag))
        rows.append(
            Row(
                player.model.label,
                tag,
                setting.max_turn,
                outcomes,
                measure(outcomes, asked),
                asked,
                failures,
                reached,
                _rules(of_row),
            )
        )
    examples = [files.episode_of(record, worlds[record["metadata"]["tag"]]) for record in _examples(records)]
    return _Played(rows, records, examples, journal, player.has_ids)


def _rules(records: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """What the server did not do in these episodes, as each of them tells: they may come from several processes."""
    counts = Counter(note for record in records for note in record.get("notes", ()))
    return tuple(
        note if count == len(records) else f"{note} in {count} of {len(records)} episodes"
        for note, count in counts.items()
    )


def _examples(records: Sequence[Mapping[str, Any]], each: int = 2) -> list[Mapping[str, Any]]:
    """A few levels won and lost."""
    won, lost = ([record for record in records if record["success"] is success] for success in (True, False))
    return [*won[:each], *lost[:each]]


def worlds_of(player: Player, config: Config) -> dict[str, World]:
    tags = dict.fromkeys(config.es_manager.val.env_configs.tags)
    worlds = {tag: World.make(config, tag, player.chat) for tag in tags}
    if player.has_ids:
        return worlds
    # Characters are no tokens: how long a prompt is, the server says.
    return {tag: replace(world, view=replace(world.view, max_prompt_tokens=NO_LIMIT)) for tag, world in worlds.items()}


def requests(config: Config, split: str) -> list[GroupRequest]:
    """The levels: seeds from `seed.val` on, tag by tag, as in the validations of a training run."""
    envs, first = config.es_manager.val, config.seed.val
    return [
        GroupRequest(tag, first + index, split, index, envs.group_size)
        for index, tag in enumerate(tags_of_groups(envs))
    ]


def _check_turns(episode: Episode, config: Config) -> None:
    with_turns([Group(episode.tag, episode.seed, episode.split, episode.group, (episode,))], config)


def _meta_info(model: Model, setting: Setting, split: str) -> dict[str, Any]:
    sampling = asdict(validation_sampling(setting.config))
    return {"model": model.label, "max_turn": setting.max_turn, "split": split, "sampling": sampling}


def _evaluation(settings: Sequence[Setting], plan: Plan) -> str:
    """What sets this evaluation and its files apart from others."""
    parts = [
        _identity(model, setting, plan.wanted.split, plan.server)
        for model in plan.wanted.models
        for setting in settings
    ]
    text = json.dumps([parts, to_dict(settings[0].config.output), plan.page], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _journal(model: Model, setting: Setting, plan: Plan) -> Journal:
    return Journal(setting.config.output.dir, _identity(model, setting, plan.wanted.split, plan.server))


def _identity(model: Model, setting: Setting, split: str, server: ServerOptions) -> dict[str, Any]:
    """All that decides what an episode is: the same command finds its journal by it, another one does not."""
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
        "sampling": asdict(validation_sampling(config)),
        "max_model_len": config.actor_rollout_ref.rollout.max_model_len,
        "prefill": server.prefill,
    }
