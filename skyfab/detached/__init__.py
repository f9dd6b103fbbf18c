"""Detached runs, read back."""
