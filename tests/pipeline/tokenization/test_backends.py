"""What tokenizer libraries throw is kept to the text on which they do."""

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fastokens
import pytest
import tokenizers

from pipeline.tokenization import Tokenizer, TokenizerError, load_tokenizer
from tests.support.tokenizer_zoo import definition, with_added, write_definition

PLAIN = [b"plain words", "café".encode()]


def that_panics(folder: Path) -> Path:
    """Write a tokenizer whose library panics on "ab   ": two added tokens claim its spaces."""
    spaces = tokenizers.AddedToken("  ", lstrip=True, normalized=False)
    letters = tokenizers.AddedToken("ab", rstrip=True, normalized=False)
    return write_definition(with_added(definition("qwen_like"), spaces, letters), folder)


class PanicException(BaseException):
    pass


def raising(error: BaseException) -> Callable[..., Any]:
    def call(*_: object, **__: object) -> Any:
        raise error

    return call


class Broken:
    """A library's tokenizer, whatever it is asked for."""

    def __init__(self, error: BaseException) -> None:
        self.encode_batch = self.encode_batch_flat = self.normalize_str = raising(error)


@pytest.mark.parametrize("fast", [True, False])
def test_a_panic_fails_its_document_and_no_other(tmp_path: Path, fast: bool) -> None:
    path = str(that_panics(tmp_path))
    tokenizer = load_tokenizer(path, fast=fast)
    batch = tokenizer.tokenize_batch([PLAIN[0], b"ab   ", PLAIN[1], b"ab   "])
    reason = "the tokenizers library fails (PanicException): AddedVocabulary bad split"
    assert batch.failures == {1: reason, 3: reason}
    assert batch.cu_tokens[2] == batch.cu_tokens[1]
    assert batch.input_ids.tolist() == tokenizer.tokenize_batch(PLAIN).input_ids.tolist()


@pytest.mark.parametrize("error", [Exception("no such token"), PanicException("no such token")])
@pytest.mark.parametrize("part", ["tokenizer", "_normalizer"])
def test_an_error_of_the_library_fails_its_documents(
    tmp_path: Path, part: str, error: BaseException
) -> None:
    tokenizer = small(tmp_path)
    setattr(tokenizer._reference, part, Broken(error))
    batch = tokenizer.tokenize_batch([*PLAIN, "e\u0301".encode()])  # only this one is rewritten
    reason = f"the tokenizers library fails ({type(error).__name__}): no such token"
    failed = (0, 1, 2) if part == "tokenizer" else (2,)
    assert batch.failures == dict.fromkeys(failed, reason)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError()])
def test_what_is_no_failure_of_the_library_is_not_caught(
    tmp_path: Path, error: BaseException
) -> None:
    tokenizer = small(tmp_path)
    tokenizer._reference.tokenizer = Broken(error)  # type: ignore[attr-defined]
    with pytest.raises(type(error)):
        tokenizer.tokenize_batch(PLAIN)


def test_a_panic_of_the_fast_path_ends_it_and_loses_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(write_definition(definition("gpt2_like"), tmp_path))
    expected = load_tokenizer(path, fast=False).tokenize_batch(PLAIN)
    tokenizer = load_tokenizer(path)
    assert tokenizer._fast is not None
    tokenizer._fast.tokenizer = Broken(PanicException("index out of range"))
    with caplog.at_level(logging.WARNING):
        batch = tokenizer.tokenize_batch(PLAIN)
    assert batch.input_ids.tolist() == expected.input_ids.tolist()
    assert not batch.failures
    assert not tokenizer.fast
    assert tokenizer.slow_reason == "fastokens failed on a text"
    reason = "the fastokens library fails (PanicException): index out of range"
    assert caplog.text.count(reason) == 1


def test_a_panic_while_loading_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(write_definition(definition("gpt2_like"), tmp_path))
    panic = raising(PanicException("bad merges"))
    monkeypatch.setattr(fastokens, "Tokenizer", SimpleNamespace(from_json_str=panic))
    reason = load_tokenizer(path).slow_reason
    assert reason == "the fastokens library fails (PanicException): bad merges"
    monkeypatch.setattr(tokenizers, "Tokenizer", SimpleNamespace(from_str=panic))
    with pytest.raises(TokenizerError, match=r"does not load: .*PanicException.*bad merges"):
        load_tokenizer(path)


def small(folder: Path) -> Tokenizer:
    return load_tokenizer(str(write_definition(definition("nfc"), folder)), fast=False)
