"""Weights that are not whole, as Git LFS leaves them where it has fetched nothing: `init` and `doctor`, which
count their parameters, say so in a line, as `train` does."""

import pytest
from command_line import run  # noqa: F401
from test_init import files  # noqa: F401

from trainer.commands.checks.doctor_files import check_files
from trainer.config.schema import parse_config

TORN = [
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 100\n", "git lfs pull"),
    (b"\x40" + bytes(7) + b'{"a":', "a header of 64 bytes in a file of 13"),
    (b"\x05" + bytes(7) + b'{"a":', "is no whole safetensors file"),
    (b"\x02" + bytes(7) + b"[]", "is no whole safetensors file"),
]


@pytest.mark.parametrize(("content", "said"), TORN)
def test_init_and_doctor_name_weights_that_are_not_whole(run, files, tmp_path, content, said):
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(content)
    status, _, err = run("init", *files)
    assert status == 2 and "model.path: model/model.safetensors" in err and said in err, err
    assert not (tmp_path / "unspiral.yaml").exists()
    for lora in (None, {}):
        config = parse_config(
            {
                "model": {"path": "model"},
                "data": {"train": "train.jsonl"},
                "retriever": {"url": "http://127.0.0.1:9"},
                "learner": {"lora": lora},
            }
        )
        found = {finding.what: finding for finding in check_files(tmp_path / "c.yaml", config)}
        assert found["model.path"].level == "bad" and said in found["model.path"].advice
        assert found["data.train"].level == "good", "the other checks go on"
