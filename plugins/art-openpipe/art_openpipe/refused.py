"""What OpenPipe ART has and art has not: it can be imported, and says why when it is used."""

from __future__ import annotations

from typing import Any, NoReturn

from art_core.errors import ConfigError


class Refused:
    """A name that is refused: calling it raises ConfigError with the reason."""

    def __init__(self, name: str, reason: str) -> None:
        self.name, self.reason = name, reason

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise ConfigError(f"{self.name} is not there with art: {self.reason}")

    def __repr__(self) -> str:
        return f"<{self.name}: not there with art>"


ServerlessBackend = Refused(
    "ServerlessBackend",
    "it trains at W&B's service, with an account and weights there; use art.local.LocalBackend here, or art_server.connect(url) "
    "for a machine with a GPU that runs 'art serve'",
)
TinkerBackend = TinkerNativeBackend = Refused(
    "TinkerBackend", "it trains at Thinking Machines' service; use art.local.LocalBackend"
)
SkyPilotBackend = Refused(
    "SkyPilotBackend",
    "OpenPipe ART has removed it; 'art serve' on the machine with the GPU, art_server.connect(url) here",
)
deploy_model = Refused(
    "deploy_model",
    "art uploads to no provider; 'art export RUN_FOLDER' writes the adapter or the merged model and the command that serves it",
)
generate_scenarios = Refused(
    "generate_scenarios", "tasks are yours to write, or any model's; a list of JSON values is all that art needs"
)
complete_task_tool = Refused(
    "complete_task_tool", "an agent ends by returning; give it a tool of your own where it must say so"
)
keep_recent_and_top = Refused(
    "keep_recent_and_top", "await model.delete_checkpoints(best_checkpoint_metric) keeps the newest and the best"
)
