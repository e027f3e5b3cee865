"""Asked before anything slow starts: is there room for the run? And what the terminal shows while it goes
on."""

import io
import json
import re

import pytest
from rich.console import Console

from services.common.errors import EnvironmentLacks
from services.likelihood.monitor.alarms import Alarm
from trainer.commands.checks.doctor import check_config, run_doctor
from trainer.commands.cli import main
from trainer.config.learner import LoRASettings
from trainer.config.schema import load_config, parse_config
from trainer.loop.run.progress import Progress, duration
from trainer.session.preflight.room import GIB, check_room
from trainer.session.preflight.sizes import adapter_count, parameter_count


@pytest.fixture
def model(tmp_path):
    """The header of a safetensors file with 3 x 4 + 10 = 22 parameters."""
    header = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48]},
    }
    header["b"] = {"dtype": "F32", "shape": [10], "data_offsets": [48, 88]}
    body = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(body).to_bytes(8, "little") + body + bytes(88))
    return tmp_path


@pytest.fixture
def config(tmp_path):
    return parse_config(
        {
            "run": {"dir": str(tmp_path / "x" / "y")},
            "model": {"path": "m"},
            "data": {"train": "t"},
            "retriever": {"corpus": "c"},
        }
    )


def test_parameters_are_counted_from_the_headers(model):
    assert parameter_count(model) == 22


def test_too_little_disk_and_too_little_memory_name_the_keys(model, config):
    with pytest.raises(
        EnvironmentLacks,
        match=r"^run\.dir: .* 0\.0 GiB free; 0\.\d GiB are needed .*trainer\.keep_checkpoints",
    ) as e:
        check_room(config, model, disk_free=1 << 20, memory_free=64 * GIB)
    assert e.value.exit_code == 3
    assert "\n" not in str(e.value)
    with pytest.raises(
        EnvironmentLacks, match=r"^memory: 1\.0 GiB are free; about \d\.\d GiB are needed .*rollout\.workers"
    ):
        check_room(config, model, disk_free=64 * GIB, memory_free=GIB)
    check_room(config, model, disk_free=64 * GIB, memory_free=64 * GIB)


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"]])
@pytest.mark.parametrize("tied", [True, False])
def test_adapters_are_counted_as_they_are_made(tmp_path, targets, tied):
    pytest.importorskip("peft")
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from trainer.learner.model.lora import add_adapters, is_adapter

    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": tied}
    made = Qwen2ForCausalLM(Qwen2Config(**shape, **heads))
    made.save_pretrained(tmp_path)
    lora = LoRASettings(rank=4, targets=targets)
    add_adapters(made, lora)
    adapters = sum(value.numel() for name, value in made.named_parameters() if is_adapter(name))
    assert adapter_count(tmp_path, lora) == adapters > 0


def test_checkpoints_of_adapters_need_room_for_adapters(tmp_path, config):
    """A 7B in bfloat16 with rank 16 was refused on a disk with 105 GiB free: 227 GiB were asked for."""
    shapes = {f"model.layers.{i}.mlp.up_proj.weight": [18944, 3584] for i in range(100)}
    header = {
        name: {"dtype": "BF16", "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()
    }
    written = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(written).to_bytes(8, "little") + written)
    with pytest.raises(EnvironmentLacks, match=r"303\.8 GiB are needed .* of 6790 M .*: 2 .*, and the one"):
        check_room(config, tmp_path, disk_free=8 * GIB, memory_free=640 * GIB)
    config.learner.lora = LoRASettings(rank=16)
    check_room(config, tmp_path, disk_free=8 * GIB, memory_free=640 * GIB)
    with pytest.raises(EnvironmentLacks, match="of 36 M parameters"):
        check_room(config, tmp_path, disk_free=GIB, memory_free=640 * GIB)


def test_what_is_needed_grows_with_workers(model, config):
    check_room(config, model, disk_free=64 * GIB, memory_free=4 * GIB)
    config.rollout.workers = 8
    with pytest.raises(EnvironmentLacks, match="8 rollout workers"):
        check_room(config, model, disk_free=64 * GIB, memory_free=4 * GIB)


def test_without_a_terminal_each_step_is_a_line_and_the_columns_line_up_within_80(config):
    out = io.StringIO()
    with Progress(2000, Console(file=out)) as progress:
        progress.stage("rollout", 1)
        metrics = {
            "step": 1,
            "reward/mean": 0.5,
            "logp/right": -0.25,
            "logp/wrong": None,
            "phase": "healthy",
            "time/step": 2.0,
        }
        full = {
            "displacement/mean": -0.0123,
            "probe/lag": -0.125,
            "llds/active_tokens": 12345,
            "rollout/tokens_per_s": 3400.0,
            "phase": "acceleration",
            "time/step": 338.2,
        }
        progress.step(metrics, [])
        progress.step(metrics | full | {"step": 1999, "logp/wrong": -1.5}, [])
    *legend, header, first, second = out.getvalue().splitlines()
    assert len(legend) == 2 and max(map(len, legend)) <= 80
    assert first.split() == ["1", "0.500", "-0.250", "-", "-", "-", "-", "-", "2.0", "1h06m", "healthy"]
    assert second.endswith("338.2  0m02s acceleration")
    assert max(map(len, (header, first, second))) <= 80
    for name in ("reward", "right", "wrong", "s/step", "left"):
        end = header.index(name) + len(name)
        assert all(row[end] == " " and row[end - 1] != " " for row in (first, second)), name


def test_a_line_in_a_pipe_is_not_broken_where_a_terminal_would_end():
    out, path = io.StringIO(), "/a/path/" + "long/" * 30
    with Progress(2, Console(file=out)) as progress:
        progress.say(f"run folder: {path}")
    assert out.getvalue() == f"run folder: {path}\n"


def test_a_column_that_stays_empty_is_explained_once():
    out = io.StringIO()
    with Progress(4, Console(file=out, width=400)) as progress:
        metrics = {
            "reward/mean": 0.5,
            "logp/right": -0.25,
            "displacement/mean": 0.0,
            "llds/active_tokens": 3.0,
            "phase": "healthy",
            "time/step": 2.0,
        }
        for step in (1, 2, 3):
            progress.step(metrics | {"step": step, "logp/wrong": -0.5 if step == 1 else None}, [])
        progress.step({k: v for k, v in metrics.items() if k != "reward/mean"} | {"step": 4}, [])
    said = [line for line in out.getvalue().splitlines() if line.startswith("- is not measured: ")]
    assert [re.findall(r"(?:: |; )([a-z ]+): ", line) for line in said] == [
        ["lag"],
        ["wrong"],
        ["reward"],
    ]
    assert "no right answer of probe.lag_steps steps ago" in said[0]


def test_the_worst_of_several_alarms_is_named_in_the_order_of_the_page():
    def alarm(rule, phase, confidence, step):
        return Alarm(rule, "reward/mean", step, step, phase, "seen", confidence, "do")

    out = io.StringIO()
    progress = Progress(9, Console(file=out, width=200))
    first = alarm("length", "decay", "high", 2)
    fall = alarm("collapse", "collapsed", "medium", 3)
    sure = alarm("acceleration", "collapsed", "high", 1)
    metrics = {"step": 3, "time/step": 1.0, "phase": "collapsed"}
    with progress:
        progress.step(metrics, [fall], [first, fall])
        progress.step(metrics | {"step": 4}, [], [first, fall])
        progress.step(metrics | {"step": 5}, [sure], [first, fall, sure])
        progress.step(metrics | {"step": 6}, [first], [first])
    said = [line for line in out.getvalue().splitlines() if "stand" in line]
    assert said == [
        "2 alarms stand; the worst: collapse, since step 3",
        "3 alarms stand; the worst: acceleration, since step 1",
    ]


def test_on_a_terminal_there_is_a_live_table():
    out = io.StringIO()
    with Progress(10, Console(file=out, width=160, force_terminal=True)) as progress:
        progress.step({"step": 3, "reward/mean": 0.5, "phase": "decay", "time/step": 60.0}, [])
    assert "3 of 10 steps done, 7m00s left" in out.getvalue()
    assert "decay" in out.getvalue()


@pytest.mark.parametrize(("seconds", "text"), [(0, "0m00s"), (61, "1m01s"), (3600, "1h00m")])
def test_durations_are_readable(seconds, text):
    assert duration(seconds) == text


def test_the_doctor_names_a_broken_configuration_and_answers_3(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("{model: {path: ./nowhere}, data: {train: ./none.jsonl}, retriever: {corpus: c}}")
    bad = {f.what: f.seen for f in check_config(file, load_config(file)) if f.level == "bad"}
    assert bad["model.path"] == "./nowhere"
    assert bad["data.train"] == "./none.jsonl"
    out = io.StringIO()
    assert run_doctor(file, Console(file=out, width=200)) == 3
    assert "no such file or folder" in out.getvalue()


def test_a_configuration_that_cannot_be_read_is_the_users_mistake_before_any_check(tmp_path, capsys):
    wrong = tmp_path / "c.yaml"
    wrong.write_text("{model: 1, data: {train: t}, retriever: {corpus: c}}")
    for file, text in ((tmp_path / "none.yaml", "none.yaml: cannot be read"), (wrong, "model")):
        with pytest.raises(SystemExit) as ended:
            main(["doctor", "--config", str(file)])
        assert ended.value.code == 2
        out, error = capsys.readouterr()
        assert out == "" and error.startswith("unspiral: ") and text in error and error.count("\n") == 1
