"""Encodes and decodes texts with the `tokenizers` library, for tokenizer_oracle_test.cc.

Reads a JSON array of requests from standard input and writes a JSON array of answers:
  request  {"file": PATH} or {"json": TEXT}, with "texts": [TEXT], "add_special": BOOL and "parse_special": BOOL.
           "random": {"seed", "count", "length"} adds random texts.
  answer   [{"text", "ids", "offsets" (bytes of the UTF-8 text), "decoded" (without special tokens), "decoded_all"}],
           or {"error": MESSAGE} if the library refuses the file
Random texts have only characters that Python's Unicode tables and the library's tables treat in the same way. The
library's tables of combining marks and compatibility characters are those of Unicode 9.
"""
import functools
import itertools
import json
import random
import sys
import unicodedata

from tokenizers import Tokenizer, normalizers

PIECES = ["'s", "'LL", "'\u017f", " ", "  ", "\n", "\r\n", "\t", "\n\n", "12", "3456", "don't", "Hello", " world", "e\u0301",
          "\u00e9", "\ufb01", "\u0130", "\u2581", "\u00a0", "\u3000", "\u200d", "\uac00\u11a8", "\u1100\u1161", "\u0628\u0650",
          "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<bos>", "<eos>", "<unused7>", "<0x41>", "<x>", "<y>", "</s>", "\ufffd",
          "\U0001f468\u200d\U0001f469", "...", "!?", "_", "\u0000", "\u0085", "\u180e", "\u2028", "\ufeff", "\uff9e", "\u0344",
          "\x04", "\x1d"]


@functools.cache
def known_characters():
    strip, nfkd = normalizers.StripAccents(), normalizers.NFKD()

    def is_treated_alike(c):
        return ((strip.normalize_str("x" + c) == "x") == (unicodedata.category(c)[0] == "M")
                and nfkd.normalize_str(c) == unicodedata.normalize("NFKD", c))

    return [c for c in map(chr, range(0x30000)) if unicodedata.category(c) not in ("Cn", "Cs") and is_treated_alike(c)]


@functools.cache
def tokenizer_of(file):
    return Tokenizer.from_file(file)


def random_text(rng, length):
    parts = []
    for _ in range(rng.randrange(1, length)):
        kind = rng.random()
        if kind < 0.4:
            parts.append(rng.choice(PIECES))
        elif kind < 0.7:
            parts.append(chr(rng.randrange(32, 127)))
        elif kind < 0.8:
            parts.append(chr(rng.randrange(0xA0, 0x250)))
        else:
            parts.append(rng.choice(known_characters()))
    return "".join(parts)


def byte_offsets(text, offsets):
    at = [0] + list(itertools.accumulate(len(c.encode()) for c in text))
    return [[at[begin], at[end]] for begin, end in offsets]


BYTES = sorted({*range(33, 127), *range(0xA1, 0xAD), *range(0xAE, 0x100)})
BYTE_ALPHABET = {b: chr(b) for b in BYTES} | {b: chr(256 + i) for i, b in enumerate(sorted({*range(256)} - {*BYTES}))}


def offsets_with_dropped_characters(tokenizer, text, tokens):
    """Returns the byte offsets of the tokens if the library drops characters that the vocabulary lacks, otherwise None.

    The library's own offsets are wrong in this case: it counts as if the tokens of a word were adjacent, also if it has
    dropped a character between them.
    """
    byte_level = "ByteLevel" in str(tokenizer.pre_tokenizer)
    units, at = [], 0
    for c in text:
        span = [at, at := at + len(c.encode())]
        units += [(unit, span) for unit in (map(BYTE_ALPHABET.get, c.encode()) if byte_level else c)]
    kept = [unit for unit in units if tokenizer.token_to_id(unit[0]) is not None]
    if len(kept) == len(units) or "".join(c for c, _ in kept) != "".join(tokens):
        return None
    ends = list(itertools.accumulate(map(len, tokens)))
    return [[kept[end - len(token)][1][0], kept[end - 1][1][1]] for token, end in zip(tokens, ends)]


def answer(request):
    try:
        if "file" in request:
            tokenizer = tokenizer_of(request["file"])
        else:
            tokenizer = Tokenizer.from_str(request["json"])
    except Exception as error:  # the library raises bare Exception
        return {"error": str(error)}
    tokenizer.encode_special_tokens = not request.get("parse_special", True)
    texts = list(request.get("texts", []))
    if "random" in request:
        rng = random.Random(request["random"]["seed"])
        texts += [random_text(rng, request["random"]["length"]) for _ in range(request["random"]["count"])]
    rows = []
    for text in texts:
        encoding = tokenizer.encode(text, add_special_tokens=request.get("add_special", True))
        offsets = (offsets_with_dropped_characters(tokenizer, text, encoding.tokens)
                   or byte_offsets(text, encoding.offsets))
        rows.append({"text": text, "ids": encoding.ids, "offsets": offsets,
                     "decoded": tokenizer.decode(encoding.ids, skip_special_tokens=True),
                     "decoded_all": tokenizer.decode(encoding.ids, skip_special_tokens=False)})
    return rows


json.dump([answer(request) for request in json.load(sys.stdin)], sys.stdout)
