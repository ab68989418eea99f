"""Coverage-guided fuzzing of what parses outside input: ``python -m fuzz TARGET --seconds 600``. Part of no package.

A target (``targets/``) turns bytes into something that a stranger could send, passes it to a public entry point and says what
must hold. What was found to be interesting, and what ever went wrong, is kept in ``corpus/`` and run again by ``make test``.
"""
