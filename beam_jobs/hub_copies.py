"""Local copies of Hugging Face datasets, `hf://datasets/OWNER/NAME`.

The hub allows some hundred commits an hour, and each write would be one. So jobs work in a copy,
uploaded at the end, manifests last.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from beam_jobs.job_errors import OptionsError
from beam_jobs.locks import OUTPUT_LOCK
from pipeline.command_line.failures import hinted
from pipeline.command_line.folder_lock import NO_LOCKS, hold_folder
from pipeline.remote.first_contact import NoAnswerError, require_answer
from pipeline.remote.user_cache import cache_folder

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo
    from huggingface_hub.hf_file_system import HfFileSystemResolvedRepositoryPath

HUB = "hf://"
_SCRATCH = [".vocag-*", "*/.vocag-*", OUTPUT_LOCK]
_MANIFESTS = ["manifest.json", "teacher-*.json"]
_MARK = ".cache/huggingface/vocag"  # the client uploads nothing of that folder
"""Holds the copy's commit and, until all is uploaded, `_WORKING` or `_SENDING`."""
_WORKING, _SENDING = "working", "sending"


def input_here(pattern: str) -> str:
    """Return an input's local path, downloaded if on the hub; OptionsError if unreadable."""
    if not pattern.startswith(HUB):
        return pattern
    with _explained(pattern):
        place = _resolve(pattern)
        return str(_download(place, place.revision) / place.path_in_repo)


@contextmanager
def output_here(url: str, say: Callable[[str], object], *, uploads: bool = True) -> Iterator[str]:
    """Yield a job's folder: for the hub a local copy, uploaded at the end.

    A killed job resumes in its copy. OptionsError if the repository can't be used or has changed
    since it was copied, or another job has the copy.
    """
    if not url.startswith(HUB):
        yield url
        return
    with _explained(url):
        place = _resolve(url)
    top = cache_folder("hub") / place.repo_type / place.repo_id / place.revision
    folder, mark = top / place.path_in_repo, top / _MARK
    with hold_folder(f"{top}.lock", f"{url}, in the copy {top}", error=OptionsError):
        with _explained(url):
            commit = _newest_commit(place)
            _renew(top, place, commit, url)
        if not uploads:
            yield str(folder)
            return
        with _marked(mark, commit, folder, url, say):
            yield str(folder)
        sent = _upload(place, folder, mark, url)
    if sent.oid != commit:
        say(f"uploaded to {url}: {sent.commit_url}")


@contextmanager
def _marked(
    mark: Path, commit: str, folder: Path, url: str, say: Callable[[str], object]
) -> Iterator[None]:
    """Mark a copy as in use until its job succeeds, or fails without changes."""
    before, files = mark.read_text(), _listing(folder)
    mark.write_text(f"{commit} {_WORKING}")
    try:
        yield
    except BaseException as error:
        if _listing(folder) == files:
            mark.write_text(before)
        elif isinstance(error, Exception):
            say(f"nothing is uploaded to {url}; run the same command again to continue in {folder}")
        raise
    mark.write_text(f"{commit} {_SENDING}")


def _listing(folder: Path) -> dict[str, tuple[int, int]]:
    found = [(str(path), path.stat()) for path in folder.rglob("*") if path.is_file()]
    return {name: (stat.st_size, stat.st_mtime_ns) for name, stat in found if _MARK not in name}


def _renew(top: Path, place: "HfFileSystemResolvedRepositoryPath", commit: str, url: str) -> None:
    """Update a copy to a commit; OptionsError if its unfinished work is of another."""
    mark = top / _MARK
    of, _, left = mark.read_text().partition(" ") if mark.exists() else ("", "", "")
    if left and of != commit:
        raise _overtaken(url, top)
    if not left and of != commit:
        shutil.rmtree(top, ignore_errors=True)
        _download(place, commit, top)
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.write_text(commit)


def _overtaken(url: str, top: Path) -> OptionsError:
    error = OptionsError(
        f"{url} has changed since an unfinished job copied it to {top}: what that job has made is "
        "of an older state, and can't be uploaded"
    )
    return hinted(error, f"rm -r {quote(str(top))}  # then run the same command again")


def _upload(
    place: "HfFileSystemResolvedRepositoryPath", folder: Path, mark: Path, url: str
) -> "CommitInfo":
    from huggingface_hub.errors import HfHubHTTPError

    commit = mark.read_text().split()[0]
    with _explained(url, f"; {folder} has what was made: run the same command again to upload it"):
        for manifests in (_MANIFESTS, []):
            try:
                sent = _send(place, folder, commit, manifests)
            except HfHubHTTPError as error:
                if _newest_commit(place) != commit:
                    raise _overtaken(url, mark.parents[2]) from error
                raise
            commit = sent.oid
            mark.write_text(f"{commit} {_SENDING}")
    mark.write_text(commit)
    return sent


def _newest_commit(place: "HfFileSystemResolvedRepositoryPath") -> str:
    from huggingface_hub import HfApi

    found = HfApi().repo_info(place.repo_id, repo_type=place.repo_type, revision=place.revision)
    return found.sha or ""


def _send(
    place: "HfFileSystemResolvedRepositoryPath", folder: Path, commit: str, ignored: Sequence[str]
) -> "CommitInfo":
    from huggingface_hub import HfApi

    return HfApi().upload_folder(
        repo_id=place.repo_id,
        repo_type=place.repo_type,
        revision=place.revision,
        folder_path=folder,
        path_in_repo=place.path_in_repo,
        ignore_patterns=[*_SCRATCH, *ignored],
        commit_message="vocag",
        parent_commit=commit,
    )


def _resolve(url: str) -> "HfFileSystemResolvedRepositoryPath":
    from huggingface_hub.hf_file_system import HfFileSystem, HfFileSystemResolvedRepositoryPath

    require_answer(url)
    place = HfFileSystem(skip_instance_cache=True).resolve_path(url)
    if not isinstance(place, HfFileSystemResolvedRepositoryPath):
        raise OptionsError(f"{url} is a bucket, where jobs don't work: name a dataset's repository")
    return place


def _download(
    place: "HfFileSystemResolvedRepositoryPath", revision: str, folder: Path | None = None
) -> Path:
    """Return the repository's folder."""
    from huggingface_hub import snapshot_download

    path = place.path_in_repo
    # The client's `*` matches slashes, too, and its `**/` only folders; a name isn't a pattern.
    wanted = [name + end for name in (path.replace("**/", "*"), escape(path)) for end in ("", "/*")]
    found = snapshot_download(
        place.repo_id,
        repo_type=place.repo_type,
        revision=revision,
        allow_patterns=wanted if path else None,
        local_dir=folder,
    )
    return Path(found)


@contextmanager
def _explained(url: str, left: str = "") -> Iterator[None]:
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except (OptionsError, NoAnswerError):
        raise
    except Exception as error:  # the client's, of many unrelated types
        if isinstance(error, OSError) and error.errno in NO_LOCKS:
            raise OptionsError(
                f"{url} is copied to a file system without locks ({error.strerror}): set "
                "XDG_CACHE_HOME and HF_HOME to folders on another one"
            ) from error
        expected = isinstance(error, (HfHubHTTPError, OSError))
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        told = reason if expected else f"its client doesn't understand what it answers, {reason}"
        refusal = OptionsError(f"{url} can't be used ({told}){left}")
        make = "hf repos create OWNER/NAME --type dataset --private"
        raise hinted(refusal, f"hf auth whoami  # if it is new: {make}") from error
