"""A generator on a host: tokens arrive one by one, from a model that an actor keeps in memory.

python examples/generate.py [HOSTS]
"""

import sys
from collections.abc import Iterator

import skyfab as sky

WORDS = ("the", "model", "stays", "on", "its", "host", "and", "the", "words", "come", "here")


class Model:
    """A stand-in for a model that takes minutes to load."""

    def __init__(self, name):
        self.name = name

    def generate(self, prompt):
        yield from prompt.split()
        yield from WORDS


@sky.function
def upper(words: Iterator[str]):
    for word in words:
        yield word.upper()


if __name__ == "__main__":
    with sky.Compute(sys.argv[1] if len(sys.argv) > 1 else "local") as compute:
        model = compute.actor(Model, "tiny")
        for token in model.generate("Look,"):
            print(token, end=" ", flush=True)
        print()
        print(*(upper(model.generate("Again:")) >> compute))  # from one host through this program to another
