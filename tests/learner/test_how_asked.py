"""A model that was exported keeps how it was asked, and whoever asks it otherwise is told, with the key."""

from __future__ import annotations

import asyncio
import io
import json
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from rich.console import Console
from scripted_runs import started, trained
from test_trainer_monitor_actions import system

from services.settings import RolloutSettings
from trainer.commands.agent import source
from trainer.commands.agent.source import agent_spec, named
from trainer.commands.checks.doctor import run_doctor
from trainer.commands.work import evaluate, warm_start
from trainer.learner import export, tensor_files
from trainer.learner.model.asked import how_asked, kept_in, unlike
from trainer.session import run as runs
from trainer.session.resuming.rules import identity_of

LAB = RolloutSettings(template="lab", topk=2, max_turns=3)


def model_of(folder, settings=LAB, chat="{{ messages }}"):
    """A model's folder, as an export under these settings leaves it."""
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    (folder / "chat_template.jinja").write_text(chat)
    about = {"optimiser_steps": 3, "asked": how_asked(settings, folder)}
    (folder / export.EXPORT_MARK).write_text(json.dumps(about))
    return folder


def test_the_description_holds_template_tags_chat_template_and_limits(tmp_path):
    kept = how_asked(LAB.model_copy(update={"tools": {"calc": "m:f"}}), model_of(tmp_path / "m"))
    assert kept["rollout"]["template"] == "lab" and kept["rollout"]["max_turns"] == 3
    assert set(kept["rollout"]) >= {"reading", "bos", "thoughts", "tools", "topk", "max_model_tokens"}
    assert kept["tags"] == ["think", "search", "information", "answer", "doc", "calc"]
    assert (
        kept["chat_template"]["file"] == "chat_template.jinja" and len(kept["chat_template"]["sha256"]) == 64
    )
    assert json.loads(json.dumps(kept)) == kept
    (tmp_path / "m" / "chat_template.jinja").unlink()
    assert how_asked(LAB, tmp_path / "m")["chat_template"] is None
    (tmp_path / "m" / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    assert how_asked(LAB, tmp_path / "m")["chat_template"]["file"] == "tokenizer_config.json"
    assert how_asked(RolloutSettings(template="no.such:Name"), tmp_path / "m")["tags"] == []


def test_one_line_names_each_key_that_differs(tmp_path):
    model = model_of(tmp_path / "m")
    assert unlike(model, LAB) is None and unlike(tmp_path, LAB) is None
    other = LAB.model_copy(update={"template": "search_r1", "topk": 5, "tools": {"calc": "m:f"}})
    assert unlike(model, other) == (
        'warning: rollout.template is search_r1, rollout.tools is {"calc":"m:f"}; the model in '
        f"{model} learnt with rollout.template=lab rollout.tools={{}}: give that, or it is asked otherwise"
    )
    named = unlike(model, other, name="runs/own/checkpoints/step_000002")
    assert "the model in runs/own/checkpoints/step_000002 learnt with" in named and str(model) not in named
    assert "rollout.topk is 5" in str(unlike(model, other, task=True))
    assert unlike(model, LAB.model_copy(update={"topk": 5})) is None  # a run may train with other limits
    (model / "chat_template.jinja").write_text("another")
    assert unlike(model, LAB) == (
        f"warning: the chat template in {model} is not the one that the model learnt with"
    )


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"asked": 1}', '{"asked": {"rollout": []}}'])
def test_an_earlier_or_torn_description_says_nothing(tmp_path, text):
    (tmp_path / export.EXPORT_MARK).write_text(text)
    assert kept_in(tmp_path) == {} and unlike(tmp_path, LAB) is None


def test_a_checkpoint_hands_it_to_its_export(tmp_path, monkeypatch):
    made = system(tmp_path)
    model = model_of(tmp_path / "before", RolloutSettings())
    config = made.config.model_copy(update={"rollout": LAB})
    saved = tmp_path / "c"
    (saved / "model").mkdir(parents=True)
    (saved / "model" / "config.json").write_text("{}")
    (saved / "learner.json").write_text('{"dtype": "float32", "optimiser_steps": 7}')
    (saved / "state.json").write_text(json.dumps({"identity": identity_of(config, model)}))
    monkeypatch.setattr(export, "find", lambda given: given)
    monkeypatch.setattr(export, "require_whole", lambda given: None)
    monkeypatch.setattr(export, "TensorReader", lambda folder: SimpleNamespace(names=[]))
    monkeypatch.setattr(tensor_files.TensorWriter, "finish", lambda self: None)
    export.export_checkpoint(saved, tmp_path / "out")
    kept = json.loads((tmp_path / "out" / export.EXPORT_MARK).read_text())
    assert kept == {"optimiser_steps": 7, "asked": how_asked(LAB, model)}


def test_a_warm_start_hands_it_to_its_export(tmp_path):
    given = []
    learner = SimpleNamespace(export_hf=lambda *arguments: given.append(arguments))
    asyncio.run(warm_start.write_whole(learner, tmp_path / "out", print, {"tags": []}))
    assert given == [(tmp_path / "out", {"tags": []})]


def test_train_says_it(tmp_path, monkeypatch):
    made = system(tmp_path)
    made.folder.close()
    started(made, monkeypatch)
    made.config.trainer.steps = 2
    model = model_of(tmp_path / "taught")
    monkeypatch.setattr(runs.models, "resolve", lambda given: model)
    monkeypatch.setattr(runs.models, "check_given", lambda given: None)
    _, out = trained(made, resume="latest")
    assert "warning: rollout.template is search_r1; the model in " in out
    made.config.rollout.template = "lab"
    made.config.trainer.steps = 4
    assert "learnt with" not in trained(made, resume="latest", allow_changed=["rollout.template"])[1]


def test_eval_says_it_with_the_limits(tmp_path, monkeypatch):
    model = model_of(tmp_path / "m")
    monkeypatch.setattr(evaluate.models, "resolve", lambda given: model)
    said = []

    async def score(folder, scratch):
        return folder

    config = SimpleNamespace(
        model=SimpleNamespace(path=str(model)), rollout=LAB.model_copy(update={"max_turns": 9})
    )
    assert evaluate.with_weights(config, None, said.append, score) == model
    assert said == [
        f"warning: rollout.max_turns is 9; the model in {model} learnt with rollout.max_turns=3: give that, "
        "or it is asked otherwise"
    ]


def test_ask_and_serve_agent_ask_a_model_as_it_learnt_and_say_where_they_are_told_otherwise(tmp_path):
    model = model_of(tmp_path / "m")
    found = named(str(model), []).config.rollout
    assert (found.template, found.topk, found.max_turns) == ("lab", 2, 3)
    said = []
    with ExitStack() as parts:
        agent_spec(str(model), "http://r:1", [], None, parts, said.append)
        assert said == []
        agent_spec(str(model), "http://r:1", ["rollout.template=search_r1"], None, parts, said.append)
    assert said == [unlike(model, LAB.model_copy(update={"template": "search_r1"}))]


def test_ask_names_a_checkpoint_and_not_the_folder_that_it_is_exported_to(tmp_path, monkeypatch):
    checkpoint = tmp_path / "step_000002"
    config = SimpleNamespace(
        rollout=LAB.model_copy(update={"template": "search_r1"}),
        retriever=SimpleNamespace(timeout_seconds=1),
        seed=0,
    )
    monkeypatch.setattr(source, "named", lambda *given: source.Named("own", config, checkpoint, None, None))
    monkeypatch.setattr(source, "export_checkpoint", lambda checkpoint, folder: model_of(folder))
    said = []
    with ExitStack() as parts:
        agent_spec("own", "http://r:1", [], None, parts, said.append)
    assert said[0] == f"weights of {checkpoint}" and f"the model in {checkpoint} learnt with" in said[1]


def test_doctor_says_it(tmp_path):
    model = model_of(tmp_path / "m")
    file = tmp_path / "c.yaml"
    file.write_text(
        f"{{model: {{path: {model}}}, data: {{train: 'lab:train_questions:0'}}, "
        "retriever: {corpus: 'lab:train_corpus:0'}}"
    )
    out = io.StringIO()
    run_doctor(file, Console(file=out, width=300), role="retriever")
    told = out.getvalue()
    assert (
        "rollout.template is search_r1; the model in " in told and "rollout.template=lab: give that" in told
    )
