"""Checks that the tokenizer.json files of two folders give the same ids and the same decoded texts:
same_tokenizers.py DIR DIR"""

import sys
from pathlib import Path

from tokenizers import Tokenizer

TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "  leading, trailing  and    inner   spaces     ",
    "tabs\tand\t\ttabs\n\nnewlines\r\n\r\n\n\n\nand " + " " * 40 + "many spaces",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n",
    "<start_of_turn>user\nWhy is the sky blue?<end_of_turn>\n<start_of_turn>model\n",
    "<table><tr><td>cell</td></tr></table><b>bold</b><unused7>",
    "1234567890 3.14159 1,000,000 0x1F",
    "caf\u00e9 na\u00efve \u00fcber \u4f60\u597d\uff0c\u4e16\u754c \u3053\u3093\u306b\u3061\u306f \ud55c\uad6d\uc5b4 \u0627\u0644\u0639\u0631\u0628\u064a\u0629",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 \u00a0\u2003\ufeff\x01\x7f",
    "Don't you'll we've I'm it's",
    "",
    "a",
    " ",
]
first, second = (Tokenizer.from_file(str(Path(folder) / "tokenizer.json")) for folder in sys.argv[1:])
wrong = 0
for text in TEXTS:
    found, expected = first.encode(text).ids, second.encode(text).ids
    if found != expected or first.decode(found, False) != second.decode(expected, False):
        wrong += 1
        print(f"{text!r}: found {found}, expected {expected}")
print(f"{len(TEXTS)} texts, {wrong} wrong")
sys.exit(wrong != 0)
