"""``art.mcp``: refused."""

from art_openpipe.refused import complete_task_tool, generate_scenarios

__all__ = ["complete_task_tool", "generate_scenarios"]
