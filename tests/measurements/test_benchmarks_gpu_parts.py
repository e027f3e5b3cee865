"""The parts of the GPU benchmarks: the made-up searcher, what is seen from beside, and the comparison."""

from __future__ import annotations

import json
import sys

import torch
from transformers import Qwen2ForCausalLM

from benchmarks import gpu_searcher
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import watch as gpu_watch
from services.rollout.worker.tokenizer import load_tokenizer


def test_the_searcher_thinks_searches_and_answers_as_often_as_it_is_told(tmp_path):
    corpus = tmp_path / "corpus.jsonl"
    texts = [f"cat{chr(97 + i % 26)} dog{chr(97 + i % 23)} bird{chr(97 + i % 19)}" for i in range(400)]
    lines = [json.dumps({"contents": f"The {text} house"}) for text in texts]
    corpus.write_text("\n".join(lines), encoding="utf-8")
    folder = gpu_searcher.make_searcher("tiny", corpus, tmp_path / "m", thought=8, query=2, searches=3)
    tokenizer = load_tokenizer(folder)
    model = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    id_of = tokenizer.convert_tokens_to_ids
    words = gpu_searcher.words_of(tokenizer)
    torch.manual_seed(0)
    context = torch.tensor([[*tokenizer.encode("who is"), words[0]]])
    for first, expected in (
        (words[0], {"<search>": 3 / 32, "<answer>": 1 / 32}),
        (words[1], {"</search>": 0.5}),
    ):
        context[0, -1] = first
        with torch.no_grad():
            p = model(context).logits[0, -1].softmax(-1)
        for tag, share in expected.items():
            assert abs(float(p[id_of(tag)]) - share) < 0.01 * share + 1e-3
        assert float(p[words].sum()) > 1 - sum(expected.values()) - 0.01
    # The layers are computed whole, and leave the class alone.
    assert all(layer.mlp.down_proj.weight[6:].abs().sum() > 0 for layer in model.model.layers)


def test_the_innermost_functions_of_a_profile_are_counted():
    stacks = "a (x.py:1);b (y.py:2) 6\na (x.py:1) 1\nc (z.py:3);b (y.py:2) 3\n"
    assert gpu_watch.top_functions(stacks) == [("b (y.py:2)", 0.9), ("a (x.py:1)", 0.1)]


def write(file, learner, rollout):
    rows = [{"tokens_per_s": rate, "us_per_token": 1e6 / rate, "turns": 2.0} for rate in rollout]
    file.write_text(
        json.dumps(
            {"devices": ["H"], "packed": {"tokens_per_s": learner, "peak_gib": 10.0}, "asynchronous": rows}
            | {"results": [{"what": "speed", "size": "3b", "ours": 0.1 * learner / 100, "ours_max": 9.0}]}
        )
    )
    return str(file)


def test_compare_names_what_became_worse_and_ends_with_its_status(tmp_path, monkeypatch, capsys):
    before = write(tmp_path / "a.json", 100.0, [900.0, 1000.0, 5000.0])
    after = write(tmp_path / "b.json", 50.0, [1000.0, 990.0, 1010.0])
    monkeypatch.setattr(sys, "argv", ["gpu", "compare", before, after])
    assert gpu.main() == 1
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["packed/tokens_per_s", "100", "50", "-50.0%", "worse"]
    # Medians of repeats: 1000 before and after.
    assert ["asynchronous/tokens_per_s", "1000", "1000", "+0.0%"] in [line[:4] for line in lines]
    assert ["results[what=speed", "size=3b]/ours", "0.1", "0.05", "+50.0%", "better"] in lines
    assert lines[-1][:3] == ["1", "of", "5"]
    monkeypatch.setattr(sys, "argv", ["gpu", "compare", before, before])
    assert gpu.main() == 0
    (tmp_path / "c.json").write_text("{}")
    monkeypatch.setattr(sys, "argv", ["gpu", "compare", before, str(tmp_path / "c.json")])
    assert gpu.main() == 2
