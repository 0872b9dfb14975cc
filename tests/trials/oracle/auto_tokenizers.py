"""What transformers' AutoTokenizer makes of texts: auto_tokenizers.py, a line of JSON for each folder on standard input.

{"folder": DIR, "texts": [TEXT]}: {"ids": [[ID]], "plain": [[ID]], "decoded": [TEXT], "named": {"bos", "eos", "pad"}}.
`plain` is without what the tokenizer adds; `decoded` is of `plain`, without special tokens.
"""

import json
import sys

from transformers import AutoTokenizer
from transformers.utils import logging

logging.set_verbosity_error()
for line in sys.stdin:
    asked = json.loads(line)
    tokenizer = AutoTokenizer.from_pretrained(asked["folder"])
    plain = [tokenizer.encode(text, add_special_tokens=False) for text in asked["texts"]]
    print(
        json.dumps(
            {
                "ids": [tokenizer.encode(text) for text in asked["texts"]],
                "plain": plain,
                "decoded": [tokenizer.decode(ids, skip_special_tokens=True) for ids in plain],
                "named": {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id, "pad": tokenizer.pad_token_id},
            }
        ),
        flush=True,
    )
