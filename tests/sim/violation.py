"""The one way in which a run fails."""


class Violation(Exception):
    """A promise is broken."""
