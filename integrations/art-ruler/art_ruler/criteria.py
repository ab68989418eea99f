"""An episode -> one score in [0, 1], by weighted criteria that are computed, without a judge.

An episode is a dict that describes a rollout: ``actions`` (dicts with a ``type``), ``final_result``, ``expected_result``,
``original_query``, ``task_type``, ``required_actions``, ``optimal_steps``, ``done``, ``errors`` and ``response_time`` (seconds).
All keys are optional, and None means the same as a missing key. ``episode_of`` converts a trajectory.
"""

from __future__ import annotations

import ast
import copy
import json
import logging
import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from numbers import Real
from typing import Any

from art_core.errors import ConfigError, RewardError
from art_core.types import Call, JsonDict, Trajectory

log = logging.getLogger("art_ruler")

Episode = Mapping[str, Any]
Evaluate = Callable[[Episode], float]

CRITERIA: dict[str, dict[str, Any]] = {
    "accuracy": {"weight": 0.4, "description": "Task accuracy"},
    "efficiency": {"weight": 0.3, "description": "Execution efficiency (number of steps)"},
    "completeness": {"weight": 0.2, "description": "Task completeness"},
    "user_satisfaction": {"weight": 0.1, "description": "User satisfaction"},
}
NO_CRITERIA = {"episode", "email_search_accuracy", "code_accuracy", "qa_accuracy"}
"""Names whose ``evaluate_<name>`` method exists but is not a criterion."""
FENCED = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)


class RULERRewardSystem:
    """Scores episodes by weighted criteria. As ``reward=`` it scores trajectories, and adds each criterion to their metrics."""

    def __init__(
        self,
        task_config: Mapping[str, Any] | None = None,
        *,
        criteria: Mapping[str, float | Mapping[str, Any]] | None = None,
    ) -> None:
        """``task_config`` has default values for the keys of an episode.

        ``criteria`` replace those of ``load_criteria``. Each is a weight, or a dict with ``weight``, ``description`` and
        ``evaluate``, a function of the episode; without ``evaluate``, the method ``evaluate_<name>`` is used.
        Raises ConfigError if nothing evaluates a criterion, or its weight is not a number.
        """
        self.task_config = dict(task_config or {})
        criteria = self.load_criteria() if criteria is None else criteria
        self.evaluation_criteria: dict[str, Any] = {name: _criterion(name, value) for name, value in criteria.items()}
        """May be changed at any time; it is read again for every episode."""
        for name in self.evaluation_criteria:  # fail before anything runs
            self._evaluation(name)
            self._weight(name)

    def load_criteria(self) -> dict[str, dict[str, Any]]:
        """Return the default criteria, each with ``weight`` and ``description``."""
        return copy.deepcopy(CRITERIA)

    def __call__(self, trajectory: Trajectory) -> float:
        """Return the weighted score of ``trajectory``, and add each criterion's score to ``trajectory.metrics``."""
        scores = self.criterion_scores(self.episode_of(trajectory))
        trajectory.metrics.update(scores)
        return self._total(scores)

    def evaluate_episode(self, episode_data: Episode) -> float:
        """Return the weighted sum of all criteria, clipped to [0, 1]."""
        return self._total(self.criterion_scores(episode_data))

    def criterion_scores(self, episode_data: Episode) -> dict[str, float]:
        """Return the unweighted score of every criterion.

        Raises ConfigError if nothing evaluates a criterion, RewardError if its function does not return a finite number.
        """
        episode = self._with_defaults(episode_data)
        return {name: _finite(name, self._evaluation(name)(episode)) for name in self.evaluation_criteria}

    def evaluate_accuracy(self, episode_data: Episode) -> float:
        """Return how close ``final_result`` is to ``expected_result``; without the latter, a heuristic.

        Strings are compared by ``string_similarity``, dicts by ``dict_similarity``; anything else scores 1 if equal, else 0.
        A falsy result counts as missing and scores 0; a falsy expectation counts as missing too.
        """
        episode = self._with_defaults(episode_data)
        actual, expected = episode.get("final_result"), episode.get("expected_result")
        if not actual:
            return 0.0
        if not expected:
            return self.heuristic_accuracy_evaluation(actual, episode)
        if isinstance(expected, str) and isinstance(actual, str):
            return self.string_similarity(expected, actual)
        if isinstance(expected, dict) and isinstance(actual, dict):
            return self.dict_similarity(expected, actual)
        return 1.0 if expected == actual else 0.0

    def evaluate_efficiency(self, episode_data: Episode) -> float:
        """Return 1 for up to ``optimal_steps`` actions, and ``1 - 0.5 (actions - optimal) / optimal`` above, at least 0.

        Without ``optimal_steps``, any number of actions scores 1.
        """
        episode = self._with_defaults(episode_data)
        steps = len(_items(episode.get("actions")))
        optimal = max(0.0, _number(episode.get("optimal_steps"), steps))
        if steps <= optimal:
            return 1.0
        # With an optimum of 0, the excess is counted in steps.
        return max(0.0, 1.0 - 0.5 * (steps - optimal) / (optimal or 1.0))

    def evaluate_completeness(self, episode_data: Episode) -> float:
        """Return the share of ``required_actions`` that occur as an action's type; without any, 1 if ``done``, else 0.5."""
        episode = self._with_defaults(episode_data)
        required = _items(episode.get("required_actions"))
        if not required:
            return 1.0 if episode.get("done") else 0.5
        done = [action.get("type") for action in _items(episode.get("actions")) if isinstance(action, Mapping)]
        return sum(action in done for action in required) / len(required)

    def evaluate_user_satisfaction(self, episode_data: Episode) -> float:
        """Return 1 minus 0.1 per error and 0.2 per minute of ``response_time`` beyond 30 seconds, at least 0."""
        episode = self._with_defaults(episode_data)
        late = max(0.0, (_number(episode.get("response_time"), 0.0) - 30) / 60)
        return max(0.0, 1.0 - 0.1 * len(_items(episode.get("errors"))) - 0.2 * late)

    def string_similarity(self, expected: str, actual: str) -> float:
        """Return difflib's ratio, 2 matches / total length, ignoring case."""
        # autojunk would ignore almost every letter of a text of 200 characters or more.
        return SequenceMatcher(None, expected.lower(), actual.lower(), autojunk=False).ratio()

    def dict_similarity(self, expected: Mapping[Any, Any], actual: Mapping[Any, Any]) -> float:
        """Return the mean of two shares: common keys among all keys, and equal values among common keys."""
        common, union = expected.keys() & actual.keys(), expected.keys() | actual.keys()
        if not union:
            return 1.0
        equal = sum(expected[key] == actual[key] for key in common)
        return (len(common) / len(union) + (equal / len(common) if common else 0.0)) / 2

    def heuristic_accuracy_evaluation(self, result: Any, episode_data: Episode) -> float:
        """Score a result without ``expected_result`` by its ``task_type``; for unknown types, 0.7 if ``done``, else 0.3."""
        by_task_type = {
            "email_search": self.evaluate_email_search_accuracy,
            "code_generation": self.evaluate_code_accuracy,
            "question_answering": self.evaluate_qa_accuracy,
        }
        evaluate = by_task_type.get(str(self._with_defaults(episode_data).get("task_type")), self._by_done)
        return evaluate(result, episode_data)

    def evaluate_email_search_accuracy(self, result: Any, episode_data: Episode) -> float:
        """Return how well ``result["selected_email"]`` matches the words of ``original_query``, at most 1.

        0.1, plus 0.7 times the share of the words that occur in its subject or body, plus 0.2 if one occurs in its sender.
        0.2 if no email was selected, 0 if the result is not a dict.
        """
        if not result or not isinstance(result, dict):
            return 0.0
        email = result.get("selected_email")
        if not isinstance(email, Mapping):
            return 0.2
        words = _text(self._with_defaults(episode_data).get("original_query")).lower().split()
        content = f"{_text(email.get('subject'))} {_text(email.get('body'))}".lower()
        share = sum(word in content for word in words) / len(words) if words else 0.0
        from_sender = any(word in _text(email.get("sender")).lower() for word in words)
        return min(1.0, 0.7 * share + 0.2 * from_sender + 0.1)

    def evaluate_code_accuracy(self, result: Any, episode_data: Episode) -> float:
        """Return the share of tests that passed according to ``result``; without test results, 0.5 if the code parses, else 0.

        The share is ``result["tests_passed"] / result["tests_total"]``, or else ``result["passed"]`` (a bool or a share).
        The code is ``result`` or ``result["code"]``; if it has code fences, their contents. Nothing is executed: have the code
        around the agent run the tests, because numbers that the agent itself reports are believed as well.
        """
        report = result if isinstance(result, Mapping) else {}
        passed, total = (_number(report.get(key), math.nan) for key in ("tests_passed", "tests_total"))
        share = passed / total if total > 0 else _number(report.get("passed"), math.nan)
        if not math.isnan(share):
            return min(max(share, 0.0), 1.0)
        text = _text(report.get("code") if report else result)
        return 0.5 if _parses("\n".join(FENCED.findall(text)) or text) else 0.0

    def evaluate_qa_accuracy(self, result: Any, episode_data: Episode) -> float:
        """Return the best ``string_similarity`` to any of ``accepted_answers``; without those, the share of the answer's words
        that occur in ``context``; without that too, 0.7 if ``done``, else 0.3.

        The answer is ``result`` or ``result["answer"]``.
        """
        episode = self._with_defaults(episode_data)
        answer = _text(result.get("answer") if isinstance(result, Mapping) else result)
        accepted = [_text(candidate) for candidate in _items(episode.get("accepted_answers"))]
        if accepted:
            return max(self.string_similarity(candidate, answer) for candidate in accepted)
        context = set(_words(_text(episode.get("context"))))
        if not context:
            return self._by_done(result, episode)
        words = _words(answer)
        return sum(word in context for word in words) / len(words) if words else 0.0

    def episode_of(self, trajectory: Trajectory) -> dict[str, Any]:
        """Return ``trajectory`` as an episode.

        If the task is a dict, the episode has its keys; ``input`` becomes ``original_query`` and ``answer`` becomes
        ``expected_result``, unless the task has these. ``actions`` are the rollout's tool calls, ``{**arguments, "type": name}``,
        each once, although later prompts repeat them; calls in the first prompt before the user's last message are not its own.
        ``final_result`` is the output, or the text of the last answer if the output is None or a framework's object.
        A failed rollout has no result; it is not ``done``, and ``errors`` has its error.
        """
        task = trajectory.task if isinstance(trajectory.task, Mapping) else {"input": trajectory.task}
        names = {"input": "original_query", "answer": "expected_result"}
        return {
            **{names[key]: value for key, value in task.items() if key in names},
            **task,
            "actions": _actions(trajectory),
            "final_result": _result(trajectory),
            "done": trajectory.error is None,
            "errors": [] if trajectory.error is None else [trajectory.error],
            "response_time": trajectory.seconds,
        }

    def _by_done(self, result: Any, episode_data: Episode) -> float:
        return 0.7 if self._with_defaults(episode_data).get("done") else 0.3

    def _with_defaults(self, episode_data: Episode) -> dict[str, Any]:
        """Return the episode with missing keys from ``task_config``; idempotent."""
        defaults = {key: value for key, value in self.task_config.items() if episode_data.get(key) is None}
        return {**episode_data, **defaults}

    def _total(self, scores: Mapping[str, float]) -> float:
        total = 0.0
        for name, score in scores.items():
            weight = self._weight(name)
            log.debug("%s: %.3f (weight %g)", name, score, weight)
            total += score * weight
        return min(max(total, 0.0), 1.0)

    def _weight(self, name: str) -> float:
        weight = _criterion(name, self.evaluation_criteria[name]).get("weight")
        if isinstance(weight, bool) or not isinstance(weight, Real) or not math.isfinite(weight):
            raise ConfigError(f"the weight of the criterion {name!r} must be a finite number, got {weight!r}")
        return float(weight)

    def _evaluation(self, name: str) -> Evaluate:
        evaluate = _criterion(name, self.evaluation_criteria[name]).get("evaluate")
        if evaluate is None and name not in NO_CRITERIA:
            evaluate = getattr(self, f"evaluate_{name}", None)
        if not callable(evaluate):
            raise ConfigError(
                f"nothing evaluates the criterion {name!r}: pass {{'weight': ..., 'evaluate': function of the episode}}, or "
                f"define evaluate_{name}(self, episode_data) in a subclass; built in: {', '.join(CRITERIA)}"
            )
        return evaluate


def _criterion(name: str, value: Any) -> dict[str, Any]:
    """Return a criterion, passed as a weight or a dict, with the defaults of the built-in criterion of that name."""
    return CRITERIA.get(name, {}) | (dict(value) if isinstance(value, Mapping) else {"weight": value})


def _finite(name: str, value: Any) -> float:
    if isinstance(value, Real) and math.isfinite(value):
        return float(value)
    raise RewardError(f"the criterion {name!r} must return a finite number, best from 0 to 1, got {value!r:.80}")


def _number(value: Any, default: float) -> float:
    return value if isinstance(value, Real) and not math.isnan(value) else default


def _items(value: Any) -> list[Any]:
    """Return the items of a list; any other value, such as a string, is one item, or none if it is empty."""
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    return [value] if value else []


def _text(value: Any) -> str:
    """Return the text of a value; of a conversation, its last message; of a message or a part, its content."""
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, Mapping):
        if value.get("messages"):
            return _text(_items(value["messages"])[-1])
        return _text(value.get("content") or value.get("text") or list(value.values()))
    if isinstance(value, list):
        return " ".join(filter(None, map(_text, value)))
    return str(value)


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _parses(source: str) -> bool:
    try:
        with warnings.catch_warnings(action="ignore"):  # keep warnings about the agent's code out of the log
            return bool(ast.parse(source).body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two for deep nesting
        return False


def _actions(trajectory: Trajectory) -> list[JsonDict]:
    """Return the tool calls in the rollout's answers, in order, followed by those that appear only in its prompts.

    The latter were made by models that were not captured. Calls are compared by name and arguments, because frameworks
    rewrite ids and white space.
    """
    answers = [call.response for call in trajectory.calls if call.finish_reason != "aborted"]
    made = list(_tool_calls(answers))
    in_prompts: Counter[tuple[str, str]] = Counter()
    for call in trajectory.calls:
        in_prompts |= Counter(_tool_calls(call.messages()[:-1]))
    if trajectory.calls:
        in_prompts -= Counter(_tool_calls(_before_the_task(trajectory.calls[0])))
    only_in_prompts = (in_prompts - Counter(made)).elements()
    # The name comes last, so that an argument named "type" can't replace it.
    return [{**json.loads(arguments), "type": name} for name, arguments in (*made, *only_in_prompts)]


def _before_the_task(first: Call) -> Sequence[JsonDict]:
    prompt = first.messages()[:-1]
    user_messages = [i for i, message in enumerate(prompt) if message.get("role") == "user"]
    return prompt[: user_messages[-1]] if user_messages else []


def _tool_calls(messages: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield the name and the arguments (a JSON object; "{}" if they are not one) of every tool call."""
    for message in messages:
        for call in message.get("tool_calls") or ():
            function = call.get("function") or call.get("custom") or {}
            yield str(function.get("name")), json.dumps(_object(function.get("arguments")), sort_keys=True)


def _object(arguments: Any) -> JsonDict:
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _result(trajectory: Trajectory) -> Any:
    if trajectory.error is not None or (trajectory.output is not None and _is_json(trajectory.output)):
        return trajectory.output
    return next(filter(None, map(_answer_text, reversed(trajectory.calls))), None)


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _answer_text(call: Call) -> str:
    """Return the answer's text, or the arguments of its tool calls if it has none: some agents end with such a call."""
    values = [value for _, arguments in _tool_calls([call.response]) for value in json.loads(arguments).values()]
    return _text(call.response.get("content")) or " ".join(filter(None, map(_text, values)))
