"""The training loop: collect, score, learn, evaluate."""
