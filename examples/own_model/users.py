"""What users ask the agent in a week: 300 questions, many of them more than once, and every week of new projects, too.

python examples/own_model/users.py [--week 2] [--feedback http://127.0.0.1:8400]

With ``--feedback`` each question is a conversation of its own at that gateway, and its user says whether the answer was right.
"""

import argparse
import random
import uuid

from app import agent, client

PROJECTS = "Falcon Orion Apollo Titan Nova Atlas Comet Phoenix Zephyr Delta Pine Quail Robin Sable Tulip"
NEW_PROJECTS = (
    "Cobalt Ember Nimbus Onyx Raven Willow Birch Cedar Dune Garnet Hazel Iris Juniper Kestrel Lotus Mango Maple Nectar"
)
EACH_WEEK = 6
KINDS = "budget launch audit review contract invoice survey inspection"


def question(random_: random.Random, week: int) -> str:
    projects = PROJECTS.split() + NEW_PROJECTS.split()[: EACH_WEEK * (week - 1)]
    asked = f"What is the cost for the {random_.choice(projects)} {random_.choice(KINDS.split())}?"
    return random_.choice([asked, asked, f"  {asked}"])


def with_feedback(asked: str, gateway: str) -> None:
    conversation = f"user-{uuid.uuid4().hex}"
    # Many retries: a gateway that restarts is back after some seconds.
    client.base_url, client.max_retries = f"{gateway}/rollouts/{conversation}/v1", 20
    try:
        right = set(agent(asked)) == set(asked.rstrip("?").split()[-2:])
    except (ValueError, LookupError, TypeError):  # nobody is helped by an answer that the agent can't read
        right = False
    score = {"conversation": conversation, "score": float(right)}
    client.with_options(base_url=gateway).post("/feedback", cast_to=object, body=score)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--week", type=int, default=1)
    parser.add_argument("--questions", type=int, default=300)
    parser.add_argument("--feedback", metavar="GATEWAY")
    options = parser.parse_args()
    random_ = random.Random(options.week - 1)
    for _ in range(options.questions):
        asked = question(random_, options.week)
        if options.feedback:
            with_feedback(asked, options.feedback)
        else:
            agent(asked)
    print(f"{options.questions} questions answered")
