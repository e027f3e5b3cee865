"""The laboratory's world: the same for a seed, different between seeds, and searchable by the real
retriever."""

import json
from pathlib import Path

import orjson
import pytest

from retriever_service.indexing.build import build_index
from retriever_service.search.index import Index
from services.common.errors import UserError
from trainer.commands.checks.doctor import check_config
from trainer.config.schema import load_config
from trainer.data import load_questions
from trainer.data.models import resolve_file
from trainer.lab.demo import EVAL_WORLD, lab_path, world_files
from trainer.lab.demonstrations import TOPK, Library
from trainer.lab.world import NAMES, QUESTIONS, make_world

SEEDS = (0, 1, 2, 3, EVAL_WORLD, EVAL_WORLD + 1, -1, -2, -24)
"""Trained on, held out, and of the warm start."""


def mapping(world):
    """Every answer by what it is an answer to: the person's name and the chain of relations."""
    return {(q.hops[0].subject, tuple(h.relation for h in q.hops)): q.answer for q in world.questions}


def test_a_seed_gives_the_same_files(tmp_path):
    first, second = world_files(tmp_path / "a", 3), world_files(tmp_path / "b", 3)
    assert [f.read_bytes() for f in first] == [f.read_bytes() for f in second]
    assert make_world(3) == make_world(3)
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == [
        "world_3_corpus.jsonl",
        "world_3_questions.jsonl",
    ]


def test_no_two_seeds_share_names_and_answers():
    worlds = {seed: mapping(make_world(seed)) for seed in SEEDS}
    for a in SEEDS:
        for b in SEEDS:
            if a < b:
                shared = worlds[a].keys() & worlds[b].keys()
                same = sum(worlds[a][k] == worlds[b][k] for k in shared)
                # 120 people of 240 x 239 names: a few meet by chance, and then their answers differ.
                assert len(shared) <= 7 * 4, (a, b)
                assert same <= 1, (a, b)


def test_every_question_follows_from_the_documents():
    world = make_world(0)
    assert len(world.questions) == 120 * len(QUESTIONS) and len(world.documents) == 120 + 40 + 30
    assert len({q.id for q in world.questions}) == len(world.questions)
    for question in world.questions:
        subject = question.hops[0].subject
        for hop in question.hops:
            assert hop.subject == subject and world.facts[subject][hop.relation] == hop.value
            subject = hop.value
        assert question.answer in NAMES and question.answer not in question.text.split()


def test_the_question_file_reads_back_as_the_world(tmp_path):
    _, file = world_files(tmp_path, 0)
    rows = load_questions(file).rows
    assert [(r.text, list(r.golden_answers), r.data_source) for r in rows] == [
        (q.text, [q.answer], q.data_source) for q in make_world(0).questions
    ]


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """Every person-relation query of a world: what the retriever's own index finds, and what the warm start
    was shown."""
    folder, world = tmp_path_factory.mktemp("world"), make_world(0)
    corpus, _ = world_files(folder, 0)
    build_index(corpus, folder / "index")
    queries = sorted({f"{h.subject} {h.relation}" for q in world.questions for h in q.hops})
    index = Index(folder / "index")
    found = [[orjson.loads(raw)["contents"] for raw, _ in hits] for hits in index.search(queries, TOPK)]
    index.close()
    library = Library(world)
    return world, {q: (hits, library.search(q)) for q, hits in zip(queries, found, strict=True)}


def test_the_first_document_of_every_hop_is_the_right_one(searched):
    world, results = searched
    assert len(results) == 120 * 3 + len({h.subject for q in world.questions for h in q.hops[1:]}) * 2
    for query, (hits, _) in results.items():
        subject, relation = query.rsplit(" ", 1)
        title, body = hits[0].split("\n")
        assert title == f'"{subject}"', query
        assert f"{relation} {world.facts[subject][relation]}" in body, query


def test_the_warm_start_was_shown_what_the_retriever_finds(searched):
    _, results = searched
    assert {q: hits[0] for q, (hits, _) in results.items()} == {
        q: shown[0] for q, (_, shown) in results.items()
    }
    assert all(len(hits) == len(shown) for hits, shown in results.values())


def test_lab_names_stand_for_files_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("UNSPIRAL_CACHE", str(tmp_path))
    corpus, questions = resolve_file("lab:train_corpus:2"), resolve_file("lab:eval_questions:2")
    assert (
        corpus
        == str(lab_path("lab:train_corpus:2"))
        == str(tmp_path / "lab" / "worlds" / "world_2_corpus.jsonl")
    )
    documents = [
        tuple(json.loads(line).values()) for line in Path(corpus).read_text(encoding="utf-8").splitlines()
    ]
    assert documents == make_world(2).documents
    assert [r.text for r in load_questions(questions).rows] == [
        q.text for q in make_world(EVAL_WORLD + 2).questions
    ]


@pytest.mark.parametrize(
    "name", ["questions.jsonl", "./lab:train_corpus:0", "/data/nq/train.parquet", "~/x.jsonl"]
)
def test_other_names_are_left_as_they_are(name):
    assert resolve_file(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "lab:",
        "lab:0",
        "lab:train_corpus",
        "lab:train_corpus:",
        "lab:train_corpus:-1",
        "lab:test_corpus:0",
        "lab:train_corpus:0:1",
        "lab:train_corpus:1000000",
        "lab:train_corpus:x",
        "lab:a/b:0",
    ],
)
def test_a_lab_name_that_means_nothing_is_told_what_is_accepted(name, tmp_path, monkeypatch):
    monkeypatch.setenv("UNSPIRAL_CACHE", str(tmp_path))
    with pytest.raises(UserError) as e:
        resolve_file(name)
    assert e.value.exit_code == 2
    assert str(e.value).startswith(
        f"{name}: expected lab:KIND:SEED, KIND one of train_questions, eval_questions, train_corpus"
    )
    assert "\n" not in str(e.value) and not any(tmp_path.iterdir())


def test_doctor_takes_lab_names_and_tells_a_wrong_one(tmp_path, monkeypatch):
    monkeypatch.setenv("UNSPIRAL_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "c.yaml"
    text = (
        "{model: {path: 'lab:0'}, data: {train: 'lab:train_questions:0'}, retriever: {corpus: "
        "'lab:CORPUS:0'}}"
    )
    file.write_text(text.replace("CORPUS", "train_corpus"))
    assert [f.level for f in check_config(file, load_config(file))] == ["good"]
    file.write_text(text.replace("CORPUS", "corpus"))
    bad = [f for f in check_config(file, load_config(file)) if f.level == "bad"]
    assert [(f.what, f.seen) for f in bad] == [("retriever.corpus", "lab:corpus:0")]
    assert bad[0].advice.startswith("lab:corpus:0: expected lab:KIND:SEED")
    assert not (tmp_path / "cache").exists()
