"""Whole evaluations with the embedded model: here, through a server, interrupted, and with a server that fails."""

import json
import re
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from itertools import chain, repeat
from pathlib import Path

import pytest
import torch
from scripted import reply, scripted_server

from ragen.checkpoint.parts import Parts, part_of
from ragen.checkpoint.save import CheckpointStore
from ragen.cli import main
from ragen.config.compose import resolve
from ragen.engine.native.engine import EngineRun, NativeEngine
from ragen.errors import ConfigError
from ragen.evaluate import run as running
from ragen.evaluate.models import LocalModel, ServerModel, local_model
from ragen.evaluate.output import read_lines
from ragen.evaluate.report import cells, headings, markdown_section, reference_of
from ragen.evaluate.run import EvaluationPlan, ServerOptions, evaluate
from ragen.evaluate.setting import Wanted, settings
from ragen.model.load import find_model, load_model
from ragen.model.lora import add_adapters
from ragen.serve.web import Server
from ragen.store.run_folder import RunFolder
from ragen.train.validation import Validator, requests

PAGE = Path(__file__).parents[2] / "docs/evaluation.md"
POCKET = LocalModel("pocket", "pocket")
NOW = datetime(2026, 1, 2, 3, 4, 5)


@pytest.fixture(autouse=True)
def _loaded_once(pocket, monkeypatch):
    monkeypatch.setattr("ragen.model.load.load_model", lambda source, device=None, merge=True: pocket)


def plan(folder, models=(POCKET,), words=(), server=None, **options):
    wanted = Wanted(models, **{"environments": ["SimpleSokoban"], "episodes": 5, "samples": 1} | options)
    words = ["agent_proxy.max_turn=3", f"output.dir={folder}", "output.append_timestamp=False", *words]
    return EvaluationPlan(wanted, settings(wanted, words), server or ServerOptions(), token_ids=True)


def evaluated(folder, quiet=lambda text: None, **options):
    return evaluate(plan(folder, **options), quiet, NOW)


def talks(result):
    """What was said and done, episode by episode."""
    lines = read_lines(result.path)
    return [(line["messages"], line["rewards"], [turn["actions"] for turn in line["turns"]]) for line in lines]


# --- a model here -------------------------------------------------------------------------------------------------


def test_success_is_that_of_a_validation(pocket, tmp_path):
    """The same levels and draws as in a training run with this config."""
    result = evaluated(tmp_path, temperature=0.5)
    config = plan(tmp_path, temperature=0.5).settings[0].config
    worlds = running.worlds_of(running.local_player(POCKET), config)
    engine = NativeEngine(pocket.model, pocket.tokenizer, worlds["SimpleSokoban"].view.chat.end_of_turn_id)
    metrics, groups = Validator(config, worlds).run(engine)
    assert result.rows[0].measured.success.value == metrics["val-env/SimpleSokoban/success"]
    assert [line["metadata"]["seed"] for line in read_lines(result.path)] == [group.seed for group in groups]
    assert running.requests(config, "val") == requests(config)


def test_what_is_written(tmp_path):
    wanted = Wanted([POCKET], environments=["SimpleSokoban"], episodes=3, samples=2, max_turns=(2, 4))
    words = [f"output.dir={tmp_path}", "output.filename=mine.pkl"]
    result = evaluate(EvaluationPlan(wanted, settings(wanted, words)), lambda text: None, NOW)
    assert result.status == "finished"
    assert result.path == tmp_path / "mine_20260102_030405.jsonl"
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".html", ".jsonl", ".md"]  # and no journal
    lines = read_lines(result.path)
    assert [line["custom_id"] for line in lines] == [f"traj_{number}" for number in range(12)]
    assert [line["meta_info"]["max_turn"] for line in lines] == [2] * 6 + [4] * 6
    assert [row.max_turn for row in result.rows] == [2, 4]
    assert all(set(row.measured.pass_at) == {1, 2} for row in result.rows)
    page = result.report.read_text()
    assert page.count("<svg") == 1 and ">nan" not in page.lower()
    assert "SimpleSokoban level" in page
    table = (tmp_path / "mine_20260102_030405.md").read_text()
    assert re.search(r"\| pocket \| 4 \| .* vs 2 turns \|", table)


def test_rows_stand_between_random_and_optimal_play(tmp_path):
    result = evaluated(tmp_path, models=(POCKET, LocalModel("pocket-blank", "blank")))
    table = markdown_section(result.rows, "SimpleSokoban").splitlines()[4:]
    assert [row.split(" | ")[0] for row in table] == ["| random play", "| pocket", "| blank", "| optimal play"]
    assert "| 80.0 % |" in table[-1]  # one of the five levels takes more than six steps
    first, second = result.rows
    assert reference_of(first, result.rows) is None and reference_of(second, result.rows) is first
    difference = dict(zip(headings(result.rows), cells(second, result.rows), strict=True))["difference"]
    assert difference == "+0.0 [-28.0, +28.0], noise vs pocket"  # equal weights: 1.96 / 7 by Agresti and Min


@pytest.mark.parametrize("rank", [0, 2], ids=["whole", "adapter"])
def test_a_checkpoint_is_played_as_it_was_trained(tmp_path, monkeypatch, rank):
    """Its own game, rules and levels, from the config of its run; newest first, and any by name."""
    monkeypatch.undo()
    run = tmp_path / "my-run"
    words = ["sokoban", "model_path=pocket", "agent_proxy.max_turn=4", "es_manager.val.env_groups=3"]
    RunFolder(run).write_config(resolve([*words, f"lora.rank={rank}"], environ={}).config)
    trained = load_model(find_model("pocket"), "cpu")
    if rank:
        add_adapters(trained.model, rank, 2 * rank)
    CheckpointStore(run, contents=["model"]).save(1, Parts(part_of(trained)))
    assert (run / "global_step_1/actor/model.safetensors").exists() == (rank == 0)
    found = local_model(str(run))
    assert found.label == "my-run/global_step_1" and found.name == str(run / "global_step_1" / "actor")
    assert local_model(str(run / "global_step_1")) == local_model(str(run / "global_step_1" / "actor")) == found
    for environments in ([], ["sokoban"], ["SimpleSokoban"]):
        (setting,) = settings(Wanted([found], environments=environments))
        assert setting.config.es_manager.val.env_configs.tags == ["SimpleSokoban"]
        assert (setting.max_turn, setting.config.es_manager.val.env_groups) == (4, 3)
        assert setting.config.agent_proxy.prompt_style == "terse" and setting.notes == []
    (setting,) = settings(Wanted([found], episodes=2, samples=5))
    assert setting.config.es_manager.val.env_configs.n_groups == [2]
    wanted = Wanted([found])
    result = evaluate(EvaluationPlan(wanted, settings(wanted, [f"output.dir={tmp_path}"])), lambda text: None)
    assert result.status == "finished" and len(result.rows[0].outcomes) == 3


def test_what_a_run_does_not_play_brings_rules_of_its_own_and_says_so(tmp_path):
    words = ["sokoban", "model_path=pocket", "agent_proxy.max_turn=4", "es_manager.val.env_groups=3"]
    RunFolder(tmp_path / "run").write_config(resolve(words, environ={}).config)
    folder = tmp_path / "run/global_step_1/actor"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    found = local_model(str(folder))

    def notes(*environments, **options):
        return [setting.notes for setting in settings(Wanted([found], environments=environments, **options))]

    for name in ("LargerSokoban", "frozenlake"):
        ((note,),) = notes(name)
        assert note.startswith(f"--env {name}: the run {tmp_path / 'run'} plays SimpleSokoban. ")
        assert "agent_proxy.prompt_style=full (there terse), agent_proxy.max_turn=5 (there 4)" in note
    assert [len(told) for told in notes("LargerSokoban", max_turns=(2, 3))] == [1, 0]
    assert notes("SimpleSokoban", max_turns=(2, 3)) == [[], []]
    with pytest.raises(ConfigError, match="named twice: SimpleSokoban, SimpleSokoban"):
        notes("sokoban", "SimpleSokoban")


def test_a_tag_that_a_run_was_only_trained_on_is_its_own_too(tmp_path):
    words = ["es_manager.train.env_configs.tags=[LargerSokoban]", "agent_proxy.max_turn=7", "model_path=a/model"]
    words += ["es_manager.val.env_configs.tags=[CoordSokoban]", "es_manager.val.env_groups=6"]
    RunFolder(tmp_path).write_config(resolve(words, "_2_sokoban", environ={}).config)
    model = LocalModel("a/model", "model", tmp_path)
    for name in ("LargerSokoban", "CoordSokoban"):
        (setting,) = settings(Wanted([model], environments=[name]))
        envs = setting.config.es_manager.val.env_configs
        assert (setting.max_turn, envs.tags, envs.n_groups, setting.notes) == (7, [name], [6], [])


def test_a_fine_tuned_checkpoint_plays_the_validation_of_its_run(tmp_path):
    run = tmp_path / "tuned"
    words = ["sokoban", "rl_or_sft=sft", "sft.training.base_model=pocket-blank", f"sft.output_dir={run}"]
    words += ["training.n_rollout=1"]  # no RL could be done with so few
    RunFolder(run).write_config(resolve([*words, "es_manager.val.env_groups=3"], environ={}).config)
    folder = run / "global_step_1/actor"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    found = local_model(str(folder.parent))
    assert found.run_folder == run
    (setting,) = settings(Wanted([found]))
    assert setting.config.model_path == str(folder)
    assert setting.config.es_manager.val.env_configs.n_groups == [3]
    (watched,) = settings(Wanted([found], environments=["sokoban"], episodes=1, samples=1, temperature=0.0))
    assert watched.config.es_manager.val.env_groups == 1


# --- interrupted --------------------------------------------------------------------------------------------------


def test_an_interrupted_evaluation_goes_on_and_ends_the_same(tmp_path, monkeypatch):
    options = {"temperature": 1.0, "episodes": 12}
    whole = evaluated(tmp_path / "whole", **options)

    @contextmanager
    def interrupted(*given):
        counts = []

        def advance(count):
            counts.append(count)
            if sum(counts) >= 2:
                raise KeyboardInterrupt

        yield advance

    with monkeypatch.context() as patch:
        patch.setattr(running, "progress", interrupted)
        with pytest.raises(KeyboardInterrupt):
            evaluated(tmp_path / "parts", **options)
    (journal,) = (tmp_path / "parts").glob(".journal-*")
    num_finished = len(journal.read_text().splitlines()) - 1
    assert 2 <= num_finished < 12
    journal.write_bytes(journal.read_bytes() + b'{"place": ["Simple')  # killed while it wrote
    played = []
    run = NativeEngine.run
    monkeypatch.setattr(NativeEngine, "run", lambda self, some, *rest: played.extend(some) or run(self, some, *rest))
    told = []
    again = evaluated(tmp_path / "parts", told.append, **options)
    assert len(played) == 12 - num_finished
    assert any(f"{num_finished} episodes are already in the journal" in text for text in told)
    assert again.path.read_bytes() == whole.path.read_bytes()
    assert not list((tmp_path / "parts").glob(".journal-*"))


def test_evaluations_under_one_name_do_not_overwrite_each_other(tmp_path):
    names = [evaluated(tmp_path, episodes=episodes).path.name for episodes in (1, 2, 1)]
    assert names == ["val_rollouts.jsonl", "val_rollouts_2.jsonl", "val_rollouts.jsonl"]
    assert [len(read_lines(tmp_path / name)) for name in names[:2]] == [1, 2]


def test_evaluations_of_the_same_second_do_not_overwrite_each_other(tmp_path):
    words = ["output.append_timestamp=True"]
    names = [evaluated(tmp_path, episodes=episodes, words=words).path.name for episodes in (1, 2)]
    assert names == ["val_rollouts_20260102_030405.jsonl", "val_rollouts_20260102_030405_2.jsonl"]
    assert [len(read_lines(tmp_path / name)) for name in names] == [1, 2]
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".html"] * 2 + [".jsonl"] * 2 + [".md"] * 2


def test_as_many_episodes_at_a_time_as_were_asked_for(tmp_path, monkeypatch):
    admitted, admit = [], EngineRun.admit
    monkeypatch.setattr(EngineRun, "admit", lambda run, rows: (admitted.append(rows), admit(run, rows))[1])
    few, many = (evaluated(tmp_path / str(size), words=[f"data.val_batch_size={size}"]) for size in (2, "null"))
    assert admitted == [2, 256] and talks(few) == talks(many)


def test_out_of_memory_says_what_to_lower(tmp_path, monkeypatch, capsys):
    def full(*given):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(EngineRun, "admit", full)
    words = ["--env", "SimpleSokoban", "--episodes", "2", "--output", str(tmp_path), "data.val_batch_size=8"]
    assert main(["eval", "pocket", *words]) == 1
    said = capsys.readouterr().err
    assert "out of memory on" in said and "now up to 8: data.val_batch_size=4" in said and "Traceback" not in said
    assert "max_model_len (now 1024)" in said and "run the same command to resume" in said


def test_to_begin_anew_forgets_every_model_at_once(tmp_path, monkeypatch):
    """Interrupted, it resumes without `fresh`: nothing older may come back for a model that had not begun."""
    models = (POCKET, LocalModel("pocket-blank", "blank"))
    made = plan(tmp_path, models=models, episodes=2)
    evaluate(replace(made, keep_journal=True), lambda text: None, NOW)

    def interrupted(*given):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(NativeEngine, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            evaluate(replace(made, fresh=True), lambda text: None, NOW)
    told = []
    assert evaluate(made, told.append, NOW).status == "finished"
    assert not [text for text in told if "already in the journal" in text]


def test_another_setting_has_another_journal(tmp_path):
    def name(**options):
        made = plan(tmp_path, **options)
        identity = running.identity(made.wanted.models[0], made.settings[0], made.wanted.split, made.server)
        return running.Journal(tmp_path, identity).path

    same = name()
    others = [
        name(temperature=0.0), name(episodes=6), name(samples=2), name(words=["seed.val=9"]), name(split="test"),
        name(models=(LocalModel("pocket-blank", "pocket"),)), name(words=["es_manager.format_penalty=-0.5"]),
        name(words=["custom_envs.SimpleSokoban.max_actions_per_traj=7"]),
    ]  # fmt: skip
    assert name() == same and len({same, *others}) == 9
    assert name(words=["output.filename=other.pkl", "trainer.test_freq=7"]) == same


def test_whatever_is_read_of_a_model_sets_it_apart(tmp_path):
    names = ("config.json", "model.safetensors", "chat_template.jinja", "tokenizer.model", "merges.txt")
    for name in names:
        (tmp_path / name).write_text("one")
    found = [LocalModel(str(tmp_path), "m").fingerprint()]
    for name in names:
        (tmp_path / name).write_text("another")
        found.append(LocalModel(str(tmp_path), "m").fingerprint())
    (tmp_path / "README.md").write_text("changes nothing")
    assert LocalModel(str(tmp_path), "m").fingerprint() == found[-1]
    assert all(found.count(one) == 1 for one in found)


# --- through a server ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("temperature", "words"),
    [(0.0, ()), (1.0, ()), (1.0, ("agent_proxy.context_window_mode=limited_multi_turn",
                                  "agent_proxy.max_context_window=2"))],
    ids=["greedy", "sampled", "window"],
)  # fmt: skip
def test_a_model_does_the_same_behind_our_server(pocket, tmp_path, temperature, words):
    with Server(pocket, "pocket") as server:
        there = evaluated(tmp_path / "there", models=(ServerModel(server.base, "pocket", "NO_KEY"),),
                          temperature=temperature, words=words)  # fmt: skip
    here = evaluated(tmp_path / "here", temperature=temperature, words=words)
    assert talks(there) == talks(here)
    assert there.rows[0].outcomes == here.rows[0].outcomes  # tokens too
    assert there.status == "finished" and there.rows[0].notes == ()


def test_a_server_that_is_killed_and_comes_back_loses_nothing(pocket, tmp_path):
    first = Server(pocket, "pocket").__enter__()
    port, read, begun, second = int(first.base.rsplit(":", 1)[1][:-3]), first.read, [], []

    def restart():
        first.__exit__()
        time.sleep(0.3)
        second.append(Server(pocket, "pocket", port=port).__enter__())

    def counted(*request):
        begun.append(request)
        if len(begun) == 4:
            threading.Thread(target=restart).start()
        return read(*request)

    first.read = counted
    told = []
    model = ServerModel(first.base, "pocket", "NO_KEY")
    there = evaluated(tmp_path / "there", told.append, models=(model,), temperature=1.0,
                      server=ServerOptions(concurrency=2))  # fmt: skip
    second[0].__exit__()
    assert any("retrying for up to 600 s" in text for text in told)
    assert there.status == "finished"
    assert talks(there) == talks(evaluated(tmp_path / "here", temperature=1.0))


def test_a_server_with_too_little_room_is_refused_and_one_with_as_much_plays_as_here(pocket, tmp_path, capsys):
    """Its own limit would hit the long episodes alone. Ours ends them, and then they count."""
    limit, words = 190, ["--env", "SimpleSokoban", "--episodes", "6", "--samples", "1", "--temperature", "0"]
    with Server(pocket, "pocket", max_model_len=limit) as server:
        there = ["--api-base", server.base, "--api-model", "pocket", *words, "--output", str(tmp_path / "there")]
        assert main(["eval", *there]) == 2
        said = capsys.readouterr().err
        assert f"has a context of {limit} tokens, and an episode may take 1024" in said and "Traceback" not in said
        options = {
            "words": [f"actor_rollout_ref.rollout.max_model_len={limit}", "agent_proxy.max_turn=5"],
            "episodes": 6, "temperature": 0.0,
        }  # fmt: skip
        cut = evaluated(tmp_path / "cut", models=(ServerModel(server.base, "pocket", "NO_KEY"),), **options)
    here = evaluated(tmp_path / "here", **options)
    assert talks(cut) == talks(here) and cut.status == "finished"
    assert cut.rows[0].measured == here.rows[0].measured
    assert "max_length" in {line["metadata"]["ended_by"] for line in read_lines(cut.path)}


UP = "Up.</think><answer>Up</answer>"


def test_failures_are_counted_and_never_scored(tmp_path):
    """The second level of three cannot be played: success is over the other two, and the same command tries again."""
    fails = {"now": True}
    levels = []

    def answer(body):
        level = body["messages"][1]["content"]
        if len(body["messages"]) == 3 and level not in levels:
            levels.append(level)
        if fails["now"] and level == levels[min(1, len(levels) - 1)] and len(levels) > 1:
            return 200, reply("x", "content_filter")
        return 200, reply(UP)

    with scripted_server(answer) as server:
        options = {
            "models": (ServerModel(server.base, "m", "NO_KEY"),), "episodes": 3,
            "server": ServerOptions(concurrency=1),
        }  # fmt: skip
        result = evaluated(tmp_path, **options)
        row = result.rows[0]
        assert (result.status, len(row.outcomes), row.num_failed, row.num_left) == ("failed", 2, 1, 0)
        assert row.measured.num_levels == 2 and row.measured.num_episodes == 2
        assert "1 failed and not scored: a reply that ended by content_filter" in cells(row, result.rows)[-1]
        # Two levels lost, one unknown: none to one of three won. By hand, Wilson's upper end of 1 of 3 is 0.7923.
        assert cells(row, result.rows)[2] == "0.0 % [0.0, 79.2], 2 of 3 finished"
        assert cells(row, result.rows)[3] == f"{row.measured.mean_return.value:.2f}"  # and no interval
        for text in (result.path.with_suffix(".md").read_text(), result.report.read_text()):
            assert "from all of them lost to all of them won" in text and "2 of 3 finished" in text
        assert len(read_lines(result.path)) == 2
        fails["now"], before = False, len(server.bodies)
        again = evaluated(tmp_path, **options)
        assert again.status == "finished" and len(again.rows[0].outcomes) == 3
        assert "finished" not in result.path.with_suffix(".md").read_text()
        assert len({body["messages"][1]["content"] for body in server.bodies[before:]}) == 1


def test_a_spent_budget_is_said_and_a_larger_one_goes_on(tmp_path):
    with scripted_server(lambda body: (200, reply(UP))) as server:
        model = (ServerModel(server.base, "m", "NO_KEY"),)
        little = evaluated(tmp_path, models=model, server=ServerOptions(concurrency=1, max_requests=4))
        assert (little.status, little.rows[0].num_left, len(server.bodies)) == ("stopped", 4, 4)
        assert "4 not played" in cells(little.rows[0], little.rows)[-1]
        rest = evaluated(tmp_path, models=model, server=ServerOptions(concurrency=1))
        assert rest.status == "finished" and rest.rows[0].num_left == 0


def test_all_models_of_a_call_share_one_budget(tmp_path):
    with scripted_server(lambda body: (200, reply(UP))) as server:
        models = tuple(ServerModel(server.base, name, "NO_KEY") for name in ("m", "n"))
        result = evaluated(tmp_path, models=models, episodes=2, server=ServerOptions(concurrency=1, max_requests=7))
    assert len(server.bodies) == 7 and [row.num_left for row in result.rows] == [0, 2]


def test_a_server_without_prefill_is_marked_in_the_table(tmp_path):
    def answer(body):
        if "continue_final_message" in body:
            return 400, {"error": {"message": "continue_final_message: extra inputs are not permitted"}}
        return 200, reply(f"<think>{UP}")

    with scripted_server(answer) as server:
        result = evaluated(tmp_path, models=(ServerModel(server.base, "m", "NO_KEY"),), episodes=2)
    assert result.rows[0].notes == ("no prefill",)
    assert cells(result.rows[0], result.rows)[-1].endswith("no prefill")
    first = read_lines(result.path)[0]
    assert first["messages"][2]["content"] == f"<think>{UP}" and "sequences" not in first
    assert "notes" not in first


def test_what_a_server_did_not_do_is_remembered_with_the_episodes(tmp_path):
    """The second call learns it anew for model n; all of m comes from the journal."""

    def answer(body):
        if len(body["messages"]) % 2:
            return 400, {"error": {"message": "the last message must not be the assistant's"}}
        return 200, reply(f"<think>{UP}")

    with scripted_server(answer) as server:
        models = tuple(ServerModel(server.base, name, "NO_KEY") for name in ("m", "n"))
        options = {"models": models, "episodes": 2}
        little = ServerOptions(concurrency=1, max_requests=9)
        assert evaluated(tmp_path, **options, server=little).status == "stopped"
        result = evaluated(tmp_path, **options)
    assert [row.notes for row in result.rows] == [("no prefill",)] * 2


def test_an_episode_under_another_rule_is_counted():
    assert running.server_notes([{"notes": ["no prefill"]}, {"notes": []}, {}]) == ("no prefill in 1 of 3 episodes",)


def test_what_was_finished_is_told_of_a_server_that_is_gone(tmp_path):
    """Three turns are answered, which is one episode, and a fourth one; then the server is killed."""
    answers = chain(repeat((200, reply(UP)), 4), repeat((0, {})))
    told = []
    with scripted_server(lambda body: next(answers)) as server:
        models = (ServerModel(server.base, "m", "NO_KEY"), POCKET)
        options = ServerOptions(concurrency=1, patience_s=0.01)
        result = evaluated(tmp_path, told.append, models=models, server=options)
    served, here = result.rows
    assert (result.status, len(served.outcomes), served.num_failed, served.num_left) == ("failed", 1, 4, 0)
    assert here.is_whole and len(read_lines(result.path)) == 1 + 5
    assert "4 failed and not scored" in cells(served, result.rows)[-1] and any(
        "(tried for 0.01 s)" in one for one in told
    )


# --- the command --------------------------------------------------------------------------------------------------


def test_the_whole_command(tmp_path, capsys):
    words = ["eval", "pocket", "--env", "frozenlake", "--episodes", "3", "--samples", "2", "--temperature", "0"]
    assert main([*words, "--output", str(tmp_path), "output.append_timestamp=False", "output.format=jsonl"]) == 0
    out, err = capsys.readouterr()
    assert "| pocket | 5 |" in out and "| random play | 5 |" in out
    assert f"report: {tmp_path / 'val_rollouts.html'}" in out
    assert "6 of 6 episodes" in err and "pkl" not in err
    assert len(json.loads((tmp_path / "val_rollouts.jsonl").read_text().splitlines()[0])["messages"]) >= 3


def test_the_python_of_the_page_runs(tmp_path, monkeypatch, capsys):
    (block,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(block, {})
    assert capsys.readouterr().out.startswith("finished Estimate(value=")
    assert len(list((tmp_path / "results/eval").glob("val_rollouts_*.jsonl"))) == 1


def test_a_server_that_is_gone_is_a_failed_run_that_can_go_on(tmp_path, capsys):
    words = ["--api-base", "http://127.0.0.1:9/v1", "--api-model", "m", "--env", "SimpleSokoban", "--patience", "0.1"]
    assert main(["eval", *words, "--output", str(tmp_path), "--episodes", "2", "--samples", "1"]) == 1
    err = capsys.readouterr().err
    assert "no connection" in err and "run the same command to resume: ./ragen eval --api-base" in err


def test_watching_a_model_play(capsys):
    assert main(["play", "sokoban", "--agent", "pocket", "--seed", "130", "--prompt"]) == 0
    out = capsys.readouterr().out
    assert "SimpleSokoban level 130 of val, played by pocket" in out and "turn 1 of 5" in out
    assert re.search(r"<think>player .*</think><answer>\w+", out) and "→ " in out
    assert re.search(r"(solved|not solved \(.*\)) after \d+ actions in \d turns, reward", out)
