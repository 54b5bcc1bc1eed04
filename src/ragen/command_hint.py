"""Commands that a message tells the user to run: as this program was started, and quoted for a shell.

    hint("report", Path("checkpoints/RAGEN/my run"))        # ./ragen report 'checkpoints/RAGEN/my run'

`./ragen`, `train.sh` and the scripts put the name of the checkout's command into a variable (scripts/env.sh). They
change to the repository's root, so for a user who is elsewhere the command and paths are absolute. Without the variable
it is the installed `ragen`.
"""

import os
import shlex
import shutil
import sys
from pathlib import Path

VARIABLE = "RAGEN_COMMAND"
CHECKOUT = Path(__file__).resolve().parents[2]
HERE = "./ragen"


def hint(*arguments: str | Path) -> str:
    """The command line of `ragen` with these arguments; a `Path` is meant from the current directory."""
    command = _command()
    is_elsewhere = command[0] == os.environ.get(VARIABLE) != HERE
    shown = [os.path.abspath(word) if isinstance(word, Path) and is_elsewhere else str(word) for word in arguments]
    return shlex.join([*command, *shown])


def _command() -> list[str]:
    if os.environ.get(VARIABLE):
        return [os.environ[VARIABLE]]
    if (CHECKOUT / "scripts" / "env.sh").is_file() and Path.cwd() == CHECKOUT:
        return [HERE]
    installed = Path(sys.executable).parent / "ragen"
    if not installed.exists():
        return [sys.executable, "-m", "ragen"]
    found = shutil.which("ragen")
    return ["ragen"] if found and os.path.samefile(found, installed) else [str(installed)]
