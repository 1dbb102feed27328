"""What ends a job's command."""


class JobError(RuntimeError):
    """The Beam job failed; what it finished is kept for the next attempt."""


class OptionsError(ValueError):
    """An option, or a combination of them, can't be used."""
