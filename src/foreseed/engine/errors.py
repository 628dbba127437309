"""The errors a user can meet; each message says what was given, what was expected and what to do."""


class ForeseedError(Exception):
    """Base of every error that foreseed raises on purpose."""


class ProgramError(ForeseedError):
    """A program file that cannot be trusted: damaged, foreign, or from the future."""


class ValuesError(ForeseedError):
    """A vector of values (or statistics) that does not fit its program, or is not finite."""


class SamplesError(ForeseedError):
    """Images or labels that a program cannot take."""


class BudgetError(ForeseedError):
    """A memory budget that the program does not fit; `needed` is the smallest that would do."""

    def __init__(self, message: str, needed: int) -> None:
        super().__init__(message)
        self.needed = needed
