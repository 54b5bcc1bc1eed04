"""The words of `ragen eval`: what is meant, and what is refused before anything is loaded."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ragen.cli import main
from ragen.config.compose import resolve
from ragen.errors import ConfigError, RunFailed
from ragen.evaluate.command import EXAMPLES, command, how_to_resume, parser, read
from ragen.evaluate.models import LocalModel, ServerModel, local_model, models_of_experiment
from ragen.evaluate.run import Evaluation
from ragen.evaluate.setting import settings
from ragen.experiment.expand import expand
from ragen.experiment.plan import Options, overrides_on
from ragen.experiment.results import write_record
from ragen.store.manifest import Manifest, write_manifest

ROOT = Path(__file__).parents[2]
DOCUMENTED = re.findall(r"^\./ragen eval (.*)$", (ROOT / "docs/evaluation.md").read_text(), re.MULTILINE)
SHOWN = re.findall(r"^  ragen eval (.*)$", EXAMPLES, re.MULTILINE)


def saved(folder, *steps):
    """Checkpoints of these steps in a run folder."""
    for step in steps:
        actor = folder / f"global_step_{step}/actor"
        actor.mkdir(parents=True)
        (actor / "config.json").write_text("{}")
    return folder


@pytest.mark.parametrize("line", [*DOCUMENTED, *SHOWN])
def test_documented_commands_say_what_they_would_do(line, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for run in ("pocket-sokoban", "mine"):
        saved(tmp_path / "checkpoints/RAGEN" / run, 150)
    assert main(["eval", *shlex.split(line, comments=True), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("models: ") and "\nepisodes: " in out and "\noutput: results/" in out


def test_commands_were_found():
    assert len(DOCUMENTED) >= 10 and len(SHOWN) >= 4


def test_a_dry_run_loads_nothing_heavy():
    code = (
        "import sys; from ragen.cli import main; main(['eval', 'pocket', '--dry-run']);"
        "print([name for name in ('torch', 'transformers', 'ray') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT / "src", timeout=120)
    assert run.stdout.splitlines()[-1] == "[]", run.stderr


def resolved(line):
    return settings(*read(parser().parse_intermixed_args(shlex.split(line))))


def test_more_turns_lift_actions_and_context_and_say_so():
    five, many = resolved("pocket --max-turns 5,25")
    assert five.notes == [] and (five.max_turn, many.max_turn) == (5, 25)
    assert many.config.custom_envs["SimpleSokoban"].max_actions_per_traj == 50
    assert many.config.actor_rollout_ref.rollout.max_model_len == 5 * 1024
    assert [note.split(": ")[1].split(" is ")[0] for note in many.notes] == [
        "custom_envs.SimpleSokoban.max_actions_per_traj",
        "actor_rollout_ref.rollout.max_model_len",
    ]


def test_what_is_given_is_not_lifted():
    words = "custom_envs.SimpleSokoban.max_actions_per_traj=12 actor_rollout_ref.rollout.max_model_len=1500"
    (setting,) = resolved(f"pocket --max-turns 25 {words}")
    assert setting.config.custom_envs["SimpleSokoban"].max_actions_per_traj == 12
    assert setting.config.actor_rollout_ref.rollout.max_model_len == 1500 and setting.notes == []


@pytest.mark.parametrize(("words", "do_sample"), [
    ("", False), ("--temperature 0.5", True), ("--temperature 0", False),
    ("--temperature 0.5 actor_rollout_ref.rollout.val_kwargs.do_sample=False", False),
])  # fmt: skip
def test_a_temperature_is_sampled_with_though_the_setting_is_greedy(tmp_path, words, do_sample):
    (tmp_path / "greedy.yaml").write_text(
        "defaults: [base, _self_]\nactor_rollout_ref: {rollout: {val_kwargs: {do_sample: False}}}\n"
    )
    (setting,) = resolved(f"a/model --config-name greedy --config-dir {tmp_path} {words}")
    assert setting.config.actor_rollout_ref.rollout.val_kwargs.do_sample is do_sample


def test_fewer_turns_lift_nothing():
    (setting,) = resolved("pocket --max-turns 2")
    assert setting.config.custom_envs["SimpleSokoban"].max_actions_per_traj == 10 and setting.notes == []


def test_several_environments_share_the_levels():
    (setting,) = resolved("pocket --env sokoban,frozenlake --episodes 5")
    envs = setting.config.es_manager.val.env_configs
    assert (envs.tags, envs.n_groups) == (["SimpleSokoban", "FrozenLake"], [3, 2])
    assert setting.config.custom_envs["FrozenLake"].env_config["success_rate"] == 1.0


def test_an_environment_brings_the_rules_that_it_is_trained_with():
    (setting,) = resolved("Qwen/Qwen2.5-0.5B-Instruct --env bandit")
    assert (setting.max_turn, setting.config.agent_proxy.max_actions_per_turn) == (1, 1)
    (setting,) = resolved("Qwen/Qwen2.5-0.5B-Instruct --env SokobanV1")
    assert setting.config.agent_proxy.max_actions_per_turn == 1
    (setting,) = resolved("Qwen/Qwen2.5-0.5B-Instruct --env frozenlake")
    assert setting.config.custom_envs["CoordFrozenLake"].env_config["success_rate"] == 1.0  # as recipe _3 has it


def test_models_and_their_names(tmp_path):
    words = "pocket --api-base http://127.0.0.1:8000/v1/ --api-model a --api-model b --api-key-env KEY"
    wanted, _ = read(parser().parse_args(shlex.split(words)))
    assert list(wanted.models) == [
        LocalModel("pocket", "pocket"),
        ServerModel("http://127.0.0.1:8000/v1", "a", "KEY"),
        ServerModel("http://127.0.0.1:8000/v1", "b", "KEY"),
    ]
    assert wanted.models[1].label == "a @ 127.0.0.1:8000"
    for name in ("x/model", "y/model"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").touch()
    same = [str(tmp_path / "x/model"), str(tmp_path / "y/model")]
    wanted, _ = read(parser().parse_args(same))
    assert [model.label for model in wanted.models] == same


def test_a_path_with_an_equals_sign_is_a_path(tmp_path):
    folder = tmp_path / "kl=0.1" / "model"
    folder.mkdir(parents=True)
    (folder / "config.json").touch()
    wanted, words = read(parser().parse_args([str(folder), "seed.val=7"]))
    assert wanted.models[0].name == str(folder) and words == ["seed.val=7"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("", "name a model"),
        ("./nowhere", "directory not found"),
        ("pocket pocket", "a model is named twice: pocket"),
        ("pocket --env sokobann", "did you mean sokoban"),
        ("pocket --env sokoban,SimpleSokoban", "named twice"),
        ("pocket --env sokoban --config-name eval", "two starting points"),
        ("pocket --env sokoban,bandit", "under different rules: max_turn is 5 for SimpleSokoban and 1 for Bandit"),
        ("pocket --env sokoban,frozenlake --episodes 1", "need at least one level each"),
        ("pocket --max-turns 5,x", "give numbers, such as 5 or 5,25"),
        ("pocket --max-turns 0", "at least 1"),
        ("pocket --max-turns 5,5", "different numbers"),
        ("pocket --max-turns 5 agent_proxy.max_turn=5", "set the same value"),
        ("pocket --episodes 0", "--episodes 0: must be at least 1"),
        ("pocket --episodes 5 es_manager.val.env_groups=5", "--episodes and es_manager.val.env_groups set the same"),
        ("pocket --temperature -1", "must be 0 (greedy) or more"),
        ("pocket --temperature nan", "must be 0 (greedy) or more"),
        ("pocket --split vall", "must be one of train, val, test, sft"),
        ("pocket --output x output.dir=y", "set the same value"),
        ("pocket output.filename=a/b", "its directory is output.dir"),
        ("pocket output.keep_batch_keys=[ids]", "output.keep_batch_keys: unknown key 'ids'"),
        ("pocket output.fromat=pkl", "did you mean output.format?"),
        ("pocket model_path=other", "name a model without a key"),
        ("--api-base http://x/v1", "belong together"),
        ("--api-model m", "belong together"),
        ("--api-base x/v1 --api-model m", "must begin with http:// or https://"),
        (
            "--api-base http://:8000/v1 --api-model m",
            "http://:8000/v1: must begin with http:// or https://, name a host",
        ),
        ("--api-base http://h/v1?a=b --api-model m", "end with a path"),
        ("--api-base http://h:abc/v1 --api-model m", "--api-base http://h:abc/v1: Port"),
        ("--api-base http://h:99999/v1 --api-model m", "--api-base http://h:99999/v1: Port"),
        ("--api-base http://[::1/v1 --api-model m", "--api-base http://[::1/v1: Invalid IPv6"),
        ("--api-base 'http://h/a b/v1' --api-model m", "as %20 and %C3%BC"),
        ("--api-base http://h/ü/v1 --api-model m", "--api-base 'http://h/ü/v1': "),
        ("pocket --env ''", "--env '': no such environment"),
        ("pocket --concurrency 0", "--concurrency 0: must be at least 1"),
        ("pocket --patience 0", "--patience 0: must be above 0"),
        ("pocket --timeout inf", "--timeout inf: must be at most 1000000 seconds"),
    ],
)
def test_what_cannot_work_is_one_message(line, says, capsys):
    assert main(["eval", *shlex.split(line), "--dry-run"]) == 2
    err = capsys.readouterr().err
    assert says in err and "Traceback" not in err


def test_no_secret_is_printed(monkeypatch, capsys):
    words = ["eval", "--api-base", "http://h/v1", "--api-model", "m", "--dry-run"]
    monkeypatch.setenv("OPENAI_API_KEY", " sk-SECRET\r\n")
    assert main(words) == 0 and ServerModel("http://h/v1", "m", "OPENAI_API_KEY").key == "sk-SECRET"
    for key in ("sk-SEC\rRET", "sk-SECRETü", "sk SECRET"):
        monkeypatch.setenv("OPENAI_API_KEY", key)
        assert main(words) == 2
    for base in ("http://user:SECRET@h/v1", "http://user:SECRET@h:abc/v1", "http://user:SECRET@[::1/v1"):
        assert main(["eval", "--api-base", base, "--api-model", "m", "--dry-run"]) == 2
    said = "".join(capsys.readouterr())
    assert (
        "SEC" not in said and said.count("see --api-key-env") == 3 and said.count("--api-key-env OPENAI_API_KEY") == 3
    )


@pytest.mark.parametrize(("name", "says"), [
    ("runs/RAGEN/mine/global_step_15", "runs/RAGEN/mine has global_step_150, global_step_100, and no global_step_15"),
    ("runs/RAGEN/mine/global_step_15/actor", "and no global_step_15"),
    ("runs/RAGEN/main", "runs/RAGEN has mine, and no main"),
    ("runs/ragen/mine/global_step_150", "runs has RAGEN, and no ragen"),
    ("runs/RAGEN/mine/episodes/global_step_1", "runs/RAGEN/mine/episodes has no checkpoint, and no global_step_1"),
    ("global_step_3", ". has no checkpoint, and no global_step_3"),
    ("nowhere/at/all", ". has runs, and no nowhere"),
])  # fmt: skip
def test_a_misspelt_folder_is_refused_before_anything_plays(tmp_path, monkeypatch, capsys, name, says):
    """Names of the hub have one slash at most; whatever has more, or names a checkpoint, is on this disk or nowhere."""
    saved(tmp_path / "runs/RAGEN/mine", 100, 150)
    (tmp_path / "runs/RAGEN/mine/episodes").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ragen.evaluate.run.evaluate", lambda plan: pytest.fail("something plays"))
    for words in (["--dry-run"], []):
        assert main(["eval", "pocket", name, *words]) == 2
        err = capsys.readouterr().err
        assert f"model {name}: directory not found; " in err and says in err and "Traceback" not in err


def test_a_misspelt_folder_is_looked_for_where_the_user_is(tmp_path):
    saved(tmp_path / "runs/RAGEN/mine", 7)
    with pytest.raises(ConfigError, match=r"/runs/RAGEN/mine has global_step_7, and no global_step_8"):
        command(["runs/RAGEN/mine/global_step_8", "--dry-run"], str(tmp_path))


def test_every_model_is_found_before_the_first_one_plays(tmp_path, monkeypatch, capsys):
    """What no word tells, for it needs a look into the files: an adapter of a model that is gone."""
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    config["base_model_name_or_path"] = str(tmp_path / "gone")
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    (adapter / "adapter_model.safetensors").touch()
    monkeypatch.setattr("ragen.evaluate.run._play_model", lambda *given: pytest.fail("something plays"))
    assert main(["eval", "pocket", str(adapter), "--output", str(tmp_path / "out")]) == 2
    assert f"model {adapter} is an adapter of {tmp_path / 'gone'}" in capsys.readouterr().err


@pytest.mark.parametrize(("end", "status"), [("interrupted", 130), ("failed", 1), ("stopped", 3)])
def test_going_on_does_not_begin_anew(tmp_path, monkeypatch, capsys, end, status):
    """Nor does the advice touch a folder that has the option's name in its own."""

    def evaluate(plan):
        assert plan.fresh
        if end == "interrupted":
            raise KeyboardInterrupt
        if end == "failed":
            raise RunFailed("the server is gone")
        return Evaluation("stopped", [], tmp_path / "x.jsonl", None)

    monkeypatch.setattr("ragen.evaluate.run.evaluate", evaluate)
    assert main(["eval", "pocket", "--fresh", "--output", "not--fresh", "--env", "sokoban"]) == status
    said = capsys.readouterr().err
    assert (
        "run the same command without --fresh to resume: ./ragen eval pocket --output not--fresh --env sokoban" in said
    )


def test_going_on_is_the_same_command():
    assert how_to_resume(["pocket", "--env=bandit"]).endswith(
        "run the same command to resume: ./ragen eval pocket --env=bandit"
    )


def test_an_empty_folder_is_no_model(tmp_path):
    with pytest.raises(ConfigError, match="has neither a Hugging Face model"):
        local_model(str(tmp_path))
    (tmp_path / "global_step_3" / "actor").mkdir(parents=True)
    with pytest.raises(ConfigError, match="saved without `model`"):
        local_model(str(tmp_path / "global_step_3"))


def test_an_experiment_is_every_one_of_its_runs(tmp_path, monkeypatch):
    """By its summary log, as a sweep leaves it; a run without a checkpoint is named, and the others are evaluated."""
    monkeypatch.chdir(tmp_path)
    plan = expand("model_scaling", Options(gpus=("cpu",), settings=(("model", "pocket,pocket-blank"),)))
    (tmp_path / "log/terminal").mkdir(parents=True)
    write_record(plan, plan.cells)
    log = tmp_path / "log/terminal/sokoban_model_scaling.log"
    folders = [tmp_path / cell.checkpoint_dir for cell in plan.cells]
    with pytest.raises(ConfigError, match=r"no checkpoint of sokoban_pocket_ragen_main, .*trainer\.save_freq=N"):
        models_of_experiment(log)
    told = []
    for num_done, folder in enumerate(folders, start=1):
        for step in (1, 20):
            actor = folder / f"global_step_{step}" / "actor"
            actor.mkdir(parents=True)
            (actor / "config.json").write_text("{}")
            write_manifest(actor.parent, Manifest(step, {"actor": ["model"]}, False, False, True, {}))
        assert [model.label for model in models_of_experiment(log, told.append)] == [
            f"{folder.name}/global_step_20" for folder in folders[:num_done]
        ]
    assert len(told) == 1 and told[0].endswith(
        "no checkpoint of sokoban_pocket_blank_ragen_main: the others are evaluated"
    )


def test_model_scaling_leaves_what_can_be_evaluated():
    for model in ("pocket", "Qwen/Qwen2.5-0.5B-Instruct"):
        (cell,) = expand("model_scaling", Options(gpus=("cpu",), steps=3, settings=(("model", model),))).cells
        config = resolve([*cell.start, *overrides_on(cell, ("cpu",))], environ={}).config
        assert config.trainer.save_freq > 0, "the last step is then saved, whatever its number"


def test_folders_are_meant_from_where_the_user_is(tmp_path, capsys, monkeypatch):
    for output, found in (("mine", tmp_path / "mine"), ("/elsewhere", Path("/elsewhere"))):
        assert command(["pocket", "--output", output, "--dry-run"], str(tmp_path)) == 0
        assert f"\noutput: {found}/val_rollouts_" in capsys.readouterr().out
    built = []
    monkeypatch.setattr("ragen.sft.pocket.build.build", lambda folder, steps: built.append(folder))
    for words in (["--output", "small"], []):
        monkeypatch.setenv("RAGEN_CALLER_DIR", str(tmp_path))
        assert main(["pocket", "build", "--steps", "1", *words]) == 0
    assert built == [tmp_path / "small", Path("models/pocket")]


def test_environments_are_played_by_as_many_at_a_time_as_there_is_room_for():
    assert resolved("a/model --env sokoban")[0].config.data.val_batch_size is None
    assert resolved("a/model --env sokoban training.val_batch_size=4")[0].config.data.val_batch_size == 4


def test_a_log_of_nothing(tmp_path, capsys):
    assert main(["eval", str(tmp_path / "x.log")]) == 2
    assert "not the log of an experiment" in capsys.readouterr().err
