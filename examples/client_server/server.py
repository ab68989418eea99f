"""A hand-written training server: distributes episodes to the clients that connect, and prints the results.

    python examples/client_server/server.py            # in one terminal
    python examples/client_server/client.py client_1   # in others, as many as you like

Expect a line per client, then the mean reward of the episodes. Each episode ends exactly once, even if a client is killed. For a
training run with every token recorded, use `art serve` and `art worker` instead.
"""

import argparse
import asyncio
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI, WebSocket
from fastapi.responses import HTMLResponse

from art_server import TrainingServer
from art_server.messages import Shutdown

PAGE = """<!doctype html>
<html lang="en"><title>Training server</title>
<h1>Training server</h1>
<p>Active clients: <span id="client-count">0</span></p>
<p>Episodes in the queue: <span id="episode-count">0</span></p>
<ul id="clients"></ul>
<script>
async function refresh() {
  const status = await (await fetch("/status")).json();
  document.getElementById("client-count").textContent = status.active_clients;
  document.getElementById("episode-count").textContent = status.episodes_queued;
  const names = status.clients.map((name) => Object.assign(document.createElement("li"), { textContent: name }));
  document.getElementById("clients").replaceChildren(...names);
}
refresh();
setInterval(refresh, 2000);
</script></html>"""


def make_app(server: TrainingServer, episodes: list[dict], finished: asyncio.Event) -> FastAPI:
    """Return the application: the clients' socket, the status, the page."""

    @asynccontextmanager
    async def lifespan(_):
        training = asyncio.create_task(train(server, episodes, finished))
        yield
        training.cancel()

    app = FastAPI(title="Training server", lifespan=lifespan)

    @app.websocket("/ws/{client_id}")
    async def clients(websocket: WebSocket, client_id: str):
        await server.serve_client(client_id, websocket)

    @app.get("/status")
    async def status():
        return {
            "active_clients": len(server.active_clients),
            "episodes_queued": server.queued,
            "results_available": len(server.results_queue),
            "clients": list(server.active_clients),
        }

    @app.get("/")
    async def page():
        return HTMLResponse(PAGE)

    return app


async def train(server: TrainingServer, episodes: list[dict], finished: asyncio.Event) -> None:
    """Distribute the episodes, wait for all results, and shut the clients down."""
    await server.distribute_episodes(episodes)
    while len(server.results_queue) < len(episodes):
        await asyncio.sleep(0.1)
    results = [result for message in server.results_queue for result in message["results"]]
    failed = [result for result in results if result.get("error")]
    rewards = [result["total_reward"] for result in results if not result.get("error")]
    mean = sum(rewards) / max(1, len(rewards))
    print(f"{len(results)} episodes ended, {len(failed)} failed, mean reward {mean:.3f}", flush=True)
    for result in failed[:1]:
        print(f"first failure: {result['error']}", flush=True)
    for client_id in list(server.active_clients):
        await server.send_to_client(client_id, Shutdown())
    finished.set()


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, default=16)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument(
        "--lease", type=float, default=10, help="seconds of silence after which a client loses its episodes"
    )
    options = parser.parse_args()
    episodes = [
        {
            "episode_id": f"episode-{n}",
            "model_name": "tiny",
            "env_config": {"environment": "guess", "arguments": {"number": n}},
        }
        for n in range(options.episodes)
    ]
    finished = asyncio.Event()
    app = make_app(TrainingServer(lease=options.lease), episodes, finished)
    server = uvicorn.Server(uvicorn.Config(app, port=options.port, log_level="warning"))
    serving = asyncio.create_task(server.serve())
    waiting = asyncio.create_task(finished.wait())
    await asyncio.wait([serving, waiting], return_when=asyncio.FIRST_COMPLETED)
    await asyncio.sleep(0.5)  # let the shutdown message reach the clients
    server.should_exit = True
    await serving


if __name__ == "__main__":
    asyncio.run(main())
