"""Encodes the text as numbers of characters: train.bin, and meta.pkl with the characters."""

import os
import pickle

import numpy as np

text = "one fish two fish red fish blue fish\n" * 200
chars = sorted(set(text))
folder = os.path.dirname(os.path.abspath(__file__))
np.array([chars.index(char) for char in text], dtype=np.uint16).tofile(os.path.join(folder, "train.bin"))
with open(os.path.join(folder, "meta.pkl"), "wb") as file:
    pickle.dump({"chars": chars}, file)
print(f"{len(text)} characters, {len(chars)} different")
