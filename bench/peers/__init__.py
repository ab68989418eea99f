"""art_core compared with TRL, ART and hand-written baselines: ``python -m bench.peers``."""
