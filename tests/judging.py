"""Groups and judges for the tests of RULER. A run's worth stands in its answer, so that a judge can be right or wrong."""

import json
import re

from art_core.types import Call, Group, Trajectory
from art_ruler import Answer

SYSTEM = {"role": "system", "content": "Be exact."}
TASK = {"role": "user", "content": "Find the invoice."}
SEARCH = {"type": "function", "function": {"name": "search", "parameters": {}}}


def call(*messages: dict, answer: str, agent: str | None = None) -> Call:
    request = {"messages": list(messages), "tools": [SEARCH]}
    response = {"role": "assistant", "content": answer}
    return Call(prompt_ids=(1,), sampled_ids=(2,), logprobs=(-1.0,), agent=agent, request=request, response=response)


def group_of(*answers: str) -> Group:
    return Group("find", tuple(Trajectory("find", (call(SYSTEM, TASK, answer=answer),)) for answer in answers))


def fence_of(messages: list[dict]) -> str:
    return re.search(r"=====[0-9a-f]{16}=====", messages[0]["content"])[0]


def runs(messages: list[dict]) -> dict[str, str]:
    """Return what a question says about each label, read as the question says that it is to be read."""
    fence = fence_of(messages)
    form = rf'<trajectory id="(\w+)">\n{fence}\n(.*?)\n{fence}\n</trajectory>'
    return dict(re.findall(form, messages[1]["content"], re.DOTALL))


def grade(messages: list[dict]) -> list[dict]:
    """Grade every run by the number that its answer says."""
    asked = runs(messages).items()
    return [
        {"trajectory_id": label, "explanation": "because", "score": float(re.search(r"worth ([\d.]+)", text)[1])}
        for label, text in asked
    ]


def judge_saying(*ways):
    """A judge that answers its n-th question in the n-th way; ``asked`` holds the questions."""
    asked: list[list[dict]] = []

    async def judge(messages: list[dict]) -> str:
        asked.append(messages)
        return ways[min(len(asked), len(ways)) - 1](grade(messages))

    judge.asked = asked
    return judge


class KnownJudge:
    """A judge with an identity, so that what it says may be kept."""

    identity = "known"
    asked = 0

    async def __call__(self, messages: list[dict]) -> Answer:
        self.asked += 1
        return Answer(plain(grade(messages)), input_tokens=1000, output_tokens=100, cost=0.25)


def plain(scores: list[dict]) -> str:
    return json.dumps({"scores": scores})


GROUP = group_of("worth 0.2", "worth 0.9", "worth 0.5")
RIGHT = [0.2, 0.9, 0.5]


def each(scores: list[dict], **change: object) -> list[dict]:
    return [{**it, **{key: value(it) if callable(value) else value for key, value in change.items()}} for it in scores]
