"""Which run a model comes from, wherever it lies now. No torch in here.

    run_of(Path("checkpoints/RAGEN/pocket-sokoban/global_step_20"))     # checkpoints/RAGEN/pocket-sokoban
    run_of(Path("models/sokoban-agent"))                                # models/sokoban-agent/training_run
    model_inside(Path("checkpoints/RAGEN/pocket-sokoban"))              # its newest checkpoint

A merged model keeps the config of its run, as `training_run/config.yaml`, so that it can be moved and still be played
by the rules under which it was trained.
"""

import filecmp
import re
from pathlib import Path

from ragen.store import manifest
from ragen.store.run_folder import RunFolder, write_whole

KEPT = "training_run"
MERGED = "merged_model"  # what fine-tuning writes in the end
MODEL_FILES = ("config.json", "adapter_config.json")
_OF_STEP = re.compile(r"global_step_\d+(_merged)?")


def checkpoint_of(model: Path) -> Path:
    """The resolved folder of a model; of a checkpoint, its own and not that of its actor."""
    place = model.resolve()
    return place.parent if place.name == "actor" else place


def run_of(model: Path) -> Path | None:
    """The folder of the run that a checkpoint or a merged model comes from, or what a merged model keeps of it."""
    place = checkpoint_of(model)
    kept, beside = RunFolder(place / KEPT), _beside(place)
    if not kept.config_path.is_file():
        return beside
    is_its_own = beside is not None and filecmp.cmp(kept.config_path, RunFolder(beside).config_path, shallow=False)
    return beside if is_its_own else kept.path


def _beside(place: Path) -> Path | None:
    if place.name == MERGED:
        return tuning_run(place.parent)
    is_of_run = _OF_STEP.fullmatch(place.name) or (place / "actor").is_dir()
    return place.parent if is_of_run and RunFolder(place.parent).config_path.is_file() else None


def keep(run: Path, model: Path) -> None:
    """Let a model that was merged in a run remember it."""
    config = RunFolder(run).config_path
    if config.is_file():
        write_whole(RunFolder(model / KEPT).config_path, config.read_bytes())


def tuning_run(output: Path) -> Path | None:
    """The run folder of fine-tuning in its output folder (`sft.output_dir`)."""
    runs = [path.parent for path in sorted(output.glob("*/config.yaml")) if is_tuning(path.parent)]
    return runs[0].resolve() if runs else None


def is_tuning(run: Path) -> bool:
    return RunFolder(run).read_config().get("rl_or_sft") == "sft"


def newest_checkpoint(run: Path) -> Path | None:
    """The one that the run would go on from, or else the last that holds a model."""
    others = [path for path in manifest.checkpoints(run) if (path / "actor").is_dir() and manifest.is_whole(path)]
    return manifest.latest(run) or (others[-1] if others else None)


def holds_model(folder: Path) -> bool:
    return any((folder / name).exists() for name in MODEL_FILES)


def model_inside(folder: Path) -> Path | None:
    """The model that a folder is likely to mean which holds none itself: of a run the newest, of fine-tuning the
    merged one."""
    if holds_model(folder) or (folder / manifest.MANIFEST).exists():
        return None
    return folder / MERGED if holds_model(folder / MERGED) else newest_checkpoint(folder)
