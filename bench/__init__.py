"""Measurements: nothing here is shipped, and no timing is asserted anywhere."""
