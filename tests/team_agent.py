"""An agent of two nodes with a tool, a policy that plays along, and a judge, for the tests of traces."""

TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}


async def agent(question, address):
    """Asks, has one tool run where the model wants it, and asks again; as two nodes of a team."""
    import httpx

    messages, headers = [{"role": "user", "content": question}], {"authorization": f"Bearer {address.api_key}"}
    async with httpx.AsyncClient(base_url=address.base_url, headers=headers, timeout=60) as client:
        for node in ("team/planner", "team/writer"):
            body = {"model": "gpt-4.1", "messages": messages, "tools": [TOOL], "max_tokens": 32}
            answer = await client.post("/chat/completions", json=body, headers={"x-art-agent": node})
            message = answer.json()["choices"][0]["message"]
            messages.append(message)
            messages += [
                {"role": "tool", "tool_call_id": call["id"], "content": "found it"}
                for call in message.get("tool_calls") or ()
            ]
    return messages[-1]["content"]


def answers(request):
    """Calls the tool first, then answers."""
    if any(message["role"] == "tool" for message in request["messages"]):
        return "The answer."
    function = {"name": "look_up", "arguments": "{}"}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
    }


class Judge:
    """Gives the runs of a group different rewards, and says why."""

    async def score(self, group):
        for number, run in enumerate(group.trajectories):
            run.notes["ruler"] = f"because of {number}"
            run.metrics["success"] = float(number > 0)
        return [float(number) for number in range(len(group.trajectories))]
