"""Training on this machine."""

from art_openpipe.local.backend import LocalBackend

Backend = LocalBackend  # the only one
__all__ = ["Backend", "LocalBackend"]
