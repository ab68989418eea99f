"""A display for tests of what is shown."""

from art_core.loop.display import Display


class Lines(Display):
    """Keeps the lines that a display would show."""

    def __init__(self):
        super().__init__(quiet=True)
        self.lines = []

    def say(self, text):
        self.lines.append(text)
