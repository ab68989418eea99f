"""Secrets and personal data do not reach the tasks; what a task needs does."""

import json
import random
import string
from collections import Counter

import pytest

from art_tasks.traffic import Request, curate
from art_tasks.traffic.curate import as_lines
from art_tasks.traffic.redact import Redactor

# Presidio and detect-secrets are in .engines.
pytestmark = pytest.mark.engines
WORDS = "cancel order refund invoice parcel address delivery broken late colour size exchange account phone store"


def sentence(random_: random.Random) -> str:
    return " ".join(random_.choice(WORDS.split()) for _ in range(8)) + f" {random_.randrange(10_000)}"


def random_text(random_: random.Random, length: int, alphabet: str = string.ascii_letters + string.digits) -> str:
    return "".join(random_.choice(alphabet) for _ in range(length))


def planted_secrets(random_: random.Random) -> dict[str, tuple[str, str]]:
    """Kind -> what somebody writes, and the part of it that must not be left."""

    def some(length: int, alphabet: str = string.ascii_letters + string.digits) -> str:
        return random_text(random_, length, alphabet)

    upper, hexadecimal, body = string.ascii_uppercase + string.digits, "0123456789abcdef", some(60)
    keys = {
        "AWS access key": f"AKIA{some(16, upper)}",
        "AWS secret key": some(40),
        "GitHub": f"ghp_{some(36)}",
        "GitLab": f"glpat-{some(20)}",
        "OpenAI project": f"sk-proj-{some(48)}",
        "OpenAI": f"sk-{some(20)}T3BlbkFJ{some(20)}",
        "Anthropic": f"sk-ant-api03-{some(93)}",
        "Hugging Face": f"hf_{some(34, string.ascii_letters)}",
        "Google": f"AIza{some(35)}",
        "Slack": f"xoxb-{some(12, string.digits)}-{some(12, string.digits)}-{some(24)}",
        "Stripe": f"sk_live_{some(24)}",
        "SendGrid": f"SG.{some(22)}.{some(43)}",
        "Twilio": f"SK{some(32, hexadecimal)}",
        "Mailchimp": f"{some(32, hexadecimal)}-us12",
        "npm": f"npm_{some(36)}",
        "PyPI": f"pypi-AgEIcHlwaS5vcmc{some(70)}",
        "Discord": f"M{some(23)}.{some(6)}.{some(27)}",
        "Telegram": f"{some(9, '123456789')}:{some(35)}",
        "JSON web token": f"eyJ{some(33)}.eyJ{some(40)}.{some(43)}",
        "hexadecimal": some(40, hexadecimal),
        "bearer": f"Bearer {some(12)}",
        "URL": f"https://ann:{some(14)}@example.com/x",
        "password": f"password: {some(9)}",
        "password in a sentence": f"my password is {some(8)}7",
        "private key": f"-----BEGIN RSA PRIVATE KEY-----\n{body}\n-----END RSA PRIVATE KEY-----",
    }
    parts = {
        "bearer": slice(7, None),
        "URL": slice(12, 26),
        "password": slice(10, None),
        "password in a sentence": slice(15, None),
    }
    return {
        kind: (key, body if kind == "private key" else key[parts.get(kind, slice(None))]) for kind, key in keys.items()
    }


def test_secrets_of_25_kinds_do_not_reach_the_tasks():
    random_ = random.Random(4)
    asked, secrets = [], []
    for number in range(20):
        for kind, (written, secret) in planted_secrets(random_).items():
            secrets.append((kind, secret))
            message = f"{sentence(random_)} it is {written} thanks"
            messages = [{"role": "user", "content": message}, {"role": "user", "content": "please"}]
            given = [message, {"question": message}, messages][number % 3]
            asked.append(Request(given, f"{kind}{number}", answer=f"you said {written} !"))
    curated = curate(asked, redact=Redactor())
    written = as_lines(curated.tasks).decode()
    assert len(secrets) == 500
    assert Counter(kind for kind, secret in secrets if secret in written) == {}
    assert curated.redacted["SECRET"] >= 1000


def test_fields_with_a_secrets_name_and_numbers_of_cards_are_replaced():
    given = {
        "password": "hunter",
        "user_pin": 4821,
        "card": 4111111111111111,
        "count": 12,
        "a@x.org": 1,
        "b@x.org": 2,
        "ok": True,
    }
    (task,) = curate([Request({**given, "text": "hello there"}, "a")], redact=Redactor(), held_out=0).train
    assert task["input"] == {
        "password": "<SECRET>", "user_pin": "<SECRET>", "card": "<CREDIT_CARD>", "count": 12, "<EMAIL_ADDRESS>": 1,
        "<EMAIL_ADDRESS> 5": 2, "ok": True, "text": "hello there",
    }  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "my password is correcthorse",
        "pwd Tiger99!x",
        "Password - Tiger99!",
        'set {"password": "my secret pass phrase"} please',
        "Mein Passwort ist Geheim99!",
        "curl -u admin:hunter22 https://example.com",
        "the code is in the mail, otp: 443322",
    ],
)
def test_passwords_in_prose_are_replaced(text):
    redacted, found = Redactor()(text)
    assert found["SECRET"] == 1
    assert not any(
        secret in redacted for secret in ("correcthorse", "Tiger99", "phrase", "Geheim99", "hunter22", "443322")
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("write to ann.lee+x@mail.example.org now", "write to <EMAIL_ADDRESS> now"),
        ("call +1 415 555 2671 or (415) 555-2671", "call <PHONE_NUMBER> or <PHONE_NUMBER>"),
        ("card 4111 1111 1111 1111", "card <CREDIT_CARD>"),
        ("pay to DE89370400440532013000", "pay to <IBAN_CODE>"),
        ("it came from 203.0.113.7", "it came from <IP_ADDRESS>"),
        ("my number is 536-90-4399", "my number is <US_SSN>"),
    ],
)
def test_personal_data_with_a_form_is_replaced(text, expected):
    assert Redactor()(text)[0] == expected


@pytest.mark.parametrize(
    "text",
    [
        "What is 3847298374 * 23984?",
        "refund order 1017 of 2026-11-03 at 12:30",
        "How do I reset my password? The token is expired.",
        "I have a basic understanding of the bearer document",
        "set max_token: 4096 and def f(token: Optional[str]) -> token = tokenizer.decode(x)",
        "What is the secret: hidden. My password is wrong. spin: fast",
        "see key-value-store-implementation-guide and api-reference-documentation-page.html",
        "git show commit 3f786850e387550fdab836ed7e6dc881de23001b",
        "std::vector of a::b",
        "see https://example.com/docs/getting-started/install-guide-for-beginners?page=12",
        "open /usr/local/lib/python3.11/site-packages/transformers/modeling_utils.py",
        "call get_user_details_by_reservation_id with 123e4567-e89b-12d3-a456-426614174000",
    ],
)
def test_what_a_task_needs_stays(text):
    assert Redactor()(text) == (text, Counter())


def test_requests_that_differ_in_what_is_redacted_are_one_task_whose_conversation_has_no_name():
    asked = [Request(f"change my mail to {name}@example.org", f"{name}@example.org") for name in ("ann", "bob")]
    (task,) = curate(asked, redact=Redactor(), held_out=0).train
    assert task["input"] == "change my mail to <EMAIL_ADDRESS>"
    assert task["seen"] == 2
    assert "ann" not in json.dumps(task)
