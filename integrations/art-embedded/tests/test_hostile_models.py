"""A model's folder may come from anybody: nothing in it is run, whatever it says."""

import json
import pickle
import shutil

import pytest
import torch

from art_core.errors import ConfigError, UpstreamError
from art_core.learner.pretrained import load_adapter, load_causal_lm, load_tokenizer
from art_embedded import TINY
from art_embedded.chat import Chat

pytest.importorskip("peft")
CODE = "from pathlib import Path\nPath({place!r}).touch()\n"


class Writes:
    """Unpickled, it makes a file."""

    def __init__(self, place):
        self.place = place

    def __reduce__(self):
        return type(self.place).touch, (self.place,)


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(TINY, tmp_path / "model")


@pytest.fixture
def run(tmp_path):
    """The file that is there if something was run."""
    return tmp_path / "run"


def test_weights_that_would_be_unpickled_are_refused(folder, run):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Writes(run)))
    with pytest.raises(ConfigError, match="safetensors"):
        load_causal_lm(folder, torch.float32)
    assert not run.exists()


def test_an_adapter_that_would_be_unpickled_is_refused(folder, run, tmp_path):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    settings = {"peft_type": "LORA", "r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    (adapter / "adapter_model.bin").write_bytes(pickle.dumps(Writes(run)))
    with pytest.raises(ConfigError, match="nothing is unpickled here"):
        load_adapter(load_causal_lm(folder, torch.float32), adapter)
    assert not run.exists()


def test_code_beside_the_weights_is_not_run(folder, run):
    (folder / "code.py").write_text(CODE.format(place=str(run)))
    config = json.loads((folder / "config.json").read_text())
    code = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": code}))
    told = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(told | {"auto_map": {"AutoTokenizer": ["code.T", None]}}))
    load_causal_lm(folder, torch.float32)
    load_tokenizer(folder)
    assert not run.exists()


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('touch ' ~ messages[0].content) }}",
        "{{ messages.append(messages[0]) }}",
        "{{ messages.__class__.__base__.__subclasses__()[0] }}",
        "{% for _ in range(10 ** 9) %}x{% endfor %}",
    ],
)
def test_a_chat_template_reaches_nothing_but_what_it_is_given(folder, run, template):
    (folder / "chat_template.jinja").write_text(template)
    chat = Chat(load_tokenizer(folder), frozenset())
    with pytest.raises(UpstreamError, match="can't render"):
        chat.render([{"role": "user", "content": str(run)}], None, {})
    assert not run.exists()
