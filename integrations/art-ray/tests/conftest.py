"""A Ray on this machine for the tests, which listens on 127.0.0.1 only and is gone after them."""

import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def local_ray():
    """A Ray that a user's own code has initialised. It ends with its file, because an idle one takes processor time."""
    import ray

    from art_ray.cluster import on_loopback

    with pytest.MonkeyPatch.context() as patch, on_loopback():
        # The workers' too: they import the tests' agents.
        patch.setenv(
            "PYTHONPATH",
            os.pathsep.join([*map(str, (HERE, HERE.parents[2] / "tests")), os.environ.get("PYTHONPATH", "")]),
        )
        ray.init(
            address="local", num_cpus=4, object_store_memory=100_000_000, include_dashboard=False, logging_level="ERROR",
            log_to_driver=False,
        )  # fmt: skip
    yield ray
    ray.shutdown()
