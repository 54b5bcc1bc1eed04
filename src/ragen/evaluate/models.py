"""The models to evaluate: a directory, a checkpoint, the result of a run, a model's name, or a server.

    local_model("pocket"), local_model("checkpoints/RAGEN/pocket-sokoban/global_step_150")
    local_model("models/sft")                                                   # fine-tuning: its merged_model
    models_of_experiment(Path("log/terminal/sokoban_model_scaling.log"))        # the newest of each of its runs
    with_bases([local_model("checkpoints/RAGEN/pocket-sokoban")])               # preceded by what the run began from
    ServerModel("http://127.0.0.1:8000/v1", "pocket", "OPENAI_API_KEY")

Nothing heavy is imported: models are only looked up on disk.
"""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from os import environ
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ragen.config.pocket_defaults import NAMES as EMBEDDED
from ragen.config.pocket_defaults import PACKAGED
from ragen.errors import ConfigError
from ragen.store import manifest
from ragen.store.find_run import run_or_checkpoint
from ragen.store.lineage import (
    CHECKPOINT,
    MERGED,
    find_folder,
    holds_model,
    is_path,
    is_tuning,
    newest_checkpoint,
    run_of,
    started_in,
)
from ragen.store.run_folder import RunFolder
from ragen.store.sweep_results import read_record, record_path

READ = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")  # weights, configs, tokenizers and chat templates


@dataclass(frozen=True)
class LocalModel:
    """A model that this machine runs."""

    name: str  # as `ragen.model.load.find_model` takes it
    label: str  # as tables show it
    run_folder: Path | None = None  # of the training run that a checkpoint belongs to
    compared_with: str | None = None  # the name of another model, if that is not the first one

    def fingerprint(self) -> dict[str, Any]:
        """Its name; for a directory, the sizes and times of its files and of those of an adapter's base."""
        folder = Path(self.name).expanduser()
        files = sorted({path for pattern in READ for path in folder.glob(pattern)}) if folder.is_dir() else []
        stats = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]
        found: dict[str, Any] = {"model": str(folder.resolve()) if files else self.name, "files": stats}
        if (folder / "adapter_config.json").exists():
            from ragen.model.load import find_model

            base = find_model(self.name).base
            if base is not None:
                name = base.name if base.name in EMBEDDED else str(base.folder)
                found["base"] = LocalModel(name, "").fingerprint()
        return found


@dataclass(frozen=True)
class ServerModel:
    """A model behind an OpenAI-compatible server."""

    base: str  # up to and including /v1
    name: str
    key_variable: str  # the environment variable that holds the key

    run_folder = None
    compared_with = None

    def __post_init__(self) -> None:
        _check_address(self.base)
        if not _is_plain(self.key):
            raise ConfigError(f"--api-key-env {self.key_variable}: the key contains characters no header can contain")

    @property
    def key(self) -> str:
        return environ.get(self.key_variable, "").strip()

    @property
    def label(self) -> str:
        return f"{self.name} @ {self.base.removeprefix('http://').removeprefix('https://').removesuffix('/v1')}"

    def fingerprint(self) -> dict[str, Any]:
        return {"model": self.name, "server": self.base}


Model = LocalModel | ServerModel


def _is_plain(text: str) -> bool:
    return all("!" <= letter <= "~" for letter in text)


def _check_address(base: str) -> None:
    """Refuse addresses that no server can have: waiting would not help."""
    if "@" in base.partition("//")[2].partition("/")[0]:
        raise ConfigError("--api-base: a user and a password in the address are not sent; see --api-key-env")
    try:
        parts = urlsplit(base)
        is_whole = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError as error:  # about the port, or an IPv6 address
        raise ConfigError(f"--api-base {base}: {error}") from None
    if not is_whole or parts.query or parts.fragment:
        raise ConfigError(f"--api-base {base}: must begin with http:// or https://, name a host and end with a path")
    if not _is_plain(base):
        raise ConfigError(f"--api-base {base!r}: write blanks and letters such as ü as %20 and %C3%BC")


def local_model(name: str) -> LocalModel:
    """The model that a command line argument means. A directory without a model is refused."""
    folder = Path(name).expanduser()
    if not folder.is_dir() and name not in PACKAGED:
        folder = run_or_checkpoint(name) or folder
    if not folder.is_dir():
        if is_path(name):
            raise ConfigError(f"model {name}: directory not found{_similar(folder)}")
        return LocalModel(name, name.rsplit("/", 1)[-1])
    if holds_model(folder):
        is_actor = folder.name == "actor" and CHECKPOINT.fullmatch(folder.parent.name)
        return _of_checkpoint(folder.parent) if is_actor else _of_model_folder(folder)
    if (folder / "actor").is_dir():
        return _of_checkpoint(folder)
    if holds_model(folder / MERGED):
        return _of_model_folder(folder / MERGED)
    found = model_of_run(folder)
    if found is None:
        raise ConfigError(
            f"model {name}: the directory has neither a Hugging Face model (config.json), nor a checkpoint (actor/), "
            "nor a run with checkpoints (global_step_*)"
        )
    return found


def _similar(folder: Path) -> str:
    """The end of a message about a missing directory: what exists instead."""
    parent = next(parent for parent in folder.parents if parent.is_dir())
    part = folder.relative_to(parent).parts[0]
    is_step = CHECKPOINT.fullmatch(part)
    others = manifest.checkpoints(parent) if is_step else [path for path in parent.iterdir() if path.is_dir()]
    names = [path.name for path in others if not path.name.startswith(".")]
    similar = ", ".join(get_close_matches(part, names, n=5, cutoff=0.0))
    return f"; {parent} has {similar or ('no checkpoint' if is_step else 'no directory')}, and no {part}"


def _of_model_folder(folder: Path) -> LocalModel:
    """A model alone, or one that was merged in a run."""
    path, run = folder.resolve(), run_of(folder)
    is_in_run = run is not None and run.parent != path
    return LocalModel(str(folder), f"{path.parent.name}/{path.name}" if is_in_run else path.name, run)


def _of_checkpoint(folder: Path) -> LocalModel:
    actor, path = folder / "actor", folder.resolve()
    if not holds_model(actor):
        raise ConfigError(f"checkpoint {folder}: no model in actor/; it was saved without `model` in save_contents")
    return LocalModel(str(actor), f"{path.parent.name}/{path.name}", run_of(path))


def model_of_run(run: Path, best: bool = True) -> LocalModel | None:
    """The merged model of finished fine-tuning, else the best checkpoint if the run keeps one, else the newest."""
    merged = run.resolve().parent / MERGED
    has_finished = (RunFolder(run).read_finished() or {}).get("status") == "finished"
    if has_finished and holds_model(merged) and is_tuning(run):
        return _of_model_folder(merged)
    chosen = (manifest.best(run) if best else None) or newest_checkpoint(run)
    return None if chosen is None else _of_checkpoint(chosen)


def models_of_experiment(log: Path, note: Callable[[str], None] = lambda text: None) -> list[LocalModel]:
    """The model of every run of an experiment, named by its summary log. Runs that have saved none are noted."""
    if not record_path(log).is_file():
        raise ConfigError(f"{log}: not the log of an experiment; `ragen sweep` writes one, with a .json beside it")
    record = read_record(record_path(log))
    cells = [cell for cells in record.by_setting().values() for cell in cells]
    models = [(cell.name, model_of_run(record.run_folder(cell), best=False)) for cell in cells]
    found = [model for _, model in models if model is not None]
    without = f"{log}: no checkpoint of {', '.join(name for name, model in models if model is None)}"
    if not found:
        raise ConfigError(f"{without}. Run it with `-- trainer.save_freq=N`, or name the models one by one")
    if len(found) < len(models):
        note(f"{without}: the others are evaluated")
    return found


def with_bases(models: list[LocalModel]) -> list[LocalModel]:
    """Every checkpoint of a run, preceded by the model that the run began from, which it is compared with."""
    found: list[LocalModel] = []
    for model in models:
        base = None if model.run_folder is None else _base_of(model.run_folder)
        if base is not None and all(other.name != base.name for other in (*models, *found)):
            found.append(base)
        found.append(model if base is None else replace(model, compared_with=base.name))
    return found


def _base_of(run: Path) -> LocalModel | None:
    name = RunFolder(run).read_config().get("model_path")
    if not name or name in EMBEDDED:
        return local_model(name) if name else None
    path, found = Path(name).expanduser(), find_folder(name, run)
    if found is not None:
        return local_model(name if path.is_dir() and path.samefile(found) else str(found))
    roots = [*started_in(run), Path()]
    if is_path(name) or ("/" in name and any((root / path).parent.is_dir() for root in roots)):
        raise ConfigError(
            f"--with-base: run {run} began from {name}, which exists neither here nor where the run was started: put "
            "it there, or omit --with-base and name its base as a model"
        )
    return local_model(name)


def max_positions(folder: Path) -> int | None:
    """The number of tokens that the model in a directory was made for."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return config.get("max_position_embeddings") or config.get("n_positions")  # the latter in GPT-2


def with_distinct_labels(models: list[Model]) -> list[Model]:
    """The models, none twice, and no two under one label."""
    labels = Counter(model.label for model in models)
    repeated = sorted(label for label, count in labels.items() if count > 1)
    if len(set(models)) < len(models):
        raise ConfigError(f"a model is named twice: {', '.join(repeated)}")
    return [
        replace(model, label=model.name) if isinstance(model, LocalModel) and model.label in repeated else model
        for model in models
    ]
