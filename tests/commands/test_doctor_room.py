"""`unspiral doctor --config` says before a run that its checkpoints have no room, as the run does."""

import json
from types import SimpleNamespace

import pytest
from test_doctor_config import config, findings  # noqa: F401

from services.common.errors import EnvironmentLacks
from trainer.commands.checks import doctor_files
from trainer.config.schema import load_config
from trainer.session.preflight import room


def test_checkpoints_without_room_are_found_before_the_run_is_refused_for_them(config, tmp_path, monkeypatch):
    folder = tmp_path / "model"
    folder.mkdir()
    shape = {"model.layers.0.mlp.up_proj.weight": [7_000_000, 1000]}
    header = {n: {"dtype": "BF16", "shape": s, "data_offsets": [0, 0]} for n, s in shape.items()}
    body = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(body).to_bytes(8, "little") + body)
    monkeypatch.setattr(doctor_files.models, "check_folder", lambda folder, given: folder)
    monkeypatch.setattr(room.shutil, "disk_usage", lambda path: SimpleNamespace(free=8 << 30))
    file = config()
    loaded = load_config(file, [])
    with pytest.raises(EnvironmentLacks) as lack:
        room.check_disk(loaded, room.trained_count(loaded, folder))
    said = str(lack.value)
    assert "8.0 GiB free; 313.2 GiB are needed for checkpoints of 7000 M parameters: 2 (trainer." in said
    status, lines = findings(file)
    assert status == 3 and said.removeprefix("run.dir: ") in " ".join(" ".join(lines).split())
    monkeypatch.setattr(room.shutil, "disk_usage", lambda path: SimpleNamespace(free=400 << 30))
    assert "are needed for checkpoints" not in " ".join(findings(file)[1])
