"""Write the model of a checkpoint with an adapter (lora.rank above 0) as an ordinary Hugging Face directory. Nothing is
overwritten, and the checkpoint stays as it is.

examples:
  ragen merge checkpoints/RAGEN/pocket-sokoban/global_step_200 --dry-run
  ragen merge checkpoints/RAGEN/pocket-sokoban/global_step_200 \\
      --output models/sokoban-agent
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from ragen.cli import CommandParser
from ragen.format import harmless
from ragen.invocation_dir import caller_folder, from_caller, model_from


def parser() -> argparse.ArgumentParser:
    made = CommandParser("merge", __doc__)
    made.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="global_step_<N> of a run, a run, or an adapter's directory"
    )
    made.add_argument("--output", metavar="DIR", help="default CHECKPOINT_merged")
    made.add_argument("--base", metavar="MODEL", help="directory or name of the base (default: the adapter's)")
    made.add_argument("--dry-run", action="store_true", help="print what would be written and stop")
    return made


def run(arguments: Sequence[str]) -> int:
    options = parser().parse_args(arguments)
    from ragen.checkpoint.merge import merge, plan

    caller = caller_folder()
    output = Path(from_caller(options.output, caller)) if options.output else None
    base = model_from(options.base, caller) if options.base else None
    planned = plan(_checkpoint(options.checkpoint, caller), output, base)
    print(harmless(str(planned)))
    if not options.dry_run:
        merge(planned)
        print(f"merged: {planned.output}")
    return 0


def _checkpoint(name: str, caller: str) -> Path:
    """The directory that a name means; of a run its best checkpoint if it keeps one, else the newest."""
    from ragen.store import find_run, lineage, manifest

    path = Path(from_caller(name, caller))
    if not path.is_dir():
        path = find_run.run_or_checkpoint(name) or path
    return manifest.best(path) or lineage.model_inside(path) or path
