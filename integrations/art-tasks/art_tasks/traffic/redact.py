"""Replaces secrets and personal data in texts.

Known forms of keys are detect-secrets'; ours are passwords in prose ("my password is ..."), whole private keys, and long random
tokens of any form. Personal data with a form (mail addresses, cards, accounts, phones) are Presidio's. Names of people and places
have no form: they would need a language model, and stay.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

from art_core.errors import ConfigError

PRIVATE_KEY = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY[A-Z ]*-----.*?(?:-----END [A-Z ]*PRIVATE KEY[A-Z ]*-----|\Z)", re.DOTALL
)
NAME = r"(?:pass(?:word|wd|phrase|code)|pwd|secret|token|credentials?|pin|(?:api|access|secret|private|auth)[ _-]?(?:key|token))"
ASSIGNED = re.compile(rf"(?i){NAME}[\"'`]?\s*(?:[:=]+>?|->)\s*(?:bearer\s+)?[\"'`]?([^\s\"'`,;]{{4,}})")
QUOTED = r"\"([^\"\n]+)\"|'([^'\n]+)'|`([^`\n]+)`"
SAID = re.compile(
    rf"(?i)\b{NAME}\s+(?:is|was|to|for [^.\n]{{1,40}}? is)\s+(?:{QUOTED}|((?=\S*[\d@#$%^&*_+=])\S{{3,}}\w))"
)
BEARER = re.compile(r"\b(?i:bearer|basic)\s+((?=\S*[0-9A-Z_=])[A-Za-z0-9+/_.=~-]{8,})")
TOKEN = re.compile(r"[A-Za-z0-9+/=_.~-]{20,}")
PREFIXED = re.compile(
    r"\b(?:AIza|(?:sk|pk|rk|hf|gh[oprsu]|xox[a-z]|npm|pypi|glpat|dop_v1|shp[a-z]{2}|key|api)[-_])[A-Za-z0-9_.-]{16,}"
)
AROUND = re.compile(r"[^\s\"'`<>(){}\[\],;]*")
"""What belongs to a token, of which a known form may be a part."""
NO_SECRETS = {
    "Base64 High Entropy String",
    "Hex High Entropy String",
    "Secret Keyword",
    "Public IP (ipv4)",
    "Private Key",
}
"""Detectors of lines of code, for which ours stand in, and of what is personal data."""
BASE64_BITS, HEX_BITS = 4.0, 3.0
"""Bits per character from which a token is random: 40 random base64 characters have about 4.8, words about 3.5."""
LEAST_SCORE = 0.4
"""Presidio's, from 0 to 1: below are digits that may be anything."""


class Part(NamedTuple):
    """A part of a text to be replaced."""

    begin: int
    end: int
    sort: str


class Redactor:
    """``redactor(text)`` returns the text with tags such as ``<EMAIL_ADDRESS>`` instead, and how many of each there are."""

    def __call__(self, text: str) -> tuple[str, Counter[str]]:
        found: Counter[str] = Counter()
        parts, rest = [], 0
        for part in _merged([*self._secrets(text), *self._personal(text)]):
            found[part.sort] += 1
            parts += [text[rest : part.begin], f"<{part.sort}>"]
            rest = part.end
        return "".join([*parts, text[rest:]]), found

    def _secrets(self, text: str) -> Iterator[Part]:
        for match in PRIVATE_KEY.finditer(text):
            yield Part(*match.span(), "SECRET")
        for pattern in (ASSIGNED, SAID, BEARER):
            for match in pattern.finditer(text):
                group = next(number for number, value in enumerate(match.groups(), 1) if value is not None)
                yield Part(*match.span(group), "SECRET")
        for match in PREFIXED.finditer(text):
            yield Part(*match.span(), "SECRET")
        for match in TOKEN.finditer(text):
            if _is_random(match[0]):
                yield Part(*match.span(), "SECRET")
        for detector in self._detectors:
            for value in detector.analyze_string(text):
                yield from _tokens_with(text, value)

    def _personal(self, text: str) -> Iterator[Part]:
        for recognizer in self._recognizers:
            for it in recognizer.analyze(text, recognizer.supported_entities, None):
                # A phone number without a space or sign may as well be any number.
                if it.score >= LEAST_SCORE and not (
                    it.entity_type == "PHONE_NUMBER" and text[it.start : it.end].isdigit()
                ):
                    yield Part(it.start, it.end, it.entity_type)

    @cached_property
    def _detectors(self) -> list[Any]:
        try:
            from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class
        except ImportError as error:
            raise _missing() from error
        return [of() for sort, of in get_mapping_from_secret_type_to_class().items() if sort not in NO_SECRETS]

    @cached_property
    def _recognizers(self) -> list[Any]:
        try:
            from presidio_analyzer import predefined_recognizers as them
        except ImportError as error:
            raise _missing() from error

        class Email(them.EmailRecognizer):
            def validate_result(self, pattern_text: str) -> bool:
                return True  # without asking the network for the list of all domains

        kinds = (
            Email, them.CreditCardRecognizer, them.IbanRecognizer, them.PhoneRecognizer, them.IpRecognizer,
            them.MacAddressRecognizer, them.CryptoRecognizer, them.UsSsnRecognizer, them.UsItinRecognizer,
        )  # fmt: skip
        return [kind() for kind in kinds]


def _missing() -> ConfigError:
    return ConfigError(
        "--redact needs detect-secrets and Presidio: pip install -e 'integrations/art-tasks[redact]' in the checkout of art"
    )


def _tokens_with(text: str, value: str) -> Iterator[Part]:
    """Yield where the tokens are that have ``value`` in them: some detectors return only a part of a key."""
    begin = text.find(value) if value else -1
    while begin >= 0:
        start = begin
        while start > 0 and AROUND.fullmatch(text[start - 1]) and text[start - 1] not in ":@/=":
            start -= 1
        end = AROUND.match(text, begin + len(value)).end()  # type: ignore[union-attr]
        yield Part(start, max(end, begin + len(value)), "SECRET")
        begin = text.find(value, max(end, begin + 1))


def _is_random(token: str) -> bool:
    from detect_secrets.plugins.high_entropy_strings import Base64HighEntropyString, HexHighEntropyString

    hexadecimal = re.fullmatch(r"[0-9a-fA-F]+", token) is not None
    kinds = [any(map(of, token)) for of in (str.isdigit, str.isupper, str.islower)]
    varied = sum(kinds) >= 2 if hexadecimal else all(kinds)
    plugin, bits = (HexHighEntropyString(), HEX_BITS) if hexadecimal else (Base64HighEntropyString(), BASE64_BITS)
    return varied and plugin.calculate_shannon_entropy(token) >= bits


def _merged(parts: list[Part]) -> list[Part]:
    """Return the parts in order; those that overlap become one, a secret if one of them is."""
    merged: list[Part] = []
    for part in sorted(parts):
        if merged and part.begin < merged[-1].end:
            last = merged[-1]
            sort = "SECRET" if "SECRET" in (last.sort, part.sort) else last.sort
            merged[-1] = Part(last.begin, max(last.end, part.end), sort)
        else:
            merged.append(part)
    return merged
