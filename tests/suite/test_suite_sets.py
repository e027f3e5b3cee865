"""Which rows of which files the seven sets are."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from services.common.errors import UserError
from trainer.suite.sets import SETS, read_suite, set_of

FLASHRAG = {
    "nq": ("test", "dev", "train"),
    "triviaqa": ("test", "dev", "train"),
    "popqa": ("test",),
    "hotpotqa": ("dev", "train"),
    "2wikimultihopqa": ("dev", "train"),
    "musique": ("dev", "train"),
    "bamboogle": ("test",),
}


def write(file, rows):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(r) + "\n" for r in rows))


def rows(split, count=5):
    return [
        {"id": f"{split}_{i}", "question": f"{split} {i}?", "golden_answers": ["Rome"]} for i in range(count)
    ]


@pytest.fixture
def flashrag(tmp_path):
    for name, splits in FLASHRAG.items():
        for split in splits:
            write(tmp_path / name / f"{split}.jsonl", rows(split))
    return tmp_path


def silent(text):
    pass


def test_a_flashrag_folder_gives_each_set_the_split_that_the_papers_score(flashrag):
    suite = read_suite(flashrag, say=silent)
    assert [one.name for one in suite.sets] == list(SETS) and suite.missing == []
    assert {one.name: one.split for one in suite.sets} == {n: s[0] for n, s in FLASHRAG.items()}
    assert all(len(one.items) == one.of == 5 and one.seed is None for one in suite.sets)
    assert suite.items[0].key == "nq/test_0"
    dev = read_suite(flashrag, split="dev", say=silent)
    assert [one.name for one in dev.sets] == [n for n, splits in FLASHRAG.items() if "dev" in splits]
    assert dev.missing == ["popqa", "bamboogle"]


def test_one_parquet_of_search_r1_holds_all_sets_and_others_are_named(tmp_path):
    table = [
        {
            "data_source": source,
            "prompt": [{"role": "user", "content": "Use <search>. Question: who?\n"}],
            "reward_model": {"style": "rule", "ground_truth": {"target": ["Rome"]}},
            "extra_info": {"split": "test", "index": i},
        }
        for source in (*SETS, "searchR1_nq", "web_questions")
        for i in range(2)
    ]
    pq.write_table(pa.Table.from_pylist(table), tmp_path / "test.parquet")
    suite = read_suite(tmp_path / "test.parquet", say=silent)
    assert {one.name: len(one.items) for one in suite.sets} == dict.fromkeys(SETS, 2) | {"nq": 4}
    assert suite.left_out == {"web_questions": 2}
    assert len({item.key for item in suite.items}) == 16


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("searchR1_hotpotqa", "hotpotqa"),
        ("2WikiMultiHopQA", "2wikimultihopqa"),
        ("2wiki", "2wikimultihopqa"),
        ("Musique_rand1000", "musique"),
        ("nq_open", "nq"),
        ("natural-questions", "nq"),
        ("hotpotqa_dev", "hotpotqa"),
        ("hotpot_dev_distractor_v1", "hotpotqa"),
        ("musique_ans_v1", "musique"),
        ("musique_full_v1", None),
        ("2_wiki", "2wikimultihopqa"),
        ("lab_two_hop", None),
        ("strategyqa", None),
    ],
)
def test_a_set_goes_by_the_names_that_files_give_it(name, found):
    assert set_of(name) == found


def test_a_subset_is_drawn_by_seed_and_a_larger_one_holds_the_smaller(tmp_path):
    write(tmp_path / "nq" / "test.jsonl", rows("test", 50))
    few, more, other = (
        read_suite(tmp_path, limit=n, seed=s, say=silent).sets[0] for n, s in ((10, 0), (20, 0), (10, 1))
    )
    keys = [{item.key for item in one.items} for one in (few, more, other)]
    assert keys[0] < keys[1] and keys[0] != keys[2] and [len(k) for k in keys] == [10, 20, 10]
    order = [int(item.question.id.split("_")[1]) for item in few.items]
    assert order == sorted(order) != list(range(10))
    assert few.describe()["subset"] == "10 of 50, seed 0"
    assert len({one.describe()["digest"] for one in (few, more, other)}) == 3


def test_a_row_that_comes_twice_is_scored_twice_under_keys_of_its_own(tmp_path):
    write(tmp_path / "nq.jsonl", rows("x", 2) + rows("x", 1))
    suite = read_suite(tmp_path / "nq.jsonl", say=silent)
    assert [item.key for item in suite.items] == ["nq/x_0", "nq/x_1", "nq/x_0#2"]
    assert suite.repeated == {"nq": 1}
    assert suite.sets[0].describe()["split"] == "unnamed"


def test_a_folder_of_training_sets_alone_or_of_other_sets_is_refused(tmp_path):
    write(tmp_path / "nq" / "train.jsonl", rows("train"))
    with pytest.raises(UserError, match=r"holds no questions of nq, .* \(split auto\)"):
        read_suite(tmp_path, say=silent)
    assert read_suite(tmp_path, split="train", say=silent).sets[0].split == "train"
    write(tmp_path / "b" / "strategyqa.jsonl", rows("x"))
    with pytest.raises(UserError, match="data sets there: strategyqa"):
        read_suite(tmp_path / "b", say=silent)


def test_files_as_their_makers_name_them_give_no_training_row_and_the_wanted_split(tmp_path):
    for name in (
        "NQ-open.dev.jsonl",
        "NQ-open.train.jsonl",
        "hotpot_dev_distractor_v1.json",
        "hotpot_train_v1.1.json",
        "musique_ans_v1.0_dev.jsonl",
        "musique_ans_v1.0_train.jsonl",
        "popqa/validation.jsonl",
        "bamboogle/Bamboogle Prerelease - Sheet1.jsonl",
        "2wiki/all.jsonl",
    ):
        write(tmp_path / name, rows(name))
    suite = read_suite(tmp_path, say=silent)
    assert {one.name: one.split for one in suite.sets} == {
        "nq": "dev",
        "popqa": "validation",
        "hotpotqa": "dev",
        "2wikimultihopqa": "",
        "musique": "dev",
        "bamboogle": "",
    }
    assert not any("train" in item.key for item in suite.items) and suite.repeated == {}
    dev = read_suite(tmp_path, split="dev", say=silent)
    assert {one.name: one.split for one in dev.sets} == {one.name: one.split for one in suite.sets}
    train = read_suite(tmp_path, split="train", say=silent)
    assert [one.split for one in train.sets] == ["train", "train", "", "train", ""]
    with pytest.raises(UserError, match="--split tset: accepted are auto, test, dev, train; did you mean"):
        read_suite(tmp_path, split="tset", say=silent)
