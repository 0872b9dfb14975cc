"""Prints the token ids of five prompts as a JSON list of lists: prompts.py MODEL_DIR. The `tokenizers` library encodes
them with MODEL_DIR/tokenizer.json."""

import json
import sys
from pathlib import Path

from tokenizers import Tokenizer

TEXTS = [
    "The capital of France is",
    "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n",
    "def fibonacci(n):\n",
    "In the beginning God created the heaven and the earth. And the earth was",
    "List three colours:\n1.",
]
tokenizer = Tokenizer.from_file(str(Path(sys.argv[1]) / "tokenizer.json"))
print(json.dumps([tokenizer.encode(text).ids for text in TEXTS]))
