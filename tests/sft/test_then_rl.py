"""Fine-tuning, then reinforcement learning from its result, in one command."""

import contextlib
import io
import json
import shutil
import subprocess
import sys
import weakref
from pathlib import Path
from typing import NamedTuple

import pytest
from recorded_runs import all_keys, watched_configs
from small import Pressed
from without_clock import metrics_without_clock

from ragen.api import run_config
from ragen.cli import main, train
from ragen.config.compose import resolve
from ragen.config.tree import leaves
from ragen.config.unused_keys import NOT_IN_SFT
from ragen.errors import ConfigError
from ragen.sft import output_dir as sft_place
from ragen.sft import run as sft_run
from ragen.sft import then_rl
from ragen.sft.output_dir import choose_output, finished_output, planned_output, tuning_config
from ragen.store.resume import decide
from ragen.store.run_folder import RunFolder
from ragen.train import learner

ROOT = Path(__file__).parents[2]
SFT, RL = Path("models/sft/small"), Path("checkpoints/RAGEN/small")  # below the current folder, so that copies do
WORDS = [
    "sokoban", "rl_or_sft=sft_then_rl", "model_path=pocket-blank", f"sft.output_dir={SFT}",
    "sft.data_generation.train_size=4", "sft.data_generation.test_size=2", "sft.training.train_batch_size=100",
    "sft.training.epochs=2", "sft.training.learning_rate=1e-3", "sft.training.lora_rank=2",
    "sft.training.logger=[console]", "agent_proxy.max_turn=3", "actor_rollout_ref.rollout.response_length=6",
    "es_manager.train.env_groups=1", "es_manager.train.group_size=2", "es_manager.val.env_groups=1",
    "ppo_mini_batch_size=2", "trainer.experiment_name=small", "trainer.project_name=RAGEN",
    "trainer.total_training_steps=2", "trainer.val_before_train=False", "trainer.test_freq=-1", "trainer.save_freq=1",
    "trainer.max_actor_ckpt_to_keep=2",
    "actor_rollout_ref.rollout.rollout_filter_value=1", "actor_rollout_ref.rollout.rollout_filter_include_zero=True",
]  # fmt: skip


class Done(NamedTuple):
    folder: Path
    output: str
    notes: str


class Killed(Exception):
    pass


def kill(*given):
    raise Killed


def config_of(*words):
    return resolve([*WORDS, *words], environ={}).config


def settings(folder):
    return leaves(RunFolder(folder).read_config())


def models_of(folder):
    found = settings(folder)
    return {found[key] for key in ("model_path", "actor_rollout_ref.model.path", "critic.model.path")}


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A folder in which the command went through, and what it said."""
    folder = tmp_path_factory.mktemp("both")
    output, notes = io.StringIO(), io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(output), contextlib.redirect_stderr(notes):
        assert main(["train", *WORDS]) == 0
    return Done(folder, output.getvalue(), notes.getvalue())


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def copied(done, here):
    shutil.copytree(done.folder, here, dirs_exist_ok=True)
    return here


# --- both, one after the other ------------------------------------------------------------------------------------


def test_rl_starts_from_the_model_that_was_written(done):
    folder, merged = done.folder, f"{SFT}/merged_model"
    assert models_of(folder / RL) == {str(folder / merged)}, "found from everywhere"
    assert settings(folder / RL)["rl_or_sft"] == "rl" and settings(folder / SFT / "lora_weights")["rl_or_sft"] == "sft"
    assert f"model: {merged} (reinforcement learning starts from it: pocket-blank, fine-tuned)" in done.notes
    lines = [line for line in done.output.splitlines() if line.startswith("run folder:")]
    assert lines == [f"run folder: {SFT}/lora_weights", f"run folder: {RL}"]
    assert (folder / RL / "global_step_2").exists()


def test_it_is_the_run_that_rl_alone_would_be(done, copied):
    """From the same model, in a process that has fine-tuned nothing: bit for bit."""
    config = resolve(["trainer.default_local_dir=alone"], "config", str(copied / RL), environ={}).config
    run = run_config(config)
    assert metrics_without_clock(run.folder) == metrics_without_clock(copied / RL)


def test_actor_critic_and_reference_start_from_it(copied, monkeypatch):
    found, find = [], learner.find_model
    monkeypatch.setattr(learner, "find_model", lambda name: (found.append(name), find(name))[1])
    monkeypatch.setattr(then_rl, "tune", None)
    kl = ["actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.kl_loss_coef=0.1"]
    run_config(config_of("algorithm.adv_estimator=gae", *kl, "trainer.total_training_steps=1"))
    assert found == [f"{copied}/{SFT}/merged_model"] * 3


# --- resuming -----------------------------------------------------------------------------------------------------


def test_killed_between_the_two_it_does_not_fine_tune_again(done, here, monkeypatch):
    """And when RL comes to load its model, those of fine-tuning are gone."""
    loaded, alive, load = [], [], sft_run.load_model

    def remembered(*given):
        made = load(*given)
        loaded.append(weakref.ref(made.model))
        return made

    def dies(config):
        alive.extend(reference() is not None for reference in loaded)
        raise Killed

    with monkeypatch.context() as patch:
        for module in ("run", "train"):
            patch.setattr(f"ragen.sft.{module}.load_model", remembered)
        patch.setattr(then_rl, "train", dies)
        with pytest.raises(Killed):
            run_config(config_of())
    assert alive == [False] * 3  # that which learned, that which was merged, that which played
    assert (SFT / "merged_model").exists() and not RL.exists()
    monkeypatch.setattr(then_rl, "tune", None)
    run = run_config(config_of())
    assert run.folder == RL and metrics_without_clock(RL) == metrics_without_clock(done.folder / RL)


def test_killed_in_fine_tuning_it_goes_on_there(done, here, monkeypatch):
    save = sft_run.Tuner.save

    def saves_and_dies(tuner, step, now):
        save(tuner, step, now)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(sft_run.Tuner, "save", saves_and_dies)
        with pytest.raises(Killed):
            run_config(config_of())
    assert not RL.exists()
    run = run_config(config_of())
    assert metrics_without_clock(SFT / "lora_weights") == metrics_without_clock(done.folder / SFT / "lora_weights")
    assert run.folder == RL and metrics_without_clock(RL) == metrics_without_clock(done.folder / RL)


def test_killed_in_rl_it_goes_on_there(done, copied, monkeypatch, capsys):
    (RL / "finished.json").unlink()
    shutil.rmtree(RL / "global_step_2")
    monkeypatch.setattr(then_rl, "tune", None)
    run = run_config(config_of())
    assert run.folder == RL and metrics_without_clock(RL) == metrics_without_clock(done.folder / RL)
    assert f"{RL} resumes after step 1" in capsys.readouterr().out


@pytest.mark.parametrize("epochs", [1, 2])
def test_who_interrupts_fine_tuning_gets_no_rl(here, monkeypatch, capsys, epochs):
    """With one epoch of one step the fine-tuning is finished all the same."""
    words = [*WORDS, f"sft.training.epochs={epochs}"]
    with monkeypatch.context() as patch:
        patch.setattr("ragen.run.session.Interrupt", Pressed)
        assert main(["train", *words]) == 130
    assert not RL.exists() and (SFT / "merged_model").exists() == (epochs == 1)
    assert ("interrupted before reinforcement learning" in capsys.readouterr().err) == (epochs == 1)
    output = finished_output(tuning_config(config_of(f"sft.training.epochs={epochs}")))
    assert output == (SFT if epochs == 1 else None), "what is finished is used the next time"


# --- other settings -----------------------------------------------------------------------------------------------


def test_other_settings_are_fine_tuned_beside_it_and_rl_starts_from_there(copied):
    """The older model is not touched, and not taken."""
    before = (SFT / "merged_model/model.safetensors").read_bytes()
    run = run_config(config_of("sft.training.learning_rate=2e-3"))
    assert run.folder == RL.with_name("small-2") and models_of(run.folder) == {f"{copied}/{SFT}-2/merged_model"}
    assert (SFT / "merged_model/model.safetensors").read_bytes() == before
    assert (SFT.with_name("small-2") / "merged_model/model.safetensors").read_bytes() != before
    again = finished_output(tuning_config(config_of("sft.training.learning_rate=2e-3")))
    assert again == SFT.with_name("small-2"), "and the next time it is found there"


@pytest.mark.parametrize(
    "word", ["actor_rollout_ref.actor.optim.lr=1e-5", "trainer.save_freq=-1", "trainer.resume_mode=disable"]
)
def test_other_settings_of_rl_alone_use_the_same_fine_tuning(copied, word):
    assert finished_output(tuning_config(config_of(word))) == SFT


@pytest.mark.parametrize("word", ["seed.train=7", "es_manager.val.env_groups=2", "agent_proxy.max_turn=4"])
def test_what_fine_tuning_looks_at_makes_another(copied, word):
    assert finished_output(tuning_config(config_of(word))) is None


def test_an_unfinished_one_and_one_without_its_model_do_not_count(copied):
    (SFT / "merged_model/config.json").unlink()
    assert finished_output(tuning_config(config_of())) is None
    (SFT / "merged_model/config.json").touch()
    (SFT / "lora_weights/finished.json").write_text(json.dumps({"status": "interrupted", "step": 1}))
    assert finished_output(tuning_config(config_of())) is None


def test_fine_tuning_reads_nothing_that_makes_no_other(here):
    """What it reads all the same says where to write, how the screen is headed, or belongs to a probe of RL."""
    harmless = {
        "model_path", "trainer.gradient_analysis_only", "trainer.rollout_data_dir", "trainer.validation_data_dir",
    }  # fmt: skip
    with watched_configs() as readers:
        config = tuning_config(config_of("sft.training.epochs=1"))
        readers.clear()
        sft_run.fine_tune(config)
    assert {key for key in readers if key.startswith(NOT_IN_SFT)} <= harmless
    assert "sft.training.epochs" in readers
    assert all(any(key.startswith(start) for key in all_keys()) for start in NOT_IN_SFT), "every prefix has a key"


def test_what_rl_is_told_about_resuming_is_not_told_to_fine_tuning(here):
    words = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={here}/global_step_9"]
    analysed = ["trainer.gradient_analysis_mode=True", "trainer.gradient_analysis_only=True"]
    decision = choose_output(tuning_config(config_of(*words, *analysed)))
    assert decision.folder.path == SFT / "lora_weights" and decision.checkpoint is None


@pytest.mark.parametrize("stored", ["as it was", "from the current folder on", "elsewhere, and gone since"])
def test_where_the_model_lies_makes_no_other_run(done, copied, stored):
    """A copied checkout, a run that was stored with a relative path, a moved checkout."""
    before, text = f"{done.folder}/{SFT}", (RL / "config.yaml").read_text()
    after = {"as it was": before, "from the current folder on": str(SFT), "elsewhere, and gone since": f"/gone/{SFT}"}
    (RL / "config.yaml").write_text(text.replace(before, after[stored]))
    assert models_of(RL) == {f"{after[stored]}/merged_model"}
    config = then_rl.training_config(config_of("trainer.total_training_steps=3"), SFT / "merged_model")
    assert decide(config).folder.path == RL and decide(config).first_step == 3


@pytest.mark.parametrize("other", ["other weights", "another number", "another folder"])
def test_another_model_makes_another_run(copied, other):
    model = {"another number": f"{SFT}-2/merged_model", "another folder": "models/mine/merged_model"}.get(other)
    if other == "other weights":
        (SFT / "merged_model/model.safetensors").write_bytes(b"others")
    model = Path(model or SFT / "merged_model")
    config = then_rl.training_config(config_of("trainer.total_training_steps=3"), model)
    assert decide(config).folder.path == RL.with_name("small-2")


# --- several at once ----------------------------------------------------------------------------------------------


@pytest.fixture
def busy(copied):
    """Another process is fine-tuning: as if this one were it. `finish()` ends that."""
    folder = RunFolder(SFT / "lora_weights")
    record = folder.finished_path.read_bytes()
    folder.finished_path.unlink()
    with contextlib.ExitStack() as stack:
        stack.enter_context(folder.owned())

        def finish():
            folder.finished_path.write_bytes(record)
            stack.close()

        yield finish


def test_who_comes_second_waits_for_the_model(busy, monkeypatch, capsys):
    polls = []

    def sleep(seconds):
        polls.append(seconds)
        if len(polls) == 3:
            busy()

    monkeypatch.setattr(sft_place, "sleep", sleep)
    monkeypatch.setattr(then_rl, "tune", None)
    monkeypatch.setattr(then_rl, "train", kill)
    with pytest.raises(Killed):
        run_config(config_of("actor_rollout_ref.actor.optim.lr=1e-5"))
    said = capsys.readouterr().err
    assert len(polls) == 3 and said.count("waiting for process") == 1
    assert f"fine-tuning: already finished with these settings, in {SFT}\n" in said


def test_ctrl_c_ends_the_waiting(busy, monkeypatch):
    def pressed(seconds):
        raise KeyboardInterrupt

    shutil.rmtree(RL)
    monkeypatch.setattr(sft_place, "sleep", pressed)
    assert main(["train", *WORDS]) == 130 and not RL.exists()


def test_of_two_that_begin_at_once_one_waits(busy, monkeypatch):
    """Nobody is there when it looks; its levels are solved, and then the folder is another's."""
    tries, tune = [], then_rl.tune
    owners = iter([None, "process 1 on here", None])
    monkeypatch.setattr(RunFolder, "live_owner", lambda folder: next(owners))
    monkeypatch.setattr(sft_place, "sleep", lambda seconds: busy())
    monkeypatch.setattr(then_rl, "tune", lambda tuning: (tries.append(tuning), tune(tuning))[1])
    run = run_config(config_of(), stage="sft")
    assert (run.folder, run.status, len(tries)) == (SFT / "lora_weights", "finished", 1)


def test_other_settings_wait_only_until_the_first_has_recorded_a_step(busy, monkeypatch, capsys):
    monkeypatch.setattr(sft_place, "sleep", kill)
    other = tuning_config(config_of("sft.training.epochs=3"))
    sft_place.wait_for_others(other)
    assert choose_output(other, is_planned=True).folder.path == Path(f"{SFT}-2/lora_weights")
    assert not capsys.readouterr().err
    with pytest.raises(Killed):
        sft_place.wait_for_others(tuning_config(config_of()))


def test_workers_are_started_once_nobody_else_is_at_work(busy, monkeypatch):
    launched = []
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("ragen.distributed.launcher.launch", lambda *given: (launched.append(given), 0)[1])
    monkeypatch.setattr(sft_place, "sleep", lambda seconds: (busy(), launched.append("waited")))
    assert main(["train", *WORDS, "system.n_gpus=2"]) == 0
    assert launched[0] == "waited" and len(launched) == 3


# --- the words ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "model"),
    [
        ([], "Qwen/Qwen2.5-0.5B-Instruct"),
        (["model.base_model=a/b"], "a/b"),
        (["model_path=a/b"], "a/b"),
        (["actor_rollout_ref.model.path=a/b"], "a/b"),
        (["sft.training.base_model=a/b"], "a/b"),
        (["sft.training.base_model=a/b", "model.base_model=a/b"], "a/b"),
    ],
)
def test_one_model_is_named_once(words, model):
    config = resolve(["sokoban", "rl_or_sft=sft_then_rl", *words], environ={}).config
    found = {config.model_path, config.actor_rollout_ref.model.path, config.critic.model.path}
    assert found == {config.sft.training.base_model} == {model}


def test_a_recipe_may_name_it(tmp_path):
    (tmp_path / "mine.yaml").write_text("defaults: [base, _self_]\nmodel_path: a/b\nrl_or_sft: sft_then_rl\n")
    assert resolve([], "mine", str(tmp_path), environ={}).config.sft.training.base_model == "a/b"
    typed = resolve(["sft.training.base_model=c/d"], "mine", str(tmp_path), environ={}).config
    assert (typed.sft.training.base_model, typed.model_path) == ("c/d", "c/d")


@pytest.mark.parametrize("key", ["model.base_model", "model_path", "actor_rollout_ref.model.path", "critic.model.path"])
def test_two_models_are_refused(capsys, key):
    assert main(["train", "sokoban", "rl_or_sft=sft_then_rl", "sft.training.base_model=a/b", f"{key}=c/d"]) == 2
    said = capsys.readouterr().err
    assert f"{key}=c/d" in said and "a/b" in said and "sft.training.base_model" in said


@pytest.mark.parametrize(
    ("word", "code"),
    [
        ("sft.training.num_gpus=2", "fine-tuning"),
        ("sft.training.epochs=0", "range"),
        ("ppo_mini_batch_size=9", "mini-batch"),
        ("es_manager.val.env_configs.tags=[Bandit,FrozenLake]", "no-demonstrations"),
    ],
)
def test_both_halves_are_checked(word, code):
    with pytest.raises(ConfigError) as caught:
        config_of(word)
    assert caught.value.code == code


def test_the_plan_shows_both_and_where_rl_starts(done, copied, capsys):
    def plan(*words):
        assert main(["train", *WORDS, *words, "--dry-run"]) == 0
        return capsys.readouterr().out.replace("\n#     ", " ")

    told = plan()
    assert f"sft: already finished with these settings, in {SFT}" in told
    assert f"rl: starts from {SFT}/merged_model\n" in told and "rl: training steps: 2" in told
    other = plan("sft.training.epochs=3")
    assert (
        f"sft: training: 3 epochs in batches of 100 answers, adapters of rank 2 on pocket-blank, in {SFT}-2/" in other
    )
    assert f"rl: starts from {SFT}-2/merged_model" in other
    (SFT / "lora_weights/finished.json").unlink()  # killed: it resumes where it was
    assert f"rl: starts from {SFT}/merged_model" in plan()


def test_the_plan_of_one_half(copied, capsys):
    def plan(*words):
        assert main(["train", *WORDS, *words, "--dry-run"]) == 0
        return capsys.readouterr().out.partition("# notes:")[0].replace("\n#     ", " ")

    tuning, training = plan("sft.training.epochs=3", "--stage", "sft"), plan("--stage", "rl")
    assert "sft: training: 3 epochs" in tuning and "rl: " not in tuning and "training levels" not in tuning
    assert f"rl: starts from {SFT}/merged_model\n" in training and "sft: " not in training
    early = plan("sft.training.epochs=3", "--stage", "rl")
    assert f"rl: starts from {SFT}-2/merged_model, which does not exist yet: run --stage sft first\n" in early


def test_without_its_merged_model_plan_and_run_go_elsewhere(copied, monkeypatch):
    """A finished run without the model is left alone like any other."""
    shutil.rmtree(SFT / "merged_model")
    monkeypatch.setattr(then_rl, "train", kill)
    assert planned_output(config_of()) == (Path(f"{SFT}-2"), False)
    with pytest.raises(Killed):
        run_config(config_of())
    assert Path(f"{SFT}-2/merged_model").exists() and not (SFT / "merged_model").exists()
    assert planned_output(config_of()) == (Path(f"{SFT}-2"), True)


def test_a_plan_loads_no_torch(here):
    code = "import sys; from ragen.cli import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    words = ["train", *WORDS, "--dry-run"]
    assert subprocess.run([sys.executable, "-c", code, *words], capture_output=True, cwd=here,
                          env={"PYTHONPATH": str(ROOT / "src")}).returncode == 0  # fmt: skip


# --- workers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("statuses", "stages"), [([0, 0], ["sft", "rl"]), ([130], ["sft"]), ([1], ["sft"])])
def test_each_half_has_workers_of_its_own(monkeypatch, statuses, stages):
    launched, ends = [], iter(statuses)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("ragen.distributed.launcher.launch", lambda *given: (launched.append(given), next(ends))[1])
    words = [*WORDS, "system.n_gpus=2"]
    assert main(["train", *words]) == statuses[-1]
    assert launched == [(2, 1, [*words, f"--stage={stage}"]) for stage in stages]


def test_the_halves_can_be_called_by_themselves(copied, monkeypatch, capsys):
    assert main(["train", *WORDS, "sft.training.epochs=3", "--stage", "rl"]) == 2
    assert "run --stage sft first" in capsys.readouterr().err
    monkeypatch.setattr(then_rl, "tune", None)
    monkeypatch.setattr(then_rl, "train", kill)
    assert main(["train", *WORDS, "--stage", "sft"]) == 0
    with pytest.raises(Killed):
        main(["train", *WORDS, "--stage", "rl"])


def test_workers_of_torchrun_take_one_half_at_a_time(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="run torchrun twice"):
        run_config(config_of())


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_other_runs_have_no_stages(capsys, more):
    assert main(["train", "sokoban", "model_path=pocket", "--stage", "sft", *more]) == 2
    assert "rl_or_sft=rl has a single stage" in capsys.readouterr().err
    assert main(["sft", "sokoban", "--stage", "rl", *more]) == 2
    assert "rl_or_sft=sft has a single stage" in capsys.readouterr().err


def test_the_command_that_takes_less_memory_is_the_whole_one():
    typed = [*WORDS, "--stage=sft"]
    options = train.parser().parse_intermixed_args(typed)
    command = train.smaller_command(options, typed, ["sft.training.micro_batch_size=2"])
    assert command.endswith(" sft.training.micro_batch_size=2") and "--stage" not in command
