"""A configuration with wrong keys, as the doctor goes on with it: without these, and with all others."""

import json

from trainer.config.what_fits import load_what_fits


def test_of_a_long_list_the_wrong_ones_alone_are_left_out(tmp_path):
    given = [f"mine.metrics:f{n}" for n in range(12)]
    wrong = {9: "nine", 10: "ten"}
    metrics = json.dumps([wrong.get(n, path) for n, path in enumerate(given)])
    (tmp_path / "c.yaml").write_text(
        "model: {path: m}\ndata: {train: q}\nretriever: {url: 'http://127.0.0.1:1'}\n"
        f"trainer: {{metrics: {metrics}, steps: none}}\n"
    )
    config, lines = load_what_fits(tmp_path / "c.yaml")
    assert config.trainer.metrics == [path for n, path in enumerate(given) if n not in wrong]
    assert len(lines) == 3 and config.trainer.steps > 0
