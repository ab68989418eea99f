"""Write email_database.json and test_queries.json from a mailbox: python -m examples.email_search.classic.export

The tiny model was not made with this mailbox, and the other example does not train on it.
"""

import json
import random
from pathlib import Path

from ..mailbox import open_mailbox
from ..tasks import HELD_OUT_MAILBOXES, ask

MAILBOX = HELD_OUT_MAILBOXES[-1]
QUERIES = 30
HERE = Path(__file__).parent


def emails() -> list[dict[str, str]]:
    """Return the mailbox in the environment's form."""
    mailbox = open_mailbox(MAILBOX)
    read = filter(None, map(mailbox.read, range(10, 100)))
    return [
        {"id": str(it.id), "subject": it.subject, "sender": it.sender, "date": it.sent, "body": it.body} for it in read
    ]


def queries() -> list[dict[str, str]]:
    """Return questions with their answers and the email that has each."""
    rng = random.Random(0)
    facts = rng.sample(open_mailbox(MAILBOX).facts, QUERIES)
    return [{"query": ask(rng, it), "email_id": str(it.message_id), "answer": it.value} for it in facts]


if __name__ == "__main__":
    for name, content in (("email_database.json", emails()), ("test_queries.json", queries())):
        (HERE / name).write_text(json.dumps(content, indent=1) + "\n")
