"""Why a row cannot be measured here."""


class Skip(Exception):
    """The machine lacks what the row compares with."""
