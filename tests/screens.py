"""A display that keeps what is said, for tests of what a person is told."""

from art_core.loop.display import Display


class Lines(Display):
    """Keeps what is said."""

    def __init__(self):
        super().__init__(quiet=True)
        self.lines = []

    def say(self, text):
        self.lines.append(text)
