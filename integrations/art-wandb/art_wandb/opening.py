"""Opens a W&B run: online where there is a key, else offline; never with a question. Knows nothing about what is logged to it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import wandb

PROJECT = "art-training"
SECONDS = 30.0
"""Until a server that does not answer is given up, at a run's beginning and at its end."""


def open_run(**given: Any) -> wandb.Run:
    """Open a W&B run beside whatever runs the process has; ``given`` are keywords of ``wandb.init``, but ``settings``.

    W&B's own settings (``WANDB_MODE``, ``WANDB_PROJECT``, ...) say what ``given`` leaves open.

    Where nothing says whether wandb may report about itself, ``WANDB_ERROR_REPORTING=false`` is put into ``os.environ`` and
    stays there, for child processes too: wandb has no setting for it, and reads the variable whenever it would report.
    """
    if "WANDB_SERVICE" not in os.environ:
        # wandb would send reports about itself, and look up their address from offline runs too.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    known = wandb.setup().settings
    given = {"project": known.project or PROJECT, **given, "reinit": "create_new"}
    why = ""
    if known.mode not in ("offline", "dryrun", "disabled"):
        try:
            if _signed_in():
                return wandb.init(**given, settings=_settings(quiet=True))
            why = "no key was found (WANDB_API_KEY, or the command: wandb login); "
        except wandb.Error as error:
            why = f"W&B cannot be used online ({str(error).splitlines()[0]}); "
        given["mode"] = "offline"
    # Offline, all that wandb has to say is where the run is, and that is said here.
    run = wandb.init(**given, settings=_settings(silent=True))
    if run.offline:
        wandb.termlog(f"{why}this run is kept offline; to upload it: wandb sync {run.settings.sync_dir}")
    return run


def _signed_in() -> bool:
    import wandb

    if wandb.run is not None:  # the program's own: whether it could sign in is known
        return not (wandb.run.offline or wandb.run.disabled)
    # With verify it would ask the server, without prompt=False the person.
    return wandb.login(prompt=False, verify=False)


def _settings(**ours: Any) -> wandb.Settings:
    """What is other than wandb's default where the environment does not say; what a program prints stays its own."""
    import wandb

    ours |= {"console": "off", "init_timeout": SECONDS, "finish_timeout": SECONDS}
    return wandb.Settings(**{name: value for name, value in ours.items() if f"WANDB_{name.upper()}" not in os.environ})
