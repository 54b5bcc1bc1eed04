"""`python train.py …` is `./ragen train …`: in this interpreter if ragen is installed here, else in the checkout's own.

The syntax is that of Python 3.6, so that an old `python` still gets as far as handing over.
"""

import importlib.util
import os
import sys

ROOT = os.path.dirname(os.path.realpath(__file__))
SRC = os.path.join(ROOT, "src")


def main(arguments):
    installed = all(importlib.util.find_spec(module) for module in ("ragen", "omegaconf"))
    if sys.version_info < (3, 11) or not installed:
        wrapper = os.path.join(ROOT, "ragen")
        os.execvp("bash", ["bash", wrapper, "train", *arguments])

    # This checkout's code, here and in the processes it starts: another clone may be the one installed.
    sys.path.insert(0, SRC)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [SRC, os.environ.get("PYTHONPATH")]))
    os.environ["RAGEN_CALLER_DIR"] = os.getcwd()  # relative folders on the command line are meant from here
    os.chdir(ROOT)
    from ragen.cli import main as ragen

    return ragen(["train", *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
