"""Inputs and outputs on the Hugging Face hub, `hf://datasets/OWNER/NAME`: copies of them here.

A repository takes some hundred commits an hour. A job writes several files for each shard and
renews a lock, each of which would be a commit. So a job works in a folder of this machine, and what
has changed there is sent at the end, manifests last.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from beam_jobs.errors import OptionsError
from beam_jobs.locks import OUTPUT_LOCK
from pipeline.command_line.failures import hinted
from pipeline.remote.first_contact import require_answer
from pipeline.remote.user_cache import cache_folder

if TYPE_CHECKING:
    from huggingface_hub.hf_file_system import HfFileSystemResolvedRepositoryPath

HUB = "hf://"
_SCRATCH = [".vocag-*", "*/.vocag-*", OUTPUT_LOCK]
_MANIFESTS = ["manifest.json", "teacher-*.json"]


def input_here(pattern: str) -> str:
    """Return an input as a path of this machine; one on the hub is downloaded by its client.

    Raises:
        OptionsError: there is no such repository, or it can't be read.
    """
    if not pattern.startswith(HUB):
        return pattern
    with _explained(pattern):
        place = _resolve(pattern)
        return str(_download(place, place.revision) / place.path_in_repo)


@contextmanager
def output_here(url: str, say: Callable[[str], object], *, uploads: bool = True) -> Iterator[str]:
    """Yield the folder in which a job works; one on the hub is copied, and uploaded at the end.

    The copy stays in the user's cache: a job that was killed resumes there.

    Args:
        url: of the output.
        say: told what was uploaded.
        uploads: whether what is there at the end is.

    Raises:
        OptionsError: there is no such repository, it can't be read or written, or it has been
            changed meanwhile.
    """
    if not url.startswith(HUB):
        yield url
        return
    from huggingface_hub import HfApi

    api = HfApi()
    with _explained(url):
        place = _resolve(url)
        now = api.repo_info(place.repo_id, repo_type=place.repo_type, revision=place.revision)
        commit = now.sha or ""
        top = cache_folder("hub") / place.repo_type / place.repo_id / place.revision
        mark = top / ".cache/huggingface/vocag-commit"  # the client uploads nothing of that folder
        if not mark.exists() or mark.read_text() != commit:
            shutil.rmtree(top, ignore_errors=True)
            _download(place, commit, top)
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.write_text(commit)
    folder = top / place.path_in_repo
    yield str(folder)
    if not uploads:
        return
    with _explained(url, f"; what was made is in {folder}, and the same command sends it"):
        for manifests in (_MANIFESTS, []):
            sent = api.upload_folder(
                repo_id=place.repo_id,
                repo_type=place.repo_type,
                revision=place.revision,
                folder_path=folder,
                path_in_repo=place.path_in_repo,
                ignore_patterns=[*_SCRATCH, *manifests],
                commit_message="vocag",
                parent_commit=commit,
            )
            commit = sent.oid
    mark.write_text(commit)
    say(f"uploaded to {url}: {sent.commit_url}")


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
