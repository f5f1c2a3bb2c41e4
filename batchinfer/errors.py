"""Errors that are the user's to fix; the command line prints them without a traceback."""


class InputError(ValueError):
    """Something given is missing, unreadable or impossible. The message says what to do."""


class KernelsWarning(RuntimeWarning):
    """The job runs, slower than it could: kernels are missing."""
