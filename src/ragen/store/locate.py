"""Find folders that a run has named, also after they were moved. No torch in here.

    find_folder("models/mine", run)            # from where the run was started; from here; or None
    find_folder("/old/models/mine", run)       # also where everything around the run was moved or copied to

Where a run was started follows from its folder: the part before its `trainer.default_local_dir`.
"""

import re
from pathlib import Path

from ragen.store.run_folder import RunFolder

CHECKPOINT = re.compile(r"global_step_\d+")


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
    """The folder that relative paths of a run are meant from, where the place of the run tells; of that a part may have
    got a number."""
    trainer = RunFolder(run).read_config().get("trainer") or {}
    inner = Path(trainer.get("default_local_dir") or "/").parent
    outer = run.resolve().parent
    num_outside = len(outer.parts) - len(inner.parts)
    pairs = zip(outer.parts[num_outside:], inner.parts, strict=False)
    is_below = not inner.is_absolute() and num_outside > 0 and all(part.startswith(name) for part, name in pairs)
    return [Path(*outer.parts[:num_outside])] if is_below else []
