"""A small server that speaks vLLM's dialect: what it is asked it answers with token ids, one per byte."""

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route


class VllmLike:
    """Answers the last message back, one token per byte, the way vLLM does with ``return_token_ids``."""

    def __init__(self) -> None:
        self.requests: list[dict] = []
        self.keys: list[str | None] = []
        self.streaming = 0
        self.app = Starlette(
            routes=[
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/v1/completions", self.raw, methods=["POST"]),
                Route("/v1/models", self.models),
            ]
        )

    async def models(self, request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "served", "object": "model"}]})

    async def raw(self, request) -> Response:
        """Continues a prompt with itself, as vLLM's older API answers; the prompt's ids stand in the choice."""
        body = orjson.loads(await request.body())
        self.requests.append(body)
        ids = body["prompt"] if isinstance(body["prompt"], list) else list(body["prompt"].encode())
        logprobs = (
            {"token_logprobs": [-1 / 2] * len(ids), "tokens": [str(it) for it in ids]} if body["logprobs"] else None
        )
        head = {"index": 0, "logprobs": logprobs, "token_ids": ids, "prompt_token_ids": ids}
        if not body.get("stream"):
            return JSONResponse({"id": "1", "choices": [{**head, "text": "more", "finish_reason": "stop"}]})
        chunks = [{"choices": [{**head, "text": "mo"}]}]
        chunks.append({"choices": [{"index": 0, "text": "re", "token_ids": [], "finish_reason": "stop"}]})
        lines = [b"data: " + orjson.dumps(chunk) + b"\n\n" for chunk in chunks]
        return Response(b"".join(lines) + b"data: [DONE]\n\n", media_type="text/event-stream")

    async def chat(self, request) -> Response:
        body = orjson.loads(await request.body())
        self.requests.append(body)
        self.keys.append(request.headers.get("authorization"))
        text = body["messages"][-1]["content"]
        match text:
            case "too long":
                said = (
                    "This model's maximum context length is 400 tokens. However, your prompt contains 12050 characters"
                )
                error = {"message": said, "type": "BadRequestError", "param": "input_text", "code": 400}
                return JSONResponse({"error": error}, 400)
            case "full":
                said = "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)"
                error = {"message": said, "type": "BadRequestError", "param": "max_tokens", "code": 400}
                return JSONResponse({"error": error}, 400)
            case "old shape":
                return JSONResponse({"object": "error", "message": "no such model", "code": 404}, 404)
            case "page":
                return Response("<html>gateway</html>", 503)
            case "not json":
                return Response("hello")
            case "slow":
                await asyncio.sleep(30)
        if body.get("stream"):
            return StreamingResponse(self.chunks(body, text), media_type="text/event-stream")
        thought = {"reasoning": "hm"} if text == "think" else {"reasoning": None}
        choice = {"index": 0, "message": {"role": "assistant", "content": text, **thought}, "finish_reason": "stop"}
        return JSONResponse({"id": "1", "prompt_token_ids": [1, 2, 3], "choices": [choice | self.tokens(text, body)]})

    @staticmethod
    def tokens(text: str, body: dict) -> dict:
        content = [{"token": letter, "logprob": -ord(letter) / 64, "top_logprobs": []} for letter in text]
        ids = {"token_ids": list(text.encode())} if body.get("return_token_ids") and text != "no ids" else {}
        return ids | ({"logprobs": {"content": content}} if body.get("logprobs") else {})

    async def chunks(self, body: dict, text: str):
        self.streaming += 1

        def event(delta: dict, finish: str | None, tokens: dict, **head) -> bytes:
            choice = {"index": 0, "delta": delta, "finish_reason": finish, **tokens}
            return b"data: " + orjson.dumps({"id": "1", **head, "choices": [choice]}) + b"\n\n"

        prompt = {} if text == "no ids" else {"prompt_token_ids": [1, 2, 3]}
        try:
            thought = {"reasoning": "hm"} if text == "think" else {}
            no_ids = {"token_ids": [] if thought else None}
            yield event({"role": "assistant", "content": "", **thought}, None, no_ids, **prompt)
            for place, letter in enumerate(text):
                finish = "stop" if place == len(text) - 1 else None
                if letter == "!":
                    yield b'data: {"error": {"message": "engine died", "code": 500}}\n\n'
                    return
                yield event({"content": letter}, finish, self.tokens(letter, body))
                await asyncio.sleep(0.01)
            yield b"data: [DONE]\n\n"
        finally:
            self.streaming -= 1


@contextmanager
def vllm_like() -> Iterator[VllmLike]:
    """Serve one from a thread of its own; ``url`` is its address."""
    fake = VllmLike()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(fake.app, log_level="critical", log_config=None, timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        while not server.started:
            time.sleep(0.01)
        fake.url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        yield fake
        server.should_exit = True
        thread.join()
