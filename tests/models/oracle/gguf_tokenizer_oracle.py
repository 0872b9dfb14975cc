"""Encodes llama.cpp's test vectors with the tokenizers library: gguf_tokenizer_oracle.py TOKENIZER_JSON INP OUT.

INP has texts, with a separator line after each. OUT has llama.cpp's ids, one line per text, without special tokens.
"""

import sys

from tokenizers import Tokenizer

tokenizer = Tokenizer.from_file(sys.argv[1])
with open(sys.argv[2], encoding="utf-8", newline="") as stream:
    texts = stream.read().split("\n__ggml_vocab_test__\n")
with open(sys.argv[3], encoding="utf-8") as stream:
    expected = [[int(number) for number in line.split()] for line in stream.read().splitlines()]
if texts and not texts[-1]:
    texts.pop()
assert len(texts) == len(expected) > 20, (len(texts), len(expected))
wrong = 0
for text, ids in zip(texts, expected):
    found = tokenizer.encode(text, add_special_tokens=False).ids
    if found != ids:
        wrong += 1
        print(f"{text!r}: found {found}, expected {ids}")
print(f"{len(texts)} texts, {wrong} wrong")
sys.exit(wrong != 0)
