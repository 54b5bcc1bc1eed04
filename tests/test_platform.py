"""Windows is refused with one message that names the way out, by the command and by the scripts."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ragen.api import train
from ragen.cli import main
from ragen.errors import ConfigError

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("platform", ["win32", "cygwin"])
def test_the_command_refuses_windows(monkeypatch, capsys, platform):
    monkeypatch.setattr(sys, "platform", platform)
    assert main(["runs"]) == 2
    said = capsys.readouterr().err
    assert "does not run on Windows" in said and "wsl --install" in said
    with pytest.raises(ConfigError, match="WSL"):
        train("sokoban")


def test_the_scripts_refuse_windows(tmp_path):
    """In Git Bash, `uname` says MINGW64_NT-10.0."""
    uname = tmp_path / "uname"
    uname.write_text("#!/bin/sh\necho MINGW64_NT-10.0-22631\n")
    uname.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ran = subprocess.run(
        [shutil.which("bash"), ROOT / "train.sh", "sokoban"], env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 2 and "WSL" in ran.stderr and not ran.stdout


def test_the_platforms_are_stated():
    page = (ROOT / "docs/installation.md").read_text()
    assert all(word in page for word in ("Linux", "macOS", "MPS", "Windows", "WSL"))
