"""For our tests and for those of plugin authors: stand-ins for the heavy parts, and the conformance kit of adapters.

Everything goes through the same door as the real parts; nothing is patched.
"""

from art_core.testing.conformance import check_adapter
from art_core.testing.fakes import CountingLearner, FakeEngine, Reply, ScriptedAgent, prompt_ids, render
from art_core.testing.report import AdapterError, AdapterReport
from art_core.testing.script import scripted_reply

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
