"""Files of Hugging Face repositories, from the hub or its client's cache.

The client asks a silent hub for minutes; here it is asked once.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from shlex import join, quote

from pipeline.command_line.failures import first_line, hinted
from pipeline.remote.first_contact import NoAnswerError, answer_of

_REPOSITORY = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*(@\S+)?")


def may_be_repository(source: str, *, with_owner: bool = False) -> bool:
    """Whether a name has the form of a repository's, [OWNER/]NAME[@REVISION]."""
    has_owner = "/" in source.partition("@")[0]
    return _REPOSITORY.fullmatch(source) is not None and (has_owner or not with_owner)


class HubError(ValueError):
    """The hub and its client's cache gave no file."""


def download_file(source: str, names: Sequence[str]) -> Path:
    """Download the first of `names` in a repository, [OWNER/]NAME[@REVISION], or raise HubError."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    repository, revision = _split(source)

    def first_of(local_only: bool) -> Path:
        missing = EntryNotFoundError("none was asked for")
        for name in names:
            try:
                found = hf_hub_download(
                    repository, name, revision=revision, local_files_only=local_only
                )
                return Path(found)
            except EntryNotFoundError as error:
                missing = error
        raise missing

    return _from_hub_or_cache(source, first_of, " or ".join(names), names)


def download_folder(source: str, patterns: Sequence[str]) -> Path:
    """Download a repository's matching files, as `download_file`; return their folder."""
    from huggingface_hub import snapshot_download

    repository, revision = _split(source)

    def folder(local_only: bool) -> Path:
        found = snapshot_download(
            repository,
            revision=revision,
            allow_patterns=list(patterns),
            local_files_only=local_only,
        )
        return Path(found)

    return _from_hub_or_cache(source, folder, "files of a model", patterns)


def why_silent(source: str) -> str | None:
    """Return why the hub can't be asked for a repository, None if it answers at all."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    repository, revision = _split(source)
    url = hf_hub_url(repository, "config.json", revision=revision)
    name = f"the Hugging Face hub ({constants.ENDPOINT})"
    try:
        answer_of(lambda: get_hf_file_metadata(url), of=name)
    except HfHubHTTPError:
        return None
    except NoAnswerError as error:
        return str(error)
    except Exception as error:  # no network, no such host, no proxy, offline by choice
        return f"{name} can't be reached ({type(error).__name__}: {first_line(error)})"
    return None


def _from_hub_or_cache(
    source: str, load: Callable[[bool], Path], what: str, patterns: Sequence[str]
) -> Path:
    silence = why_silent(source)
    try:
        return load(silence is not None)
    except Exception as error:  # the hub client raises many unrelated types
        told = f"{silence}; and its cache on this machine holds no {what}"
        if silence is None:
            told = (
                f"the Hugging Face hub gave no {what} ({type(error).__name__}: "
                f"{first_line(error)}); check the name, or HF_TOKEN for a gated repository"
            )
        remedy = _remedy(source, None if silence else error, patterns)
        raise hinted(HubError(told), remedy) from error


def _remedy(source: str, error: Exception | None, patterns: Sequence[str]) -> str:
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if error is None and constants.HF_HUB_OFFLINE:
        return "unset HF_HUB_OFFLINE TRANSFORMERS_OFFLINE"
    repository, revision = _split(source)
    if isinstance(error, GatedRepoError):  # a RepositoryNotFoundError, too
        return f"hf auth login  # accept the conditions at {constants.ENDPOINT}/{repository} first"
    if isinstance(error, RepositoryNotFoundError):
        name = quote(repository.rpartition("/")[2])
        return f"hf models ls --search {name}  # or, if it is private: hf auth login"
    if isinstance(error, RevisionNotFoundError):
        return f"{repository}  # its main branch"
    if isinstance(error, EntryNotFoundError):
        return f"hf models ls {quote(repository)}  # its files"
    folder = repository.rpartition("/")[2]
    included = [word for pattern in patterns for word in ("--include", pattern)]
    branch = ["--revision", revision] if revision else []
    command = join(["hf", "download", repository, *branch, *included, "--local-dir", folder])
    later = f"  # where the hub can be reached; then name the folder {folder}"
    return command + (later if error is None else "")


def _split(source: str) -> tuple[str, str | None]:
    repository, _, revision = source.partition("@")
    return repository, revision or None
