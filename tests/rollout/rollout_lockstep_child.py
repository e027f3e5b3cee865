"""A fresh lockstep engine in a fresh process: writes a batch of rollouts to a file. Arguments: model folder,
output file."""

import asyncio
import json
import sys

from rollout_fakes import Hit, request

from services.rollout.worker.worker import RolloutWorker
from services.settings import RolloutSettings

SETTINGS = RolloutSettings(
    template="lab",
    deterministic=True,
    max_turns=3,
    max_model_tokens=256,
    max_obs_tokens=32,
    max_response_tokens=40,
    kv_cache_gib=0.1,
)


def batch(order=lambda x: x):
    return order(
        [request(f"u{i:02d}", text=f"what is n{i % 7} ?", seed=i, group=f"g{i // 4}") for i in range(24)]
    )


async def rollouts(worker: RolloutWorker, requests) -> dict:
    async def search(query):
        return [Hit(f"d{len(query)}", '"n1"\nborn n2 river n3')]

    worker._search = lambda url: search
    done = await worker.rollout_batch(requests)
    return {t.uid: [t.arrays()[0].tolist(), [a.logprobs for a in t.actions], t.finish] for t in done}


async def new_worker(model: str) -> RolloutWorker:
    worker = RolloutWorker(
        "w", SETTINGS, model_path=model, retriever_url="http://127.0.0.1:9", retriever_timeout_seconds=5
    )
    await worker.start()
    return worker


async def main(model: str, out: str) -> None:
    worker = await new_worker(model)
    with open(out, "w") as f:
        json.dump(await rollouts(worker, batch()), f)
    await worker.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
