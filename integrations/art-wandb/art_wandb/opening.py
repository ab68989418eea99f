"""Opens a W&B run: online if there is a key, otherwise offline; never prompts."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import wandb

PROJECT = "art-training"
SECONDS = 30.0
"""Timeout for a server that does not answer, at the start and at the end of a run."""
LONGEST_TAG = 64
"""Characters; of a longer one, such as a path, the end is kept."""


def open_run(**arguments: Any) -> wandb.Run:
    """Open a W&B run, independent of other runs in the process. ``arguments`` are those of ``wandb.init``, except ``settings``.

    W&B's own settings (``WANDB_MODE``, ``WANDB_PROJECT``, ...) apply to what ``arguments`` leaves open.

    If ``WANDB_ERROR_REPORTING`` is not set, it is set to ``false`` in ``os.environ``, permanently and for child processes too:
    there is no other setting for it, and wandb reads the variable whenever it would send a report.
    """
    if "WANDB_SERVICE" not in os.environ:
        # Otherwise wandb sends reports about its own errors, and resolves their address even in offline runs.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    defaults = wandb.setup().settings
    tags = [tag[-LONGEST_TAG:] for tag in arguments.get("tags", ()) if tag]  # others are refused
    arguments = {"project": defaults.project or PROJECT, **arguments, "tags": tags, "reinit": "create_new"}
    reason = ""
    if defaults.mode not in ("offline", "dryrun", "disabled"):
        try:
            if _signed_in():
                return wandb.init(**arguments, settings=_settings(quiet=True))
            reason = "no API key (set WANDB_API_KEY, or run: wandb login); "
        except wandb.Error as error:
            reason = f"W&B cannot be used online ({str(error).splitlines()[0]}); "
        arguments["mode"] = "offline"
    # Offline, wandb itself would only print the run's folder, which the message below has.
    run = wandb.init(**arguments, settings=_settings(silent=True))
    if run.offline:
        wandb.termlog(f"{reason}this run is recorded offline; to upload it, run: wandb sync {run.settings.sync_dir}")
    return run


def _signed_in() -> bool:
    import wandb

    if wandb.run is not None:  # the program's own run shows whether signing in works
        return not (wandb.run.offline or wandb.run.disabled)
    # No request to the server, and no prompt.
    return wandb.login(prompt=False, verify=False)


def _settings(**ours: Any) -> wandb.Settings:
    """Return settings that differ from wandb's defaults, unless the environment sets them. Console output is not captured."""
    import wandb

    ours |= {"console": "off", "init_timeout": SECONDS, "finish_timeout": SECONDS}
    return wandb.Settings(**{name: value for name, value in ours.items() if f"WANDB_{name.upper()}" not in os.environ})
