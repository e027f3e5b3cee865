"""Answers: none lost, none doubled, whatever is killed; and the order in which workers are asked."""

import asyncio
import json

import pytest
from suite_rows import PROTOCOL, asked, row, trajectory_of

from retriever_service.client import Hit
from services.common.errors import UserError
from trainer.suite.answering import BATCH, Asking, Sampling
from trainer.suite.folder import begin
from trainer.suite.rows import AnswersFile, read_rows


class Pool:
    """Answers `Rome` after a turn of the loop, up to `stop_after` requests."""

    def __init__(self, target=1, stop_after=None):
        self.target, self.stop_after = target, stop_after
        self.calls, self.running, self.most = [], 0, 0

    async def rollout(self, requests):
        self.calls.append(requests)
        if self.stop_after is not None and sum(map(len, self.calls)) > self.stop_after:
            for _ in range(5):
                await asyncio.sleep(0)
            raise RuntimeError("killed")
        self.running += len(requests)
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        self.running -= len(requests)
        return [
            trajectory_of(asked(r.question.data_source, int(r.question.id[1:])), "Rome") for r in requests
        ]


PLAN = [asked(name, i) for name, n in (("nq", 30), ("musique", 15)) for i in range(n)]


async def answer(folder, pool, *, plan=PLAN, deterministic=False, retrieve=None, said=None):
    folder.mkdir(exist_ok=True)
    with AnswersFile(folder, plan) as answers:
        sampling = Sampling(0, 0.7, deterministic)
        await Asking(pool, answers, plan, sampling, retrieve, ([] if said is None else said).append).run()
        return answers.rows(plan)


async def test_progress_counts_whole_batches_and_names_no_time_before_it_is_known(tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.suite.answering.SAY_SECONDS", 0.0)
    said = []
    await answer(tmp_path / "a", Pool(), deterministic=True, said=said)
    assert [line.split(" answered")[0] for line in said] == ["16 of 45", "32 of 45", "45 of 45"]
    assert " left" in said[0] and " left" not in said[-1]
    said = []
    await answer(tmp_path / "b", Pool(), said=said)
    assert (
        len(said) == 45 and not any(" left" in line for line in said[: BATCH - 1]) and " left" in said[BATCH]
    )


@pytest.mark.parametrize("deterministic", [False, True])
async def test_what_was_answered_before_a_kill_is_not_asked_again(tmp_path, deterministic):
    first = Pool(stop_after=20)
    with pytest.raises(RuntimeError):
        await answer(tmp_path, first, deterministic=deterministic)
    file = tmp_path / "answers.jsonl"
    done = len(read_rows(file))
    assert 0 < done <= 20
    with file.open("ab") as torn:
        torn.write(b'{"key": "nq/q29", "sample": 0, "sc')
    second, said = Pool(), []
    rows = await answer(tmp_path, second, deterministic=deterministic, said=said)
    assert [r["key"] for r in rows] == [one.item.key for one in PLAN]
    assert sorted(r["key"] for r in read_rows(file)) == sorted(one.item.key for one in PLAN)
    assert said[0] == f"{done} of 45 answers are there already"
    assert "45 of 45 answered" in said[-1] and "EM so far 1.000" in said[-1]
    assert all(json.loads(line)["text"] for line in file.read_text().splitlines())


async def test_sets_follow_each_other_without_a_wait(tmp_path):
    pool = Pool(target=2)
    await answer(tmp_path, pool)
    assert pool.most == 45 and all(len(call) == 1 for call in pool.calls)


async def test_deterministic_batches_are_the_same_for_any_number_of_workers_and_after_a_kill(tmp_path):
    def batches(pool):
        return {
            tuple(r.uid for r in call if r.group == group)
            for call in pool.calls
            for group in {r.group for r in call}
        }

    pools = [Pool(), Pool(target=2), Pool(target=2)]
    for at, pool in enumerate(pools[:2]):
        (tmp_path / str(at)).mkdir()
        await answer(tmp_path / str(at), pool, deterministic=True)
    assert batches(pools[0]) == batches(pools[1])
    assert [len(call) for call in pools[1].calls] == [2 * BATCH, 45 - 2 * BATCH]
    (tmp_path / "2").mkdir()
    kept = (tmp_path / "0" / "answers.jsonl").read_text().splitlines(keepends=True)[: BATCH + 3]
    (tmp_path / "2" / "answers.jsonl").write_text("".join(kept))
    await answer(tmp_path / "2", pools[2], deterministic=True)
    first = tuple(f"suite-0-{one.item.key}" for one in PLAN[:BATCH])
    assert batches(pools[2]) == batches(pools[0]) - {first}
    assert len(read_rows(tmp_path / "2" / "answers.jsonl")) == 45


async def test_greedy_and_sampled_requests_and_documents_beforehand(tmp_path):
    async def retrieve(query):
        return [Hit("d7", f"about {query}", 1.0)]

    plan = [asked("nq", 0), asked("nq", 0, sample=1)]
    pool = Pool()
    rows = await answer(tmp_path, pool, plan=plan, retrieve=retrieve)
    greedy, sampled = (call[0] for call in pool.calls)
    assert (greedy.temperature, sampled.temperature) == (0.0, 0.7) and greedy.seed != sampled.seed
    assert greedy.question.context == ("about question 0 of nq?",)
    assert rows[0]["searches"][0] == {"query": "question 0 of nq?", "documents": ["d7"]}


def test_two_evaluations_do_not_write_into_one_file(tmp_path):
    with AnswersFile(tmp_path, PLAN):
        with pytest.raises(UserError, match="another evaluation writes"):
            AnswersFile(tmp_path, PLAN)
    AnswersFile(tmp_path, PLAN).close()


def test_rows_of_another_question_and_doubled_rows_are_refused(tmp_path):
    kept = row(asked("nq", 0, golden=("Oslo",)), "Oslo")
    file = tmp_path / "answers.jsonl"
    file.write_text(json.dumps(kept) + "\n")
    with pytest.raises(UserError, match="its row nq/q0 is another question, or has other golden answers"):
        AnswersFile(tmp_path, PLAN)
    file.write_text((json.dumps(kept) + "\n") * 2)
    with pytest.raises(UserError, match="line 2: nq/q0, sample 0, comes a second time"):
        read_rows(file)
    file.write_text("{}\n")
    with pytest.raises(UserError, match="line 1: not a row"):
        read_rows(file)


def test_a_folder_is_gone_on_with_under_the_same_plan_alone(tmp_path):
    plan = {
        "suite": "search7",
        "method": "agent",
        "model": {"name": "a", "weights": "1"},
        "protocol": PROTOCOL | {"versions": {"vllm": "1"}},
    }
    said = []
    begin(tmp_path, plan, said.append)
    moved = plan | {
        "model": {"name": "b", "weights": "1"},
        "protocol": PROTOCOL | {"versions": {"vllm": "2"}},
    }
    begin(tmp_path, moved, said.append)
    assert said == ["another version than that of the answers there: vllm: 1 | 2"]
    for change, says in (
        ({"method": "rag"}, "method: agent | rag"),
        ({"model": {"name": "a", "weights": "2"}}, "weights: 1 | 2"),
        ({"protocol": PROTOCOL | {"top_k": 5}}, "top_k: 3 | 5"),
    ):
        with pytest.raises(UserError, match=r"came by another plan") as e:
            begin(tmp_path, plan | change, said.append)
        assert says in str(e.value)


def test_a_fact_that_the_retriever_told_only_once_does_not_keep_an_evaluation_from_going_on(tmp_path):
    facts = {"backend": "bm25", "passages": 9, "corpus": "abc", "encoder": "unknown"}

    def plan_of(**changed):
        protocol = PROTOCOL | {"retriever": facts | changed}
        return {"suite": "s", "method": "agent", "model": {"name": "a", "weights": "1"}, "protocol": protocol}

    said = []
    begin(tmp_path, plan_of(), said.append)
    begin(tmp_path, plan_of(encoder='{"k1": 1}'), said.append)
    before = "the retriever did not tell this both times, so it is not compared: encoder: "
    assert said == [before + 'unknown | {"k1": 1}']
    begin(tmp_path, plan_of(), said.append)
    assert said[1:] == [before + '{"k1": 1} | unknown'], "and what was known stays known"
    for change in ({"encoder": '{"k1": 2}'}, {"encoder": "unknown", "corpus": "def"}):
        with pytest.raises(UserError, match=r"came by another plan \(retriever: "):
            begin(tmp_path, plan_of(**change), said.append)
    assert len(said) == 2
