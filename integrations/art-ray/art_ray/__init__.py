"""Rollouts and learning on a Ray cluster. Knows nothing about capture or losses."""
