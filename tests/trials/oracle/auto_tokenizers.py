"""Encodes texts with transformers' AutoTokenizer. Answers each JSON line on standard input with a JSON line.

A request is {"folder": DIR, "texts": [TEXT]}. The answer is {"ids": [[ID]], "plain": [[ID]], "decoded": [TEXT],
"named": {"bos", "eos", "pad"}}. "plain" has the ids without added special tokens. "decoded" has the decoded "plain"
without special tokens.
"""

import json
import sys

from transformers import AutoTokenizer
from transformers.utils import logging

logging.set_verbosity_error()
for line in sys.stdin:
    request = json.loads(line)
    tokenizer = AutoTokenizer.from_pretrained(request["folder"])
    plain = [tokenizer.encode(text, add_special_tokens=False) for text in request["texts"]]
    print(
        json.dumps(
            {
                "ids": [tokenizer.encode(text) for text in request["texts"]],
                "plain": plain,
                "decoded": [tokenizer.decode(ids, skip_special_tokens=True) for ids in plain],
                "named": {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id, "pad": tokenizer.pad_token_id},
            }
        ),
        flush=True,
    )
