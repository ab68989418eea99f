"""A candidate that answers some conversations in a provider's place: which ones, how it is judged, when it gets more or none."""
