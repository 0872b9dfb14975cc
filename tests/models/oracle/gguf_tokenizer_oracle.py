"""Encodes llama.cpp's test vectors with the tokenizers library: gguf_tokenizer_oracle.py TOKENIZER_JSON INP OUT.

INP holds texts, each ended by a line of its own; OUT llama.cpp's ids for each, one line a text, without special tokens.
"""

import sys

from tokenizers import Tokenizer

tokenizer = Tokenizer.from_file(sys.argv[1])
with open(sys.argv[2], encoding="utf-8", newline="") as stream:
    texts = stream.read().split("\n__ggml_vocab_test__\n")
with open(sys.argv[3], encoding="utf-8") as stream:
    wanted = [[int(number) for number in line.split()] for line in stream.read().splitlines()]
if texts and not texts[-1]:
    texts.pop()
assert len(texts) == len(wanted) > 20, (len(texts), len(wanted))
wrong = 0
for text, ids in zip(texts, wanted):
    found = tokenizer.encode(text, add_special_tokens=False).ids
    if found != ids:
        wrong += 1
        print(f"{text!r}: found {found}, wanted {ids}")
print(f"{len(texts)} texts, {wrong} wrong")
sys.exit(wrong != 0)
