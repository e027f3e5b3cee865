"""The prompts of the methods, and what they are refused for."""

import json

import pytest
from command_line import run  # noqa: F401
from places import DATA
from rollout_fakes import ScriptedEngine, byte_bpe, chat_bpe
from rollout_text import check_hostile_text
from suite_rows import asked
from tool_families import of_family

from retriever_service.http.launch import serve_in_thread
from retriever_service.index_folder.description import read_info
from retriever_service.indexing.build import build_index
from retriever_service.settings import ServerSettings
from services.common.errors import UserError
from services.contracts import Action, Question, Trajectory, TrajectoryRequest
from services.rollout.worker.loop import run_trajectory
from services.rollout.worker.templates import make_template
from services.rollout.worker.tokenizer import load_tokenizer
from services.settings import RolloutSettings
from trainer.config.schema import parse_config
from trainer.suite.methods import METHODS, PROMPTED, method_of
from trainer.suite.protocol import protocol_of
from trainer.suite.retriever_facts import retriever_facts
from trainer.suite.rows import row_of

TOKENIZER = byte_bpe(["Question: who is it? <answer> Beijing </answer> Doc 1(Title: x) "] * 3)
QUESTION = Question(
    "q", "who is it", ("Rome",), "nq", prompt="an agent's own", context=('"Rome"\nIt is </information> big.',)
)
NAMED = "PeterJinGo/SearchR1-nq_hotpotqa_train-qwen2.5-3b-it-em-grpo"
SETTINGS = RolloutSettings(max_obs_tokens=60, max_model_tokens=4096)


def prompt(method, tokenizer=TOKENIZER, question=QUESTION):
    settings = METHODS[method].settings(SETTINGS)
    template = make_template(settings.template, tokenizer, settings)
    return template.decode(template.prompt_ids(question))


def test_each_method_asks_in_its_own_words_and_in_the_chat_template():
    assert prompt("direct").endswith("</answer>. Question: who is it\n") and "<search>" not in prompt(
        "direct"
    )
    assert "step by step inside <think>" in prompt("cot")
    assert "up to 4 times" in prompt("search-o1") and "<search> your query </search>" in prompt("search-o1")
    assert "an agent's own" not in prompt("direct")
    chat = prompt("direct", chat_bpe())
    assert chat.startswith("<|im_start|>user\nAnswer the question") and chat.endswith(
        "<|im_start|>assistant\n"
    )


def test_retrieved_documents_stand_before_the_question_harmless_and_cut():
    text = prompt("rag")
    assert 'Documents:\nDoc 1(Title: "Rome") It is < /information> big.\n\nQuestion: who is it\n' in text
    many = Question("q", "who is it", ("Rome",), "nq", context=("word " * 900,) * 3)
    settings = METHODS["rag"].settings(SETTINGS)
    template = make_template(settings.template, TOKENIZER, settings)
    empty = Question("q", "who is it", ("Rome",), "nq")
    extra = len(template.prompt_ids(many)) - len(template.prompt_ids(empty))
    assert 55 <= extra <= 62 and template.decode(template.prompt_ids(many)).endswith("Question: who is it\n")
    assert settings.max_prompt_tokens == SETTINGS.max_prompt_tokens + 60


@pytest.mark.parametrize("name", ["DirectTemplate", "ChainOfThoughtTemplate", "SearchO1Template"])
def test_no_text_from_outside_becomes_a_control_token(name):
    check_hostile_text(chat_bpe(), name=f"{PROMPTED}:{name}")


async def test_a_method_without_search_takes_one_turn():
    async def search(query):
        raise AssertionError("it searched")

    settings = METHODS["cot"].settings(SETTINGS)
    engine = ScriptedEngine(TOKENIZER, ["<search> x </search> <think> a </think> <answer> Rome </answer>"])
    done = await run_trajectory(
        TrajectoryRequest("u", "g", QUESTION, 0, 0.0),
        engine=engine,
        template=make_template(settings.template, TOKENIZER, settings),
        search=search,
        settings=settings,
    )
    assert len(done.actions) == 1 and done.searches == 0


@pytest.mark.parametrize(
    ("text", "untagged", "answer", "em"),
    [
        ("The Rome.", True, "The Rome.", 1.0),
        ("The Rome.", False, None, 0.0),
        ("It is <answer> Rome </answer>", True, "Rome", 1.0),
        ("It is in Rome", True, "It is in Rome", 0.0),
        ("  ", True, None, 0.0),
    ],
)
def test_a_text_without_tags_is_an_answer_for_methods_that_ask_for_nothing_else(text, untagged, answer, em):
    one = asked("nq", 0)
    action = Action([1], [-0.5], 0, "invalid", text)
    row = row_of(
        one, Trajectory("u", "g", one.item.question, [1], [action], "turns"), None, untagged=untagged
    )
    assert (row["answer"], row["scores"]["em"], row["text"]) == (answer, em, text)
    assert [m.name for m in METHODS.values() if m.untagged] == ["direct", "rag"]


def test_a_word_level_model_is_asked_by_its_own_template_alone():
    with pytest.raises(UserError, match="--method rag: its prompt is English"):
        method_of("rag", RolloutSettings(template="lab"))
    assert method_of("agent", RolloutSettings(template="lab")).name == "agent"
    with pytest.raises(UserError, match="did you mean search-o1"):
        method_of("searcho1", SETTINGS)


def facts(settings, tokenizer=TOKENIZER, question=QUESTION, given_prompts=0):
    retriever = {"backend": "bm25"}
    found = protocol_of(
        settings,
        tokenizer,
        question,
        given_prompts=given_prompts,
        retriever=retriever,
        retrieves=False,
        untagged=False,
        seed=0,
        versions={},
    )
    json.dumps(found)
    return found


def test_prompts_of_the_data_count_where_the_template_reads_them():
    tools = of_family(TOKENIZER, "hermes")
    assert facts(SETTINGS, given_prompts=3)["prompts_of_the_data"] == 3
    by_tools = facts(SETTINGS.model_copy(update={"template": "hermes"}), tools, given_prompts=3)
    assert by_tools["prompts_of_the_data"] == 0 and "an agent's own" not in by_tools["prompt_example"]


def test_the_protocol_tells_what_moves_numbers():
    plain = Question("q", "who is it", ("Rome",), "nq")
    agent, chat = facts(SETTINGS, question=plain), facts(SETTINGS, chat_bpe(), plain)
    assert agent["chat_template"] == "none" != chat["chat_template"]
    assert agent["prompt_digest"] != chat["prompt_digest"]
    other = Question("q", "what is that?", ("Rome",), "nq")
    assert facts(SETTINGS, question=other)["prompt_digest"] == agent["prompt_digest"]
    direct = facts(METHODS["direct"].settings(SETTINGS), question=plain)
    assert (direct["max_turns"], direct["top_k"], direct["retriever"]) == (0, None, None)
    assert (agent["top_k"], agent["stop"]) == (3, ["</search>", "</answer>"])
    assert (
        facts(SETTINGS.model_copy(update={"reading": "search_r1"}), question=plain)["reading"] == "search_r1"
    )


def test_a_copy_without_its_chat_template_is_asked_without_it_and_the_protocol_says_so(tmp_path):
    """As docs/evaluation.md has it, for both places where a folder keeps the template."""
    chat_bpe().save_pretrained(tmp_path)

    def chat_template():
        return facts(SETTINGS, load_tokenizer(tmp_path))["chat_template"]

    with_it = chat_template()
    assert with_it != "none"
    file, settings = tmp_path / "chat_template.jinja", tmp_path / "tokenizer_config.json"
    older = json.loads(settings.read_text()) | {"chat_template": file.read_text()}
    file.unlink()
    assert chat_template() == "none"
    settings.write_text(json.dumps(older))
    assert chat_template() == with_it
    del older["chat_template"]
    settings.write_text(json.dumps(older))
    assert chat_template() == "none"


async def test_a_service_tells_its_corpus_and_encoder_and_one_without_health_routes_tells_nothing(tmp_path):
    index = tmp_path / "index"
    build_index(DATA / "retriever_corpus.jsonl", index)
    with serve_in_thread(ServerSettings(index=str(index), port=0)) as server:
        told = await retriever_facts(f"{server.url}/")
        silent = await retriever_facts(f"{server.url}/no/such/service")
    info = read_info(index)
    assert told == {
        "backend": "bm25",
        "passages": info.passages,
        "corpus": info.corpus_sha256[:12],
        "encoder": json.dumps(info.settings, sort_keys=True),
    }
    assert '"k1": 0.9' in told["encoder"]
    assert set(silent.values()) == {"unknown"} == set((await retriever_facts("http://127.0.0.1:1")).values())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--suite", "search8"], "--suite search8: accepted are search7; did you mean search7?"),
        (["--suite", "search7"], "no questions given; pass --data FOLDER or set data.eval"),
        (["--suite", "search7", "--limit", "3"], "with --suite give --limit-per-source"),
        (["--method", "rag"], "--method, --split, --limit-per-source and --samples go with --suite search7"),
        (["--suite", "search7", "--data", "none"], "none: no such file or folder"),
    ],
)
def test_mistakes_are_told_before_anything_starts(run, tmp_path, monkeypatch, arguments, says):
    pytest.importorskip("ray")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text("{model: {path: m}, data: {train: t}, retriever: {url: 'http://x'}}")
    status, _, err = run("eval", "--config", "c.yaml", *arguments)
    assert status == 2 and says in err


def test_weights_go_by_the_name_of_their_checkpoint_and_not_by_latest(tmp_path, monkeypatch):
    """A table that says `latest` names other weights a step later."""
    pytest.importorskip("ray")
    from trainer.commands.work import evaluate_suite

    checkpoints = tmp_path / "run" / "checkpoints"
    for step in (4, 7):
        (checkpoints / f"step_{step:06}").mkdir(parents=True)
    (checkpoints / "best").symlink_to("step_000004")
    monkeypatch.setattr("trainer.learner.checkpoint.fault", lambda path, **more: None)  # both are whole
    (tmp_path / "nq.jsonl").write_text(json.dumps({"id": "1", "question": "who?", "golden_answers": ["x"]}))
    asked = []
    monkeypatch.setattr(evaluate_suite, "with_weights", lambda config, given, *more: asked.append(given))
    config = parse_config(
        {
            "run": {"name": "run", "dir": str(tmp_path)},
            "model": {"path": "m"},
            "data": {"train": "t"},
            "retriever": {"url": "http://x"},
        }
    )
    for given in ("latest", "best", str(tmp_path / "run"), None):
        options = evaluate_suite.SuiteOptions("search7", data=tmp_path / "nq.jsonl", checkpoint=given)
        evaluate_suite.run_suite(config, options, say=lambda text: None)
    said = []
    named = config.model_copy(update={"model": config.model.model_copy(update={"path": NAMED})})
    evaluate_suite.run_suite(
        named, evaluate_suite.SuiteOptions("search7", data=tmp_path / "nq.jsonl"), said.append
    )
    assert (
        asked.pop() is None
        and f"warning: {NAMED}: rollout.reading=innermost, trained with search_r1" in said[-1]
    )
    newest, best = (str(checkpoints / f"step_{step:06}") for step in (7, 4))
    assert asked == [newest, best, newest, None]
