"""Check once, and quickly, whether a store or the hub answers.

Without a network, their clients retry for minutes.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress

from pipeline.command_line.failures import first_line
from pipeline.command_line.installed import install

FIRST_ANSWER_SECONDS = 8.0

_EXTRAS = {"gs": "gcp", "gcs": "gcp", "s3": "aws", "s3a": "aws", "http": "http", "https": "http"}
_HINTS = {"gs": " (without credentials, NO_GCE_CHECK=true skips the search for them)"}

_answered: set[str] = set()


class NoAnswerError(ConnectionError):
    """A store or the hub gave no answer."""


def answer_of[T](ask: Callable[[], T], *, of: str) -> T:
    """Return a call's result, or NoAnswerError after a timeout; its thread keeps running."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(ask())
        except Exception as error:  # whatever a client raises belongs to the caller that waits
            future.set_exception(error)

    threading.Thread(target=run, name=f"first answer of {of}", daemon=True).start()
    try:
        return future.result(FIRST_ANSWER_SECONDS)
    except TimeoutError:
        if future.done():
            raise  # the client's own
        raise NoAnswerError(
            f"{of} gave no answer within {FIRST_ANSWER_SECONDS:g} s: check the network, the "
            f"credentials and, if one is needed, the proxy{_HINTS.get(of.split(':')[0], '')}"
        ) from None


def require_answer(url: str, *, look_at: Callable[[str], object] | None = None) -> None:
    """Ask a URL's store for one file, once per process; any answer will do.

    Local paths pass. NoAnswerError without an answer or a client.
    """
    store = store_of(url)
    if store is None or store in _answered:
        return
    import fsspec  # takes a tenth of a second; not for local tokenizers

    scheme, ask = store.partition("://")[0], look_at or _look_at
    try:
        with suppress(ValueError):  # an unknown scheme, which the caller reports better
            fsspec.get_filesystem_class(scheme)  # it reads datasets, even those of other programs
        answer_of(lambda: ask(url), of=store)
    except (FileNotFoundError, PermissionError):  # an answer, too
        pass
    except NoAnswerError:
        raise
    except Exception as error:  # clients raise types of their own
        reason = first_line(error) or "no reason given"
        if isinstance(error, LookupError):  # raised amid an answer that has other fields
            reason += ", which its client looked for in vain"
        if isinstance(error, ImportError) and scheme in _EXTRAS:
            reason += f": {install(_EXTRAS[scheme])}"
        raise NoAnswerError(f"{store} can't be used: {type(error).__name__}: {reason}") from error
    _answered.add(store)


def store_of(url: str) -> str | None:
    """Return scheme and host of a URL, None for a local path.

    Example:
        >>> store_of("gs://bucket/aligned/manifest.json")
        'gs://bucket'
    """
    scheme, separator, rest = url.partition("://")
    if not separator or scheme in ("file", "local", "memory"):
        return None
    return f"{scheme}://{rest.partition('/')[0]}"


def _look_at(url: str) -> None:
    import fsspec

    filesystem, path = fsspec.core.url_to_fs(url)
    filesystem.info(path)
