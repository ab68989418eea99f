"""What a process needs from Python and its machine: threads, time limits, stacks, memory."""
