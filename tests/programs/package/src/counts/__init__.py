"""Counts of words."""

from counts.table import Table

__all__ = ["Table"]
