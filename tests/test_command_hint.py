"""Commands in messages: as the user started the program, from where they are, quoted."""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from ragen import command_hint
from ragen.command_hint import hint

ROOT = Path(__file__).parents[1]


def test_in_the_checkout(monkeypatch):
    monkeypatch.setenv("RAGEN_COMMAND", "./ragen")
    assert hint("report", Path("checkpoints/my run")) == "./ragen report 'checkpoints/my run'"


def test_the_checkout_s_command_called_from_elsewhere(monkeypatch):
    monkeypatch.setenv("RAGEN_COMMAND", "/home/me/a b/ragen")
    monkeypatch.chdir(ROOT)
    assert hint("report", Path("runs/x")) == f"'/home/me/a b/ragen' report {ROOT}/runs/x", "`./ragen` changes directory"
    assert hint("eval", "runs/x") == "'/home/me/a b/ragen' eval runs/x", "what the user typed"


def test_installed(monkeypatch, tmp_path):
    monkeypatch.delenv("RAGEN_COMMAND", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    monkeypatch.setattr(command_hint.sys, "executable", str(tmp_path / "bin/python"))
    assert hint("runs") == f"{tmp_path}/bin/python -m ragen runs"
    command = tmp_path / "bin/ragen"
    command.touch()
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    assert hint("runs") == f"{command} runs", "an environment that is not activated"
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert hint("report", Path("checkpoints/x")) == "ragen report checkpoints/x"


@pytest.mark.parametrize("here", [True, False])
def test_the_scripts_name_the_command(here, tmp_path):
    """`scripts/env.sh` in a checkout whose Python only shows the variable."""
    checkout = tmp_path / "check out"
    (checkout / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts/env.sh", checkout / "scripts")
    (checkout / "scripts/bootstrap.py").write_text(f"print({sys.executable!r})")
    show = checkout / "show.sh"
    show.write_text('source "$(dirname "$0")/scripts/env.sh"; echo "$RAGEN_COMMAND"')
    kept = {name: value for name, value in os.environ.items() if name != "RAGEN_COMMAND"}
    said = subprocess.run(["bash", show], cwd=checkout if here else tmp_path, env=kept, capture_output=True, text=True)
    assert said.stdout.strip() == ("./ragen" if here else f"{checkout.resolve()}/ragen"), said.stderr
