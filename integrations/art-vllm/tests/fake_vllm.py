"""A program that takes vLLM's command line and answers its endpoints, one token per byte; what it is told it notes in a journal.

Run by a stand-in for Python (``conftest.py``). ``FAKE_VLLM`` in its environment makes it misbehave while it starts, the
last message of a request later.
"""

import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlparse

PLACE = Path(os.environ["FAKE_VLLM_DIR"])
OPTIONS = sys.argv[1:]
CONTEXT = 2048
MODELS = [OPTIONS[OPTIONS.index("--served-model-name") + 1]]
BROKEN = """(APIServer pid=7) INFO 11-21 11:27:52 [api_utils.py:286] non-default args: {'port': 1}
(EngineCore pid=8) ERROR 11-21 11:27:59 [core.py:1] Traceback (most recent call last):
(EngineCore pid=8) ERROR 11-21 11:27:59 [core.py:1]   File "core.py", line 1, in run
(EngineCore pid=8) ERROR 11-21 11:27:59 [core.py:1] ValueError: Free memory on device cuda:0 is less than desired
(APIServer pid=7) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"""

INVALID = """pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
  Value error, User-specified max_model_len (9000) is greater than the derived max_model_len
    For further information visit https://errors.pydantic.dev"""


def note(**entry) -> None:
    with (PLACE / "journal").open("a") as file:
        file.write(json.dumps(entry) + "\n")


def first_time(name: str) -> bool:
    there = (PLACE / name).exists()
    (PLACE / name).touch()
    return not there


ill = False


def die() -> None:
    print("(EngineCore pid=8) ERROR 11-21 11:27:59 [core.py:1] torch.OutOfMemoryError: CUDA out of memory", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


class Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_) -> None:
        pass

    def reply(self, content: object, status: int = 200) -> None:
        text = content if isinstance(content, str) else json.dumps(content)
        self.send_response(status)
        self.send_header("content-length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def refuse(self, message: str, status: int) -> None:
        self.reply({"error": {"message": message, "code": status}}, status)

    def do_GET(self) -> None:
        match self.path:
            case "/health":
                self.reply("", 503 if ill else 200)
            case "/v1/models":
                parents = [None, *[MODELS[0]] * (len(MODELS) - 1)]
                served = zip(MODELS, parents, strict=True)
                self.reply({"data": [{"id": id, "parent": parent, "max_model_len": CONTEXT} for id, parent in served]})
            case "/metrics":
                values = {"prompt_tokens": 30, "prefix_cache_hits": 20, "generation_tokens": 10}
                if "--no-enable-prefix-caching" in OPTIONS:
                    del values["prefix_cache_hits"]
                lines = [f'vllm:{name}_total{{engine="0"}} {value}.0' for name, value in values.items()]
                self.reply("\n".join(["# HELP", *lines, 'vllm:prompt_tokens_created{engine="0"} 1.7e9']))
            case _:
                self.reply({"detail": "Not Found"}, 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        path = urlparse(self.path).path
        if path not in ("/v1/chat/completions", "/v1/completions"):
            note(path=self.path, **body)
        if path.endswith("_lora_adapter") and os.environ.get("FAKE_VLLM") == "no adapters":
            return self.reply({"detail": "Not Found"}, 404)
        match path:
            case "/v1/load_lora_adapter":
                if not Path(body["lora_path"]).is_dir():
                    return self.refuse("Loading lora failed: No adapter found for <path>", 404)
                if body["lora_path"].endswith("/corrupt"):
                    return self.refuse("Call to add_lora method failed: header too large", 500)
                MODELS.append(body["lora_name"])
                self.reply("Success")
            case "/v1/unload_lora_adapter":
                if body["lora_name"] not in MODELS:
                    return self.refuse("The lora adapter cannot be found.", 404)
                MODELS.remove(body["lora_name"])
                self.reply("Success")
            case "/v1/completions":
                self.score(body)
            case "/v1/chat/completions":
                self.chat(body)
            case _:
                self.reply({"success": True})

    def score(self, body: dict) -> None:
        if body["model"] not in MODELS:
            return self.refuse(f"The model `{body['model']}` does not exist.", 404)
        after = [{str(token): {"logprob": -token / 8}} for token in body["prompt"][1:]]
        self.reply({"choices": [{"prompt_logprobs": [None, *after]}]})

    def chat(self, body: dict) -> None:
        text = body["messages"][-1]["content"]
        if body["model"] not in MODELS:
            return self.refuse(f"The model `{body['model']}` does not exist.", 404)
        wanted, tools = body.get("response_format") or {}, body.get("tools") or []
        if not isinstance(wanted, dict) or not isinstance(tools, list) or not all(isinstance(it, dict) for it in tools):
            return self.refuse("Input should be a valid dictionary or list", 400)
        if (text.startswith("die once") and first_time(text)) or text == "die":
            time.sleep(0.1)
            die()
        limit = body.get("max_completion_tokens") or body.get("max_tokens") or CONTEXT
        if limit > CONTEXT:
            return self.refuse(f"max_tokens={limit} cannot be greater than max_model_len={CONTEXT}", 400)
        if text == "limit":
            text = str(limit)
        if text == "ill once" and first_time(text):
            global ill
            ill = True
            return self.refuse("EngineCore encountered an issue", 500)
        if text == "wrong":
            return self.refuse("no such thing", 500)
        if text == "slow":
            note(waits=True)
            time.sleep(1.0)
        if body.get("stream"):
            return self.stream(body, text)
        message = {"role": "assistant", "content": f"{body['model']}: {text}"}
        choice = {"index": 0, "message": message, "finish_reason": "stop", **tokens(text)}
        self.reply({"id": "1", "model": body["model"], "prompt_token_ids": [1, 2, 3], "choices": [choice]})

    def stream(self, body: dict, text: str) -> None:
        self.send_response(200)
        self.send_header("connection", "close")
        self.end_headers()
        for place, letter in enumerate(text):
            last = place == len(text) - 1
            choice = {
                "index": 0,
                "delta": {"content": letter},
                "finish_reason": "stop" if last else None,
                **tokens(letter),
            }
            self.wfile.write(
                b"data: " + json.dumps({"prompt_token_ids": [1, 2, 3], "choices": [choice]}).encode() + b"\n\n"
            )
            self.wfile.flush()
            if text == "dies midway" and place == 3:
                die()
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True


def tokens(text: str) -> dict:
    content = [{"token": letter, "logprob": -1.0} for letter in text]
    return {"token_ids": list(text.encode()), "logprobs": {"content": content}}


def main() -> None:
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    note(options=OPTIONS, pids=[os.getpid(), worker.pid], cache=os.environ.get("VLLM_CPU_KVCACHE_SPACE"))
    match os.environ.get("FAKE_VLLM"):
        case "broken" | "invalid" as how:
            print(BROKEN if how == "broken" else INVALID, flush=True)
            sys.exit(1)
        case "breaks later" if not first_time("started"):
            print(BROKEN, flush=True)
            sys.exit(1)
        case "slow":
            print("(EngineCore pid=8) INFO 11-21 11:27:59 [core.py:1] Loading safetensors 1/2", flush=True)
            time.sleep(0.6)
        case "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
    port = int(OPTIONS[OPTIONS.index("--port") + 1])
    print("serving", flush=True)
    ThreadingHTTPServer(("127.0.0.1", port), Answers).serve_forever()


if __name__ == "__main__":
    main()
