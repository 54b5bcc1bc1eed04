"""Whom to evaluate: a folder, a checkpoint, the newest checkpoint of a run, a model's name, or a server.

    local_model("pocket"), local_model("checkpoints/RAGEN/pocket-sokoban/global_step_150")
    models_of_experiment(Path("log/terminal/sokoban_model_scaling.log"))       # the newest of each of its runs
    with_bases([local_model("checkpoints/RAGEN/pocket-sokoban")])               # and before it what the run began from
    ServerModel("http://127.0.0.1:8000/v1", "pocket", "OPENAI_API_KEY")

Nothing heavy is imported: what is named is only looked for on disk.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ragen.config.embedded import NAMES as EMBEDDED
from ragen.report.folder import RunFolder
from ragen.train import manifest
from ragen.typed import ConfigError

WEIGHTS = ("*.safetensors", "*.json")


@dataclass(frozen=True)
class LocalModel:
    """A model that this machine runs."""

    name: str  # as `ragen.model.load.find_model` takes it
    label: str  # as tables show it
    run_folder: Path | None = None  # of the training run that a checkpoint belongs to
    compared_with: str | None = None  # the name of another model, where that is not the first one

    @property
    def is_embedded(self) -> bool:
        return self.name in EMBEDDED

    def fingerprint(self) -> dict[str, Any]:
        """What sets the weights apart: the name, and for a folder the sizes and times of its files."""
        folder = Path(self.name).expanduser()
        files = sorted({path for pattern in WEIGHTS for path in folder.glob(pattern)}) if folder.is_dir() else []
        found = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        return {"model": str(folder.resolve()) if files else self.name, "files": [list(item) for item in found]}


@dataclass(frozen=True)
class ServerModel:
    """A model behind an OpenAI-compatible server."""

    base: str  # up to and including /v1
    name: str
    key_variable: str  # the environment variable that holds the key

    run_folder = None
    compared_with = None

    @property
    def is_embedded(self) -> bool:
        return self.name in EMBEDDED

    @property
    def label(self) -> str:
        return f"{self.name} @ {self.base.removeprefix('http://').removeprefix('https://').removesuffix('/v1')}"

    def fingerprint(self) -> dict[str, Any]:
        return {"model": self.name, "server": self.base}


Model = LocalModel | ServerModel


def local_model(name: str) -> LocalModel:
    """The model that a word of the command line means. A folder that holds no model is refused."""
    folder = Path(name).expanduser()
    if not folder.is_dir():
        if name.startswith(("/", ".", "~")):
            raise ConfigError(f"model {name}: no such folder")
        return LocalModel(name, name.rsplit("/", 1)[-1])
    if (folder / "config.json").exists() or (folder / "adapter_config.json").exists():
        is_actor = folder.name == "actor" and folder.parent.name.startswith("global_step_")
        return _of_checkpoint(folder.parent) if is_actor else LocalModel(str(folder), folder.resolve().name)
    if (folder / "actor").is_dir():
        return _of_checkpoint(folder)
    newest = newest_checkpoint(folder)
    if newest is not None:
        return _of_checkpoint(newest)
    raise ConfigError(
        f"model {name}: the folder holds neither a Hugging Face model (config.json), nor a checkpoint (actor/), nor a "
        "run with checkpoints (global_step_*)"
    )


def newest_checkpoint(run: Path) -> Path | None:
    """The one that the run would go on from, or else the last that holds a model."""
    others = [path for path in manifest.checkpoints(run) if (path / "actor").is_dir() and manifest.is_whole(path)]
    return manifest.latest(run) or (others[-1] if others else None)


def models_of_experiment(log: Path, note: Callable[[str], None] = lambda text: None) -> list[LocalModel]:
    """The newest checkpoint of every run of an experiment, which is named by its summary log.

    Runs that have none are noted: they are not done, or have saved nothing.
    """
    from ragen.experiment.compare import read_study
    from ragen.experiment.results import record_path

    if not record_path(log).is_file():
        raise ConfigError(f"{log}: no experiment has written this log; `ragen sweep` does, with a .json beside it")
    found, without = [], []
    for setting in read_study(record_path(log)).settings:
        for trial in setting.trials:
            newest = newest_checkpoint(trial.run.folder.path)
            if newest is None:
                without.append(trial.cell.name)
            else:
                found.append(_of_checkpoint(newest))
    said = f"{log}: no checkpoint of {', '.join(without)}"
    if not found:
        raise ConfigError(f"{said}. Run it with `-- trainer.save_freq=N`, or name the models one by one")
    if without:
        note(f"{said}: the others are evaluated")
    return found


def _of_checkpoint(folder: Path) -> LocalModel:
    actor, run = folder / "actor", folder.resolve().parent
    if not any((actor / name).exists() for name in ("config.json", "adapter_config.json")):
        raise ConfigError(f"checkpoint {folder}: actor/ holds no model; it was saved without `model` in save_contents")
    has_config = (run / "config.yaml").is_file()
    return LocalModel(str(actor), f"{run.name}/{folder.resolve().name}", run if has_config else None)


def with_bases(models: list[LocalModel]) -> list[LocalModel]:
    """Every checkpoint of a run after the model that the run began from, which it is compared with."""
    found: list[LocalModel] = []
    for model in models:
        base = _base_of(model)
        if base is not None and all(other.name != base.name for other in (*models, *found)):
            found.append(base)
        found.append(model if base is None else replace(model, compared_with=base.name))
    return found


def _base_of(model: LocalModel) -> LocalModel | None:
    if model.run_folder is None:
        return None
    name = RunFolder(model.run_folder).read_config().get("model_path")
    return local_model(name) if name else None


def max_positions(folder: Path) -> int | None:
    """How many tokens the model in a folder was made for."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return config.get("max_position_embeddings")


def with_distinct_labels(models: list[Model]) -> list[Model]:
    """The models, none twice, and no two under one label."""
    labels = [model.label for model in models]
    repeated = {label for label in labels if labels.count(label) > 1}
    if not repeated:
        return models
    if len(set(models)) < len(models):
        raise ConfigError(f"a model is named twice: {', '.join(sorted(repeated))}")
    return [
        replace(model, label=model.name) if isinstance(model, LocalModel) and model.label in repeated else model
        for model in models
    ]
