"""A reward: a service judges the answer. One that is away leaves it out; a wrong key or path ends the run."""

import httpx

from services.contracts import Trajectory
from trainer.rewards import final_answer

CLIENT = httpx.Client(base_url="http://127.0.0.1:8300", timeout=10.0)
AWAY = (httpx.TimeoutException, httpx.NetworkError, httpx.RemoteProtocolError)


def judged(trajectory: Trajectory) -> float | None:
    if (answer := final_answer(trajectory)) is None:
        return 0.0
    try:
        said = CLIENT.post("/judge", json={"question": trajectory.question.text, "answer": answer})
    except AWAY:
        return None
    later = said.status_code in (408, 425, 429) or said.status_code >= 500  # not 401 or 404
    return None if later else float(said.raise_for_status().json()["score"])
