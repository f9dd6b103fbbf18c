"""The data and model of `skyfab train` and the examples: handwritten digits, and a small classifier.

``digits.csv.gz`` has 1,797 digits: a line for each, first the digit, then its 8×8 pixels row by row, from 0 (paper) to
16 (ink). It is the test part of "Optical Recognition of Handwritten Digits" by E. Alpaydin and C. Kaynak (1998), UCI
Machine Learning Repository, https://doi.org/10.24432/C50P49, licensed under CC BY 4.0
(https://creativecommons.org/licenses/by/4.0/), taken from scikit-learn's ``load_digits()``; only the format is changed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

DIGITS: Final = Path(__file__).with_name("digits.csv.gz")
