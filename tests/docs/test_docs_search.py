"""The search of the site, in a browser: what a user would type leads to the page that answers it."""

from __future__ import annotations

import pytest
from chromium import CHROMIUM, browser, until  # noqa: F401
from test_docs_site import served, site  # noqa: F401

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine"),
]
DETECTORS = "monitor/#detectors-what-each-alarm-means-and-what-to-do"
ANSWERS = "run_folder/#where-the-answers-are-answersjsonl-trajectories"
FIRST = {
    "7B": "gpu/#how-many-gpus-a-7b-needs",
    "how many GPUs for a 7B": "gpu/#how-many-gpus-a-7b-needs",
    "3B": "gpu/#memory-by-model-size",
    "out of memory": "gpu/#memory-by-model-size",
    "EM": "algorithms/#scoring-rewardkind",
    "F1": "algorithms/#scoring-rewardkind",
    "KL": "algorithms/#kl-entropy-importance-weights",
    "RL": "",
    "answers.jsonl": ANSWERS,
    "where do my answers lie": ANSWERS,
    "alarm acceleration": DETECTORS,
    "what does this alarm mean": DETECTORS,
    "add a worker": "reliability/#add-a-worker-or-take-one-away",
    "how to stop a run": "reliability/#stop-a-run-signals-and-the-drivers-death",
    "--resume latest": "resume/",
    "pip install": "deploy/#installing",
    "docker compose": "deploy/#compose",
    "verl": "any_trainer/#verl",
    "warm start": "gpu/#warm-start-a-model-that-does-not-write-the-tags",
    "how do I write a template": "extend/#a-template",
    "my own tool": "extend/#a-tool",
    "logp/right": "metrics/#likelihood",
    "metrics.jsonl": "metrics/",
    "wandb": "metrics/#other-trackers",
    "prometheus": "likelihood_service/#prometheus-access-limits",
    "reward stays 0": "not_learning/",
    "csv questions": "data/",
    "ask a question": "ask/#ask-a-question",
    "token password": "security/#tokens",
    "how to read the live page": "pages/",
    "stop early": "settings/#steps-time-an-early-end",
    "early stopping": "settings/#steps-time-an-early-end",
    "batch size": "settings/#batch-size-and-learning-rate",
    "learning rate": "settings/#batch-size-and-learning-rate",
    "lr": "settings/#batch-size-and-learning-rate",
    "save best checkpoint": "settings/#evaluation-during-a-run-and-the-best-checkpoint",
    "delete old checkpoints": "settings/#evaluation-during-a-run-and-the-best-checkpoint",
    "hyperparameters": "settings/",
    "several seeds": "settings/#seeds-and-repeatability",
    "KL penalty": "settings/#loss-grpo-and-its-variants-llds-kl-entropy",
    "max turns": "settings/#rollouts-turns-tokens-prompt-reward",
    "system prompt": "settings/#rollouts-turns-tokens-prompt-reward",
    "slurm": "slurm/",
    "sbatch": "slurm/",
    "multi node": "slurm/#several-nodes",
    "kubernetes": "deploy/#kubernetes",
    "no internet": "deploy/#without-internet",
    "python 3.13": "deploy/#installing",
    "apple silicon": "deploy/#installing",
    "OOM": "gpu/#memory-by-model-size",
    "LoRA": "gpu/#lora",
    "CUDA out of memory": "gpu/#memory-by-model-size",
    "export to huggingface": "run_folder/#export-a-checkpoint-as-a-hugging-face-model",
    "upload model to hub": "run_folder/#export-a-checkpoint-as-a-hugging-face-model",
    "evaluate a model": "evaluation/#evaluate-a-model-on-your-own-questions",
    "LLM as a judge": "extend/#an-llm-judge-or-another-service-as-a-reward",
    "elasticsearch": "retriever/#a-remote-engine",
    "openai api": "ask/#put-it-behind-a-chat-page",
    "staleness async rollout": "reliability/#staleness-asynchronous-training",
    "asynchronous training": "reliability/#staleness-asynchronous-training",
    "stop when it collapses": "monitor/#actions-stop-or-go-back-when-a-run-collapses",
    "use my own retriever": "extend/#a-retriever",
    "own reward": "extend/#a-reward",
    "own tool": "extend/#a-tool",
    "own metric": "extend/#a-metric",
    "custom loss": "extend/#a-policy-loss",
    "resume after a crash": "resume/",
    "continue after crash": "resume/",
    "how long does a step take": "gpu/#how-long-a-step-takes-time-by-stage",
    "time per step": "gpu/#how-long-a-step-takes-time-by-stage",
    "how much memory": "gpu/#memory-by-model-size",
    "which models": "models/#which-models-are-supported",
    "supported models": "models/#which-models-are-supported",
    "gemma": "models/#which-models-are-supported",
    "tool calls": "models/#tool-calls-by-family",
    "checkpoint size": "resume/#checkpoint-size-the-disk-space-of-a-run",
    "disk space": "resume/#checkpoint-size-the-disk-space-of-a-run",
    "disk full": "reliability/#disk-output-rewards-standstill",
    "LLM judge": "extend/#an-llm-judge-or-another-service-as-a-reward",
    "how many GPUs": "gpu/#how-many-gpus-a-7b-needs",
    "SFT on my own trajectories": "data/#demonstrations-sft-on-trajectories-of-your-own",
    "how to resume a run": "resume/",
    "combine rewards": "extend/#several-rewards-as-one",
    "several rewards": "extend/#several-rewards-as-one",
    "where does my function run": "extend/#where-your-functions-run",
    "which process": "extend/#where-your-functions-run",
    "API key": "extend/#api-keys-and-environment-variables",
    "environment variables": "extend/#api-keys-and-environment-variables",
    "secrets": "extend/#api-keys-and-environment-variables",
    "where does my print go": "extend/#where-print-and-logging-go",
    "logging": "extend/#where-print-and-logging-go",
    "system prompt of an instruct model": "extend/#in-the-models-chat-form-with-instructions-of-your-own",
    "PPO": "algorithms/#which-algorithms-there-are-no-ppo-no-critic",
    "critic": "algorithms/#which-algorithms-there-are-no-ppo-no-critic",
    "which algorithms": "algorithms/#which-algorithms-there-are-no-ppo-no-critic",
    "fp8": "models/#quantised-weights-awq-gptq-fp8",
    "AWQ": "models/#quantised-weights-awq-gptq-fp8",
    "quantized model": "models/#quantised-weights-awq-gptq-fp8",
    "context length": "settings/#rollouts-turns-tokens-prompt-reward",
    "length penalty": "settings/#loss-grpo-and-its-variants-llds-kl-entropy",
}
"""What is typed, and where the first result leads."""
AMONG_THREE = {
    "SIGTERM": "reliability/#stop-a-run-signals-and-the-drivers-death",
    "my own reward": "extend/",
    "grad_norm": "metrics/",
    "learner.lr": "not_learning/",
    "does LLDS help": "collapse_bench/",
    "checkpoint best": "run_folder/",
    "what is LLDS": "algorithms/#llds-algorithmllds",
    "hotpotqa": "data/",
    "redis": "likelihood_service/#stores",
    "custom reward function": "extend/#a-reward",
    "nan loss": "monitor/#detectors-what-each-alarm-means-and-what-to-do",
    "compare two checkpoints": "evaluation/#comparing",
    "which lambda": "settings/#loss-grpo-and-its-variants-llds-kl-entropy",
    "tensorboard": "metrics/#other-trackers",
    "exact match": "metrics/#reward-and-score",
    "tensor parallel": "gpu/#placement",
    "grafana dashboard": "deploy/#compose",
    "download models": "deploy/#without-internet",
    "pause": "reliability/#the-control-plane",
}
"""The same of the first three results, by their beginnings."""
RESULTS = (
    "[...document.querySelectorAll('#mkdocs-search-results article a')].map(a => a.getAttribute('href'))"
)


@pytest.fixture(scope="module")
def url(site):
    with served(site) as url:
        yield url


@pytest.fixture
def failed():
    """Errors of the page's scripts."""
    return []


@pytest.fixture
def page(url, browser, failed):
    page = browser.new_page()
    page.on("pageerror", lambda error: failed.append(str(error)))
    page.on("console", lambda m: failed.append(m.text) if m.type == "error" else None)
    opened(page, f"{url}/")
    yield page
    page.close()


def opened(page, address):
    page.goto(address)
    page.locator("a[data-bs-target='#mkdocs_search_modal']").click()
    field(page).wait_for(state="visible")


def field(page):
    return page.locator("#mkdocs-search-query")


def asked(page, query):
    """Where the results lead, once they are those of this query: the worker says which it answers."""
    return page.evaluate(
        """query => new Promise(done => {
             const told = ({data}) => {
               if (data.query !== query || !data.results) return;
               searchWorker.removeEventListener("message", told);
               done(data.results.map(result => result.location));
             };
             searchWorker.addEventListener("message", told);
             searchWorker.postMessage({query});
           })""",
        query,
    )


def until_held(page, held, seconds=60):
    for _ in range(10 * seconds):
        if held:
            return
        page.wait_for_timeout(100)
    raise TimeoutError("the page did not ask for its index")


def test_what_a_user_would_type_finds_the_page_that_answers_it(page, failed):
    found = {query: asked(page, query)[:3] for query in FIRST | AMONG_THREE}
    wrong = {query: found[query] for query, place in FIRST.items() if found[query][:1] != [place]}
    assert wrong == {}
    late = {
        q: found[q] for q, place in AMONG_THREE.items() if not any(at.startswith(place) for at in found[q])
    }
    assert late == {}
    assert failed == []


def test_two_letters_are_searched_as_they_are_typed(page):
    field(page).press_sequentially("7B")
    until(page, f"{RESULTS}.length > 0")
    assert page.evaluate(RESULTS)[0].removeprefix("./") == "gpu/#how-many-gpus-a-7b-needs"
    title = page.locator("#mkdocs-search-results article a").first.inner_text()
    assert title == "GPUs: How many GPUs a 7B needs", "a section says whose it is"


def test_enter_opens_the_first_result_of_what_was_typed(page, url):
    field(page).fill("alarm acceleration")
    field(page).press("Enter")
    page.wait_for_url(f"{url}/{DETECTORS}")


def test_enter_before_the_index_is_there_opens_the_first_result_all_the_same(page, url):
    held = []
    page.route("**/search_index.json", lambda route: held.append(route))
    opened(page, f"{url}/ask/")
    field(page).fill("verl")
    field(page).press("Enter")
    until_held(page, held)
    held[0].continue_()
    page.wait_for_url(f"{url}/any_trainer/#verl")


def test_what_was_typed_before_the_index_is_there_is_searched_once_it_is(page, url):
    held = []
    page.route("**/search_index.json", lambda route: held.append(route))
    opened(page, f"{url}/ask/")
    field(page).press_sequentially("verl")
    until_held(page, held)
    held[0].continue_()
    until(page, f"{RESULTS}.length > 0")
    assert page.evaluate(RESULTS)[0].endswith("any_trainer/#verl")


def test_enter_on_a_result_of_the_same_page_closes_the_dialog(page, url):
    opened(page, f"{url}/any_trainer/")
    field(page).fill("verl")
    field(page).press("Enter")
    page.wait_for_url(f"{url}/any_trainer/#verl")
    page.locator("#mkdocs_search_modal").wait_for(state="hidden")


def test_enter_without_a_result_stays_and_says_so(page, url):
    field(page).fill("zzyzx")
    field(page).press("Enter")
    page.get_by_text("No results found").wait_for()
    assert page.url == f"{url}/" and field(page).is_visible()


@pytest.mark.parametrize("query", ["logp/right: what is it", "-1", "^ ~ *", "a:b", "+loss", "the", "*", "ü"])
def test_what_is_typed_is_no_query_language(page, failed, query):
    """MkDocs' own worker ends with an error at the first of these, and answers nothing more."""
    asked(page, query)
    assert asked(page, "verl")[0] == "any_trainer/#verl"
    assert failed == []


def test_a_word_that_is_not_finished_finds_what_begins_with_it(page):
    assert any(place.startswith("deploy/#kube") for place in asked(page, "kubern"))
