"""A hub that never answers: a socket on this machine that listens and says nothing."""

import http.server
import socket
from collections.abc import Iterator
from pathlib import Path

import fsspec
import huggingface_hub.constants
import pytest

from pipeline.command_line.failures import hints_of
from pipeline.dataset.dataset_reading import read_manifest
from pipeline.models.teacher_files import find_teacher
from pipeline.remote import first_contact
from pipeline.remote.first_contact import NoAnswerError, answer_of, require_answer, store_of
from pipeline.remote.hub import why_silent
from pipeline.tokenization import TokenizerError, load_tokenizer
from pipeline.tokenization.sources import HUB_FILES
from tests.support.servers import answering


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the URL of a host that takes connections and never answers."""
    assert first_contact.FIRST_ANSWER_SECONDS < 10
    monkeypatch.setattr(first_contact, "FIRST_ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(first_contact, "_answered", set())
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def silent_hub(silent: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Return the URL of a hub that never answers; its client's cache is empty."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    point_hub_at(silent, monkeypatch)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    return silent


def point_hub_at(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Do what HF_ENDPOINT does when the client is imported."""
    template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


def one_line(raised: pytest.ExceptionInfo[Exception]) -> str:
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_a_tokenizer_of_a_silent_hub(silent_hub: str) -> None:
    with pytest.raises(TokenizerError) as raised:
        load_tokenizer("gpt2@main")
    assert f"hub ({silent_hub}) gave no answer within 0.2 s: check the network" in str(raised.value)
    assert one_line(raised).endswith(
        "cache on this machine holds no tokenizer.json or tokenizer.model or tekken.json"
    )


def test_a_teacher_of_a_silent_hub(silent_hub: str) -> None:
    with pytest.raises(ValueError, match=r'teacher "owner/name": .*gave no answer') as raised:
        find_teacher("owner/name")
    assert silent_hub in one_line(raised)


def test_a_silent_hub_s_files_are_fetched_elsewhere(
    silent_hub: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TokenizerError) as raised:
        load_tokenizer("owner/name@v1")
    included = " ".join(f"--include {name}" for name in HUB_FILES)
    download = f"hf download owner/name --revision v1 {included} --local-dir name"
    [hint] = hints_of(raised.value)
    assert hint.partition("  # ")[0] == f"hint: {download}"
    with pytest.raises(ValueError, match=r'teacher "owner/name"') as raised_too:
        find_teacher("owner/name")
    [hint] = hints_of(raised_too.value)
    assert hint.startswith("hint: hf download owner/name --include '*.json' ")
    (tmp_path / "owners").mkdir()
    (tmp_path / "owners" / "names").mkdir()  # a folder was meant, perhaps
    for load in (load_tokenizer, find_teacher):
        with pytest.raises(ValueError, match="no such f") as missing:
            load("owner/name")
        assert hints_of(missing.value) == ["hint: owners/names  # the nearest name"]
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(TokenizerError) as offline:
        load_tokenizer("gpt2")
    assert hints_of(offline.value) == ["hint: unset HF_HUB_OFFLINE TRANSFORMERS_OFFLINE"]


@pytest.mark.parametrize(
    ("status", "code", "hint"),
    [
        (404, "RepoNotFound", "hf models ls --search name  # or, if it is private: hf auth login"),
        (403, "GatedRepo", "hf auth login  # accept the conditions at {}/owner/name first"),
        (404, "RevisionNotFound", "owner/name  # its main branch"),
        (404, "EntryNotFound", "hf models ls owner/name  # its files"),
    ],
)
def test_what_the_hub_refuses_ends_in_a_command(
    status: int, code: str, hint: str, silent_hub: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    monkeypatch.setattr(first_contact, "FIRST_ANSWER_SECONDS", 8)
    with answering(Refusing) as port:
        url = f"http://127.0.0.1:{port}"
        point_hub_at(url, monkeypatch)
        with pytest.raises(TokenizerError, match="hub gave no tokenizer") as raised:
            load_tokenizer("owner/name@main")
        if code != "EntryNotFound":  # a model's files are whatever there are
            with pytest.raises(ValueError, match="hub gave no files") as model:
                find_teacher("owner/name@main")
            assert hints_of(model.value) == [f"hint: {hint.format(url)}"]
    assert hints_of(raised.value) == [f"hint: {hint.format(url)}"]


def test_nobody_listens(silent_hub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    point_hub_at(f"http://127.0.0.1:{port}", monkeypatch)
    assert "can't be reached (Connect" in str(why_silent("gpt2"))


def test_a_store_that_never_answers(silent: str) -> None:
    with pytest.raises(NoAnswerError, match=f"^{silent} gave no answer within 0.2 s") as raised:
        read_manifest(f"{silent}/aligned")
    one_line(raised)


def test_a_store_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(first_contact, "_look_at", asked.append)
    monkeypatch.setattr(first_contact, "_answered", set())
    monkeypatch.setattr(fsspec, "get_filesystem_class", str)  # there is a client
    for name in ("a", "b"):
        require_answer(f"gs://bucket/{name}")
        require_answer(f"{tmp_path}/{name}")
        require_answer(f"file://{tmp_path}/{name}")
    assert asked == ["gs://bucket/a"]


def test_what_a_client_raises() -> None:
    def refuse() -> None:
        raise TimeoutError("the client's own")

    with pytest.raises(TimeoutError, match="the client's own"):
        answer_of(refuse, of="a store")
    assert answer_of(lambda: 7, of="a store") == 7


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (FileNotFoundError("gone"), None),
        (PermissionError("not yours"), None),
        (RuntimeError("no credentials\nat all"), "gs://b can't be used: RuntimeError: no cred"),
        (ImportError("install gcsfs"), "gs://b can't be used: ImportError: install gcsfs"),
    ],
)
def test_what_is_an_answer(
    error: Exception, raised: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fsspec, "get_filesystem_class", str)  # there is a client
    monkeypatch.setattr(first_contact, "_answered", set())

    def ask(_: str) -> None:
        raise error

    if raised is None:
        require_answer("gs://b/x", look_at=ask)
        return
    with pytest.raises(NoAnswerError, match=raised) as caught:
        require_answer("gs://b/x", look_at=ask)
    one_line(caught)


@pytest.mark.parametrize(("scheme", "extra"), [("s3", "aws"), ("gs", "gcp")])
def test_a_missing_client_is_named_first(
    scheme: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"Install a client to access {name}")

    monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    remedy = rf"^{scheme}://b can't be used: ImportError: .*: pip install -e '.*\[{extra}\]'"
    with pytest.raises(NoAnswerError, match=remedy) as raised:
        require_answer(f"{scheme}://b/manifest.json", look_at=lambda _: pytest.fail("was asked"))
    one_line(raised)


def test_stores() -> None:
    assert store_of("s3://bucket/a/b") == "s3://bucket"
    assert store_of("https://host:80/a") == "https://host:80"
    assert store_of("corpus/a.jsonl") is None
