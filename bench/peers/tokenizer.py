"""The `tokenizers` library on the same text: the peer of bench/tokenizer_bench.cc.

    tokenizer.py TOKENIZER_JSON TEXT_FILE BYTES

A request is {"lines": BOOL, "hash": BOOL}. The script encodes the first BYTES of the text, as separate lines or as one
string. The answer is {"seconds": S}, with "hash" also {"tokens": COUNT, "hash": of all ids}. The fastest functions of
the library are used: for lines encode_batch_fast, and for one string the faster of encode and encode_batch_fast.
"""

import json
import os
import sys
import time

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["RAYON_NUM_THREADS"] = "1"

from tokenizers import Tokenizer  # noqa: E402  (reads the two environment variables at import)


def timed(call):
    begin = time.perf_counter()
    encodings = call()
    return time.perf_counter() - begin, encodings


def main():
    tokenizer = Tokenizer.from_file(sys.argv[1])
    with open(sys.argv[2], "rb") as file:
        text = file.read(int(sys.argv[3])).decode()
    lines = text.split("\n")
    for request in map(json.loads, sys.stdin):
        if request["lines"]:
            seconds, encodings = timed(lambda: tokenizer.encode_batch_fast(lines, add_special_tokens=False))
        else:
            seconds, encodings = timed(lambda: tokenizer.encode_batch_fast([text], add_special_tokens=False))
            single, _ = timed(lambda: tokenizer.encode(text, add_special_tokens=False))
            seconds = min(seconds, single)
        answer = {"seconds": seconds}
        if request.get("hash"):
            value, count = 0, 0
            for encoding in encodings:
                for token in encoding.ids:
                    value = (value * 31 + token + 1) & 0xFFFFFFFFFFFFFFFF
                count += len(encoding.ids)
            answer |= {"tokens": count, "hash": value}
        print(json.dumps(answer), flush=True)


main()
