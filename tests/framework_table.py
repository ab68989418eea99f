"""The table of frameworks in ``docs/frameworks.md``, and the agents' parts that every framework's tests share."""

from pathlib import Path

import pydantic

from art_core.testing import AdapterReport

TABLE = (Path(__file__).parent.parent / "docs" / "frameworks.md").read_text().splitlines()


class City(pydantic.BaseModel):
    """A city."""

    city: str


def rain(city: str) -> str:
    """Tell the weather."""
    return f"rain in {city}"


def user(text: str) -> list[dict[str, str]]:
    """Return a conversation that begins with ``text``."""
    return [{"role": "user", "content": text}]


def assert_documented(report: AdapterReport) -> None:
    """The report is a row of the documented table, so the table cannot say anything else than what was checked."""
    assert AdapterReport.header().splitlines()[0] in TABLE
    assert str(report) in TABLE
