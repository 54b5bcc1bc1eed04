"""Find or make the Python environment of this checkout, and print the path of its interpreter on stdout.

    PYTHON="$(python3 scripts/bootstrap.py base)"     # or dev: with the tools that test.sh needs
    .venv/bin/python scripts/bootstrap.py add sweep   # the packages of an extra, for a command that needs them

Everything else goes to stderr, since the output of train.sh is often redirected into a log. In this order:

1. RAGEN_PYTHON, as it is;
2. an activated environment (VIRTUAL_ENV, CONDA_PREFIX) in which ragen is installed, as it is;
3. `.venv` in the checkout, made on first use and repaired when it is half made, moved or out of date.

This runs before every command, so a finished `.venv` is recognised by stamps alone, one for each scope (base, dev, an
extra), without starting pip. Stamps are written last: an interrupted set-up leaves none and is repeated. When
pyproject.toml or constraints.txt changes, every stamped scope is updated. Only a `.venv` with our marker is emptied.

Standard library only, and the syntax of Python 3.6: an old Python must get as far as saying that it is too old.
"""

import contextlib
import errno
import fcntl
import hashlib
import importlib.util
import os
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
VENV = os.path.join(ROOT, ".venv")
VENV_PYTHON = os.path.join(VENV, "bin", "python")
LOCK = os.path.join(ROOT, ".venv.lock")
MARKER = os.path.join(VENV, ".ragen")  # "we made this directory, we may empty it"
EXTRAS = ("sweep", "wandb", "tensorboard", "plots", "sft", "api", "gym")  # dev has them all
ADDED = (*EXTRAS, "triton")  # the last only for the slow tests: `test.sh --slow` adds it to dev
STAMPS = {scope: os.path.join(VENV, ".ragen-" + scope) for scope in ("base", "dev", *ADDED)}

OLDEST_PYTHON = (3, 11)
RAGEN_MODULES = ("ragen", "omegaconf")  # the second tells an installed ragen from a src folder on the path
DEV_MODULES = ("pytest", "hypothesis", "ruff")

SILENCE_S = 30  # a long download prints nothing; show that we are alive
RETRY_S = 600  # an optional extra that failed to install is not tried again for ten minutes: a sweep has many runs
NOISE = (
    *("WARNING: Location", "Requirement already satisfied", "Looking in ", "Obtaining file://"),
    *("Installing build", "Checking if build", "Getting requirements", "Preparing editable", "Building ", "Created "),
    *("Stored in", "Successfully built", "Attempting uninstall", "Found existing", "Uninstalling", "Successfully un"),
)
LISTS = (("Installing collected packages: ", "Installing"), ("Successfully installed ", "Installed"))  # one long line


class SetupError(Exception):
    """Set-up is impossible as things stand; the message says what to do. Exit status 2."""


def say(text):
    print(text, file=sys.stderr, flush=True)


# --- environments that others made --------------------------------------------------------------------------------


def explicit_python(name):
    path = shutil.which(name)
    if path is None:
        raise SetupError("RAGEN_PYTHON={}: no such program. Give the path of a Python, or unset it.".format(name))
    return os.path.abspath(path)


def missing_modules(python, modules):
    """Those of `modules` that `python` cannot find, without importing them; all of them if it does not even run."""
    code = "import importlib.util, sys; print(*[m for m in sys.argv[1:] if importlib.util.find_spec(m) is None])"
    try:
        # -I: the PYTHONPATH of a surrounding ragen command must not make any Python look like an installed ragen.
        output = subprocess.check_output([python, "-I", "-c", code, *modules], stderr=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError):
        return list(modules)
    return output.decode().split()


def usable_as_is(folder, scope):
    """The Python of the environment in `folder` if ragen is installed there, else None."""
    python = os.path.join(folder, "bin", "python")
    missing = missing_modules(python, RAGEN_MODULES + (DEV_MODULES if scope == "dev" else ()))
    if set(missing) & set(RAGEN_MODULES):
        return None
    if missing:
        raise SetupError(
            "The environment {} has ragen but lacks {}, which the tests need.\n"
            "Either install it there, from {}:\n"
            "    {} -m pip install -c constraints.txt -e '.[dev]'\n"
            "or deactivate that environment, and .venv is used.".format(folder, ", ".join(missing), ROOT, python)
        )
    return python


def active_python(scope):
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        folder = os.environ.get(variable)
        # Our own .venv, activated, may be half made: there the stamp decides.
        if folder and not (os.path.realpath(folder) == os.path.realpath(VENV) and os.path.exists(MARKER)):
            python = usable_as_is(folder, scope)
            if python:
                return python
    return None


# --- our own .venv ------------------------------------------------------------------------------------------------


def read(path):
    try:
        with open(path, "rb") as file:
            return file.read()
    except (FileNotFoundError, NotADirectoryError):
        return b""


def digest(*parts):
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def place_line():
    """Changes when .venv cannot be used any more: the checkout moved, or its Python was replaced.

    pyvenv.cfg names the Python version. The version of the Python that runs *this* is not part of it: it depends on
    the terminal, and two terminals must not rebuild each other's environment.
    """
    behind = os.path.realpath(VENV_PYTHON)
    return "place " + digest(ROOT.encode(), behind.encode(), read(os.path.join(VENV, "pyvenv.cfg")))


def dependencies_line():
    """Changes when pip has to run again."""
    return "dependencies " + digest(*(read(os.path.join(ROOT, name)) for name in ("pyproject.toml", "constraints.txt")))


def stamp_lines(scope):
    return read(STAMPS[scope]).decode("utf-8", "replace").splitlines()


def ready(scope):
    scopes = (scope, "dev") if scope in EXTRAS else (scope,)
    stamp = [place_line(), dependencies_line()]
    return any(stamp_lines(one) == stamp for one in scopes) and os.access(VENV_PYTHON, os.X_OK)


def in_place():
    """Can pip work in .venv as it is?"""
    return stamp_lines("base")[:1] == [place_line()] and not missing_modules(VENV_PYTHON, ["pip"])


def stamped_scopes():
    """What .venv holds, up to date or not."""
    return [scope for scope in STAMPS if stamp_lines(scope)[:1] == [place_line()]]


def write_stamp(scope):
    partial = STAMPS[scope] + ".partial"
    with open(partial, "w") as file:
        file.write(place_line() + "\n" + dependencies_line() + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, STAMPS[scope])


def remove_stamps():
    for stamp in STAMPS.values():
        with contextlib.suppress(FileNotFoundError):
            os.remove(stamp)


@contextlib.contextmanager
def locked():
    """One process sets up, others wait. Yields the descriptor: pip inherits it, so that the lock outlives a killed
    bootstrap for as long as its pip still writes."""
    with open(LOCK, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            say("Another process is setting up .venv; waiting for it ...")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def check_can_make_venv():
    for module in ("venv", "ensurepip"):
        if importlib.util.find_spec(module) is None:
            raise SetupError(
                "Cannot make .venv: {} (Python {}.{}) has no `{}` module.\n"
                "Debian and Ubuntu: apt install python3-venv. Or activate an environment of your own and, in {}:\n"
                "    pip install -c constraints.txt -e .".format(sys.executable, *sys.version_info[:2], module, ROOT)
            )


def shorter(text):
    """A line of pip's: the number of packages instead of a long list, and a plain reason instead of a Python object."""
    if text.startswith("WARNING: Retrying "):
        return "The package index does not answer; pip tries again"
    for start, shown in LISTS:
        if text.startswith(start):
            return "{} {} packages".format(shown, len(text[len(start) :].split()))
    return text


def run_visibly(command, lock):
    """Run `command` in the checkout with its output, less the noise, on stderr. SetupError if it fails."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "PIP_USER")}
    started = time.time()
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=(lock,),
    )
    try:
        pending = b""
        while True:
            if not select.select([process.stdout], [], [], SILENCE_S)[0]:
                say("  ... still working ({:.0f} s)".format(time.time() - started))
                continue
            chunk = os.read(process.stdout.fileno(), 65536)
            lines = (pending + chunk).split(b"\n")
            pending = lines.pop()
            if not chunk and pending:
                lines.append(pending)
            for line in lines:
                text = line.decode("utf-8", "replace").rstrip()
                if text and not text.strip().startswith(NOISE):
                    say("  " + shorter(text))
            if not chunk:
                break
        status = process.wait()
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)  # the one signal after which pip removes its temporary folders
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    if status != 0:
        shown = " ".join(shlex.quote(part) for part in command)
        raise SetupError(
            "Set-up failed (exit status {}):\n    cd {} && {}\n"
            "The lines above say why. Run the same command to try again.".format(status, shlex.quote(ROOT), shown)
        )


def make_venv(python, lock):
    run_visibly([python, "-I", "-m", "venv", VENV], lock)


def pip_install(what, lock):
    options = ["--disable-pip-version-check", "--no-input", "--progress-bar=off", "-c", "constraints.txt"]
    run_visibly([VENV_PYTHON, "-I", "-u", "-m", "pip", "install", *options, *what], lock)


def ragen_with(scopes):
    extras = ",".join(scope for scope in scopes if scope != "base")
    return ["-e", ".[{}]".format(extras) if extras else "."]


def packages_of(extra):
    """Just the packages: unlike ragen with the extra, they need no build of ragen."""
    import tomllib  # not in Python 3.6

    return tomllib.loads(read(os.path.join(ROOT, "pyproject.toml")).decode())["project"]["optional-dependencies"][extra]


def is_ours():
    """May .venv be made and emptied? What a link points to belongs to another checkout, whatever its marker says."""
    if os.path.islink(VENV):
        return False
    return not os.path.isdir(VENV) or not os.listdir(VENV) or os.path.exists(MARKER)


def empty_our_folder():
    """Everything but the marker: also when this is killed, the directory stays recognisable as ours."""
    os.makedirs(VENV, exist_ok=True)
    with open(MARKER, "a"):
        pass
    for name in os.listdir(VENV):
        path = os.path.join(VENV, name)
        if path == MARKER:
            continue
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.remove(path)


def set_up(scope, lock, pip_options=()):
    """Make or update .venv so that it has `scope`, and what it had before."""
    started = time.time()
    usable = in_place()
    # Adding to a valid base does not touch its packages (the constraints are the same): a training run in another
    # terminal continues, and an interruption costs only what was being added.
    adding = usable and ready("base")
    scopes = stamped_scopes() if usable else []
    scopes += [one for one in ("base", scope) if one not in scopes]
    if adding:
        say("Adding the packages of '{}' to .venv (once) ...".format(scope))
    elif usable:
        remove_stamps()
        say("Updating ragen in .venv ...")
    else:
        check_can_make_venv()
        say("Setting up ragen in .venv (once; a few minutes) ...")
        # The Python that runs this may be that of the very .venv that is deleted now.
        inside = sys.executable.startswith(VENV + os.sep)
        python = os.path.realpath(sys.executable) if inside else sys.executable
        empty_our_folder()
        say("Step 1, the environment: Python {}.{}.{} ...".format(*sys.version_info[:3]))
        make_venv(python, lock)
        say("Step 2, the packages, by pip ({:.0f} s so far) ...".format(time.time() - started))
    what = packages_of(scope) if adding and scope in ADDED else ragen_with(scopes)
    pip_install([*pip_options, *what], lock)
    for one in scopes:
        write_stamp(one)
    done = "'{}' is".format(scope) if adding else "ragen is"
    say("{} set up in .venv ({:.0f} s).".format(done, time.time() - started))


def own_python(scope):
    if ready(scope):
        return VENV_PYTHON
    with locked() as lock:
        if ready(scope):  # the process we waited for has done it
            return VENV_PYTHON
        if not is_ours():
            python = usable_as_is(VENV, scope)
            if python:
                return python
            raise SetupError(
                "{} {}, and ragen is not installed in it; it was not changed.\n"
                "Either use it:\n"
                "    . .venv/bin/activate && pip install -c constraints.txt -e .\n"
                "or move it away, and ragen makes its own.".format(
                    VENV, "is a link" if os.path.islink(VENV) else "exists, was not made by ragen"
                )
            )
        set_up(scope, lock)
    return VENV_PYTHON


def add(extra, optional):
    """Add an extra to our .venv, where the command that needs it is running. Returns whether it is there.

    That command reports a failure. If the extra is `optional`, the next one does not try again for a while.
    """
    failed = STAMPS[extra] + ".failed"
    with locked() as lock:
        if ready(extra):
            return True
        if not (is_ours() and in_place()):
            raise SetupError(".venv is incomplete. `./ragen doctor` repairs it.")
        if optional and os.path.exists(failed) and time.time() - os.path.getmtime(failed) < RETRY_S:
            return False
        try:
            set_up(extra, lock, ["--retries=1"] if optional else [])
        except SetupError:
            with open(failed, "w"):
                return False
        return True


def find_python(scope):
    if os.environ.get("RAGEN_PYTHON"):
        return explicit_python(os.environ["RAGEN_PYTHON"])
    return active_python(scope) or own_python(scope)


def main(arguments):
    if sys.version_info < OLDEST_PYTHON:
        found = "{} is Python {}.{}".format(sys.executable, *sys.version_info[:2])
        say("ragen needs Python 3.11 or newer; {}. Install a newer one, or set RAGEN_PYTHON to its path.".format(found))
        return 2
    additions = [["add", extra, *option] for extra in ADDED for option in ([], ["--optional"])]
    if arguments not in (["base"], ["dev"], *additions):
        say("usage: bootstrap.py base|dev, or bootstrap.py add {} [--optional]".format("|".join(ADDED)))
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwind, so that pip ends too
    try:
        if arguments in additions:
            return 0 if add(arguments[1], optional="--optional" in arguments) else 2
        print(find_python(arguments[0]))
    except SetupError as error:
        say("ragen: {}".format(error))
        return 2
    except OSError as error:  # no permission, disk full, no locks on this file system
        say("ragen: set-up failed: {}".format(error))
        say("You can use your own environment instead: activate it, or set RAGEN_PYTHON.")
        return 2
    except KeyboardInterrupt:
        say("ragen: set-up interrupted. Run the same command to start it again.")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
