"""What plugins and integrations build on, beside ``art_core`` itself, its ``types``, ``errors`` and ``testing``.

Everything else in the core may change between versions. docs/extending.md says what each kind of plugin needs of this.
"""

from art_core.attribution import Target, inside_rollout, redirect_requests, run_in_child_processes, use_rollout_executor
from art_core.attribution.names import on_redirect
from art_core.config import check_settings, check_tasks, model_folder, shipped_model, weights_hash
from art_core.hookspecs import Register
from art_core.loop.advice import flat_advice, untrained_advice
from art_core.loop.display import Display, Output, display, plural
from art_core.loop.metrics import wilson_interval
from art_core.loop.rewards import reward_name, score_all
from art_core.loop.rollout import API_KEY, task_id, task_input
from art_core.loop.trackers import Tracker, Trackers
from art_core.plugins import Plugins, redirect_clients
from art_core.redaction import LEFT_OUT, describe_error, left_out, printable, without_access, without_keys
from art_core.runtime import cpu, memory
from art_core.runtime.gathering import gather_limited
from art_core.runtime.packages import cache_folder, install_packages
from art_core.runtime.threads import in_thread
from art_core.serving import start_early

__all__ = [
    "API_KEY",
    "LEFT_OUT",
    "Display",
    "Output",
    "Plugins",
    "Register",
    "Target",
    "Tracker",
    "Trackers",
    "cache_folder",
    "check_settings",
    "check_tasks",
    "cpu",
    "describe_error",
    "display",
    "flat_advice",
    "gather_limited",
    "in_thread",
    "inside_rollout",
    "install_packages",
    "left_out",
    "memory",
    "model_folder",
    "on_redirect",
    "plural",
    "printable",
    "redirect_clients",
    "redirect_requests",
    "reward_name",
    "run_in_child_processes",
    "score_all",
    "shipped_model",
    "start_early",
    "task_id",
    "task_input",
    "untrained_advice",
    "use_rollout_executor",
    "weights_hash",
    "wilson_interval",
    "without_access",
    "without_keys",
]
