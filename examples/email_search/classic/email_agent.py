"""An environment and an agent that search emails, in the classic form.

``email_database.json`` is the ``email_database`` of ``EmailSearchEnvironment``: a list of ``{id, subject, sender, date, body}``.
"""

from __future__ import annotations

import random
import re
from collections.abc import Collection
from typing import Any

from art_classic.agent import Agent
from art_classic.environment import Environment

FACT = re.compile(r"The (\w+) is ")
QUESTIONS = (
    "What is the {fact} for the {subject}?",
    "Find the {fact} of the {subject}.",
    "I need the {fact} of the {subject}.",
)
COMMON = {"a", "an", "and", "find", "for", "i", "is", "me", "need", "of", "tell", "the", "what"}
"""Words of a query that say nothing about the email."""
INSTRUCTIONS = "You are an email search specialist. Search, filter, sort, then select an email by its id."
SELECTS = ("select", "read", "open")
"""Words with which models select an email."""
HINT_WEIGHT = 0.1
"""Weight of the reward of a search or filter, relative to that of the selection."""
SHOWN = 5
"""Results that the agent sees."""


class EmailSearchEnvironment(Environment):
    """One query per episode: search, filter and sort until an email is selected. ``seed`` is that of the queries, none of which
    is about an email in ``held_out`` (ids)."""

    def __init__(
        self, email_database: list[dict[str, Any]], *, seed: int | None = None, held_out: Collection[str] = ()
    ) -> None:
        super().__init__()
        self.email_db = email_database
        self.asked_about = [it for it in email_database if FACT.search(it["body"]) and it["id"] not in held_out]
        self.rng = random.Random(seed)
        self.current_query: str | None = None
        self.search_history: list[dict[str, Any]] = []
        self.best: dict[str, float] = {}

    async def reset(self) -> dict[str, Any]:
        self.current_query = self.sample_query()
        self.search_history, self.best = [], {}
        return {
            "query": self.current_query,
            "available_actions": ["search", "filter", "sort", "select"],
            "search_results": [],
            "step": 0,
        }

    async def step(self, action: dict[str, Any]) -> tuple[dict[str, Any], float, bool, dict[str, Any]]:
        state = await self.get_state()
        found, done = state["search_results"], False
        match action["type"]:
            case "search":
                found = self.search_emails(action["query"])
                reward = self.hint("search", self.calculate_search_reward(found)) if found else -0.1
            case "filter":
                before, found = len(found), self.filter_emails(found, action["filters"])
                reward = self.calculate_filter_reward(found)
                if found:
                    reward = self.hint("filter", reward) if len(found) < before else 0.0
            case "sort":
                found, reward = self.sort_emails(found, action["by"]), 0.0
            case "select":
                reward = self.calculate_selection_reward(self.select_email(action["email_id"]), state["query"])
                done = True
            case _:
                reward = -0.1
        self.search_history.append(action)
        return {**state, "search_results": found, "step": state["step"] + 1}, reward, done, {}

    def hint(self, kind: str, worth: float) -> float:
        """Return the reward of an action that doesn't end the episode: its gain over the best of its kind in this episode.

        So it doesn't pay to search and filter forever.
        """
        best = self.best.get(kind, 0.0)
        self.best[kind] = max(worth, best)
        return HINT_WEIGHT * (self.best[kind] - best)

    def sample_query(self) -> str:
        """Return a question that an email answers."""
        email = self.rng.choice(self.asked_about)
        fact = self.rng.choice(FACT.findall(email["body"]))
        return self.rng.choice(QUESTIONS).format(fact=fact, subject=email["subject"])

    def search_emails(self, query: str) -> list[dict[str, Any]]:
        """Return the emails that contain a word of the query, most matches first."""
        results = []
        for email in self.email_db:
            content = f"{email['subject']} {email['body']} {email['sender']}".lower()
            score = sum(content.count(term) for term in query.lower().split())
            if score > 0:
                results.append({**email, "relevance_score": score})
        return sorted(results, key=lambda email: email["relevance_score"], reverse=True)

    def filter_emails(self, results: list[dict[str, Any]], filters: dict[str, str]) -> list[dict[str, Any]]:
        """Return the results that pass all filters: ``sender`` and ``subject`` are substrings, dates are bounds."""
        return [
            email
            for email in results
            if filters.get("sender", "").lower() in email["sender"].lower()
            and filters.get("subject", "").lower() in email["subject"].lower()
            and filters.get("after", "") <= email["date"]
            and email["date"] <= filters.get("before", "9999")
        ]

    def sort_emails(self, results: list[dict[str, Any]], by: str) -> list[dict[str, Any]]:
        """Return the results newest first (``"date"``), or most relevant first."""
        key = "date" if by == "date" else "relevance_score"
        return sorted(results, key=lambda email: email[key], reverse=True)

    def select_email(self, email_id: str | None) -> dict[str, Any] | None:
        return next((email for email in self.email_db if email["id"] == email_id), None)

    def calculate_search_reward(self, results: list[dict[str, Any]]) -> float:
        if not results:
            return -0.1
        scores = [result["relevance_score"] for result in results[:5]]
        senders = {result["sender"] for result in results[:10]}
        return min(sum(scores) / len(scores) * 0.1 + len(senders) * 0.01, 1.0)

    def calculate_filter_reward(self, results: list[dict[str, Any]]) -> float:
        """Fewer results are better; none is as bad as an empty search."""
        return 0.2 / len(results) if results else -0.1

    def calculate_selection_reward(self, email: dict[str, Any] | None, query: str) -> float:
        """1 for an email that contains every meaningful word of the query, at most 0.3 otherwise."""
        if email is None:
            return -0.1
        content = set(re.findall(r"\w+", f"{email['subject']} {email['body']}".lower()))
        asked = set(re.findall(r"\w+", query.lower())) - COMMON
        share = len(asked & content) / len(asked) if asked else 0.0
        return 1.0 if share == 1.0 else 0.3 * share


class EmailSearchAgent(Agent):
    """Asks the model for the next action and parses it from the words of the answer. ``action_history`` covers one episode: a
    new list replaces it at the episode's first state."""

    def __init__(self, model_name: str = "Qwen/Qwen2.5-7B-Instruct") -> None:
        super().__init__(model_name)
        self.action_history: list[dict[str, Any]] = []

    async def select_action(self, state: dict[str, Any]) -> dict[str, Any]:
        response = await self.generate_response(self.describe(state), max_tokens=150, temperature=0.7)
        action = self.parse_action(response, state)
        if not state["step"]:
            self.action_history = []  # not cleared: shallow copies of the agent run concurrently
        self.action_history.append(action)
        return action

    def describe(self, state: dict[str, Any]) -> list[dict[str, str]]:
        """Return the prompt: the instructions, the query, and the results so far."""
        results = state.get("search_results", [])
        found = [f"{it['subject']} from {it['sender']} id {it['id']}" for it in results[:SHOWN]]
        found = [f"{len(results)} results", *found] if state["step"] else []
        return [
            {"role": "system", "content": INSTRUCTIONS},
            {"role": "user", "content": "\n".join([state["query"], *found])},
        ]

    def parse_action(self, response: str, state: dict[str, Any]) -> dict[str, Any]:
        text, results = response.lower(), state.get("search_results", [])
        if "filter" in text and results:
            return {"type": "filter", "filters": self.extract_filters(response), "reasoning": response}
        if "sort" in text and results:
            return {"type": "sort", "by": "date" if "date" in text else "relevance", "reasoning": response}
        if any(word in text for word in SELECTS) and results:
            return {"type": "select", "email_id": self.extract_email_id(response, results), "reasoning": response}
        if "search" in text:
            return {"type": "search", "query": self.extract_keywords(response, state["query"]), "reasoning": response}
        return {"type": "search", "query": state["query"], "reasoning": "Default search action"}

    def extract_keywords(self, response: str, query: str) -> str:
        """Return the words of the query that the model repeats, else those in quotes, else the query."""
        repeated = [word for word in re.findall(r"\w+", query) if word.lower() not in COMMON and word in response]
        return " ".join(repeated or re.findall(r'"([^"]+)"', response)) or query

    def extract_filters(self, response: str) -> dict[str, str]:
        """Return the values that follow ``sender``, ``subject``, ``after`` and ``before``."""
        found = re.findall(r'(sender|subject|after|before)\W+"?([\w-]+)', response, re.IGNORECASE)
        return {name.lower(): value for name, value in found}

    def extract_email_id(self, response: str, results: list[dict[str, Any]]) -> str | None:
        """Return the id that the model names, else that of the first result."""
        named = [result["id"] for result in results if re.search(rf"\b{re.escape(result['id'])}\b", response)]
        return next(iter(named or [result["id"] for result in results]), None)
