"""The order of the folders (docs/architecture.md): imports go down, and the contract notices one that does not."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CHECK = "import sys; from importlinter.cli import lint_imports_command; sys.exit(lint_imports_command())"


def lint(folder: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", CHECK]
    environment = {"PYTHONPATH": str(folder / "src"), "PATH": ""}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def copied(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("*.pyc", "weights", "*.egg-info"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def test_imports_go_down(copied):
    done = lint(copied)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("file", "line", "broken"),
    [
        ("config/tree.py", "from ragen.store import manifest", "ragen.config is not allowed to import ragen.store"),
        ("algo/kl.py", "def lazily():\n    from ragen.train import update", "ragen.algo is not allowed to import"),
        ("prng.py", "import ragen.env.base", "ragen.prng is not allowed to import ragen.env"),
    ],
)
def test_a_forbidden_import_is_noticed(copied, file, line, broken):
    path = copied / "src/ragen" / file
    before = path.read_text()
    path.write_text(f"{before}\n\n{line}\n")
    try:
        done = lint(copied)
    finally:
        path.write_text(before)
    assert done.returncode == 1 and broken in done.stdout


def test_the_documented_order_is_the_checked_one():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    *folders, base = contracts[0]["layers"]
    table = (ROOT / "docs/architecture.md").read_text().split("## Layers")[1].split("\n## ")[0]
    shown = [name.removesuffix(".py") for name in re.findall(r"^\| `([\w.]+)/?` \|", table, re.MULTILINE)]
    assert shown == folders
    row = next(line for line in table.splitlines() if line.startswith("| base |"))
    assert sorted(re.findall(r"`(\w+)\.py`", row)) == sorted(base.split(" : "))
