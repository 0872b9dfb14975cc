"""The `tokenizers` library on the same text: the peer of bench/tokenizer_bench.cc.

    tokenizer.py TOKENIZER_JSON TEXT_FILE BYTES

Answers each request line {"lines": BOOL, "hash": BOOL}: encodes the first BYTES of the text, as lines or as one string, and
says {"seconds": S}, with {"tokens", "hash"} of all ids when asked. Its fastest calls are used: the batch call without
offsets for lines, the better of the single and the batch call for one string.
"""

import json
import os
import sys
import time

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["RAYON_NUM_THREADS"] = "1"

from tokenizers import Tokenizer  # noqa: E402  (reads the variables above)


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
