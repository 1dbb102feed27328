"""What ends a job's command."""


class JobError(RuntimeError):
    """The Beam job failed; what it finished is kept for the next attempt."""


class OptionsError(ValueError):
    """An option, or a combination of them, can't be used."""


class TooManyDeadLettersError(RuntimeError):
    """More of the input is left out than was allowed; the dataset is written, if it has any."""


class InputError(ValueError):
    """The input can't be read as asked for: a mistake to correct before the job starts."""
