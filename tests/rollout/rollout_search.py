"""A retriever for the rollout tests that can be slow or down on demand. Same wire format, real HTTP."""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse


class Search:
    """`queries` seen so far. While `hold` is set no query is answered, while `hold_first` is set the first
    one is not; `down` answers 503, `joint_down` does so to requests of several queries. With `echo` the title
    of a document is its query. `requests`: how many queries each request had."""

    def __init__(self, url: str):
        self.url = url
        self.reset()

    def reset(self) -> None:
        self.queries, self.hold, self.hold_first, self.down = [], False, False, False
        self.requests, self.joint_down, self.echo = [], False, False


@contextmanager
def search_server():
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    sock.listen(256)
    state, app = Search(f"http://127.0.0.1:{sock.getsockname()[1]}"), FastAPI()

    @app.post("/retrieve")
    async def retrieve(request: Request):
        body = await request.json()
        state.queries += body["queries"]
        state.requests.append(len(body["queries"]))
        if state.down or (state.joint_down and len(body["queries"]) > 1):
            return JSONResponse({"detail": "down"}, 503)
        first = len(state.queries) == len(body["queries"])
        while state.hold or (first and state.hold_first):
            await asyncio.sleep(0.02)
        hits = [
            [
                {
                    "document": {
                        "id": f"d{len(q)}",
                        "contents": f'"{q if state.echo else f"n{len(q) % 40}"}"\nborn n3 river n4',
                    },
                    "score": 1.0,
                }
            ]
            for q in body["queries"]
        ]
        return {"result": hits}

    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.should_exit = True
        thread.join(60)
        sock.close()
