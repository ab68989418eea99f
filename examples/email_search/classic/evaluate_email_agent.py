"""Evaluate the trained agent in the classic form: ART_MODEL=tiny python evaluate_email_agent.py"""

import argparse
import asyncio
import json

from email_agent import EmailSearchAgent, EmailSearchEnvironment


async def evaluate_agent(untrained=False):
    with open("test_queries.json") as f:
        test_queries = json.load(f)
    with open("email_database.json") as f:
        email_db = json.load(f)

    env = EmailSearchEnvironment(email_db)
    agent = EmailSearchAgent("Qwen/Qwen2.5-7B-Instruct")
    if not untrained:
        agent.load_checkpoint("best_checkpoint.pt")

    total_success, total_queries = 0, len(test_queries)
    for i, query_data in enumerate(test_queries):
        print(f"Testing query {i + 1}/{total_queries}: {query_data['query']}")
        state = await env.reset()
        state["query"] = query_data["query"]
        done, step_count, max_steps = False, 0, 10
        while not done and step_count < max_steps:
            action = await agent.select_action(state)
            state, reward, done, _ = await env.step(action)
            step_count += 1
            print(f"  Step {step_count}: {action['type']} - Reward: {reward:.3f}")
        if done and reward > 0.5:
            total_success += 1
            print("  Success!")
        else:
            print("  Failed")

    print(f"\nOverall Success Rate: {total_success / total_queries:.2%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--untrained", action="store_true", help="evaluate the model as it was before training")
    asyncio.run(evaluate_agent(**vars(parser.parse_args())))
