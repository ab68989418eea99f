"""The plugin for Google's Agent Development Kit: its agents are agents, and model calls have their names."""

from __future__ import annotations

import json
from typing import Any

from art_core import hookimpl, when_imported
from art_core.types import RolloutAddress, RunAgent
from art_http.frameworks import is_a, name_while


@hookimpl
def adapt_agent(agent: object, shared: bool) -> RunAgent | None:
    """Run an agent, a workflow or an app with a task as the user's message; the output is that of the last final response."""
    kinds = {"node": ("google.adk.agents.BaseAgent", "google.adk.workflow.Workflow"), "app": ("google.adk.apps.App",)}
    kind = next((kind for kind, names in kinds.items() if is_a(agent, *names)), None)
    if kind is None:
        return None
    from google.adk.runners import InMemoryRunner
    from google.genai.types import Content, Part

    async def run(task_input: Any, address: RolloutAddress) -> Any:
        runner, output = InMemoryRunner(**{kind: agent}), ""
        session = await runner.session_service.create_session(app_name=runner.app_name, user_id="user")
        text = task_input if isinstance(task_input, str) else json.dumps(task_input, ensure_ascii=False)
        message = Content(role="user", parts=[Part(text=text)])
        try:
            async for event in runner.run_async(user_id="user", session_id=session.id, new_message=message):
                if event.is_final_response() and (said := _output(event)) is not None:
                    output = said
        finally:
            # It would also close the agent's toolsets, which other rollouts use.
            if not shared:
                await runner.close()
        return output

    return run


def _output(event: Any) -> Any:
    """Return the event's text, or else what a workflow's function returned."""
    parts = (event.content and event.content.parts) or ()
    return "".join(part.text or "" for part in parts if not part.thought) or event.output


@hookimpl
def redirect_clients() -> None:
    """Name the agent that is calling."""
    when_imported("google.adk.agents.base_agent", _name_agents)


def _name_agents(module: Any) -> None:
    name_while(module.BaseAgent, "run_async", lambda agent: agent.name)
