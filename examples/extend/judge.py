"""A reward: a service judges the answer. A judge that cannot be asked leaves the trajectory out."""

import httpx

from services.contracts import Trajectory
from trainer.rewards import final_answer

CLIENT = httpx.Client(base_url="http://127.0.0.1:8300", timeout=10.0)


def judged(trajectory: Trajectory) -> float | None:
    if (answer := final_answer(trajectory)) is None:
        return 0.0
    asked = {"question": trajectory.question.text, "answer": answer}
    try:
        return float(CLIENT.post("/judge", json=asked).raise_for_status().json()["score"])
    except httpx.HTTPError:
        return None
