"""LiteLLM downloads nothing while ADK is tested, and may leave its log unfinished when an event loop ends."""

import os

# Before it is imported.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"


def pytest_configure(config):
    config.addinivalue_line("filterwarnings", "ignore:coroutine 'Logging.async_success_handler':RuntimeWarning")
