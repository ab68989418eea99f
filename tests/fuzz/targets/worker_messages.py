"""What workers and clients of a server say -> episodes that end once each, or a refusal that changes nothing (``art_server``)."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Annotated, Any

from fastapi import APIRouter, Body, FastAPI

from art_core.errors import ConfigError
from art_core.types import Call, Group, Trajectory
from art_server.bodies import StrictJson, explain_refusals
from art_server.messages import BadMessage, ModelState, read, write
from art_server.requests import JobRequest
from art_server.roster import MAX_BAD_MESSAGES, TrainingServer
from art_server.wire import group_from_wire, group_to_wire
from fuzz.choices import Choices, changed, spelled, written
from fuzz.serving import run

logging.getLogger("art_server").setLevel(logging.CRITICAL + 1)
STATUS = {
    "type": "status_update",
    "v": 1,
    "status": "idle",
    "session": "b",
    "capacity": 2,
    "pool": "default",
    "running": ["L0", "L1"],
}
RESULT = {
    "type": "episode_result",
    "v": 1,
    "client_id": "bad",
    "results": [{"episode_id": "e0", "lease": "L0", "output": {"a": 1}}],
}
CLASSIC = {
    "type": "episode_result",
    "results": [{"episode_id": "e1", "total_reward": 1.0, "steps": 3, "data": {"done": True}}],
}
SAID: tuple[dict[str, Any], ...] = (
    STATUS, RESULT, CLASSIC, {"type": "status_update", "status": "left", "v": 1}, {"type": "status_update",
    "status": "connected"},
    {"type": "train_episodes", "v": 1, "client_id": "a", "episodes": [{"episode_id": "e", "input": 1,
    "rollout": {}}]},
    {"type": "episode_result", "v": 1, "results": [{"episode_id": "e0", "lease": "L2"}, {"episode_id": "e1"}]},
    {"type": "status_update", "v": 1, "status": "idle", "session": "b", "running": ["L2", "L3"]},
    {"type": "cancel_episodes", "v": 1, "leases": ["a"]}, {"type": "update_model", "v": 1,
    "model_state": {"version": 1, "url": "u"}},
    {"type": "ack", "v": 1, "leases": ["a"], "stale": []}, {"type": "error", "v": 1, "code": "refused",
    "message": "m"},
)  # fmt: skip
BODIES: tuple[dict[str, Any], ...] = (
    {"kind": "collect", "tasks": ["a"], "group_size": 2, "split": "train", "step": 1, "pool": "default",
    "allow_no_calls": False,
     "sampling": {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}, "inputs": None},
    {"kind": "score", "groups": [["r"]], "reward": "ruler"},
    {"kind": "scores", "groups": [[{"rollout_id": "r", "reward": 1.0, "metrics": {"a": 1}, "notes": {"a": "b"},
                                    "call_rewards": {"0": 0.5}}]], "by": "me"},
    {"kind": "learn", "groups": [{"trajectories": [{"rollout_id": "r", "reward": None}], "advantages": [0.5],
    "call_advantages": [[1]]}]},
)  # fmt: skip
GROUP = Group(
    "t",
    (
        Trajectory(
            "t",
            (Call(prompt_ids=(1,), sampled_ids=(2,), logprobs=(-0.5,), forced=(0,), reward=1.0),),
            output="o",
            reward=1.0,
        ),
    ),
    (0.5,),
    ((0.5,),),
)
PIECES = ('{"type":', '"status_update"', '"episode_result"', '"status":"idle"', '"v":1', ",", "}", "[" * 1100,
"9" * 5000, "NaN", "\ud83d", "é",
          '"results":[{"episode_id":"e0","lease":"L0"}]', '"running":["L0"]', '"\\ud800"')  # fmt: skip
EPISODES = 5

SEEDS = [
    *(bytes([0, 1, kind, 0]) for kind in range(len(SAID))),
    bytes([0, 3, 0, 0, 1, 0, 2, 0]),
    bytes([0, 2, 255, 5, 128, 129, 133, 132, 134, 0, 0]),
    *(bytes([1, kind, 0]) for kind in range(len(BODIES))),
    b"\x01\xff" + bytes([135]),
    b"\x02\x00",
]


def one_input(data: bytes) -> None:
    choices = Choices(data)
    match choices.byte() % 3:
        case 0:
            run(_check_roster([_said(choices) for _ in range(choices.byte() % 8)]))
        case 1:
            raw = (kind := choices.byte()) > 200
            body = spelled(choices.rest(), PIECES).encode(errors="surrogatepass") if raw else _body(kind, choices)
            run(_check_body(body))
        case _:
            _check_wire(choices)


def _said(choices: Choices) -> str | bytes:
    kind = choices.byte()
    if kind > 200:
        text = spelled(choices.some(), PIECES)
        return text if kind % 2 else text.encode(errors="surrogatepass")
    return written(changed(SAID[kind % len(SAID)], choices)).decode()


def _body(kind: int, choices: Choices) -> bytes:
    return written(changed(BODIES[kind % len(BODIES)], choices))


class _Socket:
    """Hears what the server says to one worker."""

    def __init__(self) -> None:
        self.heard: list[dict[str, Any]] = []
        self.closed: int | None = None

    async def send_text(self, data: str) -> None:
        data.encode()  # as a WebSocket sends it
        self.heard.append(json.loads(data))
        read(data, "server")

    async def close(self, code: int = 1000, reason: str | None = None) -> None:
        self.closed = code

    def leases(self) -> dict[str, str]:
        """Return episode -> lease of all that it was given."""
        given = [it for message in self.heard if message["type"] == "train_episodes" for it in message["episodes"]]
        return {it["episode_id"]: it["lease"] for it in given}


async def _turns() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


async def _check_roster(said: list[str | bytes]) -> None:
    server, good, bad = TrainingServer(lease=1000.0), _Socket(), _Socket()
    server.publish(ModelState(version=3))
    await server.register_client("good", good, "g")
    await server.register_client("bad", bad, "b")
    hello = {"type": "status_update", "v": 1, "status": "connected", "capacity": 2}
    await server.handle("good", json.dumps({**hello, "session": "g"}))
    await server.handle("bad", json.dumps({**hello, "session": "b"}))
    await server.distribute_episodes({"episode_id": f"e{number}"} for number in range(EPISODES))
    await _turns()
    theirs, own = set(good.leases().values()), [*bad.leases().values()]
    for text in said:
        if server.active_clients.get("bad") is not bad:
            break
        for number, lease in enumerate((*own, *sorted(theirs))):  # it may have heard of the others' too
            text = (
                text.replace(f"L{number}", lease)
                if isinstance(text, str)
                else text.replace(b"L%d" % number, lease.encode())
            )
        before = _state(server)
        message = _read(text)
        await server.handle("bad", text)
        if message is None or message.client_id not in (None, "bad"):
            assert _state(server) == before, "what is refused changes nothing"
        await _turns()
        assert theirs <= {lease for lease, name in _state(server)[0] if name == "good"}, "nobody else loses an episode"
        assert all(worker["running"] <= max(worker["capacity"], 4) for worker in server.workers())
    refused = sum(message["type"] == "error" for message in bad.heard)
    assert refused < MAX_BAD_MESSAGES
    await server.unregister_client("bad", bad)
    for client in [it for it in server.workers() if it["id"] == "bad"]:
        assert client["state"] in ("gone", "left")
    await _finish(server, good)
    await server.close()


async def _finish(server: TrainingServer, good: _Socket) -> None:
    """Let the bad worker's episodes be lost and the other do what is left: each has then ended once."""
    another = _Socket()
    await server.register_client("bad", another, "new")
    await server.handle(
        "bad", json.dumps({"type": "status_update", "v": 1, "status": "connected", "session": "new", "capacity": 0})
    )
    done: set[str] = set()
    for _ in range(2 * EPISODES):
        await _turns()
        for episode, lease in good.leases().items():
            if lease not in done:
                done.add(lease)
                result = {"type": "episode_result", "v": 1, "results": [{"episode_id": episode, "lease": lease}]}
                await server.handle("good", json.dumps(result))
    ended = [result["episode_id"] for it in server.results_queue for result in it["results"]]
    assert len(server.results_queue) == EPISODES and not server.training_queue, (ended, "every episode ends, and once")
    json.dumps(server.results_queue)


def _state(server: TrainingServer) -> Any:
    held = sorted((lease, client.client_id) for client in server._clients.values() for lease in client.held)
    kept = [{key: value for key, value in worker.items() if key != "last_seen"} for worker in server.workers()]
    return held, kept, len(server.results_queue), [it.episode_id for it in server.training_queue]


def _read(text: str | bytes) -> Any:
    """Return the message, held to the same on its way back; None where it is none."""
    for sender in ("server", "worker"):
        try:
            message = read(text, sender)  # type: ignore[arg-type]
        except BadMessage as error:
            assert len(str(error)) < 2000
            message = None
            continue
        assert write(read(write(message), sender)) == write(message)  # type: ignore[arg-type]
    return message


router = APIRouter(route_class=StrictJson)
REACHED: list[Any] = []


@router.put("/job")
async def _job(body: Annotated[JobRequest, Body()]) -> dict[str, str]:
    REACHED.append(body)
    return {"kind": body.kind}


APP = FastAPI()
explain_refusals(APP)
APP.include_router(router)


async def _check_body(body: bytes) -> None:
    REACHED.clear()
    told: list[Any] = []
    messages = iter([{"type": "http.request", "body": body}])

    async def receive() -> Any:
        return next(messages)

    async def send(message: Any) -> None:
        told.append(message)

    scope = {
        "type": "http",
        "method": "PUT",
        "path": "/job",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    await APP(scope, receive, send)
    status, content = told[0]["status"], b"".join(it.get("body", b"") for it in told[1:])
    assert status in (200, 422), (status, content)
    assert (status == 200) == bool(REACHED) and len(content) < 20_000 and json.loads(content)
    for job in REACHED:
        assert job.kind in ("collect", "score", "scores", "learn") and json.dumps(
            job.model_dump(), allow_nan=job.kind == "collect"
        )
        if job.kind in ("scores", "learn"):
            given = [it for group in job.groups for it in (group if job.kind == "scores" else group.trajectories)]
            assert all(index >= 0 for it in given for index in it.of_calls())


def _check_wire(choices: Choices) -> None:
    told = json.loads(json.dumps(group_to_wire(GROUP)))
    assert group_from_wire(told) == GROUP
    try:
        broken = json.loads(written(changed(told, choices)))
    except (ValueError, RecursionError):
        return
    try:
        found = group_from_wire(broken)
    except ConfigError as error:
        assert len(str(error)) < 500
        return
    assert isinstance(found, Group)
