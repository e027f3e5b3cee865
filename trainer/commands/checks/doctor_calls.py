"""The doctor's trial call of a user's retriever, tool, metrics and loss, as a run calls them: one query, one
question, four made trajectories, two rows of log-probs. What returns another form than a run takes is found
before anything starts."""

from __future__ import annotations

import asyncio
import importlib.util
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from retriever_service.search.users_index import TRIAL, Search, call_search
from retriever_service.settings import ServerSettings
from services.common.counting import counted
from services.common.errors import UserError
from services.common.loading.lazy import LazyModule
from services.common.loading.user_code import ENDS, is_import_path, is_slip
from services.common.names import nearest
from services.common.printing.harmless import in_one_line
from services.common.processes.patience import Patience
from services.contracts import Question
from services.rollout.worker.tools import MADE_OF, Toolbox
from trainer.commands.checks.crowd import Crowd
from trainer.commands.checks.doctor_reward import made
from trainer.commands.checks.findings import Finding, late, tried
from trainer.config.schema import Config
from trainer.loop.records.users_metrics import RUNS_OWN, StepMetrics, UsersMetrics

if TYPE_CHECKING:
    from services.rollout.worker import plain_text, templates, tokenizer
    from trainer.commands.checks import loss_trial
    from trainer.session.preflight import template_trial
else:  # transformers and torch take seconds
    loss_trial = LazyModule("trainer.commands.checks.loss_trial")
    plain_text = LazyModule("services.rollout.worker.plain_text")
    templates = LazyModule("services.rollout.worker.templates")
    template_trial = LazyModule("trainer.session.preflight.template_trial")
    tokenizer = LazyModule("services.rollout.worker.tokenizer")

T = TypeVar("T")
SECONDS = 30.0
"""Longest wait for one call."""
SEARCH_SECONDS: float = ServerSettings.model_fields["request_timeout_seconds"].default
"""Longest wait of a search at the service that a run starts."""
REWARDS = [1.0, 0.0, 0.0, 1.0]
"""Of the made trajectories, for metrics."""
OTHER_TEXTS = ("5", "2 + 3", '{"query": "Rome"}', "print(2 + 3)")
"""What a tool that raises for a question is asked beside a golden answer: such as calculators, tools that
take JSON, and interpreters take."""
CLOSING = {"aclose", "cleanup", "dispose", "quit", "shutdown", "stop", "teardown", "__aexit__", "__exit__"}
"""Names under which others give back what an object holds."""
SHOWN = 60
"""Characters of a question or an observation that are shown."""


@dataclass(frozen=True)
class Limit:
    """Longest wait for a call: that of the run, where it is no longer than the doctor waits itself."""

    key: str
    run_seconds: float

    @property
    def seconds(self) -> float:
        return min(self.run_seconds, SECONDS)

    def __str__(self) -> str:
        of_run = f"{self.key}={self.run_seconds:g}"
        return of_run if self.run_seconds <= SECONDS else f"{SECONDS:g} s (a run waits {of_run})"


def check_search(
    key: str,
    path: str,
    search: Search,
    question: Question,
    topk: int,
    limit: Limit | None = None,
    crowd: Crowd | None = None,
) -> Finding:
    """Whether a search of a question returns passages with scores, as many as asked for, best first, and in
    time for a crowd."""

    def call() -> tuple[list[tuple[str, float]], float]:
        where = f"{key}={path}"
        if limit and limit.run_seconds < SECONDS:  # a run calls it once before, when it opens it
            in_time(where, lambda: call_search(where, search, TRIAL, 1))
        began = time.monotonic()
        passages = in_time(where, lambda: call_search(where, search, question.text, topk), limit)
        return passages, time.monotonic() - began

    answered = tried(key, path, call)
    if isinstance(answered, Finding):
        return answered
    found, seconds = answered
    seen = f"{path}: {counted(len(found), 'passage')} of {in_one_line(question.text, SHOWN)!r}"
    notes = []
    longest = min(limit.run_seconds if limit else SECONDS, SEARCH_SECONDS)
    if crowd and (note := crowd.note(key.removesuffix(".index"), seconds, longest)):
        notes.append(note)
    if not found:
        notes.append("none for the first question of the run; a policy that reads nothing learns no search")
    if len(found) > topk:
        notes.append(f"it was asked for {topk}; a run takes the first {topk}")
    if (blank := next((n for n, (text, _) in enumerate(found) if not text.strip()), None)) is not None:
        notes.append(f"passage {blank} is empty")
    scores = [score for _, score in found]
    if (at := next((n for n, pair in enumerate(pairwise(scores), 1) if pair[1] > pair[0]), None)) is not None:
        notes.append(
            f"passage {at} has a higher score ({scores[at]:g}) than the one before it ({scores[at - 1]:g}); "
            "expected best first: the policy reads them in the order that they come in"
        )
    return Finding(key, "note" if notes else "good", seen, "; ".join(notes))


def check_tool(
    key: str, path: str, tool: Callable[..., object], question: Question, limit: Limit | None = None
) -> Finding:
    """What a tool returns for a text that no tool expects: a policy writes anything. One that raises is asked
    for other texts."""
    limit = limit or Limit("rollout.tool_timeout_seconds", SECONDS)
    raised = ""
    others = dict.fromkeys((*question.golden_answers[:1], *OTHER_TEXTS))
    for number, text in enumerate((question.text, *others), 1):
        closing: list[str] = []

        async def called(text: str = text, closing: list[str] = closing) -> str:
            box = Toolbox({key.rpartition(".")[2]: tool}, question, limit.seconds)
            try:
                return await box.call(key.rpartition(".")[2], text)
            finally:
                closing += await box.close()

        began = time.monotonic()
        try:
            # Longer than its own limit, which an async tool that blocks its event loop does not keep.
            most = 2 * limit.seconds + 1 if hasattr(tool, "close") else limit.seconds + 1
            said = in_time(f"{key}: no result within {limit}", lambda: on_one_loop(called()), None, most)
        except TimeoutError as error:
            if time.monotonic() - began < limit.seconds:  # the tool's own, of a service that is away
                advice = f"{error}: a run samples such a trajectory again, and ends at the third such call"
                return Finding(key, "note", path, advice)
            late.append(key)
            leave_loop()
            return Finding(key, "bad", path, f"{key}: no result within {limit}")
        except UserError as error:
            if error.__cause__ is None:  # of its form or time, and not raised by the tool
                leave_loop()
                return Finding(key, "bad", path, str(error))
            made_of = str(error).startswith(f"{key}: {MADE_OF}")
            # Of a word or two an interpreter says NameError too, and rightly.
            slip = number == 1 and is_slip(error.__cause__)
            if made_of or isinstance(error.__cause__, ENDS) or slip:
                return Finding(key, "bad", path, str(error))  # whatever the policy writes
            raised = raised or str(error)
            if number <= len(others):
                continue
            advice = (
                f"{raised}; it raised for all {number} texts that were tried, so a run ends at its first call"
            )
            return Finding(
                key, "bad", path, f"{advice}: mend that; where a policy's text is wrong, return a text"
            )
        seen = f"{path}: {in_one_line(said, SHOWN)!r} for {in_one_line(text, SHOWN)!r}"
        if closing:
            return Finding(key, "bad", seen, closing[0])
        if raised:
            advice = f"{raised}: a policy writes anything, and a tool that raises ends the run; return a text"
            return Finding(key, "note", seen, advice)
        if advice := _never_closed(tool):
            return Finding(key, "note", seen, advice)
        return Finding(key, "good", seen)
    raise AssertionError("the last text returns")


def _never_closed(tool: Callable[..., object]) -> str:
    """Of a class that has another method where a run looks for `close`; "" of others."""
    if not isinstance(tool, type) or callable(getattr(tool, "close", None)):
        return ""
    own = {name for name in dir(tool) if not hasattr(object, name) and callable(getattr(tool, name))}
    meant = next(iter(sorted(own & CLOSING)), None) or nearest("close", own)
    if not meant:
        return ""
    return f"`{meant}` is never called: when a trajectory has ended a run calls `close`, plain or async"


def check_metrics(key: str, path: str, function: StepMetrics, config: Config, question: Question) -> Finding:
    """The names of the numbers that it makes of a right answer, a wrong one, none, and one after a search."""
    said: list[str] = []
    trajectories = made(question, config.rollout.reading)
    metrics = UsersMetrics({path: function}, said.append)
    where = f"{key}=[{path}]"
    numbers = tried(key, path, lambda: in_time(where, lambda: metrics.of(trajectories, REWARDS, {})))
    if isinstance(numbers, Finding):
        return numbers
    if said:
        return Finding(key, "bad", path, said[0])
    if taken := [name for name in numbers if name.partition("/")[0] in RUNS_OWN]:
        return Finding(
            key,
            "note",
            f"{path}: {', '.join(numbers)}",
            f"{', '.join(taken)}: begins as metrics of a run do, which leaves out a name that it uses "
            "itself; give another, such as my/name",
        )
    if not numbers:
        advice = (
            "as it should be where it counts calls of tools, of which these answers have none; not where it "
            "returned nothing, or a number that is not finite"
        )
        seen = f"{path}: no number for a right, a wrong, no answer, and a right one after a search"
        return Finding(key, "note", seen, advice)
    return Finding(key, "good", f"{path}: {', '.join(numbers)}")


def check_loss(key: str, path: str, loss: Callable[..., Any], config: Config) -> Finding:
    """Whether it gives a finite loss per token with a finite gradient, and what that does to tokens of good
    answers."""
    if importlib.util.find_spec("torch") is None:
        return Finding(key, "good", f"{path}: loaded; not called, for want of torch")
    where, trial = f"{key}={path}", loss_trial.gradient  # torch is imported outside of the call's time
    gradient = tried(key, path, lambda: in_time(where, lambda: trial(where, loss, config)))
    if isinstance(gradient, Finding):
        return gradient
    advice = ""
    if gradient >= 0:
        does = "make them less likely (a loss is made smaller: its sign?)" if gradient else "not move them"
        advice = f"tokens of a positive advantage: a step would {does}"
    seen = f"{path}: one loss per token, with a gradient"
    return Finding(key, "note" if advice else "good", seen, advice)


def check_template(key: str, path: str, model: Path, config: Config, question: Question) -> Finding:
    """Whether each method of a template of the user's own returns what a rollout takes. model: its folder."""

    reads = not is_import_path(config.reward.kind)

    def call() -> list[str]:
        # Outside of the call's time: the first import of transformers may take as long.
        encodes, try_template = tokenizer.load_tokenizer(model), template_trial.try_template
        controls = plain_text.control_tokens(encodes)

        def trial() -> list[str]:
            template = templates.make_template(path, encodes, config.rollout)
            if reads and (unread := template_trial.unread_answer(template)):
                raise UserError(
                    f"{key}={path}: reward.kind={config.reward.kind} reads <answer> and </answer>, and the "
                    f"template answers by {unread}, so that no answer earns anything; accepted are these "
                    "tags, or a reward of your own that reads the text of the last action"
                )
            return try_template(template, config.rollout, question, controls)

        return in_time(f"{key}={path}", trial)

    notes = tried(key, path, call)
    if isinstance(notes, Finding):
        return notes
    seen = f"{path}: a prompt, observations, the notice, and the reading of actions"
    return Finding(key, "note" if notes else "good", seen, "; ".join(notes))


def check_call(key: str, path: str, loaded: object, config: Config, question: Question) -> Finding | None:
    """The trial of a part that was loaded; None for a part that no call is made of here."""
    if key.endswith("retriever.index"):
        held_out = config.evaluation.retriever if key.startswith("evaluation.") else None
        settings = held_out or config.retriever
        limit = Limit(f"{key.removesuffix('.index')}.timeout_seconds", settings.timeout_seconds)
        crowd = Crowd.of(config, settings.concurrency)
        return check_search(key, path, cast(Search, loaded), question, config.rollout.topk, limit, crowd)
    if key.startswith("rollout.tools."):
        tools = cast(Mapping[str, Callable[..., object]], loaded)
        limit = Limit("rollout.tool_timeout_seconds", config.rollout.tool_timeout_seconds)
        return check_tool(key, path, next(iter(tools.values())), question, limit)
    if key == "trainer.metrics":
        return check_metrics(key, path, cast(Mapping[str, StepMetrics], loaded)[path], config, question)
    if key == "algorithm.loss":
        return check_loss(key, path, cast(Callable[..., Any], loaded), config)
    return None


def on_one_loop(call: Coroutine[Any, Any, T]) -> T:
    """The result of a call of a tool, all on one loop as in a worker: what a module of the user's keeps open,
    such as the connections of an HTTP client, belongs to the loop that made it."""
    if not _loops:
        _loops.append(asyncio.new_event_loop())
        threading.Thread(target=_loops[0].run_forever, name="doctor-tools", daemon=True).start()
    return asyncio.run_coroutine_threadsafe(call, _loops[0]).result()


def leave_loop() -> None:
    """After a call that came to no end: it may hold the loop, and the next calls are made on another."""
    _loops.clear()


_loops: list[asyncio.AbstractEventLoop] = []
"""None, or that loop; one that a call may block is left to itself."""


def in_time(where: str, call: Callable[[], T], limit: Limit | None = None, seconds: float | None = None) -> T:
    """The result of a call. Raises what it raises, and UserError where it lasts longer than the limit, or
    SECONDS, of which a call that works counts its processor time alone: a busy machine is no fault of its. It
    then goes on in a thread that nobody waits for. seconds: waits so long instead, and `where` is the
    line."""
    done: list[T] = []
    raised: list[BaseException] = []

    def work() -> None:
        try:
            done.append(call())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=work, name="doctor-trial", daemon=True)
    thread.start()
    own = seconds or (limit.seconds if limit and limit.run_seconds <= SECONDS else None)
    if own:  # a limit of the run's, by the clock
        thread.join(own)
    else:
        patience = Patience(SECONDS, time.process_time)
        while thread.is_alive() and not patience.over():
            thread.join(patience.look_seconds / 5)
    if raised:
        raise raised[0]
    if not done:
        late.append(where)
        raise UserError(
            where if seconds else f"{where}: no result of one call within {limit or f'{SECONDS:g} s'}"
        )
    return done[0]
