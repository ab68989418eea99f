"""Names of OpenPipe ART that art does not support: they can be imported, and raise an error with the reason when used."""

from __future__ import annotations

from typing import Any, NoReturn

from art_core.errors import ConfigError


class Refused:
    """An unsupported name: calling it raises ConfigError with the reason."""

    def __init__(self, name: str, reason: str) -> None:
        self.name, self.reason = name, reason

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise ConfigError(f"{self.name} is not supported by art: {self.reason}")

    def __repr__(self) -> str:
        return f"<{self.name}: not supported by art>"


ServerlessBackend = Refused(
    "ServerlessBackend",
    "it trains at W&B's service, with an account and weights there; use art.local.LocalBackend, or art_server.connect(url) for a "
    "GPU machine that runs 'art serve'",
)
TinkerBackend = TinkerNativeBackend = Refused(
    "TinkerBackend", "it trains at Thinking Machines' service; use art.local.LocalBackend"
)
SkyPilotBackend = Refused(
    "SkyPilotBackend",
    "OpenPipe ART has removed it; run 'art serve' on the GPU machine, and use art_server.connect(url) here",
)
deploy_model = Refused(
    "deploy_model",
    "art does not upload to providers; 'art export RUN_FOLDER' writes the adapter or merged model, and the command to serve it",
)
generate_scenarios = Refused(
    "generate_scenarios", "write the tasks yourself or with any model; art only needs a list of JSON values"
)
complete_task_tool = Refused(
    "complete_task_tool", "an agent ends by returning; if it must say so, give it a tool of your own"
)
keep_recent_and_top = Refused(
    "keep_recent_and_top", "await model.delete_checkpoints(best_checkpoint_metric) keeps the newest and the best"
)
