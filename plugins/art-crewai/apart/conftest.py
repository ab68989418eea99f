"""CrewAI reports nothing while it is tested, keeps nothing in the home folder, and its own warnings are no errors."""

import os
import tempfile

FOLDER = tempfile.TemporaryDirectory()
# Before it is imported.
os.environ |= {"CREWAI_DISABLE_TELEMETRY": "true", "CREWAI_TRACING_ENABLED": "false", "OTEL_SDK_DISABLED": "true"}
os.environ["XDG_DATA_HOME"] = FOLDER.name


def pytest_configure(config):
    for ignored in ("Cannot set an attribute on 'crewai:ImportWarning", ":DeprecationWarning"):
        config.addinivalue_line("filterwarnings", f"ignore:{ignored}")


def pytest_unconfigure():
    FOLDER.cleanup()
