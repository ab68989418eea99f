"""Episodes and runs get the numbers of the formulas in the README, and odd ones get numbers too."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from art_core.errors import ConfigError, RewardError
from art_core.scoring import score
from art_core.types import Call, Group, Trajectory
from art_ruler.criteria import RULERRewardSystem

SYSTEM = RULERRewardSystem()
EMAIL = {
    "id": "email_123",
    "subject": "Team Meeting Schedule for Next Week",
    "sender": "boss@company.com",
    "body": "Hi team, here is the schedule for next week...",
}
EPISODE = {
    "actions": [
        {"type": "search", "query": "meeting schedule"},
        {"type": "filter", "filters": {"sender": "boss@company.com"}},
        {"type": "select", "email_id": "email_123"},
    ],
    "final_result": {"selected_email": EMAIL},
    "original_query": "meeting schedule boss",
    "done": True,
    "task_type": "email_search",
    "response_time": 25,
    "errors": [],
}
CONFIG = {"task_type": "email_search", "optimal_steps": 5, "required_actions": ["search", "filter", "select"]}


def acts(count: int) -> list[dict]:
    return [{"type": "search"}] * count


# Episodes


def test_the_usage_example_gives_its_number():
    scores = RULERRewardSystem(CONFIG).criterion_scores(EPISODE)
    assert scores == pytest.approx(
        {"accuracy": 0.7 * 2 / 3 + 0.3, "efficiency": 1, "completeness": 1, "user_satisfaction": 1}
    )
    assert RULERRewardSystem(CONFIG).evaluate_episode(EPISODE) == pytest.approx(0.9067, abs=5e-5)


@pytest.mark.parametrize(
    ("criterion", "episode", "expected"),
    [
        ("accuracy", {"final_result": "", "expected_result": "x"}, 0),
        ("accuracy", {"final_result": "ABCD", "expected_result": "abxd"}, 0.75),
        ("accuracy", {"final_result": {"a": 1, "b": 2}, "expected_result": {"a": 1, "c": 2}}, (1 / 3 + 1) / 2),
        ("accuracy", {"final_result": {"a": 1}, "expected_result": {"b": 1}}, 0),
        ("accuracy", {"final_result": [1], "expected_result": [1]}, 1),
        ("accuracy", {"final_result": "1", "expected_result": 1}, 0),
        ("accuracy", {"final_result": "x", "done": True}, 0.7),
        ("accuracy", {"final_result": "x"}, 0.3),
        ("efficiency", {"actions": acts(9)}, 1),
        ("efficiency", {"actions": acts(5), "optimal_steps": 5}, 1),
        ("efficiency", {"actions": acts(6), "optimal_steps": 4}, 0.75),
        ("efficiency", {"actions": acts(40), "optimal_steps": 4}, 0),
        ("completeness", {"done": True}, 1),
        ("completeness", {}, 0.5),
        ("completeness", {"actions": acts(2), "required_actions": ["search", "select"], "done": True}, 0.5),
        ("user_satisfaction", {}, 1),
        ("user_satisfaction", {"errors": ["a", "b"], "response_time": 90}, 0.6),
        ("user_satisfaction", {"errors": ["a"] * 11}, 0),
    ],
)
def test_each_criterion_has_its_formula(criterion, episode, expected):
    assert getattr(SYSTEM, f"evaluate_{criterion}")(episode) == pytest.approx(expected)
    assert SYSTEM.criterion_scores(episode)[criterion] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("result", "query", "expected"),
    [
        ("a text", "meeting", 0),
        ({"found": 1}, "meeting", 0.2),
        ({"selected_email": None}, "meeting", 0.2),
        ({"selected_email": "email_123"}, "meeting", 0.2),
        ({"selected_email": EMAIL}, None, 0.1),
        ({"selected_email": {"subject": None, "sender": None}}, "none", 0.1),
        ({"selected_email": EMAIL}, "meeting", 0.8),
        ({"selected_email": EMAIL}, "boss schedule", 0.65),
        ({"selected_email": {**EMAIL, "body": "from the boss"}}, "boss schedule", 1),
        ({"selected_email": EMAIL}, {"messages": [{"role": "user", "content": "meeting"}], "mailbox": 3}, 0.8),
    ],
)
def test_an_email_is_compared_with_the_query(result, query, expected):
    episode = {"final_result": result, "original_query": query, "task_type": "email_search"}
    assert SYSTEM.evaluate_accuracy(episode) == pytest.approx(expected)
    assert SYSTEM.evaluate_email_search_accuracy(result, episode) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        ({"tests_passed": 3, "tests_total": 4, "passed": True}, 0.75),
        ({"tests_passed": 9, "tests_total": 4}, 1),
        ({"tests_passed": 0, "tests_total": 0, "passed": True}, 1),
        ({"passed": False, "code": "x = 1"}, 0),
        ({"tests_passed": "all", "tests_total": None, "code": "x = 1"}, 0.5),
        ("def f():\n    return 1", 0.5),
        ("def f(:", 0),
        ("Here it is:\n```python\nx = 1\n```\nDone, I hope!", 0.5),
        ("Here it is:\n```python\nx = = 1\n```", 0),
        ("# nothing yet", 0),
        (r"x = '\d'", 0.5),
        ("x = 1\0", 0),
        ("x = '\ud800'", 0),
        ("(" * 5000, 0),
        ("-" * 50_000 + "1", 0),
        ({"code": None}, 0),
        (7, 0.5),
    ],
)
def test_code_is_read_and_never_run(result, expected):
    episode = {"final_result": result, "task_type": "code_generation", "done": True}
    assert SYSTEM.evaluate_accuracy(episode) == expected


@pytest.mark.parametrize(
    ("result", "said", "expected"),
    [
        ("paris", {"accepted_answers": ["Lyon", "Paris"]}, 1),
        ({"answer": "Paris"}, {"accepted_answers": "PARIS"}, 1),
        ("Paris it is", {"context": "The capital is Paris. It is large."}, 1),
        ("Paris or Rome", {"context": ["The capital", "is Paris."]}, 1 / 3),
        ("?!", {"context": "The capital is Paris."}, 0),
        ("Paris", {"done": True}, 0.7),
        ("Paris", {}, 0.3),
    ],
)
def test_an_answer_is_compared_with_what_the_episode_has(result, said, expected):
    episode = {"final_result": result, "task_type": "question_answering", **said}
    assert SYSTEM.evaluate_accuracy(episode) == pytest.approx(expected)


def test_the_task_config_stands_for_what_an_episode_does_not_say():
    system = RULERRewardSystem({"optimal_steps": 1, "required_actions": ["search"], "task_type": "email_search"})
    said = {"actions": acts(3), "final_result": {"selected_email": EMAIL}, "optimal_steps": None}
    assert system.criterion_scores(said) == pytest.approx(
        {"accuracy": 0.1, "efficiency": 0, "completeness": 1, "user_satisfaction": 1}
    )
    assert system.evaluate_efficiency(said) == 0
    assert system.evaluate_efficiency({**said, "optimal_steps": 2}) == 0.75
    assert system.evaluate_completeness({**said, "required_actions": ["select"]}) == 0


@pytest.mark.parametrize(
    ("criterion", "episode", "expected"),
    [
        ("efficiency", {"actions": [], "optimal_steps": 0}, 1),
        ("efficiency", {"actions": acts(1), "optimal_steps": 0}, 0.5),
        ("efficiency", {"actions": acts(1), "optimal_steps": -3}, 0.5),
        ("efficiency", {"actions": acts(4), "optimal_steps": "few"}, 1),
        ("efficiency", {"actions": acts(4), "optimal_steps": float("nan")}, 1),
        ("completeness", {"actions": ["search", None], "required_actions": ["search"]}, 0),
        ("completeness", {"actions": acts(1), "required_actions": "search"}, 1),
        ("user_satisfaction", {"errors": "one long error message", "response_time": "soon"}, 0.9),
        ("user_satisfaction", {"response_time": float("inf")}, 0),
    ],
)
def test_odd_values_say_as_little_or_as_much_as_they_can(criterion, episode, expected):
    assert SYSTEM.criterion_scores(episode)[criterion] == pytest.approx(expected)


def test_a_paraphrase_of_two_hundred_characters_is_as_similar_as_its_letters_say():
    expected = (
        "The invoice from Acme for the new office chairs is due on 3 May, and Maria asked that it be paid from the account "
        "of the Berlin office, because the other account is closed for the audit until the end of the quarter."
    )
    actual = (
        "Acme's invoice for the office chairs is due on 3 May; Maria wants it paid from the Berlin office's account, since "
        "the other account stays closed until the quarter ends because of the audit, as she wrote."
    )
    assert min(len(expected), len(actual)) >= 200
    assert SYSTEM.string_similarity(expected, actual) > 0.6
    assert SYSTEM.string_similarity(actual, expected) > 0.6


def test_two_empty_dicts_are_the_same():
    assert SYSTEM.dict_similarity({}, {}) == 1


ODD = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "a", "code"]), inner),
    max_leaves=6,
)
KEYS = [*EPISODE, "expected_result", "optimal_steps", "required_actions", "accepted_answers", "context"]
TYPES = st.sampled_from(["email_search", "code_generation", "question_answering", "general"]) | ODD
EMAILS = st.fixed_dictionaries({"selected_email": st.dictionaries(st.sampled_from([*EMAIL]), ODD) | ODD}) | ODD


@pytest.mark.system
@given(st.dictionaries(st.sampled_from(KEYS), ODD), TYPES, EMAILS)
def test_any_episode_has_a_score(episode, task_type, result):
    episode |= {"task_type": task_type, "final_result": result}
    assert all(0 <= value <= 1 for value in SYSTEM.criterion_scores(episode).values())
    assert 0 <= SYSTEM.evaluate_episode(episode) <= 1


def test_nothing_is_printed(capsys):
    SYSTEM.evaluate_episode(EPISODE)
    assert capsys.readouterr() == ("", "")


# Criteria


def brief(episode) -> float:
    return 1.0 if len(episode["final_result"]) < 10 else 0.0


def test_criteria_and_weights_can_be_given():
    brevity = {"weight": 0.25, "description": "Few words", "evaluate": brief}
    system = RULERRewardSystem(criteria={"accuracy": 0.5, "brevity": brevity})
    assert system.evaluation_criteria["accuracy"] == {"weight": 0.5, "description": "Task accuracy"}
    assert system.criterion_scores({"final_result": "Paris", "done": True}) == {"accuracy": 0.7, "brevity": 1}
    assert system.evaluate_episode({"final_result": "Paris", "done": True}) == pytest.approx(0.6)


def test_criteria_can_be_changed_afterwards_and_are_each_systems_own():
    system = RULERRewardSystem()
    del system.evaluation_criteria["accuracy"]
    system.evaluation_criteria["efficiency"]["weight"] = 0.5
    system.evaluation_criteria["completeness"] = 0.4
    system.evaluation_criteria["brevity"] = {"weight": 0.1, "evaluate": brief}
    assert system.evaluate_episode({"final_result": "Paris"}) == pytest.approx(0.5 + 0.2 + 0.1 + 0.1)
    system.load_criteria()["efficiency"]["weight"] = 0.5
    assert RULERRewardSystem().load_criteria() == RULERRewardSystem().evaluation_criteria
    assert RULERRewardSystem().evaluation_criteria["efficiency"]["weight"] == 0.3


def test_a_criterion_finds_every_key_of_a_failed_run():
    nothing = {"weight": 1, "evaluate": lambda episode: episode["final_result"] is None}
    assert RULERRewardSystem(criteria={"silence": nothing})(Trajectory("find", (), error="ValueError: no")) == 1


def test_a_subclass_evaluates_criteria_of_its_own_and_ours_in_its_own_way():
    class Brief(RULERRewardSystem):
        def load_criteria(self):
            return {**super().load_criteria(), "brevity": 0.5}

        def evaluate_brevity(self, episode_data):
            return brief(episode_data)

        def evaluate_accuracy(self, episode_data):
            return 0.0

    scores = Brief({"final_result": "Paris"}).criterion_scores({})
    assert (scores["accuracy"], scores["brevity"]) == (0, 1)


@pytest.mark.parametrize("name", ["brevity", "episode", "code_accuracy"])
def test_a_criterion_that_nothing_evaluates_is_named(name):
    with pytest.raises(ConfigError, match=f"nothing evaluates the criterion '{name}'.*evaluate_{name}"):
        RULERRewardSystem(criteria={name: 0.5})
    system = RULERRewardSystem()
    system.evaluation_criteria[name] = {"weight": 0.5}
    with pytest.raises(ConfigError, match=f"nothing evaluates the criterion '{name}'"):
        system.evaluate_episode({})


@pytest.mark.parametrize("weight", [None, "high", True, float("nan")])
def test_a_weight_that_is_no_number_is_named(weight):
    with pytest.raises(ConfigError, match="the weight of the criterion 'brevity' must be a finite number"):
        RULERRewardSystem(criteria={"brevity": {"weight": weight, "evaluate": brief}})


@pytest.mark.parametrize("value", [None, "1", float("nan")])
def test_a_criterion_that_gives_no_number_is_named(value):
    system = RULERRewardSystem(criteria={"brevity": {"weight": 1, "evaluate": lambda episode: value}})
    with pytest.raises(RewardError, match="the criterion 'brevity' must return a finite number"):
        system.evaluate_episode({})


def test_the_sum_is_cut_to_0_and_1():
    for weight, total in ((3, 1), (-3, 0)):
        system = RULERRewardSystem(criteria={"brevity": {"weight": weight, "evaluate": lambda episode: 1}})
        assert system.evaluate_episode({}) == total


# Runs


def tool_call(name: str, arguments: str = "{}", call_id: str = "1") -> dict:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def answer(content: str | None = None, *tool_calls: dict) -> dict:
    return {"role": "assistant", "content": content, **({"tool_calls": list(tool_calls)} if tool_calls else {})}


def call(*messages: dict, **fields: object) -> Call:
    *prompt, response = messages
    return Call((1,), (2,), (-1.0,), request={"messages": prompt}, response=response, **fields)


ASK = {"role": "user", "content": "Where is it?"}
HITS = {"role": "tool", "tool_call_id": "1", "content": "2 hits"}


def types(*calls: Call) -> list[str]:
    return [action["type"] for action in SYSTEM.episode_of(Trajectory("find", calls))["actions"]]


def test_a_run_is_an_episode():
    task = {"input": "Where is it?", "answer": "Paris", "optimal_steps": 1, "done": "not the task's to say"}
    search = answer(None, tool_call("search", '{"query": "x", "type": "select"}'))
    calls = (call(ASK, search), call(ASK, search, HITS, answer("Paris")))
    assert SYSTEM.episode_of(Trajectory(task, calls, output="Paris", seconds=2.5)) == {
        **task,
        "original_query": "Where is it?",
        "expected_result": "Paris",
        "actions": [{"query": "x", "type": "search"}],
        "final_result": "Paris",
        "done": True,
        "errors": [],
        "response_time": 2.5,
    }


def test_what_the_task_names_itself_counts_before_its_input_and_answer():
    task = {"input": {"q": 1}, "answer": "no", "original_query": "Where?", "expected_result": "yes"}
    episode = SYSTEM.episode_of(Trajectory(task, ()))
    assert (episode["original_query"], episode["expected_result"]) == ("Where?", "yes")
    assert SYSTEM.episode_of(Trajectory("Where?", ()))["original_query"] == "Where?"


def test_a_failed_run_has_no_result_and_one_error():
    episode = SYSTEM.episode_of(Trajectory("find", (call(ASK, answer("Paris")),), error="ValueError: no"))
    assert (episode["final_result"], episode["done"], episode["errors"]) == (None, False, ["ValueError: no"])


def test_an_action_counts_once_although_later_prompts_repeat_it_in_other_words():
    search, again = (answer(None, tool_call("search", text, i)) for text, i in (('{"q":1}', "a"), ('{ "q": 1 }', "b")))
    calls = (call(ASK, search), call(ASK, again, HITS, search), call(ASK, again, HITS, again, HITS, answer("2")))
    assert types(*calls) == ["search", "search"]


def test_sub_agents_forks_and_compacted_conversations_count_what_they_did():
    plan, search, read = (answer(None, tool_call(name)) for name in ("plan", "search", "read"))
    calls = (
        call(ASK, plan),
        call({"role": "user", "content": "sub-task"}, search, agent="helper"),
        call({"role": "user", "content": "sub-task"}, search, agent="other"),
        call(ASK, plan, HITS, read),
        call({"role": "user", "content": "So far: planned."}, read, HITS, answer("done")),
    )
    assert types(*calls) == ["plan", "search", "search", "read"]


def test_actions_that_only_prompts_show_count_unless_they_are_examples():
    asked = {"role": "user", "content": "An example."}
    messages = (asked, answer(None, tool_call("select")), HITS, answer("x"), ASK, answer(None, tool_call("search")))
    assert types(call(*messages, HITS, answer("done"))) == ["search"]


def test_an_aborted_answer_did_nothing():
    search = answer(None, tool_call("search"))
    assert types(call(ASK, search, finish_reason="aborted"), call(ASK, search)) == ["search"]


@pytest.mark.parametrize("arguments", ["not JSON", "[1]", "null", None, "[" * 100_000])
def test_arguments_that_are_no_object_leave_the_name(arguments):
    search = answer(None, {"function": {"name": "search", "arguments": arguments}})
    assert SYSTEM.episode_of(Trajectory("find", (call(ASK, search),)))["actions"] == [{"type": "search"}]


def test_the_last_answer_is_the_result_where_the_output_is_an_object_or_none():
    parts = answer([{"type": "text", "text": "It is"}, {"type": "text", "text": "Paris"}])
    final = answer(None, tool_call("return_final_answer", json.dumps({"answer": "Paris"})))
    for last, result in ((parts, "It is Paris"), (final, "Paris"), (answer(""), "first")):
        calls = (call(ASK, answer("first")), call(ASK, answer("first"), ASK, last))
        for output in (object(), {"messages": [object()]}, None):
            assert SYSTEM.episode_of(Trajectory("find", calls, output=output))["final_result"] == result
    assert SYSTEM.episode_of(Trajectory("find", calls, output=0))["final_result"] == 0
    assert SYSTEM.episode_of(Trajectory("find", ()))["final_result"] is None


async def test_as_a_reward_its_parts_are_in_the_metrics():
    task = {"input": "Where is it?", "answer": "Paris", "required_actions": ["search"]}
    searched = (call(ASK, answer(None, tool_call("search"))),)
    runs = (Trajectory(task, searched, output="paris", seconds=60), Trajectory(task, (), error="ValueError: no"))
    good, bad = (await score(Group(task, runs), RULERRewardSystem())).trajectories
    assert good.metrics == {"accuracy": 1, "efficiency": 1, "completeness": 1, "user_satisfaction": 0.9}
    assert good.reward == pytest.approx(0.99)
    assert bad.metrics == {"accuracy": 0, "efficiency": 1, "completeness": 0, "user_satisfaction": 0.9}
    assert bad.reward == pytest.approx(0.39)
