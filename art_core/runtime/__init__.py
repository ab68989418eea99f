"""Threads, time limits, stacks and memory."""
