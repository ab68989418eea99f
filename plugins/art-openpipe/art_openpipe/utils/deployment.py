"""``art.utils.deployment``: refused."""

from art_openpipe.refused import deploy_model

__all__ = ["deploy_model"]
