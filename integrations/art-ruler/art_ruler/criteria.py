"""An episode -> one score in [0, 1], by weighted criteria that are computed. Knows nothing about judges, and asks none.

An episode is a dict that says what a run did: ``actions`` (dicts with a ``type``), ``final_result``, ``expected_result``,
``original_query``, ``task_type``, ``required_actions``, ``optimal_steps``, ``done``, ``errors`` and ``response_time`` (seconds).
None of them has to be there, and None says as little as a key that is missing. ``episode_of`` makes one of a trajectory.
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
"""``evaluate_<name>`` exists, and is of another kind."""
FENCED = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)


class RULERRewardSystem:
    """Scores episodes by weighted criteria; as ``reward=`` it scores trajectories, and shows the parts in their metrics."""

    def __init__(
        self,
        task_config: Mapping[str, Any] | None = None,
        *,
        criteria: Mapping[str, float | Mapping[str, Any]] | None = None,
    ) -> None:
        """``task_config`` holds keys of an episode, for episodes that do not say them themselves.

        ``criteria`` stand in place of those of ``load_criteria``. Each is a weight, or a dict with ``weight``,
        ``description`` and ``evaluate``, a function of the episode; without that the method ``evaluate_<name>`` counts.
        Raises ConfigError for a criterion that nothing evaluates or whose weight is not a number.
        """
        self.task_config = dict(task_config or {})
        given = self.load_criteria() if criteria is None else criteria
        self.evaluation_criteria: dict[str, Any] = {name: _criterion(name, it) for name, it in given.items()}
        """May be changed at any time, and is read at every episode."""
        for name in self.evaluation_criteria:  # so that a mistake is refused before anything runs
            self._evaluation(name)
            self._weight(name)

    def load_criteria(self) -> dict[str, dict[str, Any]]:
        """Return the criteria that count where none are given, each with ``weight`` and ``description``."""
        return copy.deepcopy(CRITERIA)

    def __call__(self, trajectory: Trajectory) -> float:
        """Return the weighted score of ``trajectory``; each criterion's own goes to ``trajectory.metrics`` under its name."""
        scores = self.criterion_scores(self.episode_of(trajectory))
        trajectory.metrics.update(scores)
        return self._total(scores)

    def evaluate_episode(self, episode_data: Episode) -> float:
        """Return the sum of weight times score over all criteria, cut to [0, 1]."""
        return self._total(self.criterion_scores(episode_data))

    def criterion_scores(self, episode_data: Episode) -> dict[str, float]:
        """Return the score of every criterion, without its weight.

        Raises ConfigError for a criterion that nothing evaluates, RewardError for one that is not given a finite number.
        """
        episode = self._whole(episode_data)
        return {name: _finite(name, self._evaluation(name)(episode)) for name in self.evaluation_criteria}

    def evaluate_accuracy(self, episode_data: Episode) -> float:
        """Return how near ``final_result`` is to ``expected_result``; a heuristic where nothing is expected.

        Two texts by ``string_similarity``, two dicts by ``dict_similarity``, all else 1 if equal and 0 if not. A result
        that is empty, zero or false is none and scores 0; an expectation like that is none either.
        """
        episode = self._whole(episode_data)
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
        """Return 1 up to ``optimal_steps`` actions, and above ``1 - 0.5 (actions - optimal) / optimal``, at least 0.

        Without ``optimal_steps`` every number of actions is the best one.
        """
        episode = self._whole(episode_data)
        steps = len(_items(episode.get("actions")))
        optimal = max(0.0, _number(episode.get("optimal_steps"), steps))
        if steps <= optimal:
            return 1.0
        # Nothing can be a share of no steps: with an optimum of 0 the excess is counted in steps.
        return max(0.0, 1.0 - 0.5 * (steps - optimal) / (optimal or 1.0))

    def evaluate_completeness(self, episode_data: Episode) -> float:
        """Return the share of ``required_actions`` that are the type of an action; with none, 1 if ``done``, else 0.5."""
        episode = self._whole(episode_data)
        required = _items(episode.get("required_actions"))
        if not required:
            return 1.0 if episode.get("done") else 0.5
        done = [action.get("type") for action in _items(episode.get("actions")) if isinstance(action, Mapping)]
        return sum(action in done for action in required) / len(required)

    def evaluate_user_satisfaction(self, episode_data: Episode) -> float:
        """Return 1, less 0.1 for each of ``errors`` and 0.2 for each minute of ``response_time`` after the first 30 seconds."""
        episode = self._whole(episode_data)
        late = max(0.0, (_number(episode.get("response_time"), 0.0) - 30) / 60)
        return max(0.0, 1.0 - 0.1 * len(_items(episode.get("errors"))) - 0.2 * late)

    def string_similarity(self, expected: str, actual: str) -> float:
        """Return difflib's ratio, 2 matches / total length, without regard to case."""
        return SequenceMatcher(None, expected.lower(), actual.lower()).ratio()

    def dict_similarity(self, expected: Mapping[Any, Any], actual: Mapping[Any, Any]) -> float:
        """Return the mean of two shares: keys that both have, of all keys; and equal values, of the keys that both have."""
        common, every = expected.keys() & actual.keys(), expected.keys() | actual.keys()
        if not every:
            return 1.0
        equal = sum(expected[key] == actual[key] for key in common)
        return (len(common) / len(every) + (equal / len(common) if common else 0.0)) / 2

    def heuristic_accuracy_evaluation(self, result: Any, episode_data: Episode) -> float:
        """Return what ``task_type`` says of a result that nothing is expected of; for other types 0.7 if ``done``, else 0.3."""
        by_task_type = {
            "email_search": self.evaluate_email_search_accuracy,
            "code_generation": self.evaluate_code_accuracy,
            "question_answering": self.evaluate_qa_accuracy,
        }
        evaluate = by_task_type.get(str(self._whole(episode_data).get("task_type")), self._by_end)
        return evaluate(result, episode_data)

    def evaluate_email_search_accuracy(self, result: Any, episode_data: Episode) -> float:
        """Return how well ``result["selected_email"]`` fits the words of ``original_query``, at most 1.

        0.1, plus 0.7 times the share of the words that are in its subject or body, plus 0.2 where one is in its sender.
        0.2 where no email was selected, 0 where the result is not a dict.
        """
        if not result or not isinstance(result, dict):
            return 0.0
        email = result.get("selected_email")
        if not isinstance(email, Mapping):
            return 0.2
        words = _text(self._whole(episode_data).get("original_query")).lower().split()
        content = f"{_text(email.get('subject'))} {_text(email.get('body'))}".lower()
        share = sum(word in content for word in words) / len(words) if words else 0.0
        from_sender = any(word in _text(email.get("sender")).lower() for word in words)
        return min(1.0, 0.7 * share + 0.2 * from_sender + 0.1)

    def evaluate_code_accuracy(self, result: Any, episode_data: Episode) -> float:
        """Return the share of tests that ``result`` says it passed; where it says none, 0.5 for Python that parses, else 0.

        The share is ``result["tests_passed"] / result["tests_total"]``, or else ``result["passed"]`` (a bool or a share).
        The source is ``result`` or ``result["code"]``, of a text with code fences what stands in them. Nothing is run: let
        what returns the result run the tests, because an agent's own word for them would be believed too.
        """
        said = result if isinstance(result, Mapping) else {}
        passed, total = (_number(said.get(key), math.nan) for key in ("tests_passed", "tests_total"))
        share = passed / total if total > 0 else _number(said.get("passed"), math.nan)
        if not math.isnan(share):
            return min(max(share, 0.0), 1.0)
        text = _text(said.get("code") if said else result)
        return 0.5 if _parses("\n".join(FENCED.findall(text)) or text) else 0.0

    def evaluate_qa_accuracy(self, result: Any, episode_data: Episode) -> float:
        """Return the best ``string_similarity`` to one of ``accepted_answers``; without any, the share of the answer's words
        that are in ``context``; without that either, 0.7 if ``done``, else 0.3.

        The answer is ``result`` or ``result["answer"]``.
        """
        episode = self._whole(episode_data)
        answer = _text(result.get("answer") if isinstance(result, Mapping) else result)
        accepted = [_text(it) for it in _items(episode.get("accepted_answers"))]
        if accepted:
            return max(self.string_similarity(it, answer) for it in accepted)
        context = set(_words(_text(episode.get("context"))))
        if not context:
            return self._by_end(result, episode)
        words = _words(answer)
        return sum(word in context for word in words) / len(words) if words else 0.0

    def episode_of(self, trajectory: Trajectory) -> dict[str, Any]:
        """Return ``trajectory`` as an episode.

        A task that is a dict gives its keys; its ``input`` is the ``original_query``, and its ``answer`` the
        ``expected_result``, unless it has these. ``actions`` are the run's tool calls, ``{**arguments, "type": name}``, each
        once, although later prompts repeat them; those that its first prompt shows before the user's last message are
        none of its own. ``final_result`` is the output; where that is an object of a framework or there is none, what the
        last answer says. A failed run has no result; it is not ``done``, and its error is one of ``errors``.
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

    def _by_end(self, result: Any, episode_data: Episode) -> float:
        return 0.7 if self._whole(episode_data).get("done") else 0.3

    def _whole(self, episode_data: Episode) -> dict[str, Any]:
        """Return the episode with what only ``task_config`` says; once more changes nothing."""
        return {**episode_data, **{key: it for key, it in self.task_config.items() if episode_data.get(key) is None}}

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
            raise ConfigError(f"the criterion {name!r} has the weight {weight!r}; give it a finite number")
        return float(weight)

    def _evaluation(self, name: str) -> Evaluate:
        evaluate = _criterion(name, self.evaluation_criteria[name]).get("evaluate")
        if evaluate is None and name not in NO_CRITERIA:
            evaluate = getattr(self, f"evaluate_{name}", None)
        if not callable(evaluate):
            raise ConfigError(
                f"nothing evaluates the criterion {name!r}: give it {{'weight': ..., 'evaluate': function of the episode}}, "
                f"or define evaluate_{name}(self, episode_data) in a subclass; there are {', '.join(CRITERIA)}"
            )
        return evaluate


def _criterion(name: str, given: Any) -> dict[str, Any]:
    """Return a criterion given as its weight or as a dict; what it does not say of one of ours is as ever."""
    return CRITERIA.get(name, {}) | (dict(given) if isinstance(given, Mapping) else {"weight": given})


def _finite(name: str, value: Any) -> float:
    if isinstance(value, Real) and math.isfinite(value):
        return float(value)
    raise RewardError(f"the criterion {name!r} gave {value!r:.80}; let it return a finite number, best from 0 to 1")


def _number(value: Any, default: float) -> float:
    return value if isinstance(value, Real) and not math.isnan(value) else default


def _items(value: Any) -> list[Any]:
    """Return the items of a list; anything else that is not empty is one item, for a text must not count as its letters."""
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    return [value] if value else []


def _text(value: Any) -> str:
    """Return the text of a value: of a conversation its last message's, of a message its content's, of a part its text."""
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
        with warnings.catch_warnings(action="ignore"):  # "\d" in somebody's text is no concern of the run's log
            return bool(ast.parse(source).body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # what it raises, the last two for deep nesting
        return False


def _actions(trajectory: Trajectory) -> list[JsonDict]:
    """Return what the run's own answers call, in order, and then what only its prompts show.

    Prompts are compared by name and arguments, for frameworks write ids and spaces anew. They alone show the calls of
    models that were not captured.
    """
    made = [it for call in trajectory.calls if call.finish_reason != "aborted" for it in _tool_calls([call.response])]
    shown: Counter[tuple[str, str]] = Counter()
    for call in trajectory.calls:
        shown |= Counter(_tool_calls(call.messages()[:-1]))
    if trajectory.calls:
        shown -= Counter(_tool_calls(_before_the_task(trajectory.calls[0])))
    only_shown = (shown - Counter(made)).elements()
    # The name comes last, so that an argument "type" cannot pass for it.
    return [{**json.loads(arguments), "type": name} for name, arguments in (*made, *only_shown)]


def _before_the_task(first: Call) -> Sequence[JsonDict]:
    prompt = first.messages()[:-1]
    asked = [i for i, message in enumerate(prompt) if message.get("role") == "user"]
    return prompt[: asked[-1]] if asked else []


def _tool_calls(messages: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield the name and the arguments, a JSON object, of every tool call; "{}" where the arguments are not one."""
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
    return next(filter(None, map(_said, reversed(trajectory.calls))), None)


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _said(call: Call) -> str:
    """Return the answer's text; of one that only calls tools, what it gives them: agents end with such a call too."""
    given = [value for _, arguments in _tool_calls([call.response]) for value in json.loads(arguments).values()]
    return _text(call.response.get("content")) or " ".join(filter(None, map(_text, given)))
