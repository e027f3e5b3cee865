"""`reward.concurrency`: many calls of a reward at a time, whose results they are, and what ends them."""

import asyncio
import math
import re
import signal
import subprocess
import sys
import threading
from contextlib import closing

import numpy as np
import pytest
from places import ROOT
from scripted_pool import member, pool_of, requests, trajectory
from test_trainer_sampling import QUESTIONS, RAW, Pool, finished

from services.common.errors import UserError
from services.contracts import Action, Question, Trajectory
from services.rollout.errors import WorkerLostError
from trainer.config.schema import parse_config
from trainer.data import PromptCursor
from trainer.loop.rollouts.held_out import evaluate
from trainer.loop.rollouts.sampling import BatchSampler
from trainer.loop.rollouts.scoring import sampled_and_scored
from trainer.rewards import make_reward
from trainer.rewards.calls import RewardCalls

WAIT = 60


def trajectories(count):
    question = Question("q", "where?", ("Rome",), "nq")
    return [
        Trajectory(f"u{i}", "g", question, [1], [Action([1], [-0.5], 0, "answer", "x")], "answer")
        for i in range(count)
    ]


def number(trajectory):
    return int(trajectory.uid[1:])


def scored(reward, count, concurrency, timeout_seconds=600.0):
    with closing(RewardCalls(reward, "m:judge", timeout_seconds, concurrency=concurrency)) as calls:
        return asyncio.run(calls.of(trajectories(count)))


def test_results_stand_in_the_order_of_the_trajectories_whichever_call_ends_first():
    ended = [threading.Event() for _ in range(5)]

    def last_first(trajectory):
        mine = number(trajectory)
        assert mine == 4 or ended[mine + 1].wait(WAIT)
        ended[mine].set()
        return mine / 7

    assert scored(last_first, 5, concurrency=5) == [i / 7 for i in range(5)]


def test_as_many_calls_at_a_time_as_are_set_and_the_same_bits_as_one():
    running, most = [], []
    full = threading.Barrier(3)

    def reward(trajectory):
        running.append(1)
        most.append(len(running))
        full.wait(WAIT)
        running.pop()
        return math.sin(number(trajectory)) / 3

    together = scored(reward, 9, concurrency=3)
    assert max(most) == 3
    assert together == scored(lambda t: math.sin(number(t)) / 3, 9, concurrency=1)


def test_rows_without_a_number_are_left_out_alone():
    said = (None, math.nan, math.inf, 0.5, None, 1.0)
    earned = scored(lambda t: said[number(t)], 6, concurrency=4)
    assert [i for i, value in enumerate(earned) if math.isfinite(value)] == [3, 5]


def test_a_call_that_raises_ends_the_batch_though_others_hang_and_no_further_one_is_made():
    both, over, begun = threading.Barrier(2), threading.Event(), []

    def reward(trajectory):
        begun.append(trajectory.uid)
        both.wait(WAIT)
        if number(trajectory) == 1:
            raise UserError("reward.kind 'm:judge': on trajectory u1: KeyError: 'score'")
        over.wait(WAIT)

    with pytest.raises(UserError, match="u1: KeyError"):
        scored(reward, 9, concurrency=2)
    over.set()
    # The thread that raised may have taken one more before the others were cancelled.
    assert sorted(begun)[:2] == ["u0", "u1"] and len(begun) <= 3


def test_a_late_call_is_named_though_others_return():
    over = threading.Event()

    def reward(trajectory):
        return over.wait(WAIT) if number(trajectory) == 2 else 1.0

    with pytest.raises(
        UserError, match=r"'m:judge': on trajectory u2: no result within reward.timeout_seconds=0.5"
    ):
        scored(reward, 6, concurrency=3, timeout_seconds=0.5)
    over.set()


def test_the_calls_in_hand_are_told_with_how_many_are_done():
    begun, over = threading.Barrier(3), threading.Event()

    def reward(trajectory):
        if number(trajectory) in (1, 2):
            begun.wait(WAIT)
            over.wait(WAIT)
        return 1.0

    calls = RewardCalls(reward, "m:judge", 600.0, concurrency=2)

    async def run():
        task = asyncio.create_task(calls.of(trajectories(4)))
        await asyncio.to_thread(begun.wait, WAIT)
        said = calls.waits_for()
        over.set()
        await task
        return said

    said = asyncio.run(run())
    assert re.fullmatch(
        r"reward.kind 'm:judge' on trajectory u[12] for \d+ s and 1 other \(1 of 4 done\)", said
    )
    assert calls.waits_for() == "" and calls.returned == 4
    calls.close()


def test_the_threads_end_when_they_are_closed():
    threads, full = set(), threading.Barrier(4)

    def reward(trajectory):
        threads.add(threading.current_thread())
        full.wait(WAIT)

    scored(reward, 8, concurrency=4)
    for thread in threads:
        thread.join(WAIT)
    assert len(threads) == 4 and not any(thread.is_alive() for thread in threads)


# -- a sampler's batches


def sampler(pool, reward, concurrency, **reward_settings):
    config = parse_config(
        RAW
        | {
            "rollout": {"prompts_per_step": 2, "group_size": 3},
            "data": {"train": "t", "shuffle": False},
            "reward": {"concurrency": concurrency} | reward_settings,
        }
    )
    return BatchSampler(config, pool, PromptCursor(QUESTIONS, 0, False), reward)


class Slow(Pool):
    """Tells of each trajectory as it is sampled, the last first; the first is sampled once `go` is set."""

    def __init__(self):
        super().__init__()
        self.go = threading.Event()
        self.cancelled = False

    async def rollout(self, requests, on_done=None):
        done = [finished(request) for request in requests]
        for one in reversed(done[1:]):
            if on_done:
                on_done(one)
        try:
            while not self.go.is_set():
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        if on_done:
            on_done(done[0])
        return done


def rating(trajectory):
    return float(trajectory.uid[-2:]) + float(trajectory.question.id) / 8


def test_a_reward_is_asked_while_others_are_sampled_still_and_each_is_asked_once():
    pool, asked, told = Slow(), [], []

    def reward(trajectory):
        asked.append(trajectory.uid)
        if len(asked) == 5:
            pool.go.set()  # sampling ends after five rewards: with one call after it there would be none
        return rating(trajectory)

    made = sampler(pool, reward, concurrency=2)
    with closing(made.calls):
        batch = asyncio.run(made.sample(3, told.append))
    assert len(asked) == len(set(asked)) == 6 and len(told) == 6
    alone = asyncio.run(sampler(Pool(), rating, concurrency=1).sample(3))
    assert [t.uid for t in batch.trajectories] == [t.uid for t in alone.trajectories]
    assert batch.rewards.tobytes() == alone.rewards.tobytes() and np.isfinite(batch.rewards).all()
    assert made.highest == 2.125


def test_one_at_a_time_is_asked_in_order_once_all_are_sampled():
    pool, asked = Slow(), []
    made = sampler(pool, lambda t: asked.append((t.uid, pool.go.is_set())), concurrency=1)

    async def run():
        sampling = asyncio.create_task(made.sample(3))
        await asyncio.sleep(0)
        pool.go.set()
        return await sampling

    batch = asyncio.run(run())
    assert asked == [(t.uid, True) for t in batch.trajectories]


@pytest.mark.parametrize("fault", ["raises", "hangs"])
def test_a_reward_that_fails_ends_the_sampling_that_goes_on(fault):
    pool, over = Slow(), threading.Event()

    def reward(trajectory):
        if fault == "raises":
            raise UserError("reward.kind 'm:judge': no result, for it fails")
        over.wait(WAIT)

    made = sampler(pool, reward, concurrency=2, timeout_seconds=0.5)
    with pytest.raises(UserError, match="no result"):
        asyncio.run(made.sample(3))
    over.set()
    assert pool.cancelled and not pool.go.is_set()


def test_held_out_questions_ask_it_as_well():
    pool = Slow()

    def reward(trajectory):
        pool.go.set()
        return float(trajectory.question.id == "1")

    with closing(RewardCalls(reward, "m:judge", 600.0, concurrency=4)) as calls:
        scoring = evaluate(pool, QUESTIONS[:4], tag="t", temperature=0.0, seed=0, calls=calls, right_at=1.0)
        scores, _ = asyncio.run(scoring)
    assert scores["overall"]["right"] == 0.25


@pytest.mark.parametrize("concurrency", [1, 3])
async def test_of_a_real_pool_each_trajectory_is_scored_once_though_a_worker_is_lost(concurrency):
    asked, cut = [], asyncio.Event()
    loop = asyncio.get_running_loop()

    async def dies(method, *args):
        await cut.wait()
        raise WorkerLostError("the node is gone")

    async def samples(method, *args):
        return trajectory(args[0])

    def reward(one):
        asked.append(one.uid)
        loop.call_soon_threadsafe(cut.set)
        return number(one) / 3

    if concurrency == 1:
        cut.set()  # no reward is asked for before all are sampled
    with closing(RewardCalls(reward, "m:judge", 600.0, concurrency=concurrency)) as calls:
        scoring = sampled_and_scored(pool_of(member(0, dies), member(1, samples)), requests(8), calls)
        done, earned = await asyncio.wait_for(scoring, WAIT)
    assert [t.uid for t in done] == [f"u{i}" for i in range(8)]
    assert earned == [i / 3 for i in range(8)] and sorted(asked) == [t.uid for t in done]


JUDGED = """
import asyncio, os, signal, threading
from services.contracts import Question, TrajectoryRequest, Trajectory
from trainer.loop.rollouts.scoring import sampled_and_scored
from trainer.rewards.calls import RewardCalls
from trainer.session.stopping import StopSignals

begun = threading.Barrier(4, action=lambda: os.kill(os.getpid(), signal.SIGTERM))

def hangs(trajectory):
    begun.wait(60)
    threading.Event().wait()

class Pool:
    async def rollout(self, requests, on_done):
        for request in requests:
            on_done(Trajectory(request.uid, "g", request.question, [1], [], "answer"))
        await asyncio.sleep(SAMPLING)
        return [Trajectory(r.uid, "g", r.question, [1], [], "answer") for r in requests]

async def run():
    question = Question("q", "where?", ("Rome",), "nq")
    requests = [TrajectoryRequest(f"u{i}", "g", question, 0, 1.0) for i in range(8)]
    with StopSignals(print, grace_seconds=0.2) as stop, stop.step_in_hand():
        await sampled_and_scored(Pool(), requests, RewardCalls(hangs, "m:judge", 600.0, concurrency=4))

try:
    asyncio.run(run())
except asyncio.CancelledError:
    print("cut short")
"""


@pytest.mark.parametrize("sampling", ["0", "600"])
def test_a_signal_while_judges_are_asked_ends_the_process_though_they_hang(sampling):
    done = subprocess.run(
        [sys.executable, "-c", JUDGED.replace("SAMPLING", sampling)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    said = done.stdout.splitlines()
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert said[0].startswith(f"{signal.SIGTERM.name}: finishing this step") and said[-1] == "cut short"


# -- `async` rewards

CLIENTS = []


async def later(trajectory):
    """As one with a client of its own: all calls are of one loop, and meet there."""
    CLIENTS.append(asyncio.get_running_loop())
    arrived = len(CLIENTS)
    while arrived <= 3 and len(CLIENTS) < 3:
        await asyncio.sleep(0.001)
    return number(trajectory) / 3


class Ready:
    async def __call__(self, trajectory):
        return None


async def leaves(trajectory):
    sys.exit(3)


async def gives_up(trajectory):
    raise asyncio.CancelledError


async def says(trajectory):
    return "good"


def wrapped(trajectory):
    return later(trajectory)


ready = Ready()


@pytest.mark.parametrize("name", ["later", "wrapped"])
def test_an_async_reward_is_awaited_so_many_at_a_time_on_one_loop(name):
    CLIENTS.clear()
    reward = make_reward(f"test_reward_concurrency:{name}")
    assert scored(reward, 7, concurrency=3) == [i / 3 for i in range(7)]
    assert len(set(CLIENTS)) == 1
    assert scored(reward, 2, concurrency=1) == [0.0, 1 / 3] and len(set(CLIENTS)) == 1


def test_an_async_object_may_leave_a_trajectory_out():
    assert math.isnan(scored(make_reward("test_reward_concurrency:ready"), 1, concurrency=2)[0])


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("leaves", r"it ends the program, by SystemExit\(3\) \(.*line \d+\)"),
        ("gives_up", r"RuntimeError: cancelled \(.*line \d+\)"),
        ("says", r"TypeError: returned the text 'good'; expected a number or None"),
    ],
)
def test_an_async_reward_that_fails_is_told_with_its_place_and_the_next_one_is_heard(name, line):
    for _ in range(2):
        with pytest.raises(UserError, match=rf"{name}': on trajectory u0: {line}"):
            scored(make_reward(f"test_reward_concurrency:{name}"), 1, concurrency=2)


def test_an_async_reward_that_takes_no_trajectory_is_refused():
    with pytest.raises(UserError, match="expected a function of one trajectory, found takes_none"):
        make_reward("test_reward_concurrency:takes_none")


async def takes_none():
    return 1.0
