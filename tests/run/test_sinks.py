"""Sinks: offline without a key, never a question, and no failure of theirs is the run's."""

import http.server
import json
import math
import os
import pty
import subprocess
import sys
import threading
import types
from pathlib import Path

import numpy as np
import pytest

from ragen.config.schema import Config
from ragen.extras import pip_command
from ragen.run import sinks
from ragen.run.sinks import Sink, host_answers, make_sinks, numbers, wandb_key, wandb_mode

SRC = Path(__file__).parents[2] / "src"
KEY = "0123456789abcdef0123456789abcdef01234567"
NAMES = ("val-env/CoordSokoban/success", "train/CoordSokoban/pass@16", "rollout/filter_reason/zero_score")


def config_with(*loggers):
    config = Config()
    config.trainer.logger = list(loggers)
    config.trainer.project_name, config.trainer.experiment_name = "my/project", "first try"
    return config


# --- what any sink does -------------------------------------------------------------------------------------------


def test_only_numbers_are_passed_on():
    metrics = {"step": 3, "a": 1, "b": 0.5, "c": True, "d": np.float32(0.25), "e": "text", "f": None, "g": [1]}
    assert numbers(metrics) == {"a": 1, "b": 0.5, "c": True, "d": 0.25}
    assert math.isnan(numbers({"x": math.nan})["x"])


def test_a_failure_is_said_once_and_the_sink_is_off():
    said, seen = [], []

    def write(step, metrics):
        seen.append(step)
        if step == 2:
            raise RuntimeError("the disk\nis full")

    sink = Sink("X", write, seen.append, said.append)
    for step in range(5):
        sink.log(step, {"a": 1.0})
    sink.close("finished")
    assert seen == [0, 1, 2], "neither later metrics nor the end"
    assert said == ["X: the disk is full; no more metrics go there, the run folder has them all"]


def test_the_end_comes_once_and_may_fail():
    said, ends = [], []

    def end(status):
        ends.append(status)
        raise OSError("gone")

    sink = Sink("X", lambda step, metrics: None, end, said.append)
    sink.close("early_stopped")
    sink.close("finished")
    assert ends == ["early_stopped"] and len(said) == 1
    with pytest.raises(ValueError, match="must be one of finished"):
        sink.close("done")


def test_ctrl_c_in_a_sink_is_the_users_and_passes():
    def write(step, metrics):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Sink("X", write, print, print).log(1, {})


def test_the_console_is_no_sink(folder):
    assert make_sinks(config_with("console"), folder) == []


# --- W&B: which mode ----------------------------------------------------------------------------------------------


def never(url):
    raise AssertionError("nobody may be asked")


@pytest.mark.parametrize(
    ("environ", "answers", "mode", "why"),
    [
        ({}, never, "offline", "no key for api.wandb.ai in WANDB_API_KEY or netrc"),
        ({"WANDB_API_KEY": KEY}, lambda url: False, "offline", "https://api.wandb.ai does not answer"),
        ({"WANDB_API_KEY": KEY}, lambda url: url == "https://api.wandb.ai", "online", "a key is there"),
        ({"WANDB_API_KEY": KEY, "WANDB_MODE": "offline"}, never, "offline", "WANDB_MODE=offline"),
        ({"WANDB_API_KEY": KEY, "WANDB_MODE": "dryrun"}, never, "offline", "WANDB_MODE=dryrun"),
        ({"WANDB_API_KEY": KEY, "WANDB_MODE": "Disabled"}, never, "disabled", "WANDB_MODE=disabled"),
        ({"WANDB_API_KEY": KEY, "WANDB_MODE": "offlin"}, never, "offline", "WANDB_MODE=offlin is not "),
        ({"WANDB_MODE": "online"}, never, "offline", "no key"),
        (
            {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": "http://lab:8080/"},
            lambda url: url == "http://lab:8080",
            "online",
            "http://lab:8080 answers",
        ),
    ],
)
def test_when_wandb_goes_online(environ, answers, mode, why, tmp_path):
    found = wandb_mode({"HOME": str(tmp_path), **environ}, answers)
    assert found[0] == mode and why in found[1]


def test_keys_come_from_the_variable_or_netrc_of_that_host(tmp_path):
    home = {"HOME": str(tmp_path)}
    assert wandb_key(home) is None
    netrc = tmp_path / ".netrc"
    netrc.write_text("machine api.wandb.ai login user password from-netrc\ndefault login x password not-for-us\n")
    netrc.chmod(0o600)
    assert wandb_key(home) == "from-netrc"
    assert wandb_key(home | {"WANDB_API_KEY": KEY}) == KEY
    assert wandb_key(home | {"WANDB_BASE_URL": "http://lab:8080"}) is None, "neither another host's nor the default"
    assert wandb_key(home | {"NETRC": str(tmp_path / "other")}) is None
    netrc.write_text("machine")
    assert wandb_key(home) is None


class Server(http.server.BaseHTTPRequestHandler):
    def do_HEAD(self):
        self.send_response(int(self.path[1:]))
        self.end_headers()

    def log_message(self, *words):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{running.server_port}"
    running.shutdown()
    running.server_close()


def test_whether_a_host_answers(server):
    assert [host_answers(f"{server}/{code}") for code in (200, 401, 404, 407, 502)] == [True, True, True, False, False]
    assert not host_answers("http://127.0.0.1:1")
    assert not host_answers("not an address")


def test_no_waiting_for_a_host_or_a_name_that_hangs(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    with http.server.HTTPServer(("127.0.0.1", 0), Server) as silent:  # accepts, and nobody serves
        assert not host_answers(f"http://127.0.0.1:{silent.server_port}/200", seconds=0.2)
    release = threading.Event()
    monkeypatch.setattr(sinks, "_speaks", lambda url, seconds: release.wait(60))
    assert not host_answers("http://a-name-server-that-hangs", seconds=0.1)
    release.set()


# --- W&B: what it is told -----------------------------------------------------------------------------------------


class FakeRun:
    url = "https://wandb.ai/me/my-project/runs/1"

    def __init__(self, options):
        self.options, self.logged, self.summary, self.exit_code = options, [], {}, None
        self.dir = os.path.abspath("wandb/offline-run-1/files")

    def log(self, metrics, step):
        self.logged.append((step, metrics))

    def finish(self, exit_code):
        self.exit_code = exit_code


@pytest.fixture
def fake_wandb(monkeypatch):
    module = types.ModuleType("wandb")
    module.runs, module.refused, module.torn_down = [], None, 0

    def init(**options):
        if module.refused and options["settings"]["mode"] == "online":
            raise module.refused
        module.runs.append(FakeRun(options))
        return module.runs[-1]

    def teardown():
        module.torn_down += 1

    module.Settings, module.setup, module.init, module.teardown = dict, lambda settings: None, init, teardown
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setattr(sinks, "host_answers", lambda url: True)
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    return module


def test_an_online_run(fake_wandb, folder):
    said = []
    (sink,) = make_sinks(config_with("wandb"), folder, say=said.append, environ={"WANDB_API_KEY": KEY})
    sink.log(3, {"actor/entropy": np.float64(0.5), "note": "text"})
    sink.close("early_stopped")
    (run,) = fake_wandb.runs
    assert said == [f"W&B: {FakeRun.url}"]
    assert run.logged == [(3, {"actor/entropy": 0.5})]
    assert (run.summary, run.exit_code) == ({"status": "early_stopped"}, 3)
    options = run.options
    assert (options["project"], options["name"], options["resume"]) == ("my-project", "first try", "allow")
    assert options["config"]["trainer"]["project_name"] == "my/project"
    settings = options["settings"]
    assert (settings["api_key"], settings["mode"], settings["silent"]) == (KEY, "online", True)


def test_wandb_is_told_of_an_earlier_step_at_the_newest(fake_wandb, folder):
    """It would drop it. A resumed run may have no other step to tell of."""
    opened = {"say": print, "environ": {"WANDB_MODE": "offline"}}
    (sink,) = make_sinks(config_with("wandb"), folder, **opened)
    (resumed,) = make_sinks(config_with("wandb"), folder, first_step=2, **opened)
    for step, metrics in ((0, {"a": 1}), (1, {"a": 2}), (2, {"a": 3}), (1, {"b": 4})):
        sink.log(step, metrics)
    resumed.log(1, {"b": 4})
    told = (2, {"b": 4, "step": 1})
    assert [run.logged for run in fake_wandb.runs] == [[(0, {"a": 1}), (1, {"a": 2}), (2, {"a": 3}), told], [told]]


def test_tables_go_to_wandb(fake_wandb, folder):
    fake_wandb.Table = lambda columns, data: ("table", columns, data)
    (sink,) = make_sinks(config_with("wandb"), folder, say=print, environ={"WANDB_MODE": "offline"})
    sink.table(4, "rollout/group_rv_table", [{"group_id": 0, "reward_std": 0.5}, {"group_id": 1, "reward_std": 0.0}])
    sink.table(4, "nothing", [])
    table = ("table", ["group_id", "reward_std"], [[0, 0.5], [1, 0.0]])
    assert fake_wandb.runs[0].logged == [(4, {"rollout/group_rv_table": table})]


def test_a_sink_without_tables_leaves_them_out():
    sink = Sink("X", lambda step, metrics: None, lambda status: None, pytest.fail)
    sink.table(1, "a", [{"b": 1}])


def test_a_resumed_run_keeps_its_id(fake_wandb, folder, tmp_path):
    for _ in range(2):
        make_sinks(config_with("wandb"), folder, say=print, environ={"WANDB_MODE": "offline"})
    make_sinks(config_with("wandb"), type(folder)(tmp_path / "other"), say=print, environ={"WANDB_MODE": "offline"})
    first, second, other = (run.options["id"] for run in fake_wandb.runs)
    assert first == second != other


def test_a_refused_key_means_offline_and_is_not_shown(fake_wandb, folder):
    fake_wandb.refused, said = RuntimeError(f"bad key {KEY}"), []
    (sink,) = make_sinks(config_with("wandb"), folder, say=said.append, environ={"WANDB_API_KEY": KEY})
    assert sink.name == "W&B" and fake_wandb.torn_down == 1
    assert fake_wandb.runs[0].options["settings"]["mode"] == "offline"
    assert "api_key" not in fake_wandb.runs[0].options["settings"]
    assert len(said) == 1
    assert said[0].startswith("W&B: offline (bad key …); to upload the run later: ")
    assert said[0].endswith(f"sync {os.path.join('wandb', 'offline-run-1')}")


def test_disabled_is_off(fake_wandb, folder):
    said = []
    assert make_sinks(config_with("wandb"), folder, say=said.append, environ={"WANDB_MODE": "disabled"}) == []
    assert said == ["W&B: off (WANDB_MODE=disabled)"]


def test_whatever_else_goes_wrong_the_run_goes_on(fake_wandb, folder):
    said = []
    fake_wandb.init = lambda **options: 1 / 0
    assert make_sinks(config_with("wandb"), folder, say=said.append, environ={"WANDB_MODE": "offline"}) == []
    assert said == ["W&B: division by zero; the run continues without it"]


@pytest.mark.parametrize("stand_in", [None, types.ModuleType("wandb")])
def test_a_missing_package_is_one_line(stand_in, folder, monkeypatch):
    """The second is what a folder `wandb/` beside the program imports as."""
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    said = []
    assert make_sinks(config_with("wandb"), folder, say=said.append) == []
    assert said == [f"W&B: the package is not installed ({pip_command('wandb')}); the run continues without it"]


def without_network():
    """A prefix that takes all networks away, where the system allows it."""
    prefix = ["unshare", "--map-root-user", "--net"]
    try:
        works = subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        works = False
    return prefix if works else []


def test_the_real_wandb_needs_neither_key_nor_network_nor_an_answer(tmp_path):
    pytest.importorskip("wandb.sdk")
    code = (
        "import sys; from ragen.config.schema import Config; from ragen.store.run_folder import RunFolder\n"
        "from ragen.run.sinks import make_sinks\n"
        "config = Config(); config.trainer.logger = ['console', 'wandb']; config.trainer.project_name = 'a/b'\n"
        "(sink,) = make_sinks(config, RunFolder('run'))\n"
        "sink.table(1, 'rollout/group_rv_table', [{'group_id': 0, 'reward_std': 0.5, 'selected': True}])\n"
        "sink.log(1, {'val-env/CoordSokoban/success': 0.5, 'x': float('nan')}); sink.close('finished')\n"
        "print(sys.stdin.isatty(), 'torch' in sys.modules)"
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    dead = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    terminal, typed = pty.openpty()  # a terminal on which nobody types: a question would wait for ever
    run = subprocess.run(
        [*without_network(), sys.executable, "-c", code],
        cwd=tmp_path,
        env=kept | dead | {"PYTHONPATH": str(SRC), "HOME": str(tmp_path)},
        stdin=typed,
        capture_output=True,
        text=True,
        timeout=120,
    )
    os.close(terminal)
    os.close(typed)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "True False\n", "nothing of W&B's own"
    (line,) = run.stderr.splitlines()
    assert line.startswith("W&B: offline (no key for api.wandb.ai in WANDB_API_KEY or netrc); to upload the run later:")
    place = tmp_path / line.split(" sync ")[1]
    assert place.parent == tmp_path / "wandb" and place.name.startswith("offline-run-")
    run_id = (tmp_path / "run/wandb-id").read_text()
    written = (place / f"run-{run_id}.wandb").read_bytes()
    assert b"val-env/CoordSokoban/success" in written and b"adv_estimator" in written
    (table,) = (place / "files/media/table/rollout").glob("group_rv_table_*.table.json")
    assert json.loads(table.read_text()) | {"ncols": 3, "nrows": 1} == {
        "columns": ["group_id", "reward_std", "selected"], "data": [[0, 0.5, True]], "ncols": 3, "nrows": 1,
    }  # fmt: skip


# --- TensorBoard --------------------------------------------------------------------------------------------------


def test_tensorboard_holds_the_metrics_under_their_names(folder):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def written():
        events = EventAccumulator(str(folder.path / "tensorboard"))
        events.Reload()
        return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}

    said = []
    for first_step, steps, shift in ((0, range(4), 0.0), (2, range(3, 6), 0.5)):  # killed after 3, resumed from 2
        (sink,) = make_sinks(config_with("tensorboard"), folder, first_step=first_step, say=said.append)
        for step in steps:
            sink.log(step, dict.fromkeys(NAMES, step / 4 + shift) | {"text": "no"})
        sink.close("finished")
    assert said[0] == f"TensorBoard: tensorboard --logdir {folder.path / 'tensorboard'}"
    values = [(0, 0.0), (1, 0.25), (2, 0.5), (3, 1.25), (4, 1.5), (5, 1.75)]
    assert written() == {name: values for name in NAMES}, "step 3 of the first process is gone"


def test_tensorboard_missing_is_one_line(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    said = []
    assert make_sinks(config_with("tensorboard", "tensorboard"), folder, say=said.append) == []
    how = pip_command("tensorboard")
    assert said == [f"TensorBoard: the package is not installed ({how}); the run continues without it"]


def test_importing_the_module_loads_nothing_heavy():
    heavy = ("torch", "wandb", "tensorboard")
    code = f"import sys, json, ragen.run.sinks; print(json.dumps([name for name in {heavy!r} if name in sys.modules]))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ | {"PYTHONPATH": SRC}
    )
    assert json.loads(done.stdout) == []
