"""Training on this machine."""

from art_openpipe.local.backend import LocalBackend

__all__ = ["LocalBackend"]
