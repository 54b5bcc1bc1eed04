"""Fine-tuning as a whole: what is learned, what is kept, what survives, and what comes out."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from recorded_runs import all_keys, reasons_without_effect, watched_configs
from safetensors.torch import load_file
from small import WORDS, Pressed, config_of, fine_tuned
from transformers import AutoModelForCausalLM, AutoTokenizer
from without_clock import metrics_without_clock

from ragen.api import run_config
from ragen.checkpoint.save import CheckpointStore
from ragen.cli import main
from ragen.config import derive, unused_keys
from ragen.distributed.workers import ALONE
from ragen.errors import ConfigError, RunFailed
from ragen.model.load import find_model, load_model
from ragen.report.run_report import write_report
from ragen.run import session
from ragen.run.prepare import prepare
from ragen.run.run_logger import NullLogger
from ragen.run.session import Session
from ragen.sft import train as sft_train
from ragen.sft.data import Lesson, make_data, read_rows
from ragen.sft.output_dir import choose_output
from ragen.sft.tokens import num_answers
from ragen.sft.train import Tuner, plan_batches
from ragen.store.resume import Decision
from ragen.store.run_folder import RunFolder
from ragen.train.optimizer import MasterAdamW
from ragen.train.update import imitate


def tuner(tmp_path: Path, *words: str) -> Tuner:
    config = config_of(*words)
    data = make_data(Lesson.of(config))
    batches = plan_batches(num_answers(data.train, derive.rules(config)), config)
    decision = Decision(RunFolder(tmp_path))
    one = Session(config, ALONE, decision, NullLogger(), CheckpointStore(tmp_path, keep_actor=None))
    return Tuner(config, find_model("pocket-blank"), data, batches, one)


def rows_of(folder: Path) -> list[dict]:
    return RunFolder(folder).read_metrics().rows


# --- the loss -----------------------------------------------------------------------------------------------------


def plain_loss(model, tokenizer, rows) -> float:
    """Each row by itself, with nothing but transformers: prompt, forced tag, and the answer to be learned."""
    total, count = 0.0, 0
    for row in rows:
        prompt = tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True) + "<think>"
        answer = row["response"].removeprefix("<think>") + tokenizer.eos_token
        given, learned = (tokenizer.encode(text, add_special_tokens=False) for text in (prompt, answer))
        with torch.no_grad():
            logits = model(torch.tensor([given + learned])).logits[0, len(given) - 1 : -1]
        total += float(F.cross_entropy(logits, torch.tensor(learned), reduction="sum"))
        count += len(learned)
    return total / count


def test_the_loss_is_that_of_transformers(run):
    """On the rows of the file, before training and of the merged model after it."""
    output = run.folder.parent
    rows = read_rows(output / "sft/data/sokoban/test.parquet")
    merged = output / "merged_model"
    model = AutoModelForCausalLM.from_pretrained(merged).eval()
    expected = plain_loss(model, AutoTokenizer.from_pretrained(merged), rows)
    losses = {row["step"]: row["val/loss"] for row in rows_of(run.folder) if "val/loss" in row}
    assert min(losses.values()) == pytest.approx(expected, abs=1e-5)
    assert losses[0] > min(losses.values()) + 0.1


def test_packing_changes_nothing(tmp_path):
    """One by one, four at a time, or all together: the loss and the gradient are the same."""
    one = tuner(tmp_path / "one")
    found = []
    for micro_size in (1, 4, 100):
        again = tuner(tmp_path / str(micro_size), "sft.training.lora_rank=0")
        optimizer = MasterAdamW(again.model.parameters(), one.optimizer.settings, 10)
        updated = imitate(again.model, optimizer, one.train, micro_size, grad_clip=1.0)
        found.append((updated.metrics["train/loss"], updated.metrics["train/grad_norm"]))
        one.scorer.micro_batch_size = micro_size
        found[-1] += (one.loss(one.test),)
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-5)


def test_every_token_of_an_answer_weighs_the_same(tmp_path):
    """A mean over tokens, not over sequences: what a level counts grows with its answers."""
    there = tuner(tmp_path)
    losses = [there.loss([answers]) for answers in there.test]
    counts = [answers.num_sampled for answers in there.test]
    expected = sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)
    assert len(set(counts)) > 1
    assert there.loss(there.test) == pytest.approx(expected, abs=1e-5)


def test_the_optimizer_is_the_documented_one(tmp_path):
    there = tuner(tmp_path, "sft.training.learning_rate=1e-4")
    settings = there.optimizer.settings
    assert (settings.lr, settings.betas, settings.weight_decay) == (1e-4, [0.9, 0.95], 0.01)
    assert there.optimizer.adamw.defaults["betas"] == (0.9, 0.95)
    there.optimizer.total_steps = 20
    rates = []
    for _ in range(20):
        rates.append(there.optimizer.lr)
        there.optimizer.advance()
    assert rates[0] == pytest.approx(0.5e-4) and rates[1] == pytest.approx(1e-4)  # a tenth of the steps is warm-up
    assert rates[11] == pytest.approx(0.5e-4)  # half-way down the cosine
    assert rates[2:] == sorted(rates[2:], reverse=True) and rates[-1] < 1e-6


def test_only_the_adapter_learns(run):
    base = load_model(find_model("pocket-blank")).model
    merged = load_file(run.folder.parent / "merged_model/model.safetensors")
    blank = {name: weight for name, weight in base.state_dict().items() if "norm" in name or name == "embed.weight"}
    assert torch.equal(merged["model.embed_tokens.weight"], blank["embed.weight"])
    changed = load_file(run.folder / f"global_step_{run.num_steps}/actor/adapter_model.safetensors")
    assert any(bool(weight.any()) for name, weight in changed.items() if "lora_B" in name)


# --- what a run leaves --------------------------------------------------------------------------------------------


def test_everything_is_there(run):
    output = run.folder.parent
    assert run.status == "finished" and run.num_steps == 5  # 19 answers, twice, by eight and more
    assert run.report.exists()
    for name in ("config.yaml", "metrics.jsonl", "train.log", "finished.json", "global_step_3", "global_step_5"):
        assert (run.folder / name).exists(), name
    lines = (run.folder / "train.log").read_text().splitlines()
    assert [line.split(" - ")[0] for line in lines] == [f"step:{step}" for step in range(6)]
    assert "val-env/SokobanV1/success" in (output / "merged_model/validate.log").read_text()
    assert (run.folder / "episodes/val-000005.jsonl.gz").exists()
    last = rows_of(run.folder)[-1]
    assert {"train/loss", "val/loss", "val-env/SokobanV1/success", "val-env/SokobanV1/optimal"} <= last.keys()
    html = run.report.read_text()
    assert "val/loss" in html and "train/loss" in html


def test_the_report_says_how_it_was_learned(run, tmp_path):
    """An estimator of advantages has no part in it."""
    html = run.report.read_text()
    assert "supervised fine-tuning, LoRA rank 4" in html and "8 to train, 3 to test" in html
    assert "<dt>estimator</dt>" not in html
    folder = RunFolder(tmp_path)
    folder.write_config(config_of("sft.training.lora_rank=0"))
    folder.append_metrics(1, {"train/loss": 1.0})
    assert "supervised fine-tuning, full weights" in write_report(folder).read_text()
    folder.write_config(replace(config_of(), rl_or_sft="rl"))
    assert "<dt>estimator</dt>" in write_report(folder).read_text()


def _listed(folder: Path, capsys) -> list[dict]:
    assert main(["runs", str(folder), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_it_is_listed_among_the_runs(run, capsys):
    (row,) = _listed(run.folder.parent, capsys)
    assert (row["name"], row["status"], row["estimator"], row["step"]) == ("lora_weights", "finished", "sft", 5)
    assert row["metric"] == "val-env/SokobanV1/success" and row["last"]["step"] == 5


def test_the_merged_model_is_the_best_checkpoint(run):
    """Merged and unmerged give the same logits, in the hands of transformers and of peft."""
    peft = pytest.importorskip("peft")
    output = run.folder.parent
    merged = AutoModelForCausalLM.from_pretrained(output / "merged_model").eval()
    assert next(merged.parameters()).dtype == torch.float32
    losses = {row["step"]: row["val/loss"] for row in rows_of(run.folder) if "val/loss" in row}
    best = min(losses, key=losses.get)
    base = AutoModelForCausalLM.from_pretrained(output / "merged_model").eval()
    blank = load_model(find_model("pocket-blank")).model
    from ragen.model.decoder import to_huggingface

    base.load_state_dict(dict(to_huggingface(blank)), strict=False)
    theirs = peft.PeftModel.from_pretrained(base, run.folder / f"global_step_{best}/actor").eval()
    ids = torch.arange(40)[None] % merged.config.vocab_size
    with torch.no_grad():
        assert torch.allclose(merged(ids).logits, theirs(ids).logits, atol=1e-4)


def test_the_folder_of_the_run_is_no_model_and_the_one_inside_is_named_once(run):
    for folder, inside in ((run.folder, f"global_step_{run.num_steps}"), (run.folder.parent, "merged_model")):
        with pytest.raises(ConfigError) as error:
            prepare(["sokoban", "rl_or_sft=sft", f"sft.training.base_model={folder}"], environ={})
        assert (error.value.code, error.value.key) == ("not-a-model", "sft.training.base_model")
        assert str(error.value).endswith(f"name {folder / inside}") and len(error.value.problems) == 1


def test_reinforcement_learning_can_start_from_it(run, tmp_path):
    words = [
        "sokoban", f"model.base_model={run.folder.parent / 'merged_model'}", "agent_proxy.prompt_style=terse",
        "es_manager.train.env_groups=1", "es_manager.train.group_size=2", "ppo_mini_batch_size=2",
        "es_manager.val.env_groups=1", "actor_rollout_ref.rollout.response_length=8", "training.max_turns=1",
        "trainer.total_training_steps=1", "trainer.val_before_train=False", "trainer.logger=[console]",
        "optimization.adv_estimator=brpo", "trainer.save_freq=-1", f"trainer.default_local_dir={tmp_path}/rl",
    ]  # fmt: skip
    assert main(["train", *words]) == 0
    assert rows_of(tmp_path / "rl")[-1]["step"] == 1


def test_a_finished_run_is_left_alone(run, capsys):
    output = run.folder.parent
    before = {path: path.read_bytes() for path in output.rglob("*") if path.is_file() and path.name != ".owner"}
    again = fine_tuned(output, "sft.training.epochs=1")
    assert again.folder == output.with_name("out-2") / "lora_weights"
    assert (output.with_name("out-2") / "merged_model/config.json").exists()
    assert "it is left untouched" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in before} == before


def test_a_merged_model_of_other_origin_is_left_alone(tmp_path):

    (tmp_path / "out/merged_model").mkdir(parents=True)
    decision = choose_output(config_of(f"sft.output_dir={tmp_path}/out"))
    assert decision.folder.path == tmp_path / "out-2/lora_weights"
    assert "merged_model exists" in decision.reason


def test_rows_of_an_attempt_that_never_began_are_replaced(tmp_path):
    from ragen.sft.run import _store_data

    config, other = (config_of(f"sft.output_dir={tmp_path}", f"sft.data_generation.train_size={n}") for n in (2, 3))
    for asked in (config, other):
        data = make_data(Lesson.of(asked))
        _store_data(data, asked, choose_output(asked))
        assert read_rows(tmp_path / "sft/data/sokoban/train.parquet") == data.train


@pytest.mark.parametrize("folder", ["../shared", "{}/shared"])
def test_rows_outside_of_the_output_folder_are_never_replaced(tmp_path, folder):
    """They may be another run's."""
    from ragen.sft.run import _store_data

    words = [f"sft.data_generation.data_dir={folder.format(tmp_path)}", "sft.data_generation.train_size=2"]
    one, same, other = (
        config_of(*words, f"sft.output_dir={tmp_path}/{name}", f"sft.data_generation.seed={seed}")
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    for asked in (one, same):
        _store_data(make_data(Lesson.of(asked)), asked, choose_output(asked))
    with pytest.raises(ConfigError, match="holds other rows"):
        _store_data(make_data(Lesson.of(other)), other, choose_output(other))
    assert read_rows(tmp_path / "shared/sokoban/train.parquet") == make_data(Lesson.of(one)).train


# --- stopping and resuming ----------------------------------------------------------------------------------------


class Killed(Exception):
    pass


@pytest.mark.parametrize("killed_in_step", [2, 4])
def test_a_killed_run_ends_as_if_it_had_not_been(run, tmp_path, monkeypatch, killed_in_step):
    """Before its first checkpoint, and after it."""
    record = session.Session.log_step

    def killing(self, step, metrics, clock):
        record(self, step, metrics, clock)
        if step == killed_in_step:
            raise Killed

    monkeypatch.setattr(session.Session, "log_step", killing)
    with pytest.raises(Killed):
        fine_tuned(tmp_path / "out")
    monkeypatch.setattr(session.Session, "log_step", record)
    again = fine_tuned(tmp_path / "out")
    assert again.folder == tmp_path / "out/lora_weights" and again.status == "finished"
    assert metrics_without_clock(again.folder) == metrics_without_clock(run.folder)
    ours, theirs = ((place.folder.parent / "merged_model/model.safetensors").read_bytes() for place in (again, run))
    assert ours == theirs
    assert len((again.folder / "train.log").read_text().splitlines()) == 6


def test_an_interrupted_run_goes_on_in_the_middle_of_an_epoch(run, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr("ragen.run.session.Interrupt", Pressed)
        stopped = fine_tuned(tmp_path / "out")
    assert (stopped.status, stopped.num_steps) == ("interrupted", 1)
    assert "run the same command to resume" in capsys.readouterr().out
    assert (stopped.folder / "global_step_1").exists() and not (tmp_path / "out/merged_model").exists()
    again = fine_tuned(tmp_path / "out")
    assert metrics_without_clock(again.folder) == metrics_without_clock(run.folder)


def test_killed_after_training_it_only_plays(run, tmp_path, monkeypatch):
    """The steps and the merged model are there: neither is made again."""
    shutil.copytree(run.folder.parent, tmp_path / "out")
    (tmp_path / "out/lora_weights/finished.json").unlink()
    (tmp_path / "out/merged_model/validate.log").unlink()
    stored = (tmp_path / "out/lora_weights/config.yaml").read_text()
    (tmp_path / "out/lora_weights/config.yaml").write_text(
        stored.replace(str(run.folder.parent), str(tmp_path / "out"))
    )
    monkeypatch.setattr("ragen.sft.train.imitate", None)
    monkeypatch.setattr("ragen.sft.run.write_model_folder", None)
    again = fine_tuned(tmp_path / "out")
    assert again.folder == tmp_path / "out/lora_weights"
    assert metrics_without_clock(again.folder) == metrics_without_clock(run.folder)
    ours, theirs = ((place / "metrics.jsonl").read_bytes().count(b"\n") for place in (again.folder, run.folder))
    assert ours == theirs, "what it had played already is forgotten"
    assert (tmp_path / "out/merged_model/validate.log").exists()


def test_the_success_is_that_of_the_step_whose_weights_were_merged(tmp_path, monkeypatch, capsys):
    losses = iter((3.0, 1.0, 2.0))
    monkeypatch.setattr(sft_train.Tuner, "loss", lambda self, samples: next(losses))
    run = fine_tuned(tmp_path / "out")
    said = capsys.readouterr().out
    played = [row["step"] for row in rows_of(run.folder) if "val-env/SokobanV1/success" in row]
    assert (run.num_steps, played) == (5, [3])
    assert "best: step 3" in said and "\nstep:3 - val-env/" in said
    assert (tmp_path / "out/merged_model/validate.log").read_text().startswith("step:3 - val-env/")
    assert [file.step for file in RunFolder(run.folder).episode_files("val")] == [3]
    (listed,) = _listed(tmp_path, capsys)
    assert (listed["step"], listed["last"]["step"], listed["best"]["step"]) == (5, 3, 3)
    assert "There is only one validation, at step 3" in run.report.read_text()


# --- other ways ---------------------------------------------------------------------------------------------------


def test_where_no_epoch_is_better_the_base_is_the_result(tmp_path, capsys):
    run = fine_tuned(tmp_path / "out", "sft.training.learning_rate=0", "sft.training.epochs=1")
    assert "no epoch is better than the base model" in capsys.readouterr().out
    merged = load_model(find_model(str(tmp_path / "out/merged_model"))).model.state_dict()
    base = load_model(find_model("pocket-blank")).model.state_dict()
    assert all(torch.equal(merged[name], base[name]) for name in base)
    assert json.loads((run.folder / f"global_step_{run.num_steps}/trainer_state.json").read_text())["best"]["step"] == 0


def test_all_weights_can_be_learned(tmp_path):
    """Rank 0, no loss beforehand, no thinking, another game; and the loss of the result is that of the best epoch."""
    words = [
        "sft.training.lora_rank=0", "sft.training.validate_before_training=False", "training.no_think_rl=True",
        "sft.data_generation.num_processes=2", f"sft.output_dir={tmp_path}/out",
    ]  # fmt: skip
    run = run_config(config_of(*words, environment="frozenlake"))
    losses = [row["val/loss"] for row in rows_of(run.folder) if "val/loss" in row]
    assert len(losses) == 2 and losses[1] < losses[0]
    assert rows_of(run.folder)[0]["step"] == 1
    assert (run.folder / f"global_step_{run.num_steps}/actor/model.safetensors").exists()
    merged = load_model(find_model(str(tmp_path / "out/merged_model"))).model.state_dict()
    base = load_model(find_model("pocket-blank")).model.state_dict()
    assert not torch.equal(merged["embed.weight"], base["embed.weight"])


def test_where_no_loss_is_finite_the_run_says_so(tmp_path):
    there = tuner(tmp_path)
    there.best = sft_train.Best()
    with pytest.raises(RunFailed, match="no loss on the test rows was finite"):
        there.best_checkpoint()


def test_the_verb_is_the_documented_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["sokoban", *WORDS[1:], "--dry-run"]
    assert main(["sft", *words]) == 0
    by_verb = capsys.readouterr().out
    assert main(["train", *words, "rl_or_sft=sft"]) == 0
    assert capsys.readouterr().out == by_verb
    assert "8 solved levels of SokobanV1, and 3 more to test on, in models/sft/sft/data/sokoban" in by_verb.replace(
        "\n#     ", " "
    )
    assert "adapters of rank 4 on pocket-blank" in by_verb


@pytest.mark.parametrize("word", ["rl_or_sft=rl", "rl_or_sft=sft_then_rl", "+rl_or_sft='rl'", "~rl_or_sft"])
def test_the_verb_does_nothing_else(capsys, word):
    assert main(["sft", "sokoban", word, "--dry-run"]) == 2
    assert f"{word}: ragen sft only fine-tunes; use ragen train" in capsys.readouterr().err


def test_the_kind_of_run_may_be_typed_besides(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["sft", "sokoban", *WORDS, "--dry-run"]) == 0


def test_the_plan_names_the_folder_that_is_taken(run, capsys):
    assert main(["sft", "sokoban", *WORDS[1:], f"sft.output_dir={run.folder.parent}", "--dry-run"]) == 0
    assert f"merged, in {run.folder.parent}-" in capsys.readouterr().out.replace("\n#     ", " ")


def test_a_folder_in_use_is_avoided_with_the_key_of_fine_tuning(tmp_path, capsys):
    words = ["sokoban", *WORDS[1:], "env.env_kwargs.cell_format=plain", f"sft.output_dir={tmp_path}"]
    with RunFolder(tmp_path / "lora_weights").owned():
        assert main(["sft", *words]) == 2
    said = capsys.readouterr().err
    assert f"{tmp_path}/lora_weights is in use by process" in said
    assert "choose another directory with sft.output_dir" in said and "default_local_dir" not in said


def test_a_key_is_read_or_says_that_it_is_not(tmp_path):
    """What is read all the same: for which only an empty value is ever stored, or what no such run writes."""
    harmless = {"trainer.total_training_steps", "trainer.gradient_analysis_only", "trainer.rollout_data_dir"}
    elsewhere = {  # checked when the run is resolved, launched, or used in another kind of it
        "rl_or_sft", "actor_rollout_ref.rollout.name", "agent_proxy.batch_adjust_mode", "trainer.project_name",
        "trainer.default_local_dir", "trainer.n_gpus_per_node", "trainer.nnodes", "trainer.resume_from_path",
        "ray_kwargs.ray_init", "sft.data_generation.prefix", "sft.frozenlake.size", "sft.frozenlake.p",
        "sft.frozenlake.is_slippery",
    }  # fmt: skip
    with watched_configs() as readers:
        config = config_of(f"sft.output_dir={tmp_path}", "sft.training.epochs=1")
        readers.clear()
        run_config(config)
    said = {key for key in all_keys() if unused_keys.reason(key, "sft")} | set(reasons_without_effect())
    assert not said & set(readers) - harmless
    assert set(all_keys()) - set(readers) - said <= elsewhere


def test_help_fits_a_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as end:
        main(["sft", "--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert "ragen sft [ENV" in shown and max(map(len, shown.splitlines())) <= 80


def test_bad_words_end_with_status_2(capsys):
    assert main(["sft", "sokoban", "sft.training.epochs=0"]) == 2
    assert "sft.training.epochs=0: must be at least 1" in capsys.readouterr().err


def test_memory_is_explained_by_the_keys_of_fine_tuning(monkeypatch):
    from ragen.run.memory import OutOfMemory, explained, smaller

    config = config_of("data.val_batch_size=7")
    assert smaller(config) == ["sft.training.micro_batch_size=2", "data.val_batch_size=3"]
    with (
        pytest.raises(OutOfMemory, match=r"sft\.training\.micro_batch_size") as error,
        explained(replace(config), torch.device("cpu"), Path("nowhere")),
    ):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
    assert error.value.overrides == smaller(config)
