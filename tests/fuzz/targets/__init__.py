"""One module a target: ``SEEDS``, bytes to start from, and ``one_input(data)``, which raises where something does not hold."""
