"""art_core beside TRL and ART, and beside what one writes by hand: ``python -m bench.peers``."""
