"""Tokenizer of a checkpoint: ``tokenizer.json``, and which tokens begin and end a sequence.

``tokenizer.json`` is the ``tokenizers`` library's own format, a chain of parts: a *normalizer* rewrites the text, a
*pre-tokenizer* cuts it into words, the *model* makes tokens of them, a *post-processor* puts special tokens around
them, and a *decoder* makes text of tokens again. The library runs any chain that the file describes, and a file can
describe one that doubles a text forty times, searches it with a pattern that never ends, or makes the library abort. So
the chain is checked first: its parts have to be among those that models of these kinds use, `PARTS`, and a pattern has
to be one of `lowbit.formats.words`. Byte-pair encoding is the only supported kind of model, and one that drops merges
at random is refused, because the same text must have the same tokens. Padding and truncation are for training in
batches and are switched off.

**The token that begins a sequence** is given by the post-processor, unless ``add_bos_token`` in
``tokenizer_config.json`` overrides it. **The tokens that end it** are given by the first of ``generation_config.json``,
``config.json`` and ``tokenizer_config.json`` that names any; otherwise the caller decides where a text ends.

Source: the published tokenizers of Llama, Mistral and Mixtral; the ``tokenizers`` library.
"""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from lowbit.contract.checks import spoken
from lowbit.errors import FormatError
from lowbit.formats.chat import MOST_TEMPLATE, ChatTemplate
from lowbit.formats.checkpoint.reader import CONFIG, Checkpoint
from lowbit.formats.tokenizer import Tokenizer, failures_told
from lowbit.formats.words import PATTERNS
from lowbit.system.json_files import Fields, described, parsed, read_bytes, read_fields
from lowbit.text import quoted

FILE, SETTINGS, GENERATION = "tokenizer.json", "tokenizer_config.json", "generation_config.json"
TEMPLATE = "chat_template.jinja"
MOST_BYTES = 2**25
MOST_PARTS = 16

PARTS: dict[str, tuple[str, ...]] = {
    "normalizer": ("NFC", "Prepend", "Replace"),
    "pre_tokenizer": ("ByteLevel", "Digits", "Metaspace", "Split"),
    "decoder": ("ByteFallback", "ByteLevel", "Fuse", "Metaspace", "Replace", "Strip"),
    "post_processor": ("ByteLevel", "TemplateProcessing"),
}
"""The parts that a chain may have; each stage may also be a sequence of them."""
SEQUENCES = {
    "normalizer": "normalizers",
    "pre_tokenizer": "pretokenizers",
    "decoder": "decoders",
    "post_processor": "processors",
}
"""The field from which the library reads the parts of a sequence. It ignores unknown fields."""


def read_tokenizer(source: Checkpoint) -> Tokenizer:
    """Make the tokenizer of a checkpoint directory.

    Raises:
        ArgumentError: the directory has no ``tokenizer.json``.
        FormatError: a part that is not supported, a token outside the model's vocabulary, or a damaged file.
    """
    fields = parsed(FILE, read_bytes(source.folder / FILE, MOST_BYTES))
    chain = {stage: _parts(fields, stage) for stage in PARTS}
    _check_model(fields)
    library = _library(fields, source.config.vocabulary)
    settings = _fields_if_there(source.folder / SETTINGS)
    bos = _bos(chain["post_processor"], settings, library)
    return Tokenizer(bos, _stop(source, settings, library), library, _chat_template(source, settings))


def byte_tokenizer() -> bytes:
    """A ``tokenizer.json`` of 256 tokens without merges: the token of a byte is its value."""
    stand_ins = {byte: chr(byte) for byte in (*range(33, 127), *range(161, 173), *range(174, 256))}
    others = (byte for byte in range(256) if byte not in stand_ins)
    stand_ins |= {byte: chr(256 + number) for number, byte in enumerate(others)}  # a printable character for each byte
    library = tokenizers.Tokenizer(BPE(vocab={text: byte for byte, text in sorted(stand_ins.items())}, merges=[]))
    library.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    return (json.dumps(json.loads(library.to_str()), indent=1, ensure_ascii=False) + "\n").encode()


def written_tokenizer(tokenizer: Tokenizer) -> dict[str, bytes]:
    """The files of a tokenizer, for `read_tokenizer` and any other reader: their content by name."""
    content, bos = json.loads(tokenizer.to_json()), tokenizer.bos
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": bos is not None}
    if bos is not None:
        text = tokenizer.text_of(bos)
        begins, own = {"SpecialToken": {"id": text, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
        content["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [begins, own],
            "pair": [begins, own, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {text: {"id": text, "ids": [bos], "tokens": [text]}},
        }
        settings["bos_token"] = text
    files = {FILE: content, SETTINGS: settings}
    if tokenizer.stop:
        settings["eos_token"] = tokenizer.text_of(tokenizer.stop[0])
        files[GENERATION] = {"eos_token_id": list(tokenizer.stop)}
    if tokenizer.chat is not None:
        settings |= dict(tokenizer.chat.tokens) | {"chat_template": tokenizer.chat.source}
    return {name: (json.dumps(each, indent=1, ensure_ascii=False) + "\n").encode() for name, each in files.items()}


# **The chain.**


def _parts(fields: Fields, stage: str) -> list[Fields]:
    """The checked parts of one stage in order, including those inside sequences."""
    found: list[Fields] = []
    waiting = [part for part in [fields.optional(stage, dict)] if part is not None]
    while waiting:
        part = Fields(f"{fields.file}: {stage}", waiting.pop())
        if len(found) + len(waiting) >= MOST_PARTS:
            raise FormatError(fields.file, stage, f"more than {MOST_PARTS} parts", f"at most {MOST_PARTS}")
        if part.value("type", str) == "Sequence":
            inner = part.value(SEQUENCES[stage], list)
            if len(inner) > MOST_PARTS or not all(isinstance(each, dict) for each in inner):
                raise FormatError(fields.file, stage, described(inner), f"a sequence of at most {MOST_PARTS} parts")
            waiting += reversed(inner)
        else:
            _check_part(part, PARTS[stage])
            found.append(part)
    return found


def _check_part(part: Fields, known: tuple[str, ...]) -> None:
    kind = part.value("type", str)
    if kind not in known:
        raise FormatError(part.file, "type", quoted(kind), spoken([repr(name) for name in known]))
    if kind in ("Replace", "Split"):
        pattern = part.value("pattern", dict)
        text, expression = pattern.get("String"), pattern.get("Regex")
        is_known = kind == "Split" and isinstance(expression, str) and expression in PATTERNS
        if len(pattern) != 1 or (not (isinstance(text, str) and text) and not is_known):
            raise FormatError(part.file, "pattern", described(pattern), "a plain text, or a known pattern of words")
        content = part.value("content", str, "")
        if kind == "Replace" and len(content) > len(text or ""):
            raise FormatError(part.file, "content", quoted(content), "not longer than what it replaces")
    lengths = {"prepend": len(part.value("prepend", str, ""))}
    lengths |= {name: part.value(name, int, 0) for name in ("start", "stop")}
    for name, length in lengths.items():
        if not 0 <= length <= 1:
            raise FormatError(part.file, name, length, "at most one character")


def _check_model(fields: Fields) -> None:
    model = Fields(f"{fields.file}: model", fields.value("model", dict))
    if (kind := model.value("type", str)) != "BPE":
        raise FormatError(model.file, "type", quoted(kind), "'BPE'")
    if dropout := model.optional("dropout", float):
        raise FormatError(model.file, "dropout", dropout, "0: the same text has the same tokens")


def _library(fields: Fields, vocabulary: int) -> tokenizers.Tokenizer:
    """The library's tokenizer, without the parts that add tokens around a text or truncate it."""
    content = dict(fields.values) | {"post_processor": None, "padding": None, "truncation": None}
    content["added_tokens"] = _added(fields, vocabulary)
    with failures_told(fields.file, "content", "a tokenizer that fits together"):
        library = tokenizers.Tokenizer.from_str(json.dumps(content))
        ids = library.get_vocab(with_added_tokens=True).values()
    if not ids or max(ids) >= vocabulary or len(set(ids)) != len(ids):
        given = f"{len(ids)} tokens up to number {max(ids, default=0)}"
        raise FormatError(fields.file, "vocabulary", given, f"distinct numbers below the model's {vocabulary}")
    return library


def _added(fields: Fields, vocabulary: int) -> list[Any]:
    """The added tokens for which the model has a row: the text models of Gemma 3 have none for the image token."""
    given = fields.optional("added_tokens", list) or []
    return [
        token
        for token in given
        if not isinstance(token, dict) or type(token.get("id")) is not int or token["id"] < vocabulary
    ]


# **The ends of a sequence.**


def _bos(parts: list[Fields], settings: Fields | None, library: tokenizers.Tokenizer) -> int | None:
    """The token that begins every sequence."""
    templates = [part for part in parts if part.values["type"] == "TemplateProcessing"]
    begins = _first_of_template(templates[0]) if len(templates) == 1 else None
    if len(templates) > 1:
        raise FormatError(FILE, "post_processor", f"{len(templates)} templates", "one")
    if settings is None:
        return None if begins is None else _number(begins, "post_processor", FILE, library)
    if settings.value("add_eos_token", bool, default=False):
        raise FormatError(settings.file, "add_eos_token", True, "False")
    if not settings.value("add_bos_token", bool, begins is not None):
        return None
    named = begins if begins is not None else _content(settings, "bos_token")
    if named is None:
        raise FormatError(settings.file, "bos_token", "missing", "a token, as add_bos_token is True")
    return _number(named, "bos_token", settings.file, library)


def _first_of_template(template: Fields) -> str | None:
    """The special token that a template puts first, if any; it must not put one elsewhere."""
    single = template.value("single", list)
    kinds = [next(iter(item), None) if isinstance(item, dict) else None for item in single[:3]]
    if kinds == ["Sequence"]:
        return None
    if kinds != ["SpecialToken", "Sequence"] or not isinstance(single[0]["SpecialToken"], dict):
        raise FormatError(template.file, "single", described(single), "a text, with at most one token before it")
    return Fields(template.file, single[0]["SpecialToken"]).value("id", str)


def _stop(source: Checkpoint, settings: Fields | None, library: tokenizers.Tokenizer) -> tuple[int, ...]:
    """The tokens that end a sequence, from the first file that names any."""
    for path in (source.folder / GENERATION, source.folder / CONFIG):
        fields = _fields_if_there(path)
        given = None if fields is None else fields.values.get("eos_token_id")
        if fields is not None and given is not None:
            numbers = given if isinstance(given, list) else [given]
            if not all(type(number) is int and 0 <= number < source.config.vocabulary for number in numbers):
                allowed = f"tokens from 0 to {source.config.vocabulary - 1}"
                raise FormatError(fields.file, "eos_token_id", described(given), allowed)
            return tuple(dict.fromkeys(numbers))
    named = None if settings is None else _content(settings, "eos_token")
    return () if named is None else (_number(named, "eos_token", SETTINGS, library),)


def _chat_template(source: Checkpoint, settings: Fields | None) -> ChatTemplate | None:
    """The chat template: its own file, a field, or the default of several."""
    names = ("bos_token", "eos_token")
    texts = {} if settings is None else {name: _content(settings, name) for name in names}
    tokens = {name: text for name, text in texts.items() if text is not None}
    if (path := source.folder / TEMPLATE).exists():
        content = read_bytes(path, MOST_TEMPLATE)
        try:
            return ChatTemplate(TEMPLATE, content.decode(), tokens)
        except UnicodeDecodeError as error:
            raise FormatError(TEMPLATE, "text", f"undecodable at byte {error.start}", "UTF-8") from None
    if settings is None or settings.values.get("chat_template") is None:
        return None
    if isinstance(settings.values["chat_template"], list):
        for each in settings.value("chat_template", list):
            if isinstance(each, dict) and each.get("name") == "default":
                return ChatTemplate(SETTINGS, Fields(SETTINGS, each).value("template", str), tokens)
        raise FormatError(SETTINGS, "chat_template", "a list without the name default", "a template")
    return ChatTemplate(SETTINGS, settings.value("chat_template", str), tokens)


def _content(settings: Fields, key: str) -> str | None:
    """A token given by its text, or by an object that holds it."""
    if isinstance(settings.values.get(key), dict):
        return Fields(settings.file, settings.values[key]).value("content", str)
    return settings.optional(key, str)


def _number(token: str, field: str, file: str, library: tokenizers.Tokenizer) -> int:
    try:
        number = library.token_to_id(token)
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can spell and UTF-8 cannot
        number = None
    if number is None:
        raise FormatError(file, field, quoted(token), "a token of the vocabulary")
    return number


def _fields_if_there(path: Path) -> Fields | None:
    return read_fields(path) if path.exists() else None
