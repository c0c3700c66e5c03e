"""The error tree: by who is at fault and what there is to do.

Every message names the flag, file, line, row or learner at fault, and the remedy. The command line
prints the message as one line; a traceback appears only with ``--debug``. The exit codes here are those that
no error stands for.
"""

EXIT_STOPPED = 4
"""Of a run that ended before its final cut; it goes on from its checkpoint."""

EXIT_INTERRUPTED = 130
"""Of a process that Ctrl-C ended at once (128 + SIGINT)."""


class YetoError(Exception):
    """Base class of every error Yeto raises on purpose."""

    exit_code = 1


class ConfigError(YetoError):
    """A flag, environment variable or configuration file asks for something impossible."""

    exit_code = 2


class CoordinatorError(YetoError):
    """An event that no delay and no peer can cause reached the coordinator: a bug of the caller."""


class TapeError(YetoError):
    """A tape is damaged or cannot be written; the message names file and line."""


class ReplayDivergence(YetoError):
    """A recorded decision differs from the one that the rules give."""


class CheckpointError(YetoError):
    """A checkpoint is missing, damaged, or belongs to another run."""


class RecordingError(YetoError):
    """A recording of payloads is missing, damaged, of another session, or cannot be written."""


class ProtocolError(YetoError):
    """A peer sent bytes that the protocol does not allow here and now."""


class MergeError(YetoError):
    """Tensors given to the merge do not fit each other, or a result is unusable."""


class SvdPoolError(YetoError):
    """A worker of the SVD pool failed, and with it the whole pool, for good; the message names the worker."""


class DataError(YetoError):
    """A data file, row, template or tokenizer cannot be used; names file, row and remedy."""


def first_of(error: BaseException) -> BaseException:
    """Return the first error of a group of groups; several tasks may fail of one cause, and it says it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
