"""Copying exercises without chat: many labels in few tokens.

They come first. A model that can't copy yet gets hardly any signal from one label in a hundred tokens. Here a third of the
tokens are labels, and they teach the skill that questions need: find the earlier occurrence and repeat what followed it.
"""

from __future__ import annotations

import random

from examples.email_search.mailbox import ATTRIBUTES, CITIES, KINDS, MONTHS, PEOPLE, PROJECTS, random_value

Pieces = list[tuple[str, bool]]
"""Consecutive pieces of a text, and whether each is a label."""

WORDS = [*PROJECTS, *KINDS, *PEOPLE, *CITIES, *MONTHS, *ATTRIBUTES]
SEPARATORS = (" ", " ", '", "', "\n", ". ")


def make_drill(rng: random.Random) -> Pieces:
    """Return a random exercise."""
    return rng.choice([repeat_words, _look_up_ids, _look_up_facts])(rng)


def repeat_words(rng: random.Random) -> Pieces:
    """Return a list of words followed by the same list."""
    words = rng.choices(WORDS, k=rng.randint(4, 12))
    separator = rng.choice(SEPARATORS)
    # The first word can't be predicted.
    return [(separator.join(words) + "\n" + words[0], False), (separator + separator.join(words[1:]), True)]


def _look_up_ids(rng: random.Random) -> Pieces:
    projects, kinds = rng.sample(PROJECTS, 3), rng.sample(KINDS, 3)
    topics = rng.sample([(project, kind) for project in projects for kind in kinds], rng.randint(2, 5))
    ids = dict(zip(topics, rng.sample(range(10, 100), len(topics)), strict=True))
    table = "".join(f"{p} {k} from {rng.choice(PEOPLE)} id {ids[p, k]}\n" for p, k in topics)
    pieces = [(table, False)]
    for project, kind in rng.sample(topics, len(topics)):
        pieces += [(f"{project} {kind} id ", False), (f"{ids[project, kind]}", True), ("\n", False)]
    return pieces


def _look_up_facts(rng: random.Random) -> Pieces:
    values = {name: random_value(rng, name) for name in rng.sample(ATTRIBUTES, rng.randint(2, 5))}
    pieces = [("".join(f"The {name} is {value}. " for name, value in values.items()) + "\n", False)]
    for name in rng.sample(list(values), len(values)):
        opening = rng.choice([f"The {name} is ", f"{name}: ", f'What is the {name}? "'])
        pieces += [(opening, False), (f"{values[name]}", True), (rng.choice([". ", "\n"]), False)]
    return pieces
