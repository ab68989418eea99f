"""``ARTLangfuseTracker``: episodes arrive as traces, and what they add up to is read back."""

import json
import logging
import os
import socket
import subprocess
import sys
import time

import pytest

import art_langfuse
from art_core.errors import ConfigError
from art_langfuse import ARTLangfuseTracker
from art_langfuse.classic import TracesMissing

EPISODE = {
    "episode_id": "ep_001",
    "agent_type": "email_search",
    "model_name": "Qwen/Qwen2.5-7B-Instruct",
    "initial_state": {"query": "find meeting emails"},
    "actions": [
        {
            "type": "search",
            "state": {"query": "find meeting emails"},
            "parameters": {"keywords": ["meeting", "schedule"]},
            "result": {"found_emails": 15},
            "reward": 0.3,
            "reasoning": "Initial search for meeting-related emails",
        }
    ],
    "final_result": {"selected_email": "email_123"},
    "total_reward": 0.85,
    "success": True,
}


@pytest.fixture
def tracker(server):
    tracker = ARTLangfuseTracker(wait=10)
    yield tracker
    tracker.close()


def test_an_episode_is_a_trace_with_a_span_for_each_action(server, tracker):
    trace = tracker.track_episode(EPISODE)
    tracker.flush()
    assert server.encodings == {"gzip"}
    root, action = sorted(server.observations(trace.id), key=lambda it: it["name"], reverse=True)
    assert (root["name"], root["traceName"], root["parentObservationId"]) == ("episode_ep_001", "episode_ep_001", None)
    assert json.loads(root["input"])["initial_state"] == EPISODE["initial_state"]
    assert json.loads(root["output"]) == {
        "final_result": {"selected_email": "email_123"}, "total_reward": 0.85, "success": True
    }  # fmt: skip
    assert root["metadata"]["model_name"] == "Qwen/Qwen2.5-7B-Instruct"
    assert (action["name"], action["type"], action["parentObservationId"]) == ("action_0_search", "SPAN", root["id"])
    assert json.loads(action["output"])["reward"] == 0.3
    assert action["metadata"]["reasoning"] == "Initial search for meeting-related emails"


def test_what_json_cannot_say_is_its_repr_and_loses_nothing_else(server, tracker):
    ring = []
    ring.append(ring)
    board = {(0, 1): "x", "next": {(1, 1): "o"}, "ring": ring}
    actions = [{"type": "put", "state": board, "reasoning": board}]
    trace = tracker.track_episode({**EPISODE, "initial_state": board, "final_result": board, "actions": actions})
    tracker.track_model_generation("Where?", "Here.", {"temperature": board, "token_count": 3})
    assert tracker.get_performance_analytics([trace.id])["average_reward"] == 0.85
    root, action = sorted(server.observations(trace.id), key=lambda it: it["name"], reverse=True)
    assert json.loads(root["output"])["final_result"] == repr(board)
    assert action["metadata"]["reasoning"] == {"(0, 1)": "x", "next": "{(1, 1): 'o'}", "ring": "[[...]]"}


def test_analytics_of_the_example_are_its_numbers(tracker):
    trace = tracker.track_episode(EPISODE)
    assert tracker.get_performance_analytics([trace.id]) == {
        "total_traces": 1,
        "success_rate": 1.0,
        "average_reward": 0.85,
        "average_steps": 1.0,
        "action_distribution": {"search": 1},
        "error_patterns": [],
    }


def test_analytics_add_up_and_tell_how_episodes_failed(tracker):
    failing = {
        "episode_id": 2,
        "actions": [
            {"type": "open_first_mail", "result": {"error": "mail 17 not found"}},
            {"type": "open_first_mail", "result": {"error": "mail 4 not found"}},
            {"type": "search", "result": {}},
        ],
        "total_reward": 0.05,
        "success": False,
    }
    stuck = {"actions": [{"type": "search"}], "total_reward": 0.0, "success": False}
    traces = [tracker.track_episode(it).id for it in (EPISODE, failing, stuck)]
    found = tracker.get_performance_analytics(traces)
    assert found["success_rate"] == pytest.approx(1 / 3) and found["average_reward"] == pytest.approx(0.3)
    assert found["average_steps"] == pytest.approx(5 / 3)
    assert found["action_distribution"] == {"search": 3, "open_first_mail": 2}
    assert found["error_patterns"] == [
        {"pattern": "open_first_mail: mail # not found", "count": 2, "trace_ids": [traces[1]]},
        {"pattern": "no success, last action search", "count": 1, "trace_ids": [traces[2]]},
    ]


def test_actions_without_times_keep_their_order_whatever_order_langfuse_shows(server, tracker):
    actions = [{"type": kind} for kind in ("search", "open", "give_up")]
    trace = tracker.track_episode({"actions": actions, "success": False}).id
    tracker.flush()
    server.spans = dict(reversed(server.spans.items()))
    [pattern] = tracker.get_performance_analytics([trace])["error_patterns"]
    assert pattern["pattern"] == "no success, last action give_up"


def test_analytics_wait_until_langfuse_shows_what_it_was_sent(server, tracker):
    trace = tracker.track_episode(EPISODE)
    server.hidden = 2
    assert tracker.get_performance_analytics([trace.id])["total_traces"] == 1


def test_traces_that_are_never_shown_are_named(server, tracker, monkeypatch):
    monkeypatch.setattr(tracker, "_wait", 0.1)
    with pytest.raises(TracesMissing, match=r"1 of 1 traces yet, 00ff first"):
        tracker.get_performance_analytics(["00ff"])
    assert tracker.get_performance_analytics([])["success_rate"] == 0


def test_generations_and_sessions_arrive(server, tracker):
    said = {"model_name": "tiny", "temperature": 0.2, "max_tokens": 20, "token_count": 33, "latency_ms": 250}
    generation = tracker.track_model_generation("Where?", "Here.", said)
    session = tracker.track_training_session(
        {"session_id": "s1", "config": {"lr": 1e-4}, "final_metrics": {"reward": 1.0}, "training_time": 60}
    )
    tracker.flush()
    [shown] = server.observations(generation.trace_id)
    assert (shown["id"], shown["type"], shown["model"]) == (generation.id, "GENERATION", "tiny")
    assert (shown["input"], shown["output"], shown["usageDetails"]) == ("Where?", "Here.", {"total": 33})
    assert shown["modelParameters"] == {"temperature": 0.2, "max_tokens": 20}
    [shown] = server.observations(session.id)
    assert shown["name"] == "training_session_s1" and json.loads(shown["output"])["final_metrics"] == {"reward": 1.0}


@pytest.mark.system
def test_a_server_that_fails_gets_everything_once(server, tracker):
    server.faults.extend([500, "cut", (429, {"retry-after": "1"}), "lost", 503])
    traces = [tracker.track_episode({**EPISODE, "episode_id": number}).id for number in range(4)]
    tracker.flush()
    assert sorted(server.traces()) == sorted(traces) and len(server.spans) == 8
    assert not server.faults


def test_a_server_that_is_away_is_logged_and_caught_up_with(server, tracker, monkeypatch, caplog):
    monkeypatch.setattr("art_langfuse.outbox.PATIENCE", 0.3)
    server.faults.extend([500] * 50)
    first = tracker.track_episode(EPISODE)
    tracker.flush()
    assert "2 wait to be sent again" in caplog.text and not server.spans
    server.faults.clear()
    second = tracker.track_episode(EPISODE)
    tracker.flush()
    assert set(server.traces()) == {first.id, second.id}


SILENT = """
import art_langfuse.classic as classic
classic.CLOSE_SECONDS = 0.5
tracker = classic.ARTLangfuseTracker()
for number in range(5):
    tracker.track_episode({"episode_id": number})
print("ends", flush=True)
"""


@pytest.mark.system
def test_a_server_that_stays_silent_holds_up_the_end_of_a_program_once(server):
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it takes connections and never answers
        environment = {**os.environ, "LANGFUSE_HOST": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        program = subprocess.Popen(
            [sys.executable, "-c", SILENT], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        with program:
            assert program.stdout.readline() == "ends\n"
            began = time.monotonic()
            said = program.communicate(timeout=60)[1]
    assert time.monotonic() - began < 8 and program.returncode == 0
    assert "5 observations could not be sent" in said and "are lost" in said


def test_what_is_tracked_after_the_end_is_said_and_not_sent(server, caplog):
    tracker = ARTLangfuseTracker()
    tracker.close()
    trace = tracker.track_episode(EPISODE)
    tracker.flush()
    tracker.close()
    assert f"trace {trace.id} is not sent" in caplog.text and not server.spans


def test_keys_that_are_missing_are_named(monkeypatch, server, caplog):
    monkeypatch.delenv("LANGFUSE_SECRET_KEY")
    with pytest.raises(ConfigError, match="LANGFUSE_SECRET_KEY is not set"):
        ARTLangfuseTracker()
    monkeypatch.delenv("LANGFUSE_PUBLIC_KEY")
    with pytest.raises(ConfigError, match="LANGFUSE_PUBLIC_KEY and LANGFUSE_SECRET_KEY are not set"):
        art_langfuse.LangfuseTracker.check()
    monkeypatch.setenv("LANGFUSE_PUBLIC_KEY", "pk")
    monkeypatch.setenv("LANGFUSE_SECRET_KEY", "wrong")
    tracker = ARTLangfuseTracker()
    with caplog.at_level(logging.WARNING):
        tracker.track_episode(EPISODE)
        tracker.close()
    assert "401" in caplog.text and "check the keys" in caplog.text


def test_content_that_is_refused_is_left_out_alone(server, tracker, caplog):
    server.refuses = "poison"
    trace = tracker.track_episode({**EPISODE, "actions": [{"type": "poison"}, {"type": "search"}]})
    tracker.flush()
    assert [it["name"] for it in server.observations(trace.id)] == ["episode_ep_001", "action_1_search"]
    assert "1 were refused and skipped" in caplog.text


def test_an_address_that_moved_is_no_success(server, tracker, caplog):
    server.faults.append((301, {"location": "https://elsewhere.invalid/"}))
    tracker.track_episode(EPISODE)
    tracker.flush()
    assert "status 301" in caplog.text and not server.spans
    tracker.close()
    assert len(server.spans) == 2


def test_the_address_has_two_names(monkeypatch, server):
    monkeypatch.setenv("LANGFUSE_HOST", "http://nowhere.invalid")
    monkeypatch.setenv("LANGFUSE_BASE_URL", server.url)
    tracker = ARTLangfuseTracker()
    trace = tracker.track_episode(EPISODE)
    tracker.close()
    assert server.traces() == [trace.id]
