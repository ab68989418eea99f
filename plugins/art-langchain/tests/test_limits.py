"""The greatest number of tokens of an answer has many names, and reaches the policy once."""

import pytest
from langchain_core.language_models import FakeListChatModel

import art_langchain
import art_openai

art_openai.redirect_clients()
art_langchain.redirect_clients()


class Limited(FakeListChatModel):
    """One that limits its answers."""

    limit: int

    def _get_ls_params(self, stop=None, **kwargs):
        return super()._get_ls_params(stop, **kwargs) | {"ls_max_tokens": self.limit}


@pytest.mark.parametrize(
    ("bound", "sent"),
    [
        ({}, 1000),
        ({"max_tokens": None}, 1000),
        ({"max_completion_tokens": 7}, 7),
        ({"max_completion_tokens": 7, "max_tokens": 9}, 7),
        ({"num_predict": 7}, 7),
        ({"num_predict": -1}, None),
    ],
)
def test_the_calls_own_limit_beats_the_models_whatever_it_is_called(stub, bound, sent):
    with stub.rollout():
        Limited(responses=["mine"], limit=1000).bind(**bound).invoke("hello")
    (asked,) = stub.of("r")
    assert asked.body.get("max_completion_tokens") == sent
    assert "max_tokens" not in asked.body


def test_a_limit_below_one_is_none(stub):
    with stub.rollout():
        Limited(responses=["mine"], limit=-1).invoke("hello")
    (asked,) = stub.of("r")
    assert not {"max_tokens", "max_completion_tokens"} & asked.body.keys()
