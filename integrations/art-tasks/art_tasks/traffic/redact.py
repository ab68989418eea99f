"""Replaces secrets and personal data in texts.

Known forms of keys are detect-secrets'; ours are passwords in prose ("my password is ..."), whole private keys, and long random
tokens of any form. Personal data with a form (mail addresses, cards, accounts, phones) are Presidio's. Names of people and places
have no form: they would need a language model, and stay.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, NamedTuple

from art_core.errors import ConfigError

SECRET = "SECRET"
NO_VALUES = (
    "expired|wrong|not|invalid|incorrect|correct|missing|required|too|being|still|also|the|that|this|in|on|always|now|never|reset|"
    "changed|lost|empty|blank|set|stored|safe|secure|weak|strong|locked|unknown|what|something|very|already|gone"
)
"""Words after "my password is" that aren't passwords."""
PRIVATE_KEY = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY[A-Z ]*-----.*?(?:-----END [A-Z ]*PRIVATE KEY[A-Z ]*-----|\Z)", re.DOTALL
)
PASSWORD = r"(?:pass(?:word|wd|phrase|code)?|pwd|passwort|kennwort|contraseña|mot de passe|senha)"
KEY = (
    r"(?:secret|token|credentials?|pin|otp|(?:verification|security) code"
    r"|(?:api|access|secret|private|auth)[ _-]?(?:key|token))"
)
NAMED = re.compile(rf"(?i)(?:.*[ _-])?(?:{PASSWORD}|{KEY})")
"""Names of fields whose values are secrets."""
QUOTED = r"\"([^\"\n]+)\"|'([^'\n]+)'|`([^`\n]+)`"
VARIED = r"(?=[^\s\"'`,;]*\d)[^\s\"'`,;()\[\]]{4,}\w"
ASSIGN = r"[\"'`]?\s*(?:[:=]+>?|->|\s[-–])\s*(?:bearer\s+)?"
PATTERNS = [
    re.compile(rf"(?i)(?<![a-z]){PASSWORD}{ASSIGN}(?:{QUOTED}|([^\s\"'`,;]{{4,}}))"),
    re.compile(rf"(?i)(?<![a-z_]){KEY}{ASSIGN}(?:{QUOTED}|({VARIED}))"),
    re.compile(
        rf"(?i)(?<![a-z])(?:{PASSWORD}|{KEY})\s+(?:is|was|to|ist|es|est|for [^.\n]{{1,40}}? is)\s+"
        rf"(?:{QUOTED}|((?=\S*[\d@#$%^&*_+=])\S{{3,}}\w))"
    ),
    re.compile(
        rf"(?i)\b(?:my|our|his|her|their|mein) {PASSWORD} (?:is|was|ist)\s+(?!(?:{NO_VALUES})\b)([^\W\d_]{{4,}})"
    ),
    re.compile(rf"(?i)(?<![a-z]){PASSWORD}\s+((?=\S*\d)(?=\S*[a-z])[^\s\"'`,;()]{{5,}}\w)"),
    re.compile(r"\b(?i:bearer|basic)\s+((?=\S*[0-9A-Z_=])[A-Za-z0-9+/_.=~-]{8,})"),
    re.compile(r"\s-u\s+[^\s:]+:(\S+)"),
]
"""Secrets in prose, code and commands; a group of each is the secret."""
TOKEN = re.compile(r"[A-Za-z0-9+/=_.~-]{20,}")
PREFIXED = re.compile(
    r"\b(?:AIza[A-Za-z0-9_-]{30,}|hf_[A-Za-z0-9]{30,}"
    r"|(?:sk|pk|rk|gh[oprsu]|xox[a-z]|npm|pypi|glpat|dop_v1|shp[a-z]{2})[-_](?=\S*\d)[A-Za-z0-9_.-]{16,})"
)
DIGEST = re.compile(r"(?i)(?:commit|sha-?\d*|md5|hash|digest|rev|revision)\W{0,3}\Z")
"""What is written before a number that identifies something public."""
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
            yield Part(*match.span(), SECRET)
        for pattern in PATTERNS:
            for match in pattern.finditer(text):
                group = next(number for number, value in enumerate(match.groups(), 1) if value is not None)
                yield Part(*match.span(group), SECRET)
        for match in PREFIXED.finditer(text):
            yield Part(*match.span(), SECRET)
        for match in TOKEN.finditer(text):
            for begin, end in _pieces(match):
                if _is_random(text[begin:end]) and not DIGEST.search(text[max(0, begin - 20) : begin]):
                    yield Part(begin, end, SECRET)
        for detector in self._detectors:
            for value in detector.analyze_string(text):
                yield from _tokens_with(text, value)

    def _personal(self, text: str) -> Iterator[Part]:
        for recognizer in self._recognizers:
            for it in recognizer.analyze(text, recognizer.supported_entities, None):
                if it.score >= LEAST_SCORE and not _may_be_anything(it.entity_type, text[it.start : it.end]):
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
        yield Part(start, max(end, begin + len(value)), SECRET)
        begin = text.find(value, max(end, begin + 1))


def _may_be_anything(sort: str, text: str) -> bool:
    """Whether it is a phone number without a space or sign, or an address that may be code, such as ``a::b``."""
    return (sort == "PHONE_NUMBER" and text.isdigit()) or (sort == "IP_ADDRESS" and sum(map(str.isdigit, text)) < 2)


def _pieces(match: re.Match[str]) -> list[tuple[int, int]]:
    """Return where a long token, or the parts of a path, are."""
    token, begin = match[0], match.start()
    if token.count("/") < 3 and not token.startswith(("/", "//", "./")):
        return [match.span()]
    return [(begin + it.start(), begin + it.end()) for it in re.finditer(r"[^/]{20,}", token)]


def names_secret(name: str) -> bool:
    """Whether a field with this name has a secret."""
    return NAMED.fullmatch(name) is not None


def _is_random(token: str) -> bool:
    hexadecimal = re.fullmatch(r"[0-9a-fA-F]+", token) is not None
    kinds = [any(map(of, token)) for of in (str.isdigit, str.isupper, str.islower)]
    varied = sum(kinds) >= 2 if hexadecimal else all(kinds)
    return varied and _entropy(hexadecimal)(token) >= (HEX_BITS if hexadecimal else BASE64_BITS)


@functools.cache
def _entropy(hexadecimal: bool) -> Callable[[str], float]:
    from detect_secrets.plugins.high_entropy_strings import Base64HighEntropyString, HexHighEntropyString

    return (HexHighEntropyString() if hexadecimal else Base64HighEntropyString()).calculate_shannon_entropy


def _merged(parts: list[Part]) -> list[Part]:
    """Return the parts in order; those that overlap become one, a secret if one of them is."""
    merged: list[Part] = []
    for part in sorted(parts):
        if merged and part.begin < merged[-1].end:
            last = merged[-1]
            sort = SECRET if SECRET in (last.sort, part.sort) else last.sort
            merged[-1] = Part(last.begin, max(last.end, part.end), sort)
        else:
            merged.append(part)
    return merged
