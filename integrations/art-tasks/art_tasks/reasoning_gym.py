"""reasoning-gym: puzzles that are generated without end, each with its own check (Apache-2.0; arXiv 2505.24760)."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import warnings
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from art_core.errors import ConfigError
from art_core.types import JsonDict, Tasks, Trajectory

SEEDS = {"train": 1_000_000, "test": 2_000_000, "shots": 3_000_000}
"""A puzzle is made from seed + index. One that is among the solved ones is left out; for tests also one that is trained."""
SIZES = {"train": 1000, "test": 200}
INSTRUCTION = "Answer with the solution alone."
MAX_TOKENS = 64


class ReasoningGym:
    """The suite."""

    origin = "reasoning-gym, Apache-2.0"

    def names(self) -> Sequence[str]:
        """Return the names of all data sets."""
        _library()
        from reasoning_gym.factory import DATASETS

        return tuple(sorted(DATASETS))

    def load(self, name: str, split: str, *, size: int | None = None, shots: int = 3, **difficulty: Any) -> Tasks:
        """Return ``size`` puzzles (1,000, or 200 for ``"test"``), each after ``shots`` solved ones.

        ``difficulty`` are fields of the data set's own config, such as ``max_words=6``. The solved puzzles are the same in all
        tasks. Without any, a small model rambles and never ends with an answer. Data sets that check answers without knowing one,
        such as ``rush_hour``, have none.
        """
        size = SIZES[split] if size is None else size
        # Not all data sets can be of size 0.
        made = list(self._made(name, "shots", max(1, shots), difficulty))[:shots]
        solved = [each for each in made if each["answer"] is not None]
        before = [message for each in solved for message in _solved(each)]
        known = {each["question"] for each in solved}
        if split == "test":
            # What training takes by default, whatever size is trained.
            known |= self._different(name, "train", SIZES["train"], difficulty, known).keys()
        tasks = []
        for each in self._different(name, split, size, difficulty, known).values():
            messages = [*before, {"role": "user", "content": _question(each)}]
            tasks.append({"id": f"{name}-{split}-{len(tasks)}", "input": messages, "data_set": name, "entry": each})
        if len(tasks) < size:
            raise ConfigError(
                f"reasoning-gym/{name} has only {len(tasks)} different {split} puzzles at this difficulty, not {size}; pass a "
                "smaller size=, or make it harder"
            )
        return Tasks(tasks, reward, agent, self.origin)

    def _different(
        self, name: str, split: str, size: int, difficulty: dict[str, Any], known: Collection[str]
    ) -> dict[str, JsonDict]:
        """Return up to ``size`` puzzles by question, of twice as many, without those that are known."""
        found: dict[str, JsonDict] = {}
        for each in self._made(name, split, 2 * size, difficulty):
            if each["question"] not in known:
                found.setdefault(each["question"], each)
            if len(found) == size:
                break
        return found

    def _made(self, name: str, split: str, size: int, difficulty: dict[str, Any]) -> Iterator[JsonDict]:
        library = _library()
        from reasoning_gym.factory import DATASETS

        if name not in DATASETS:
            raise ConfigError(f"reasoning-gym has no data set {name!r}; art tasks reasoning-gym lists them")
        fields = {field.name for field in dataclasses.fields(DATASETS[name][1])} - {"seed", "size"}
        if unknown := sorted(set(difficulty) - fields):
            raise ConfigError(
                f"reasoning-gym/{name} has no option {unknown[0]!r}; its options: {', '.join(sorted(fields))}"
            )
        try:
            made = library.create_dataset(name, seed=SEEDS[split], size=size, **difficulty)
        except (AssertionError, TypeError) as error:
            raise ConfigError(f"reasoning-gym/{name} refuses {difficulty}: {error}") from error
        yield from (_plain(made[index]) for index in range(size))


def _library() -> Any:
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ConfigError("reasoning-gym is not installed; run: pip install reasoning-gym")
    return _imported()


@functools.cache
def _imported() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # of a package that it imports
        return importlib.import_module("reasoning_gym")


def _plain(entry: JsonDict) -> JsonDict:
    return {name: entry[name] for name in ("question", "answer", "metadata")}


def _question(entry: JsonDict) -> str:
    return f"{entry['question'].strip()}\n{INSTRUCTION}"


def _solved(entry: JsonDict) -> list[JsonDict]:
    return [{"role": "user", "content": _question(entry)}, {"role": "assistant", "content": str(entry["answer"])}]


def reward(trajectory: Trajectory) -> float:
    """Return the data set's own score of the answer, 0 to 1; the metric ``success`` is 1 for a full score."""
    _library()
    from reasoning_gym.factory import get_score_answer_fn

    task = trajectory.task
    score = float(get_score_answer_fn(task["data_set"])(answer=trajectory.output, entry=task["entry"]))
    trajectory.metrics["success"] = float(score >= 1)
    return score


async def agent_function(messages: list[JsonDict]) -> str:
    """Ask the model once, with the OpenAI client."""
    import openai

    async with openai.AsyncOpenAI(api_key="unused: the policy answers") as client:
        answer = await client.chat.completions.create(model="policy", messages=messages, max_tokens=MAX_TOKENS)
    return (answer.choices[0].message.content or "").strip()


def agent() -> Any:
    """Return the reference agent."""
    return agent_function
