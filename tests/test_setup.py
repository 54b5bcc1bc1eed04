"""Set-up: scripts/bootstrap.py finds or makes the environment, and the entry scripts use it. No network is needed.

bootstrap.py works on the checkout it lies in, so each test loads a copy from its own checkout, in which the two
slow steps, `python -m venv` and pip, are replaced by recorders.
"""

import ast
import fcntl
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import tomllib
import zipfile
from pathlib import Path

import pytest
from processes import PATIENCE, started

from ragen.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
ENTRY_SCRIPTS = ("train.sh", "test.sh", "ragen")
NOT_ADDED = ("all", "vllm", "triton", "dev")  # extras that no command of ragen installs


class Checkout:
    """A small checkout with a bootstrap whose venv and pip only leave traces."""

    def __init__(self, root: Path):
        self.root = root
        self.venv = root / ".venv"
        self.calls: list[str] = []
        (root / "scripts").mkdir(parents=True)
        (root / "pyproject.toml").write_text(
            "[project.optional-dependencies]\nsweep = ['ray']\nwandb = ['wandb']\ntriton = ['triton']\n"
        )
        (root / "constraints.txt").write_text("torch==2.13.0\n")
        for name in ("scripts/bootstrap.py", "scripts/env.sh", "train.py", *ENTRY_SCRIPTS):
            shutil.copy(ROOT / name, root / name)
        self.load()

    def load(self) -> None:
        path = self.root / "scripts" / "bootstrap.py"
        spec = importlib.util.spec_from_file_location("bootstrap_under_test", path)
        self.module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.module)
        self.module.make_venv = self.make_venv
        self.module.pip_install = self.pip_install

    def moved_to(self, root: Path) -> None:
        self.root.rename(root)
        self.root, self.venv = root, root / ".venv"
        self.load()

    def make_venv(self, python: str, lock: int) -> None:
        assert (self.venv / ".ragen").exists(), "the marker comes first"
        self.calls.append("venv")
        make_environment(self.venv)

    def pip_install(self, what: list[str], lock: int) -> None:
        self.calls.append(" ".join(["pip", *what]))

    def pip_fails(self, what: list[str], lock: int) -> None:
        self.calls.append("failing pip")
        raise self.module.SetupError("pip failed")

    def run(self, *arguments: str) -> tuple[int, list[str]]:
        """The exit status, and which slow steps were taken."""
        self.calls.clear()
        handler = signal.getsignal(signal.SIGTERM)
        try:
            return self.module.main(list(arguments or ["base"])), list(self.calls)
        finally:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, handler)


def make_environment(folder: Path, *modules: str) -> Path:
    """An environment that runs, without pip, and in which just `modules` (and a module `pip`) can be found."""
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    site = folder / "lib" / f"python{version}" / "site-packages"
    site.mkdir(parents=True)
    (folder / "bin").mkdir()
    behind = Path(os.path.realpath(sys.executable))
    (folder / "bin" / "python").symlink_to(behind)
    (folder / "pyvenv.cfg").write_text(f"home = {behind.parent}\ninclude-system-site-packages = false\n")
    for module in ("pip", *modules):
        (site / f"{module}.py").touch()
    return folder


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    for variable in ("RAGEN_PYTHON", "VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH", "RAGEN_SCOPE"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path.resolve() / "check out")


# --- our own .venv ------------------------------------------------------------------------------------------------


def test_fresh_checkout_is_set_up_and_only_the_path_is_printed(checkout, capsys):
    assert checkout.run() == (0, ["venv", "pip -e ."])
    printed = capsys.readouterr()
    assert printed.out == f"{checkout.venv}/bin/python\n"
    assert "Setting up ragen in .venv" in printed.err
    assert (checkout.venv / ".ragen-base").exists()
    assert not (checkout.venv / ".ragen-dev").exists()


def test_a_valid_stamp_starts_no_process(checkout, monkeypatch):
    checkout.run()
    monkeypatch.setattr(subprocess, "Popen", None)
    assert checkout.run() == (0, [])


def test_dev_implies_base(checkout):
    assert checkout.run("dev") == (0, ["venv", "pip -e .[dev]"])
    assert checkout.run("base") == (0, [])
    assert checkout.run("dev") == (0, [])


def test_dev_is_added_to_a_base_in_place(checkout):
    checkout.run("base")
    assert checkout.run("dev") == (0, ["pip -e .[dev]"])


def test_a_failed_dev_install_leaves_the_base_usable(checkout):
    checkout.run("base")
    checkout.module.pip_install = checkout.pip_fails
    assert checkout.run("dev")[0] == 2
    assert checkout.run("base") == (0, [])


@pytest.mark.parametrize(("error", "status"), [(None, 2), (KeyboardInterrupt, 130), (OSError("disk full"), 2)])
def test_an_unfinished_install_is_redone_from_scratch(checkout, error, status):
    def unfinished(what, lock):
        (checkout.venv / "half-installed").touch()
        if error:
            raise error
        checkout.pip_fails(what, lock)

    checkout.module.pip_install = unfinished
    assert checkout.run()[0] == status
    assert not (checkout.venv / ".ragen-base").exists()

    checkout.module.pip_install = checkout.pip_install
    assert checkout.run() == (0, ["venv", "pip -e ."])
    assert not (checkout.venv / "half-installed").exists()


def test_killed_before_the_marker_was_written(checkout):
    checkout.venv.mkdir()
    assert checkout.run() == (0, ["venv", "pip -e ."])


@pytest.mark.parametrize("name", ["constraints.txt", "pyproject.toml"])
def test_changed_dependency_files_install_again_in_place(checkout, name):
    checkout.run("dev")
    with open(checkout.root / name, "a") as file:
        file.write("# newer\n")
    assert checkout.run() == (0, ["pip -e .[dev]"])
    assert checkout.run("dev") == (0, [])


def test_an_interrupted_update_is_redone_from_scratch(checkout):
    checkout.run()
    (checkout.root / "constraints.txt").write_text("torch==2.14.0\n")
    checkout.module.pip_install = checkout.pip_fails
    assert checkout.run() == (2, ["failing pip"])
    checkout.module.pip_install = checkout.pip_install
    assert checkout.run() == (0, ["venv", "pip -e ."])


def test_a_moved_checkout_is_redone_from_scratch(checkout, tmp_path):
    checkout.run()
    checkout.moved_to(tmp_path / "elsewhere")
    assert checkout.run() == (0, ["venv", "pip -e ."])


def test_a_python_that_went_away_is_redone_from_scratch(checkout):
    checkout.run()
    python = checkout.venv / "bin" / "python"
    python.unlink()
    python.symlink_to("/nowhere/python3.11")
    assert checkout.run() == (0, ["venv", "pip -e ."])


def test_a_venv_of_someone_else_is_refused_untouched(checkout, capsys):
    make_environment(checkout.venv, "numpy")
    before = sorted(checkout.venv.rglob("*"))
    assert checkout.run() == (2, [])
    assert sorted(checkout.venv.rglob("*")) == before
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "not changed" in printed.err and "move it away" in printed.err


def test_a_venv_of_someone_else_with_ragen_in_it_is_used(checkout, capsys):
    make_environment(checkout.venv, "ragen", "omegaconf")
    assert checkout.run() == (0, [])
    assert capsys.readouterr().out == f"{checkout.venv}/bin/python\n"
    assert not (checkout.venv / ".ragen").exists()


@pytest.mark.parametrize(("modules", "status"), [(("ragen", "omegaconf"), 0), ((), 2)])
def test_the_venv_of_another_checkout_behind_a_link_is_never_emptied(checkout, tmp_path, modules, status):
    theirs = make_environment(tmp_path / "theirs", *modules)
    (theirs / ".ragen").touch()
    checkout.venv.symlink_to(theirs)
    before = sorted(theirs.rglob("*"))
    assert checkout.run() == (status, [])
    assert sorted(theirs.rglob("*")) == before


def test_a_link_to_nothing_is_named(checkout, capsys):
    checkout.venv.symlink_to(checkout.root / "gone")
    assert checkout.run() == (2, [])
    assert "is a link" in capsys.readouterr().err


def test_a_python_without_venv_gets_one_message(checkout, monkeypatch, capsys):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ensurepip" else find_spec(name))
    assert checkout.run() == (2, [])
    message = capsys.readouterr().err
    assert sys.executable in message and "apt install python3-venv" in message


def test_a_second_process_waits_and_then_finds_the_stamp(checkout, capsys):
    command, pipe = [sys.executable, checkout.root / "scripts" / "bootstrap.py", "base"], subprocess.PIPE
    with open(checkout.root / ".venv.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with started(command, stdout=pipe, stderr=pipe, text=True) as second:
            assert "waiting" in second.stderr.readline()
            checkout.venv.mkdir()
            (checkout.venv / ".ragen").touch()
            make_environment(checkout.venv)
            checkout.module.write_stamp("base")
            assert second.poll() is None
            fcntl.flock(lock, fcntl.LOCK_UN)
            output, rest = second.communicate(timeout=PATIENCE)
    assert (second.returncode, output, rest) == (0, f"{checkout.venv}/bin/python\n", "")


# --- extras -------------------------------------------------------------------------------------------------------


def test_an_extra_is_added_to_the_base_and_not_installed_twice(checkout, capsys):
    checkout.run()
    assert checkout.run("add", "sweep") == (0, ["pip ray"])
    assert "Adding the packages of 'sweep'" in capsys.readouterr().err
    assert checkout.run("add", "sweep") == (0, [])
    assert checkout.run() == (0, [])


def test_dev_has_every_extra(checkout):
    checkout.run("dev")
    assert checkout.run("add", "sweep") == (0, [])


def test_triton_is_added_to_dev_and_stays_there(checkout):
    """Only the slow tests need it, and it is large."""
    checkout.run("dev")
    assert checkout.run("add", "triton", "--optional") == (0, ["pip --retries=1 triton"])
    assert checkout.run("add", "triton", "--optional") == (0, [])
    with open(checkout.root / "constraints.txt", "a") as file:
        file.write("# newer\n")
    assert checkout.run("dev") == (0, ["pip -e .[dev,triton]"])


@pytest.mark.parametrize("name", ["constraints.txt", "pyproject.toml"])
def test_an_update_includes_the_extras_that_were_added(checkout, name):
    checkout.run()
    checkout.run("add", "sweep")
    checkout.run("add", "wandb")
    with open(checkout.root / name, "a") as file:
        file.write("# newer\n")
    assert checkout.run() == (0, ["pip -e .[sweep,wandb]"])
    assert checkout.run("add", "wandb") == (0, [])


def test_a_failed_addition_leaves_the_rest_usable_and_is_tried_again(checkout):
    checkout.run()
    checkout.module.pip_install = checkout.pip_fails
    assert checkout.run("add", "sweep") == (2, ["failing pip"])
    assert checkout.run() == (0, [])
    checkout.module.pip_install = checkout.pip_install
    assert checkout.run("add", "sweep") == (0, ["pip ray"])


def test_an_optional_addition_that_failed_is_not_tried_again_at_once(checkout):
    checkout.run()
    checkout.module.pip_install = checkout.pip_fails
    assert checkout.run("add", "wandb", "--optional") == (2, ["failing pip"])
    checkout.module.pip_install = checkout.pip_install
    assert checkout.run("add", "wandb", "--optional") == (2, [])
    os.utime(checkout.venv / ".ragen-wandb.failed", (0, 0))
    assert checkout.run("add", "wandb", "--optional") == (0, ["pip --retries=1 wandb"])


def test_an_environment_that_is_incomplete_is_not_emptied_under_the_command_that_runs_in_it(checkout, capsys):
    checkout.run()
    (checkout.venv / ".ragen-base").unlink()
    assert checkout.run("add", "sweep") == (2, [])
    assert "incomplete" in capsys.readouterr().err
    assert (checkout.venv / "bin" / "python").exists()


def test_an_addition_never_makes_an_environment(checkout):
    assert checkout.run("add", "sweep") == (2, [])
    assert not checkout.venv.exists()


@pytest.mark.parametrize("arguments", [["sweep"], ["add"], ["add", "vllm"], ["add", "sweep", "--force"], ["dev", "x"]])
def test_wrong_arguments(checkout, arguments, capsys):
    assert checkout.run(*arguments) == (2, [])
    assert "usage" in capsys.readouterr().err


@pytest.fixture
def extras(checkout, monkeypatch):
    """`ragen.extras` as if this Python were that of the checkout's .venv, in which only base was set up."""
    from ragen import extras

    checkout.run()
    monkeypatch.setattr(extras, "ROOT", checkout.root)
    monkeypatch.setattr(extras, "BOOTSTRAP", checkout.root / "scripts" / "bootstrap.py")
    monkeypatch.setitem(extras.MODULES, "sweep", ["added_by_the_test"])
    monkeypatch.setattr(sys, "prefix", str(checkout.venv))
    monkeypatch.setattr(sys, "path", [str(checkout.root / "site"), *sys.path])
    (checkout.root / "site").mkdir()
    return extras


def fake_bootstrap(checkout: Checkout) -> None:
    """Replace bootstrap.py by one that "installs" `added_by_the_test` and records how it was called."""
    (checkout.root / "scripts" / "bootstrap.py").write_text(
        f"import pathlib, sys\nroot = pathlib.Path({str(checkout.root)!r})\n"
        "with open(root / 'calls', 'a') as file: print(*sys.argv[1:], file=file)\n"
        "(root / 'site' / 'added_by_the_test.py').touch()\n(root / '.venv' / '.ragen-sweep').touch()\n"
    )


def test_a_command_adds_what_it_needs_once(checkout, extras):
    fake_bootstrap(checkout)
    extras.require("sweep")
    importlib.import_module("added_by_the_test")
    extras.require("sweep")
    assert (checkout.root / "calls").read_text() == "add sweep\n"
    sys.modules.pop("added_by_the_test")


def test_an_interrupted_addition_is_repeated_although_the_module_can_be_found(checkout, extras):
    fake_bootstrap(checkout)
    (checkout.root / "site" / "added_by_the_test.py").touch()
    extras.require("sweep")
    assert (checkout.root / "calls").read_text() == "add sweep\n"


def test_an_addition_that_fails_is_one_line_with_a_command(checkout, extras):
    (checkout.root / "scripts" / "bootstrap.py").write_text("raise SystemExit(2)")
    with pytest.raises(ConfigError) as error:
        extras.require("sweep")
    message = str(error.value)
    assert "added_by_the_test" in message and extras.pip_command("sweep") in message and "\n" not in message


def test_an_interrupted_addition_interrupts_the_command(checkout, extras):
    (checkout.root / "scripts" / "bootstrap.py").write_text("raise SystemExit(130)")
    with pytest.raises(KeyboardInterrupt):
        extras.require("sweep")


def test_a_missing_logger_is_no_error(checkout, extras, monkeypatch):
    monkeypatch.setitem(extras.MODULES, "wandb", ["added_by_the_test"])
    fake_bootstrap(checkout)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    extras.install_loggers(["console", "wandb"])
    assert not (checkout.root / "calls").exists()
    monkeypatch.delenv("WANDB_MODE")
    extras.install_loggers(["console", "wandb"])
    assert (checkout.root / "calls").read_text() == "add wandb --optional\n"
    (checkout.root / "scripts" / "bootstrap.py").write_text("raise SystemExit(2)")
    extras.install_loggers(["wandb"])


@pytest.mark.parametrize("kind", ["another prefix", "no marker", "a link"])
def test_an_environment_of_the_users_own_is_never_changed(checkout, extras, monkeypatch, tmp_path, kind):
    if kind == "another prefix":
        monkeypatch.setattr(sys, "prefix", str(make_environment(tmp_path / "mine")))
    elif kind == "no marker":
        (checkout.venv / ".ragen").unlink()
    else:
        checkout.venv.rename(tmp_path / "theirs")
        checkout.venv.symlink_to(tmp_path / "theirs")
    fake_bootstrap(checkout)
    with pytest.raises(ConfigError, match="added_by_the_test not installed in this environment") as error:
        extras.require("sweep")
    assert f"-c '{checkout.root}/constraints.txt' -e '{checkout.root}[sweep]'" in str(error.value)
    extras.install_loggers(["sweep"])
    assert not (checkout.root / "calls").exists()


def test_an_installed_ragen_names_the_extra_without_a_checkout(extras, monkeypatch, tmp_path):
    monkeypatch.setattr(extras, "ROOT", tmp_path)
    monkeypatch.setattr(extras, "BOOTSTRAP", tmp_path / "scripts" / "bootstrap.py")
    assert extras.pip_command("sweep").endswith("-m pip install 'ragen[sweep]'")


def test_a_directory_of_past_runs_is_not_the_package(checkout, extras):
    (checkout.root / "site" / "added_by_the_test").mkdir()
    assert extras._missing("sweep") == ["added_by_the_test"]


def test_extras_are_the_same_everywhere(checkout):
    from ragen.extras import MODULES

    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert list(MODULES) == list(checkout.module.EXTRAS) == [name for name in listed if name not in NOT_ADDED]
    assert listed["all"] == [f"ragen[{','.join(MODULES)}]"]
    assert "ragen[all]" in listed["dev"]


# --- the processes that bootstrap starts --------------------------------------------------------------------------


def test_output_is_shown_on_stderr_without_the_noise(checkout, capsys):
    code = "print('Collecting torch'); print('WARNING: Location x is ignored'); print('no newline', end='')"
    with checkout.module.locked() as lock:
        checkout.module.run_visibly([sys.executable, "-c", code], lock)
    assert capsys.readouterr() == ("", "  Collecting torch\n  no newline\n")


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("Installing collected packages: numpy, torch, ragen", "Installing 3 packages"),
        ("Successfully installed numpy-2.0 torch-2.9 ragen-0.1", "Installed 3 packages"),
        ("Collecting torch", "Collecting torch"),
        ("WARNING: Retrying (Retry(total=4, …", "The package index does not answer; pip tries again"),
    ],
)
def test_long_lines_are_shortened(checkout, line, shown):
    assert checkout.module.shorter(line) == shown


def test_silence_is_broken(checkout, capsys):
    checkout.module.SILENCE_S = 0.05
    with checkout.module.locked() as lock:
        checkout.module.run_visibly([sys.executable, "-c", "import time; time.sleep(0.5)"], lock)
    assert "still working" in capsys.readouterr().err


def test_a_failing_command_is_named(checkout):
    with checkout.module.locked() as lock, pytest.raises(checkout.module.SetupError, match=r"status 7.*\n.* -c "):
        checkout.module.run_visibly([sys.executable, "-c", "raise SystemExit(7)"], lock)


def test_an_interrupted_bootstrap_lets_its_child_tidy_up(checkout):
    child = "import pathlib, time\ntry: print('up', flush=True); time.sleep(60)\nfinally: pathlib.Path('tidy').touch()"
    program = (
        "import sys; sys.path.insert(0, 'scripts'); import bootstrap as b\n"
        f"b.find_python = lambda scope: b.run_visibly([sys.executable, '-c', {child!r}], 2)\n"
        "sys.exit(b.main(['base']))"
    )
    for number, status in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        command = [sys.executable, "-c", program]
        with started(command, cwd=checkout.root, stderr=subprocess.PIPE, text=True) as parent:
            assert parent.stderr.readline() == "  up\n"
            parent.send_signal(number)
            parent.communicate(timeout=PATIENCE)
        assert parent.returncode == status
        (checkout.root / "tidy").unlink()


def test_a_killed_bootstrap_keeps_its_lock_while_its_child_writes(checkout):
    ready = checkout.root / "ready"
    program = (
        "import sys; sys.path.insert(0, 'scripts'); import bootstrap as b\n"
        f"with b.locked() as lock: b.run_visibly(['bash', '-c', 'touch {ready.name}; exec sleep 2'], lock)"
    )
    with started([sys.executable, "-c", program], cwd=checkout.root) as parent:
        while not ready.exists():
            assert parent.poll() is None
            time.sleep(0.01)
    with open(checkout.root / ".venv.lock", "a") as lock:
        with pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(lock, fcntl.LOCK_EX)  # and it is free once the child has ended


# --- environments that are used as they are -----------------------------------------------------------------------


@pytest.mark.parametrize("variable", ["VIRTUAL_ENV", "CONDA_PREFIX"])
def test_an_activated_environment_with_ragen_is_used(checkout, tmp_path, monkeypatch, capsys, variable):
    environment = make_environment(tmp_path / "mine", "ragen", "omegaconf")
    monkeypatch.setenv(variable, str(environment))
    assert checkout.run() == (0, [])
    assert capsys.readouterr().out == f"{environment}/bin/python\n"
    assert not checkout.venv.exists()


@pytest.mark.parametrize("modules", [(), ("ragen",), ("omegaconf",)])
def test_an_activated_environment_without_ragen_is_not_used(checkout, tmp_path, monkeypatch, modules):
    monkeypatch.setenv("VIRTUAL_ENV", str(make_environment(tmp_path / "other", *modules)))
    assert checkout.run() == (0, ["venv", "pip -e ."])


def test_our_own_venv_when_activated_still_needs_its_stamp(checkout, monkeypatch):
    checkout.run()
    (checkout.venv / ".ragen-base").unlink()
    monkeypatch.setenv("VIRTUAL_ENV", str(checkout.venv))
    assert checkout.run() == (0, ["venv", "pip -e ."])


def test_tests_in_an_activated_environment_without_test_tools(checkout, tmp_path, monkeypatch, capsys):
    environment = make_environment(tmp_path / "mine", "ragen", "omegaconf", "pytest")
    monkeypatch.setenv("VIRTUAL_ENV", str(environment))
    assert checkout.run("dev") == (2, [])
    message = capsys.readouterr().err
    assert "lacks hypothesis, ruff" in message and "-e '.[dev]'" in message and "deactivate" in message


def test_ragen_python_is_used_as_it_is(checkout, monkeypatch, capsys):
    monkeypatch.setenv("RAGEN_PYTHON", "sh")
    assert checkout.run("dev") == (0, [])
    assert capsys.readouterr().out == f"{shutil.which('sh')}\n"


def test_ragen_python_that_does_not_exist(checkout, monkeypatch, capsys):
    monkeypatch.setenv("RAGEN_PYTHON", "/nowhere/python")
    assert checkout.run() == (2, [])
    assert "RAGEN_PYTHON=/nowhere/python" in capsys.readouterr().err


# --- scripts ------------------------------------------------------------------------------------------------------


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return path


def run(*command: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [str(part) for part in command], cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True
    )


@pytest.fixture
def stub(tmp_path):
    """A Python that prints where it runs, which code comes first, and what it was asked."""
    return script(tmp_path / "stub", 'pwd -P\necho "$PYTHONPATH"\nfor a in "$@"; do echo "<$a>"; done\nexit 3\n')


@pytest.mark.parametrize("entry", ["train.sh", "a link to train.sh"])
def test_train_forwards_its_arguments_from_any_folder(checkout, tmp_path, stub, entry):
    elsewhere = tmp_path / "else where"
    elsewhere.mkdir()
    path = checkout.root / "train.sh"
    if entry != "train.sh":
        link = elsewhere / "train.sh"
        link.symlink_to(path)
        path = link
    ran = run("bash", path, "sokoban", "a b", "x=[1,2]", cwd=elsewhere, RAGEN_PYTHON=str(stub), PYTHONPATH="/more")
    assert ran.stdout.splitlines() == [
        str(checkout.root),
        f"{checkout.root}/src:/more",
        *("<-m>", "<ragen>", "<train>", "<sokoban>", "<a b>", "<x=[1,2]>"),
    ]
    assert ran.stderr == ""
    assert ran.returncode == 3


def test_the_wrapper_and_nested_calls_keep_the_path_short(checkout, stub):
    source = f"{checkout.root}/src"
    ran = run(checkout.root / "ragen", cwd=checkout.root, RAGEN_PYTHON=str(stub), PYTHONPATH=source)
    assert ran.stdout.splitlines() == [str(checkout.root), source, "<-m>", "<ragen>"]


def test_a_relative_ragen_python_is_relative_to_the_callers_folder(checkout, stub):
    ran = run("bash", checkout.root / "ragen", cwd=stub.parent, RAGEN_PYTHON="./stub")
    assert ran.stdout.splitlines()[-2:] == ["<-m>", "<ragen>"]


def test_train_py_hands_over_when_ragen_is_not_installed(checkout, tmp_path, stub):
    python = make_environment(tmp_path / "bare") / "bin" / "python"
    ran = run(python, checkout.root / "train.py", "sokoban", cwd=tmp_path, RAGEN_PYTHON=str(stub))
    assert ran.stdout.splitlines()[2:] == ["<-m>", "<ragen>", "<train>", "<sokoban>"]
    assert ran.returncode == 3


def test_train_py_runs_this_checkouts_code_where_ragen_is_installed(checkout, tmp_path):
    python = make_environment(tmp_path / "mine", "ragen", "omegaconf") / "bin" / "python"
    package = checkout.root / "src" / "ragen"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "cli.py").write_text("import os\ndef main(argv):\n    print(os.getcwd(), *argv)\n    return 3\n")
    ran = run(python, checkout.root / "train.py", "sokoban", "seed=1", cwd=tmp_path)
    assert ran.stdout == f"{checkout.root} train sokoban seed=1\n"
    assert ran.returncode == 3


CHECKS = ["-m ruff check .", "-m ruff format --check ."]


@pytest.mark.parametrize(
    ("ruff", "pytest_", "expected"), [(0, 0, 0), (1, 0, 1), (0, 1, 1), (1, 5, 5)], ids=["ok", "ruff", "pytest", "both"]
)
def test_test_sh_runs_all_checks_and_fails_if_any_does(checkout, tmp_path, ruff, pytest_, expected):
    stub = script(tmp_path / "stub", f'echo "$*"\ncase "$2" in ruff) exit {ruff};; pytest) exit {pytest_};; esac\n')
    ran = run("bash", checkout.root / "test.sh", cwd=tmp_path, RAGEN_PYTHON=str(stub))
    *checks, tests = ran.stdout.splitlines()
    assert checks == CHECKS
    assert re.fullmatch(r"-m pytest -n \d+ --dist worksteal", tests)
    assert ran.returncode == expected


@pytest.mark.parametrize("fails", ["", "lint_imports", "mypy"])
def test_test_sh_checks_imports_and_types_where_they_are_configured(checkout, tmp_path, fails):
    with open(checkout.root / "pyproject.toml", "a") as file:
        file.write("[tool.importlinter]\n[tool.mypy]\n")
    stub = script(tmp_path / "stub", f'echo "$*"\ncase "$*" in *"{fails or "nothing"}"*) exit 4;; esac\n')
    ran = run("bash", checkout.root / "test.sh", cwd=tmp_path, RAGEN_PYTHON=str(stub))
    called = ran.stdout.splitlines()
    assert called[:2] == CHECKS and "lint_imports" in called[2] and called[3] == "-m mypy" and len(called) == 5
    assert ran.returncode == (4 if fails else 0)


def test_test_sh_slow_runs_just_the_slow_tests(checkout, tmp_path, stub):
    ran = run("bash", checkout.root / "test.sh", "--slow", "-k", "a b", cwd=tmp_path, RAGEN_PYTHON=str(stub))
    called = " ".join(ran.stdout.splitlines()[2:])
    assert re.fullmatch(r"<-m> <pytest> <-n> <\d+> <--dist> <worksteal> <-m> <slow> <-k> <a b>", called)


@pytest.mark.skipif(os.uname().sysname != "Linux" or os.uname().machine != "x86_64", reason="Triton: Linux, x86-64")
@pytest.mark.parametrize("is_ours", [True, False])
def test_test_sh_slow_adds_triton_to_our_own_environment_only(checkout, tmp_path, is_ours):
    python = script((checkout.venv / "bin" if is_ours else tmp_path) / "python", 'echo "$*"\n')
    ran = run("bash", checkout.root / "test.sh", "--slow", cwd=tmp_path, RAGEN_PYTHON=str(python))
    assert ("scripts/bootstrap.py add triton --optional" in ran.stderr) == is_ours
    assert "-m pytest" in ran.stdout


@pytest.mark.parametrize(
    ("fast", "slow", "status", "last"),
    [
        ("5 passed, 2 skipped in 3.1s", "=== 2 passed in 75.23s (0:01:15) ===", 0, "7 passed, 0 failed"),
        ("1 failed, 4 passed, 1 error in 3.1s", "2 passed in 1s", 1, "6 passed, 2 failed"),
        ("5 passed in 3.1s", "1 failed in 1s", 1, "5 passed, 1 failed"),
        ("crashed", "1 passed in 1s", 1, "1 passed, 0 failed"),
    ],
)
def test_ci_runs_both_and_counts(checkout, tmp_path, fast, slow, status, last):
    shutil.copytree(ROOT / ".ci", checkout.root / ".ci")
    lines = [f'case "$*" in *" slow"*) echo "{slow}";; *pytest*) echo "{fast}";; esac']
    failing = [mark for mark, text in (("slow", slow), ("worksteal", fast)) if "failed" in text or "crashed" in text]
    lines += [f'case "$*" in *{mark}) exit 1;; esac' for mark in failing]
    stub = script(tmp_path / "stub", "\n".join(lines) + "\n")
    ran = run(checkout.root / ".ci" / "run", cwd=tmp_path, RAGEN_PYTHON=str(stub))
    assert ran.stdout.splitlines()[-1] == last
    assert ran.returncode == status


def test_test_sh_with_arguments_runs_just_pytest(checkout, tmp_path, stub):
    ran = run("bash", checkout.root / "test.sh", "tests/env", "-k", "a b", cwd=tmp_path, RAGEN_PYTHON=str(stub))
    assert ran.stdout.splitlines()[2:] == ["<-m>", "<pytest>", "<tests/env>", "<-k>", "<a b>"]


@pytest.fixture
def bare_path(tmp_path):
    """A PATH with what the scripts need, and no Python."""
    folder = tmp_path / "path"
    folder.mkdir()
    for name in ("bash", "dirname", "readlink", "sh"):
        (folder / name).symlink_to(shutil.which(name))
    return folder


@pytest.mark.parametrize("entry", ENTRY_SCRIPTS)
def test_an_old_python_gets_one_message(checkout, bare_path, entry):
    script(bare_path / "python3", "echo 3.8\n")
    script(bare_path / "python", "echo 'pyenv: python: command not found' >&2; exit 127\n")
    ran = run("bash", checkout.root / entry, "x", cwd=checkout.root, PATH=str(bare_path))
    assert ran.returncode == 2
    assert ran.stdout == ""
    assert ran.stderr.count("\n") == 1
    assert "needs Python 3.11 or newer; found: python3 (3.8), python (broken)" in ran.stderr


def test_no_python_at_all(checkout, bare_path):
    ran = run("bash", checkout.root / "train.sh", cwd=checkout.root, PATH=str(bare_path))
    assert ran.returncode == 2
    assert "found: none" in ran.stderr


def test_a_newer_python_behind_an_old_one_is_found(checkout, bare_path, stub):
    script(bare_path / "python3", "echo 3.8\n")
    (bare_path / "python3.12").symlink_to(sys.executable)
    environment = {"PATH": str(bare_path), "RAGEN_PYTHON": str(stub)}
    assert run("bash", checkout.root / "ragen", cwd=checkout.root, **environment).returncode == 3


def test_a_failed_set_up_ends_the_script_with_its_status(checkout):
    make_environment(checkout.venv)
    ran = run("bash", checkout.root / "train.sh", cwd=checkout.root)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "not changed" in ran.stderr


@pytest.mark.parametrize("name", ["scripts/bootstrap.py", "train.py"])
def test_old_pythons_can_parse_what_tells_them_that_they_are_old(name):
    ast.parse((ROOT / name).read_text(), feature_version=(3, 6))


def test_bootstrap_refuses_an_old_python(checkout, monkeypatch, capsys):
    monkeypatch.setattr(checkout.module.sys, "version_info", (3, 8, 10))
    assert checkout.run() == (2, [])
    assert "is Python 3.8" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["train.sh", "test.sh", "ragen", "train.py", ".ci/run"])
def test_entry_points_are_executable(name):
    assert os.access(ROOT / name, os.X_OK)


def test_constraints_pin_every_direct_dependency():
    pinned = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if not line.startswith("#")
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [names for extra, names in project["optional-dependencies"].items() if extra not in ("all", "vllm")]
    wanted = {re.split(r">=|;", name)[0].lower() for name in sum(extras, project["dependencies"])}
    assert wanted - {"ragen[all]"} <= pinned
    assert "torch==2.13.0\n" in (ROOT / "constraints.txt").read_text()


@pytest.mark.slow
def test_a_wheel_holds_every_data_file_and_building_it_leaves_nothing(tmp_path):
    checkout = tmp_path / "checkout"
    shutil.copytree(ROOT / "src", checkout / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    for name in ("pyproject.toml", "LICENSE", "setup.py"):
        shutil.copy(ROOT / name, checkout / name)
    before = set(checkout.rglob("*"))
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "-w", tmp_path]
    ran = run(sys.executable, "-m", "pip", "wheel", *options, checkout, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert set(checkout.rglob("*")) == before
    (wheel,) = tmp_path.glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    files = [path for path in (ROOT / "src" / "ragen").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert packed == {str(path.relative_to(ROOT / "src")) for path in files}
    assert "ragen/py.typed" in packed


# --- what is loaded -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code",
    ["import ragen", "from ragen.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass"],
    ids=["import ragen", "ragen --help"],
)
def test_nothing_heavy_is_loaded(code):
    code += "\nimport sys\nprint('loaded:', *({'torch', 'ray', 'transformers', 'vllm', 'wandb'} & set(sys.modules)))"
    ran = run(sys.executable, "-c", code, cwd=ROOT, PYTHONPATH=str(ROOT / "src"))
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == "loaded:"
