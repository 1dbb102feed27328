"""Errors that end a job's command."""


class JobError(RuntimeError):
    """The Beam job failed; finished work is kept for the next attempt."""


class OptionsError(ValueError):
    """An option, or a combination of them, can't be used."""


class TooManyDeadLettersError(RuntimeError):
    """More input is left out than allowed; the dataset is written, unless it is empty."""


class InputError(ValueError):
    """The input can't be read as requested: a mistake to correct before the job starts."""
