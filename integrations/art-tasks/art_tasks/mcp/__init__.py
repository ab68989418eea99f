"""Agents with the tools of an MCP server, tasks for them, and a reward that reads each task's own rubric."""

from art_tasks.mcp.agent import agent_of
from art_tasks.mcp.rubric import Rubric
from art_tasks.mcp.server import Server

__all__ = ["Rubric", "Server", "agent_of"]
