"""Where the user is. The entry scripts go to the repository's root; what is typed is meant from where they were called.

caller = caller_folder()            # "" where nothing was changed
from_caller("runs/mine", caller)    # a path
model_from("runs/mine", caller)     # that path if a folder is there; any other name of a model stays as it is
"""

import os

VARIABLE = "RAGEN_CALLER_DIR"


def caller_folder() -> str:
    """Read once, and taken away: a process that this one starts is called from here."""
    return os.environ.pop(VARIABLE, "")


def from_caller(path: str, caller: str) -> str:
    return os.path.join(caller, os.path.expanduser(path))


def model_from(name: str, caller: str) -> str:
    there = from_caller(name, caller)
    return there if caller and name and os.path.isdir(there) else name
