"""TokenTree -> gradient step -> Weights.

Importing this package is light: torch and transformers are imported when ``TorchLearner`` or ``tree_logprobs`` is first
used, and peft only for an adapter.
"""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING, Any

from art_core.errors import ConfigError

if TYPE_CHECKING:
    from art_core.learner.torch_learner import TorchLearner
    from art_core.learner.tree_forward import tree_logprobs

__all__ = ["TorchLearner", "tree_logprobs"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Looked up, not imported: importing peft takes a second, and only adapters need it.
    if missing := [name for name in ("torch", "transformers", "peft") if importlib.util.find_spec(name) is None]:
        raise ConfigError(f"the learner needs {', '.join(missing)}; install art-core[train] (docs/install.md)")
    # Read when torch is loaded: OpenMP threads that wait must not spin on cores that engine and agents need.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from art_core.learner.torch_learner import TorchLearner
    from art_core.learner.tree_forward import tree_logprobs

    return {"TorchLearner": TorchLearner, "tree_logprobs": tree_logprobs}[name]
