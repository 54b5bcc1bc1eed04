"""The files in `examples/` run as they stand; what scripts and benchmarks import is there."""

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = [path for folder in ("benchmarks", "examples", "scripts") for path in sorted((ROOT / folder).rglob("*.py"))]


def run_example(name: str, *arguments: str) -> str:
    environ = os.environ | {"PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(ROOT / "examples" / name), *arguments]
    run = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=300)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_training_from_python_raises_success(tmp_path):
    printed = run_example("train_from_python.py", str(tmp_path / "run"))
    first, last = (int(number) for number in re.findall(r"^step \d+: success (\d+)%$", printed, re.MULTILINE))
    assert first < last
    assert printed.splitlines()[-1] == f"finished after 4 steps; report: {tmp_path / 'run' / 'report.html'}"
    assert (tmp_path / "run/report.html").exists()


def test_an_own_environment_is_checked_measured_and_played():
    printed = run_example("own_environment.py")
    assert re.match(r"success: random play \d\d%, optimal play 100%\n", printed)
    assert "\nsolved after 1 action\n" in printed


def test_the_own_environment_is_the_one_of_the_guide():
    guide = (ROOT / "docs/add-an-environment.md").read_text(encoding="utf-8")
    code = re.search(r"^```python\n.*?^(class .*?)^```", guide, re.MULTILINE | re.DOTALL)[1]
    assert code in (ROOT / "examples/own_environment.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_what_a_script_imports_from_the_package_is_there(path):
    """Lazy imports too, which only a run of hours would notice."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "ragen":
            module = importlib.import_module(node.module)
            for name in (alias.name for alias in node.names):
                assert hasattr(module, name) or importlib.util.find_spec(f"{node.module}.{name}"), name
