from importlib.resources import files

import numpy as np


class Table:
    """How often the package's own words occur in a text."""

    def __init__(self):
        self.words = (files("counts") / "words.txt").read_text().split()
        self.counts = np.zeros(len(self.words), dtype=int)

    def add(self, text):
        for word in text.split():
            if word in self.words:
                self.counts[self.words.index(word)] += 1

    def __str__(self):
        return " ".join(f"{word}={count}" for word, count in zip(self.words, self.counts, strict=True))
