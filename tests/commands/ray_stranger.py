"""What whoever knows address and ports gets from Ray: without a token, or with that of RAY_AUTH_TOKEN.

ray_stranger.py ask HOST PORT...     each port's answers to Ray's calls and to HTTP, as JSON
ray_stranger.py task HOST:PORT       runs a task on the cluster, and prints what it returned
"""

from __future__ import annotations

import json
import os
import socket
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

SECONDS = 3.0
CALLS = (
    "InternalKVGcsService/InternalKVKeys",
    "NodeManagerService/GetSystemConfig",
    "CoreWorkerService/GetCoreWorkerStats",
)
"""One for each kind of server. They only read, and an empty request is a whole one."""


def ask(host: str, port: int) -> dict[str, str]:
    """Answers to each call and to GET /metrics; none where nobody answers at all."""
    try:
        socket.create_connection((host, port), SECONDS).close()
    except OSError:
        return {}
    answers = {call: grpc_answer(f"{host}:{port}", call) for call in CALLS}
    try:
        with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=SECONDS) as answer:
            answers["GET /metrics"] = str(answer.status)
    except urllib.error.HTTPError as e:
        answers["GET /metrics"] = str(e.code)
    except Exception as e:  # it speaks no HTTP
        answers["GET /metrics"] = type(e).__name__
    return answers


def grpc_answer(address: str, call: str) -> str:
    import grpc

    token = os.environ.get("RAY_AUTH_TOKEN")
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    with grpc.insecure_channel(address, options=(("grpc.enable_http_proxy", 0),)) as channel:
        try:
            channel.unary_unary(f"/ray.rpc.{call}")(b"", timeout=SECONDS, metadata=metadata)
        except grpc.RpcError as e:
            return e.code().name
    return "OK"


def run_task(address: str) -> str:
    import ray
    from ray._private import services

    services.resolve_ip_for_localhost = lambda host: (
        host
    )  # Ray would ask this machine's outer address instead
    ray.init(_node_ip_address="127.0.0.1", address=address, log_to_driver=False, configure_logging=False)
    return ray.get(ray.remote(num_cpus=0)(lambda: "ran").remote(), timeout=30)


if __name__ == "__main__":
    what, target, *ports = sys.argv[1:]
    if what == "task":
        print(run_task(target))
    else:
        with ThreadPoolExecutor(8) as pool:
            print(json.dumps(dict(zip(ports, pool.map(lambda p: ask(target, int(p)), ports), strict=True))))
