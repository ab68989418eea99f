"""Tasks from what an agent's users asked for: traffic is read, cleaned of duplicates and secrets, and split."""

from art_tasks.traffic.curate import Curated, curate
from art_tasks.traffic.sources import Request, Traffic, read

__all__ = ["Curated", "Request", "Traffic", "curate", "read"]
