"""Which run a model comes from, and which folder a run means by a name, also after they were moved. No torch in here.

    run_of(Path("checkpoints/RAGEN/pocket-sokoban/global_step_20"))     # checkpoints/RAGEN/pocket-sokoban
    run_of(Path("models/sokoban-agent"))                                # models/sokoban-agent/training_run
    model_inside(Path("checkpoints/RAGEN/pocket-sokoban"))              # its newest checkpoint
    find_folder("models/mine", run)            # from where the run was started; from here; or None
    find_folder("/old/models/mine", run)       # also where everything around the run was moved or copied to

A merged model keeps the config of its run, as `training_run/config.yaml`, so that it can be moved and still be played
by the rules it was trained with. Where a run was started follows from its folder: the part before its
`trainer.default_local_dir`.
"""

import filecmp
import re
from pathlib import Path

from ragen.config.derive import MERGED
from ragen.store import manifest
from ragen.store.fsync import write_whole
from ragen.store.run_folder import RunFolder

CHECKPOINT = re.compile(r"global_step_\d+")
KEPT = "training_run"
MODEL_FILES = ("config.json", "adapter_config.json")
_OF_STEP = re.compile(r"global_step_\d+(_merged)?")


def checkpoint_of(model: Path) -> Path:
    """The resolved folder of a model; for the actor of a checkpoint, the checkpoint."""
    folder = model.resolve()
    return folder.parent if folder.name == "actor" else folder


def run_of(model: Path) -> Path | None:
    """The folder of the run that a checkpoint or a merged model comes from, or what a merged model keeps of it."""
    folder = checkpoint_of(model)
    kept, beside = RunFolder(folder / KEPT), _run_beside(folder)
    if not kept.config_path.is_file():
        return beside
    is_its_own = beside is not None and filecmp.cmp(kept.config_path, RunFolder(beside).config_path, shallow=False)
    return beside if is_its_own else kept.path


def _run_beside(folder: Path) -> Path | None:
    if folder.name == MERGED:
        return tuning_run(folder.parent)
    is_of_run = _OF_STEP.fullmatch(folder.name) or (folder / "actor").is_dir()
    return folder.parent if is_of_run and RunFolder(folder.parent).config_path.is_file() else None


def keep(run: Path, model: Path) -> None:
    """Store the config of the run with a model that was merged in it."""
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
    """The one that the run would resume from, or else the last that holds a model."""
    others = [path for path in manifest.checkpoints(run) if (path / "actor").is_dir() and manifest.is_whole(path)]
    return manifest.latest(run) or (others[-1] if others else None)


def holds_model(folder: Path) -> bool:
    return any((folder / name).exists() for name in MODEL_FILES)


def model_inside(folder: Path) -> Path | None:
    """The model that a folder stands for if it holds none itself: a run's newest, fine-tuning's merged one."""
    if holds_model(folder) or (folder / manifest.MANIFEST).exists():
        return None
    return folder / MERGED if holds_model(folder / MERGED) else newest_checkpoint(folder)


def is_path(name: str) -> bool:
    """Whether a name can only be a path: hub names have an owner and a name, and no checkpoints."""
    return name.startswith(("/", ".", "~")) or name.count("/") > 1 or any(map(CHECKPOINT.fullmatch, Path(name).parts))


def find_folder(name: str, run: Path) -> Path | None:
    """The folder that a run means by this name."""
    path, roots = Path(name).expanduser(), started_in(run)
    ends = [Path(*path.parts[start:]) for start in range(1, len(path.parts))] if path.is_absolute() else []
    places = [root / path for root in (*roots, Path())] + [root / end for end in ends for root in roots]
    return next((place for place in places if place.is_dir()), None)


def started_in(run: Path) -> list[Path]:
    """The folder that relative paths of a run start from, if its own path tells; parts of it may have got a number."""
    trainer = RunFolder(run).read_config().get("trainer") or {}
    inner = Path(trainer.get("default_local_dir") or "/").parent
    outer = run.resolve().parent
    num_outside = len(outer.parts) - len(inner.parts)
    pairs = zip(outer.parts[num_outside:], inner.parts, strict=False)
    is_below = not inner.is_absolute() and num_outside > 0 and all(part.startswith(name) for part, name in pairs)
    return [Path(*outer.parts[:num_outside])] if is_below else []
