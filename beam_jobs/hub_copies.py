"""Inputs and outputs on the Hugging Face hub, `hf://datasets/OWNER/NAME`: copies of them here.

A repository takes some hundred commits an hour. A job writes several files for each shard and
renews a lock, each of which would be a commit. So a job works in a folder of this machine, and what
has changed there is sent at the end, manifests last.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from beam_jobs.errors import OptionsError
from beam_jobs.locks import OUTPUT_LOCK
from pipeline.command_line.failures import hinted
from pipeline.remote.first_contact import require_answer
from pipeline.remote.user_cache import cache_folder

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo
    from huggingface_hub.hf_file_system import HfFileSystemResolvedRepositoryPath

HUB = "hf://"
_SCRATCH = [".vocag-*", "*/.vocag-*", OUTPUT_LOCK]
_MANIFESTS = ["manifest.json", "teacher-*.json"]
_MARK = ".cache/huggingface/vocag"  # the client uploads nothing of that folder
"""Holds the commit that the copy stands on and, until all is uploaded, what is being done there."""
_WORKING, _SENDING = "working", "sending"


def input_here(pattern: str) -> str:
    """Return an input as a path here, downloaded from the hub; OptionsError if it can't be read."""
    if not pattern.startswith(HUB):
        return pattern
    with _explained(pattern):
        place = _resolve(pattern)
        return str(_download(place, place.revision) / place.path_in_repo)


@contextmanager
def output_here(url: str, say: Callable[[str], object], *, uploads: bool = True) -> Iterator[str]:
    """Yield the folder in which a job works; one on the hub is copied, and uploaded at the end.

    The copy stays in the user's cache: a job that was killed resumes there. `say` is told what was
    uploaded; without `uploads` nothing is. OptionsError if the repository can't be used, or
    somebody else has changed it since it was copied.
    """
    if not url.startswith(HUB):
        yield url
        return
    from huggingface_hub import HfApi

    with _explained(url):
        place = _resolve(url)
        found = HfApi().repo_info(place.repo_id, repo_type=place.repo_type, revision=place.revision)
        commit = found.sha or ""
        top = _copy(place, commit, url)
    folder, mark = top / place.path_in_repo, top / _MARK
    if not uploads:
        yield str(folder)
        return
    mark.write_text(f"{commit} {_WORKING}")
    try:
        yield str(folder)
    except Exception:
        say(f"nothing is uploaded to {url}; run the same command again to continue in {folder}")
        raise
    mark.write_text(f"{commit} {_SENDING}")
    with _explained(url, f"; {folder} has what was made: run the same command again to upload it"):
        for manifests in (_MANIFESTS, []):
            sent = _send(place, folder, mark.read_text().split()[0], manifests)
            mark.write_text(f"{sent.oid} {_SENDING}")
    mark.write_text(sent.oid)
    if sent.oid != commit:
        say(f"uploaded to {url}: {sent.commit_url}")


def _copy(place: "HfFileSystemResolvedRepositoryPath", commit: str, url: str) -> Path:
    """Return where a repository's copy is, at a commit unless a job's work is left there."""
    top = cache_folder("hub") / place.repo_type / place.repo_id / place.revision
    mark = top / _MARK
    of, _, left = mark.read_text().partition(" ") if mark.exists() else ("", "", "")
    if left and of != commit:
        refusal = OptionsError(f"{url} has changed since an unfinished job copied it to {top}")
        made = "what that job has made"
        if left == _SENDING:
            folder = top / place.path_in_repo
            made += f"; `hf upload` sends it from {folder} and overwrites the change"
        raise hinted(refusal, f"rm -r {quote(str(top))}  # and {made}")
    if not left and of != commit:
        shutil.rmtree(top, ignore_errors=True)
        _download(place, commit, top)
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.write_text(commit)
    return top


def _send(
    place: "HfFileSystemResolvedRepositoryPath", folder: Path, commit: str, ignored: Sequence[str]
) -> "CommitInfo":
    """Upload what differs, on top of a commit; return the one that is made."""
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
    """Download a repository's files below a path, or that match it; return where they are."""
    from huggingface_hub import snapshot_download

    path = place.path_in_repo
    found = snapshot_download(
        place.repo_id,
        repo_type=place.repo_type,
        revision=revision,
        allow_patterns=[path, f"{path}/*"] if path else None,
        local_dir=folder,
    )
    return Path(found)


@contextmanager
def _explained(url: str, left: str = "") -> Iterator[None]:
    """Turn the client's errors, which name no token, into one that says what to do."""
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except (HfHubHTTPError, FileNotFoundError) as error:
        reason = " ".join(str(error).split())
        refusal = OptionsError(f"{url} can't be used ({type(error).__name__}: {reason}){left}")
        make = "hf repos create OWNER/NAME --type dataset --private"
        raise hinted(refusal, f"hf auth whoami  # if it is new: {make}") from error
