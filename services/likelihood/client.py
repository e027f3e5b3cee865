"""The client that a learner posts through: calls return at once, records arrive in order, once, and survive
an outage.

A background thread sends. While the service is away, messages wait in memory (bounded), then on disk; what is
on disk when the process ends is sent by the next client on the same folder. The service stores each (run,
step, attempt, uid) once, so that a message whose answer was lost can be sent again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import orjson

from services.common.answers import object_of
from services.common.errors import EnvironmentLacks, UserError
from services.common.http.addresses import is_http
from services.common.printing.messages import said_by
from services.contracts import TokenBatch
from services.likelihood.microscope.building import Lens, Slide
from services.likelihood.microscope.probe_slide import ProbeSlide
from services.likelihood.microscope.record import SamplesRecord
from services.likelihood.records import EventRecord, Record, StepRecord, check_run_name
from services.likelihood.spool import Message, Spool
from services.likelihood.wire.about import AboutRecord
from services.likelihood.wire.tokens import pack_tokens, unpack_tokens

log = logging.getLogger("unspiral.likelihood")
SAMPLES_PART = 128
"""Most trajectories of one message token by token."""
SAMPLE_TOKEN_BYTES = 100
"""That a token of them takes while the message waits."""
RETRY_SECONDS = (0.2, 0.5, 1.0, 2.0, 5.0)
PART = 10_000
"""Most trajectories of one message; a larger step goes in parts."""
POISON = {408, 500}
"""Answers that a message itself may be the cause of, as of a connection that breaks while it is sent."""
POISON_TRIES = 8
AGAIN = {401, 403, 408, 425, 429, 500, 502, 503, 504}
"""Answers after which the same message is sent again: the service, a proxy or a token may be put right."""


class LikelihoodClient:
    """post_step, put_tokens and post_event return at once and never raise for an outage; the other calls ask
    the service.

    url: the service's address. spool_dir: folder for what cannot be delivered yet. token: bearer token, if
    the service asks for one. Records and arrays must not be changed after they were handed over. Raises
    EnvironmentLacks if the folder cannot be used, UserError for an address without http.
    """

    def __init__(
        self,
        url: str,
        *,
        spool_dir: str | Path,
        token: str | None = None,
        memory_bytes: int = 128 << 20,
        token_steps: int = 8,
        timeout_seconds: float = 30.0,
    ):
        if not is_http(url):
            raise UserError(f"likelihood service {url!r}: expected an address such as http://127.0.0.1:8100")
        self.url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        timeout = httpx.Timeout(timeout_seconds, connect=min(3.0, timeout_seconds))
        self._http = httpx.Client(base_url=self.url, headers=headers, timeout=timeout, trust_env=False)
        self._spool = Spool(spool_dir, memory_bytes, token_steps)
        self._changed = threading.Condition()
        self._closing = self._away = False
        self.refused = 0
        """Messages that the service refused for good (a superseded attempt, a bad record); each is logged."""
        self._suspect = (-1, 0)
        """Number of the message that is tried, and how often it failed in a way that it may be the cause
        of."""
        self._thread = threading.Thread(target=self._send_all, name="likelihood-client", daemon=True)
        self._thread.start()

    def post_step(self, run: str, record: StepRecord) -> None:
        """Hand over one step. Its trajectories may be TrajectoryRecord or plain dicts of that form.

        Raises UserError for a bad run name, EnvironmentLacks if the service is away and the disk is full,
        ValueError after close.
        """
        for at in range(0, max(1, len(record.trajectories)), PART):  # the service merges the parts of a step
            part = record.model_copy(update={"trajectories": record.trajectories[at : at + PART]})
            size = (
                1000 + 100 * len(part.metrics) + sum(200 + 120 * len(_actions(t)) for t in part.trajectories)
            )
            self._add("step", run, record.step, "POST", "steps", partial(_json, part), size)

    def put_tokens(self, run: str, step: int, batch: TokenBatch, attempt: int = 0) -> None:
        """Hand over the token arrays of a step (`batch.logp_old` must be set)."""
        if batch.logp_old is None:
            raise UserError(f"run {run}, step {step}: token arrays without logp_old")
        size = 20 * len(batch.token_ids) + 100 * len(batch)
        self._add(
            "tokens",
            run,
            step,
            "PUT",
            f"steps/{step}/tokens?attempt={attempt}",
            lambda: pack_tokens(batch),
            size,
        )

    def post_samples(self, run: str, step: int, slide: Slide, lens: Lens, attempt: int = 0) -> None:
        """Hand over the trajectories of a step that are to be kept token by token. Their records are made in
        the background, in parts. slide, lens: services.likelihood.microscope.building."""
        for first in range(0, len(slide.trajectories), SAMPLES_PART):
            whole = len(slide.trajectories) <= SAMPLES_PART
            part = slide if whole else slide.part(first, first + SAMPLES_PART)
            make = partial(_samples, part, lens, attempt)
            size = SAMPLE_TOKEN_BYTES * len(part.tokens.token_ids)
            self._add("samples", run, step, "POST", f"steps/{step}/samples", make, size)

    def post_probes(self, run: str, step: int, slide: ProbeSlide, lens: Lens, attempt: int = 0) -> None:
        """Hand over trajectories of the fixed probe as a step has scored them again. Their records are made
        in the background. slide: services.likelihood.microscope.probe_slide."""
        make = partial(_samples, slide, lens, attempt)
        size = SAMPLE_TOKEN_BYTES * len(slide.tokens.token_ids)
        self._add("samples", run, step, "POST", f"steps/{step}/samples", make, size)

    def post_event(self, run: str, event: EventRecord) -> None:
        """Hand over something that happened in the run."""
        self._add("event", run, event.step, "POST", "events", lambda: _json(event), 3000)

    def post_about(self, run: str, about: AboutRecord) -> None:
        """Hand over what the run says of itself; keys that are not set stay as they are in the store."""
        body = about.model_dump(exclude_unset=True)
        self._add("about", run, 0, "POST", "about", lambda: orjson.dumps(body), 10_000)

    def get_tokens(self, run: str, step: int, timeout_seconds: float | None = None) -> TokenBatch | None:
        """The token arrays of a step, also while they still wait to be delivered.

        None if the service has none (any more), cannot be reached, or answers with something else.
        timeout_seconds: for each part of the answer, instead of the client's own.
        """
        limit = httpx.USE_CLIENT_DEFAULT if timeout_seconds is None else timeout_seconds
        try:
            with self._changed:
                waiting = self._spool.find("tokens", run, step)
            if waiting is not None:
                return unpack_tokens(waiting.body)
            answer = self._http.get(f"/v1/runs/{check_run_name(run)}/steps/{step}/tokens", timeout=limit)
            if answer.status_code == 200:
                return unpack_tokens(answer.content)
            problem = None if answer.status_code == 404 else _reason(answer)
        except Exception as e:  # of service, body or file, whichever it is: no probe is worth the run
            problem = " ".join(f"{type(e).__name__}: {e}".split())[:200]
        if problem is not None:
            log.warning(
                "likelihood service %s: token arrays of step %d not read (%s)", self.url, step, problem
            )
        return None

    @property
    def waiting(self) -> int:
        """Messages that were handed over and not yet stored by the service."""
        with self._changed:
            return len(self._spool)

    def flush(self, timeout: float) -> bool:
        """Wait until everything handed over so far is stored. False if that took longer than `timeout`
        seconds."""
        deadline = time.monotonic() + timeout
        with self._changed:
            # Not until the queue is empty: other threads may go on adding to it.
            last = self._spool.next_seq - 1
            while (oldest := self._spool.oldest()) is not None and oldest <= last:
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    return False
        return True

    def keep(self, timeout: float) -> None:
        """Have everything handed over so far outlive this process: stored, or on disk where the service is
        away (known to be, or for `timeout` seconds). Raises EnvironmentLacks if the disk is full."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while len(self._spool) and not self._away and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            self._spool.to_disk()

    def close(self, timeout: float = 10.0) -> int:
        """Deliver what can be delivered, leave the rest on disk, and end the thread. Returns how many
        messages were left."""
        if self._closing:
            return 0
        self.flush(timeout)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout + 5)
        with self._changed:
            left = len(self._spool)
            self._spool.close()
        self._http.close()
        if left:
            log.warning(
                "likelihood service %s: %d records not delivered; they wait in %s",
                self.url,
                left,
                self._spool.folder,
            )
        return left

    def __enter__(self) -> LikelihoodClient:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()

    def _add(
        self, kind: str, run: str, step: int, method: str, path: str, make: Callable[[], bytes], size: int
    ) -> None:
        message = Message(kind, run, step, method, f"/v1/runs/{check_run_name(run)}/{path}", make, size)
        with self._changed:
            if self._closing:
                raise ValueError("the likelihood client is closed")
            self._spool.add(message)
            self._changed.notify_all()

    def _send_all(self) -> None:
        failures = 0
        while True:
            with self._changed:
                while not self._closing and not len(self._spool):
                    self._changed.wait()
                if self._closing:
                    return
                message = self._spool.first()
                if message is None:  # it could not be read
                    self._changed.notify_all()
                    continue
            # Without the lock: a slow service must not keep the run from handing over the next step.
            problem = self._send(message)
            if problem is None:
                with self._changed:
                    self._away = False
                    self._spool.done(message)
                    self._changed.notify_all()
                if failures:
                    log.warning("likelihood service %s: back after %d failed tries", self.url, failures)
                failures = 0
                continue
            if failures == 0:
                log.warning(
                    "likelihood service %s: %s; records wait in memory, then in %s",
                    self.url,
                    problem,
                    self._spool.folder,
                )
            pause = RETRY_SECONDS[min(failures, len(RETRY_SECONDS) - 1)]
            failures += 1
            until = time.monotonic() + pause
            with self._changed:
                self._away = True
                self._changed.notify_all()
                while not self._closing and time.monotonic() < until:
                    self._changed.wait(until - time.monotonic())
                if self._closing:
                    return

    def _send(self, message: Message) -> str | None:
        """None when the message is dealt with; else why it must be sent again."""
        kind = "application/json" if message.method == "POST" else "application/octet-stream"
        body = message.written()
        if body is None:
            self.refused += 1
            return None
        try:
            answer = self._http.request(
                message.method, message.path, content=body, headers={"Content-Type": kind}
            )
        except (httpx.ConnectError, httpx.ConnectTimeout) as e:
            return f"cannot be reached ({said_by(e)})"
        except httpx.HTTPError as e:
            problem = f"breaks off ({said_by(e)})"
            return None if self._is_poison(message, problem) else problem
        said = object_of(answer.content)
        if answer.is_success and said.get("run") == message.run:
            return None
        # Not in the service's own words, so an ingress or a page before it answers; a body that is too large
        # for that one stays so.
        strange = answer.status_code != 413 and (answer.is_success or "detail" not in said)
        if strange or answer.status_code in AGAIN:
            problem = _reason(answer)
            return None if answer.status_code in POISON and self._is_poison(message, problem) else problem
        self.refused += 1
        level = logging.INFO if answer.status_code == 409 else logging.ERROR
        log.log(
            level,
            "likelihood service %s refused %s of run %s, step %d: %s",
            self.url,
            message.kind,
            message.run,
            message.step,
            _reason(answer),
        )
        return None

    def _is_poison(self, message: Message, problem: str) -> bool:
        """Put a message aside that fails again and again although the service is well: those behind it must
        not wait for ever."""
        tries = self._suspect[1] + 1 if self._suspect[0] == message.seq else 1
        self._suspect = message.seq, tries
        if tries < POISON_TRIES or not self._is_well():
            return False
        try:
            with self._changed:
                bad = self._spool.put_aside(message)
        except (EnvironmentLacks, OSError) as e:  # a full disk must not end the thread that sends
            self._suspect = message.seq, 0
            log.error(
                "likelihood service %s: %s of run %s, step %d cannot be put aside (%s): it is tried again",
                *(self.url, message.kind, message.run, message.step, e),
            )
            return False
        self.refused += 1
        about = (self.url, message.kind, message.run, message.step, tries, problem, bad)
        log.error(
            "likelihood service %s: %s of run %s, step %d failed %d times (%s); put aside as %s", *about
        )
        return True

    def _is_well(self) -> bool:
        """Not `/healthz`: a service whose store hangs is up, and no message is to blame."""
        try:
            return self._http.get("/readyz").is_success
        except httpx.HTTPError:
            return False


def _actions(trajectory: Any) -> list:
    return trajectory["actions"] if isinstance(trajectory, dict) else trajectory.actions


def _samples(slide: Slide | ProbeSlide, lens: Lens, attempt: int) -> bytes:
    record = SamplesRecord.model_construct(attempt=attempt, trajectories=slide.records(lens))
    return _json(record)


def _json(record: Record) -> bytes:
    """JSON of a record whose parts may be plain dicts; a number that is not finite becomes null."""
    return orjson.dumps(vars(record), default=vars, option=orjson.OPT_SERIALIZE_NUMPY)


def _reason(answer: httpx.Response) -> str:
    detail = object_of(answer.content).get("detail")
    if detail is not None:
        return f"{answer.status_code} {' '.join(str(detail).split())[:500]}"
    what = "; its answer is not the service's" if answer.is_success else ""
    return f"{answer.status_code} {answer.reason_phrase}{what}"
