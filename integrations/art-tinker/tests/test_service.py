"""Errors for a server that is missing, dead or refuses a request, and for unsupported settings; what a server keeps."""

import io
import os
import shutil
import tarfile
from types import SimpleNamespace

import pytest
from http_server import serving
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from art_core import TrainConfig, losses
from art_core.errors import ConfigError
from art_tinker import check, service
from art_tinker.learner import TinkerLearner


@pytest.fixture
def alive(monkeypatch):
    monkeypatch.setenv("TINKER_API_KEY", "tml-of-no-account")
    with serving(Route("/api/v1/healthz", lambda _: JSONResponse({"status": "ok"}))) as url:
        monkeypatch.setenv("TINKER_BASE_URL", url)
        yield url


class Never:
    """A result that never comes."""

    def result(self, timeout=None):
        raise TimeoutError


class Refused:
    def result(self, timeout=None):
        raise ValueError("rank 512 is too large")  # what the SDK raises if a request fails on the server


class Keeper:
    """A service, its adapter and its REST client in one, that counts what it keeps."""

    def __init__(self):
        self.kept = []

    def create_lora_training_client(self, *_):
        return self

    def create_rest_client(self):
        return self

    def save_state(self, name):
        return self._keep(f"weights/{name}")

    def save_weights_for_sampler(self, name, _seconds):
        return self._keep(f"sampler_weights/{name}")

    def _keep(self, name):
        self.kept.append(name)
        return service.begin(lambda: SimpleNamespace(path=f"tinker://run/{name}"))

    def load_state_with_optimizer(self, path):
        assert path.removeprefix("tinker://run/") in self.kept
        return service.begin(lambda: None)

    def delete_checkpoint(self, _run, name):
        self.kept.remove(name)


def test_a_server_that_answers_passes_the_check(alive):
    check()


def test_without_a_key_the_check_says_what_to_set(alive, monkeypatch):
    monkeypatch.delenv("TINKER_API_KEY")
    with pytest.raises(ConfigError, match="set TINKER_API_KEY"):
        check()


def test_without_a_server_the_check_names_the_address(monkeypatch):
    monkeypatch.setenv("TINKER_API_KEY", "tml-of-no-account")
    monkeypatch.setenv("TINKER_BASE_URL", "http://127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"no Tinker server answers at http://127.0.0.1:1"):
        check()


def test_a_server_that_dies_while_a_result_is_awaited_ends_the_run(monkeypatch):
    monkeypatch.setenv("TINKER_BASE_URL", "http://127.0.0.1:1")
    monkeypatch.setattr(service, "GIVE_UP_AFTER", 0.0)
    monkeypatch.setattr(service, "POLL_SECONDS", 0.0)
    with pytest.raises(service.ServerLost, match=r"lost \(compute gradients: no answer for 0 s\); .*to resume"):
        service.wait(Never(), "compute gradients")


def test_what_the_server_refuses_is_said_with_its_reason(alive):
    with pytest.raises(ConfigError, match="refused to make an adapter: ValueError: rank 512 is too large"):
        service.wait(Refused(), "make an adapter")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kl": 0.1}, "can't use kl=0.1; omit it"),
        ({"lora_rank": 0}, "can't use lora_rank=0; omit it"),
        ({"temperature": 0.6, "max_temperature": 1.0}, "pass temperature=1"),
        ({"learner_args": {"processes": 2}}, "no learner_args processes; it has download, averages"),
    ],
)
def test_settings_that_no_server_has_are_refused(settings, message):
    config = TrainConfig(**{"model": "tiny", "temperature": 1.0, "max_temperature": 1.0, **settings})
    with pytest.raises(ConfigError, match=message):
        TinkerLearner("tiny", config, losses.grpo)


def archive(**files):
    """A server's archive of an adapter: ``files`` are the contents of its configuration and weights."""
    names = {"config": "adapter_config.json", "weights": "adapter_model.safetensors"}
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w:gz") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(names[name])
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return written.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        archive(config=b'{"target_modules": ["q_proj"]}', weights=os.urandom(100_000))[:50_000],
        archive(config=b"<html>"),
        archive(config=b"[]"),
        archive(config=b"{}", weights=b"junk"),
        archive(),
        b"no archive",
    ],
    ids=["cut short", "no JSON", "no mapping", "broken weights", "empty", "no archive"],
)
def test_an_adapter_that_cannot_be_unpacked_leaves_a_checkpoint_without_it(monkeypatch, tmp_path, caplog, content):
    class Sending(Keeper):
        def get_checkpoint_archive_url(self, _run, _name):
            return service.begin(lambda: SimpleNamespace(url=f"{url}/archive"))

    monkeypatch.setattr("tinker.ServiceClient", Sending)
    with serving(Route("/archive", lambda _: Response(content))) as url:
        learner = TinkerLearner("tiny", TrainConfig(model="tiny", temperature=1.0, max_temperature=1.0), losses.grpo)
        learner.save(tmp_path / "step-000001")
    assert "has no adapter here" in caplog.text
    assert [it.name for it in (tmp_path / "step-000001").iterdir()] == ["learner.json"]


def test_a_resumed_run_deletes_what_the_server_keeps_for_checkpoints_from_before(monkeypatch, tmp_path):
    keeper = Keeper()
    monkeypatch.setattr("tinker.ServiceClient", lambda: keeper)
    config = TrainConfig(model="tiny", temperature=1.0, max_temperature=1.0, learner_args={"download": False})
    killed = TinkerLearner("tiny", config, losses.grpo)
    folders = [tmp_path / f"step-{step:06d}" for step in (1, 2, 3)]
    for folder in folders[:2]:
        killed.save(folder)
    (tmp_path / "step-000000").mkdir()  # damaged
    resumed = TinkerLearner("tiny", config, losses.grpo)
    resumed.restore(folders[1])
    assert len(keeper.kept) == 4
    shutil.rmtree(folders[0])
    resumed.save(folders[2])
    assert len(keeper.kept) == 4
    resumed.restore(folders[1])
    resumed.restore(folders[2])
