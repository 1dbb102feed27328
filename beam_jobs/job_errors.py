"""Errors that end a job's command."""


class JobError(RuntimeError):
    """The Beam job failed; finished work is kept for the next attempt."""


class OptionsError(ValueError):
    """An option, or a combination, can't be used."""


class TooManyDeadLettersError(RuntimeError):
    """Too much input is left out; the dataset is written, unless empty."""


class InputError(ValueError):
    """The input can't be used as requested."""
