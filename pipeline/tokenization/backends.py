"""The tokenizer libraries under one interface; `fastokens` is the fast path."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import product
from types import MappingProxyType
from typing import NamedTuple

import fastokens
import numpy as np
import orjson
import sentencepiece
import tokenizers
from numpy.typing import NDArray

from pipeline.tokenization.contents import (
    byte_names,
    contents_of,
    loses_characters,
    lost_bytes,
    spells_text,
)
from pipeline.tokenization.conversion import convert_sentencepiece
from pipeline.tokenization.definition import (
    SPACE_PIECE,
    Conventions,
    Definition,
    added_tokens,
    bare_definition,
    content_normalizer,
    disarm_control_tokens,
    keeps_ascii,
    model_pieces,
    pre_tokenizer_steps,
    puts_space_first,
    read_conventions,
    spells_spaces,
    without_gaps,
    without_metaspace,
)
from pipeline.tokenization.offset_proof import byte_positions
from pipeline.tokenization.sources import TokenizerError, TokenizerFile


class LibraryError(ValueError):
    """A tokenizer library failed on a text."""


@contextmanager
def _failures_of(library: str) -> Iterator[None]:
    """Raise a library's failures, also Rust panics, as `LibraryError`.

    A `PanicException` isn't an `Exception`; each library has its own and exports none.
    """
    try:
        yield
    except (LibraryError, MemoryError):
        raise
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            kind = type(error).__name__
            raise LibraryError(f"the {library} library fails ({kind}): {error}") from error
        raise


class Report(NamedTuple):
    """A text's ids [T], byte ranges [T, 2], and tokens' surfaces, b"" if unknown."""

    ids: NDArray[np.uint32]
    ranges: NDArray[np.int64]
    surfaces: list[bytes]


class Encoded(NamedTuple):
    """A text's ids [T], and a call for the library's report, which few texts need."""

    ids: NDArray[np.uint32]
    report: Callable[[], Report]


class HuggingFaceReference:
    """A `tokenizer.json`, read by `tokenizers`.

    Attributes:
        control: ids by name of control tokens that no text spells; empty if honoured.
        added_strings: added tokens that texts may hold.
        pieces: ids by token string, without added tokens.
        keeps_ascii: whether lengths alone place tokens in an ASCII text.
        restarting: ids of added tokens after which a space may be put, as before a text.
    """

    def __init__(self, file: TokenizerFile, *, honour_special: bool, proven: bool) -> None:
        """Load the tokenizer; TokenizerError if it would give wrong ids or offsets."""
        original = file.definition
        self.definition = bare_definition(original)
        self.control: dict[str, int] = {}
        try:
            if not honour_special:
                self.definition, self.control = disarm_control_tokens(self.definition)
            if not proven:  # the library's own message about a definition is the best
                _ = self.tokenizer
            self.conventions = read_conventions(original)
        except Exception as error:  # also missing fields, or fields of a wrong type
            reason = error if isinstance(error, LibraryError) else repr(error)
            raise TokenizerError(f'tokenizer "{file.source}" does not load: {reason}') from error
        self.lost_bytes = lost_bytes(self.definition)
        self.byte_names: Mapping[int, bytes] = byte_names(self.definition)
        self.spells = spells_text(self.definition)
        self._spells_spaces = spells_spaces(self.definition)
        self.pieces = model_pieces(original)
        ids = [*self.pieces.values(), *(token["id"] for token in added_tokens(original))]
        self.vocab_size = 1 + max(ids, default=-1)
        self.named_tokens: Mapping[str, int] = {
            token["content"]: token["id"] for token in added_tokens(original)
        }
        hidden = set(self.control.values())
        self.added_strings: Sequence[str] = [
            name for name, token_id in self.named_tokens.items() if token_id not in hidden
        ]
        puts_space = puts_space_first(self.definition)
        # If a text is split again, each piece of it may get a space.
        once = len([*pre_tokenizer_steps(self.definition)]) <= 1
        # Such a space amid a text, or one that makes up for a lost byte, would pass for one put
        # before the text: lengths can't tell them apart.
        several = bool(self.added_strings) or not once or min(self.lost_bytes, default=255) < 128
        self.keeps_ascii = keeps_ascii(self.definition) and not (several and puts_space)
        restarting = self.added_strings if puts_space and once else ()
        self.restarting = [self.named_tokens[name] for name in restarting]
        if not proven:
            self._require_usable(file)

    @cached_property
    @_failures_of("tokenizers")
    def tokenizer(self) -> tokenizers.Tokenizer:
        """The library's tokenizer, built on first use."""
        return tokenizers.Tokenizer.from_str(orjson.dumps(self.definition).decode())

    @cached_property
    @_failures_of("tokenizers")
    def _normalizer(self) -> tokenizers.normalizers.Normalizer | None:
        only = orjson.dumps(content_normalizer(self.definition)).decode()
        normalizer: tokenizers.normalizers.Normalizer | None
        normalizer = tokenizers.Tokenizer.from_str(only).normalizer
        return normalizer

    @_failures_of("tokenizers")
    def encode_batch(self, texts: Sequence[str]) -> list[Encoded]:
        """Encode texts once, without special tokens."""
        encoded = []
        encodings = self.tokenizer.encode_batch(list(texts), add_special_tokens=False)
        for text, encoding in zip(texts, encodings, strict=True):
            ids = np.array(encoding.ids, np.uint32)
            encoded.append(Encoded(ids, partial(self._report, text, ids, encoding)))
        return encoded

    def contents(self) -> list[bytes]:
        """See `contents_of`."""
        return contents_of(
            self.definition, self.control, vocab_size=self.vocab_size, normalize=self.normalize
        )

    @_failures_of("tokenizers")
    def normalize(self, text: str) -> str:
        """Normalise a text as tokens spell it, with spaces for `▁`."""
        text = self._normal_form(text)
        return text.replace(SPACE_PIECE, " ") if self._spells_spaces else text

    def _normal_form(self, text: str) -> str:
        return text if self._normalizer is None else str(self._normalizer.normalize_str(text))

    def _report(self, text: str, ids: NDArray[np.uint32], encoding: tokenizers.Encoding) -> Report:
        characters = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        surfaces = [b""] * len(ids)
        if self._spells_spaces and self.definition["model"].get("type") == "Unigram":
            # Other models give the unknown token's name. A blank could be the space put first.
            tokens = (token.replace(SPACE_PIECE, " ") for token in encoding.tokens)
            surfaces = [token.encode() if token.strip(" ") else b"" for token in tokens]
        return Report(ids, byte_positions(text)[characters], surfaces)

    def _require_usable(self, file: TokenizerFile) -> None:
        if loses_characters(self.definition):
            raise TokenizerError(
                f'tokenizer "{file.source}" has no unknown token: characters that its BPE lacks '
                "vanish and shift the offsets behind them; give its model an "
                '"unk_token" or byte fallback'
            )
        if self.definition["model"].get("dropout"):
            raise TokenizerError(
                f'tokenizer "{file.source}" has BPE dropout {self.definition["model"]["dropout"]}: '
                'it splits a text differently each time; set "dropout" to null in its file'
            )
        normal_forms: dict[str, str] = {}
        loaded = added_tokens(self.definition)
        for token, own in zip(added_tokens(file.definition), loaded, strict=True):
            found = self.tokenizer.token_to_id(own["content"])
            if found != token["id"]:
                raise TokenizerError(
                    f'tokenizer "{file.source}": added token {token["content"]!r} has id '
                    f"{token['id']} in the file but the tokenizers library gives it {found}; "
                    "number added tokens without gaps from the end of the vocabulary"
                )
            form = self._normal_form(own["content"]) if own["normalized"] else own["content"]
            if not form:
                raise TokenizerError(
                    f'tokenizer "{file.source}": added token {token["content"]!r} is nothing when '
                    "normalised, which the tokenizers library finds everywhere: it fails at most "
                    'characters, and at some texts never ends; set its "normalized" to false'
                )
            if own["rstrip"] and not own["lstrip"] and not form.strip():
                raise TokenizerError(
                    f'tokenizer "{file.source}": added token {token["content"]!r} is white space '
                    "that takes in what follows it: of 20,000 spaces in a row the tokenizers "
                    'library makes 2 GB, of 40,000 8 GB; set its "rstrip" to false'
                )
            other = token["content"]
            if own["normalized"]:
                other = normal_forms.setdefault(form, other)
            if other != token["content"]:
                raise TokenizerError(
                    f'tokenizer "{file.source}": added tokens {other!r} and {token["content"]!r} '
                    f"are both {form!r} when normalised, and the tokenizers library takes either "
                    'at random: remove one of them, or set its "normalized" to false'
                )


class SentencePieceReference:
    """A SentencePiece model (BPE or Unigram), with the attributes of `HuggingFaceReference`."""

    added_strings: Sequence[str] = ()
    byte_names: Mapping[int, bytes] = MappingProxyType({})  # its texts spell no byte
    restarting: Sequence[int] = ()
    lost_bytes = b""
    spells = True

    def __init__(self, file: TokenizerFile, *, honour_special: bool) -> None:
        """Load the model; TokenizerError if it isn't one, or special strings should be honoured."""
        if honour_special:
            raise TokenizerError(
                f'tokenizer "{file.source}": a SentencePiece model never reads special strings in '
                "a text as control tokens; use its tokenizer.json or leave special strings plain"
            )
        self.processor = sentencepiece.SentencePieceProcessor()
        try:
            self.processor.LoadFromSerializedProto(file.data)
        except RuntimeError as error:
            raise TokenizerError(
                f'tokenizer "{file.source}" isn\'t a SentencePiece model: {error}'
            ) from error
        self.vocab_size = int(self.processor.vocab_size())
        bos = _non_negative(self.processor.bos_id())
        self.conventions = Conventions(
            bos_token_id=bos,
            eos_token_id=_non_negative(self.processor.eos_id()),
            adds_bos=bos is not None,
            adds_eos=False,
        )
        control = filter(self.processor.is_control, range(self.vocab_size))
        self.control = {self.processor.id_to_piece(place): place for place in control}
        self.named_tokens: Mapping[str, int] = self.control
        self.keeps_ascii = self._keeps_ascii()

    @_failures_of("sentencepiece")
    def encode_batch(self, texts: Sequence[str]) -> list[Encoded]:
        """Encode texts; a report encodes its text again."""
        arrays = self.processor.Encode(list(texts), return_type="numpy", num_threads=1)
        return [
            Encoded(array.astype(np.uint32), partial(self._report, text))
            for text, array in zip(texts, arrays, strict=True)
        ]

    def contents(self) -> list[bytes]:
        """Return each id's bytes in a normalised text, b"" if unknown."""
        table = []
        for token_id in range(self.vocab_size):
            piece = self.processor.id_to_piece(token_id)
            if self.processor.is_byte(token_id):
                table.append(bytes([int(piece[1:-1], 16)]))
            elif self.processor.is_control(token_id) or self.processor.is_unknown(token_id):
                table.append(b"")
            else:
                table.append(piece.replace(SPACE_PIECE, " ").encode())
        return table

    @cached_property
    def pieces(self) -> dict[str, int]:
        """Token strings and ids."""
        return {self.processor.id_to_piece(place): place for place in range(self.vocab_size)}

    @_failures_of("sentencepiece")
    def normalize(self, text: str) -> str:
        """Normalise a text as tokens spell it."""
        return str(self.processor.Normalize(text)).replace(SPACE_PIECE, " ")

    def _report(self, text: str) -> Report:
        report = self.processor.Encode(text.encode(), return_type="offset_mapping")
        ranges = np.array(report["offsets"], np.int64).reshape(-1, 2)
        surfaces = [piece.replace(SPACE_PIECE.encode(), b" ") for piece in report["pieces"]]
        return Report(np.array(report["ids"], np.uint32), ranges, surfaces)

    def _keeps_ascii(self) -> bool:
        """Whether normalising keeps every pair of ASCII characters."""
        pairs = "".join(
            f"a{first}{second}b" for first, second in product(map(chr, range(128)), repeat=2)
        )
        return self.normalize(pairs).removeprefix(" ") == pairs


Reference = HuggingFaceReference | SentencePieceReference


UNLIKE = "\u017f\u180e"
"""Characters around which `fastokens` (0.3) is known to split texts elsewhere than the reference:
a long s, which for the reference ends a contraction that a pattern spells with s, and a separator
that is white space for one of its engines (PCRE2)."""


class FastEncoder:
    """`fastokens`, which gives ids without offsets."""

    @_failures_of("fastokens")
    def __init__(self, file: TokenizerFile, reference: Reference) -> None:
        """Load a tokenizer.json; LibraryError if fastokens doesn't support it."""
        user_defined: list[int] = []
        if isinstance(reference, HuggingFaceReference):
            self.definition = reference.definition
        else:
            converted = convert_sentencepiece(file.data, source=file.source)
            self.definition, control = disarm_control_tokens(converted)
            own = (token["id"] for token in added_tokens(converted))
            user_defined = [token_id for token_id in own if token_id not in control.values()]
        if any(token["single_word"] for token in added_tokens(self.definition)):
            raise LibraryError("fastokens: added tokens of single words, which it ends otherwise")
        # SentencePiece puts a space before a user-defined piece, a tokenizer.json after it.
        unsure = [*user_defined, *_unmergeable(self.definition)]
        self._unsure_ids = np.isin(np.arange(reference.vocab_size), unsure)
        self._unsure = [*UNLIKE]
        if self.definition["model"].get("byte_fallback"):  # it reads a byte's name as the byte
            self._unsure.append("<0x")
        # It refuses decoders that it doesn't know; nothing is decoded.
        encoding = without_metaspace(self.definition, reference.added_strings) | {
            "decoder": None,
            "post_processor": None,
        }
        encoding["model"] = without_gaps(encoding["model"])
        # Parallelism comes from workers, which would fight over threads otherwise.
        os.environ.setdefault("FASTOKENS_BPE_THREADS", "1")
        self.tokenizer = fastokens.Tokenizer.from_json_str(orjson.dumps(encoding).decode())

    @_failures_of("fastokens")
    def encode_batch(
        self, texts: Sequence[str]
    ) -> tuple[NDArray[np.uint32], NDArray[np.int64], NDArray[np.bool_]]:
        """Return ids [N], documents' starts [D + 1], and which documents [D] need the reference.

        Those were refused and have no ids, or are known to be read differently.
        """
        try:
            flat, starts = self.tokenizer.encode_batch_flat(list(texts))
        except ValueError:  # it gives nothing for the others
            if len(texts) == 1:
                return np.empty(0, np.uint32), np.zeros(2, np.int64), np.ones(1, np.bool_)
            ids, bounds, unsure = zip(*(self.encode_batch([text]) for text in texts), strict=True)
            cu_tokens = np.cumsum([0, *(each[1] for each in bounds)], dtype=np.int64)
            return np.concatenate(ids), cu_tokens, np.concatenate(unsure)
        input_ids, cu_tokens = np.frombuffer(flat, np.uint32), np.frombuffer(starts, np.int64)
        held = np.array(
            [any(string in text for string in self._unsure) for text in texts], np.bool_
        )
        if self._unsure_ids.any():
            counts = np.concatenate([[0], np.cumsum(self._unsure_ids[input_ids])])
            held |= np.diff(counts[cu_tokens]) > 0
        return input_ids, cu_tokens, held


def _unmergeable(definition: Definition) -> list[int]:
    """Return the ids of pieces that hold a character without a piece of its own.

    A BPE, which starts from characters, never makes them, but `fastokens` (0.3) finds them.
    """
    pieces = model_pieces(definition)
    unknown = set("".join(pieces)).difference(pieces)
    if not unknown:
        return []
    others = {*byte_names(definition), *(token["id"] for token in added_tokens(definition))}
    return [
        token_id
        for piece, token_id in pieces.items()
        if token_id not in others and not unknown.isdisjoint(piece)
    ]


def load_reference(file: TokenizerFile, *, honour_special: bool, proven: bool) -> Reference:
    """Load a file's reference tokenizer."""
    if file.kind == "huggingface":
        return HuggingFaceReference(file, honour_special=honour_special, proven=proven)
    return SentencePieceReference(file, honour_special=honour_special)


def _non_negative(token_id: int) -> int | None:
    return int(token_id) if token_id >= 0 else None
