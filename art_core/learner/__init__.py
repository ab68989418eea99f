"""TokenTree -> gradient step -> Weights. Knows nothing about rewards, groups or which loss it is handed.

Imports torch and transformers, so it is imported only by those who train; peft only for an adapter.
"""

from art_core.errors import ConfigError

try:
    import peft  # noqa: F401
    import torch  # noqa: F401
    import transformers  # noqa: F401
except ImportError as error:
    raise ConfigError(
        f"the learner needs torch, transformers and peft ({error}); install art-core[train], as docs/install.md says"
    ) from error

from art_core.learner.torch_learner import TorchLearner
from art_core.learner.tree_forward import tree_logprobs

__all__ = ["TorchLearner", "tree_logprobs"]
