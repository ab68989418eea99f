"""What users ask the agent in a week: 300 questions, many of them more than once."""

import random

from app import agent

PROJECTS = "Falcon Orion Apollo Titan Nova Atlas Comet Phoenix Zephyr Delta Pine Quail Robin Sable Tulip"
KINDS = "budget launch audit review contract invoice survey inspection"

if __name__ == "__main__":
    random_ = random.Random(0)
    for _ in range(300):
        question = f"What is the cost for the {random_.choice(PROJECTS.split())} {random_.choice(KINDS.split())}?"
        agent(random_.choice([question, question, f"  {question}"]))
    print("300 questions answered")
