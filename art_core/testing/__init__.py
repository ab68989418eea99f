"""For plugin authors' tests and our own: stand-ins for the heavy parts, and ``check_adapter``.

Stand-ins are passed in like the real parts; nothing is patched.
"""

from art_core.testing.conformance import AdapterError, AdapterReport, check_adapter
from art_core.testing.fakes import CountingLearner, FakeEngine, Reply, ScriptedAgent, prompt_ids, render
from art_core.testing.provider import scripted_reply

__all__ = [
    "AdapterError",
    "AdapterReport",
    "CountingLearner",
    "FakeEngine",
    "Reply",
    "ScriptedAgent",
    "check_adapter",
    "prompt_ids",
    "render",
    "scripted_reply",
]
