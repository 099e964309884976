"""The errors by which the judge hears of the way a call was made, and of a backend that does not load."""

from lowbit.errors import UnavailableError


class BrokenPromiseError(AssertionError):
    """A verdict on the way a call was made rather than on its result; the first word of its text is the verdict."""


class HostRefusedError(UnavailableError):
    """The host's own words on why the backend cannot be loaded."""

    def __init__(self, text: str) -> None:
        super().__init__(text, "", "")

    def __str__(self) -> str:
        return self.what
