"""Prints how PyTorch's context parallelism shards sequences and merges partial attention results, as JSON.

    context_parallel.py SEED

The output is {"layouts": [{"tokens", "ranks", "order": [POSITION]}],
               "merges": [{"tokens", "parts": [{"out", "log_sums", "second_half"}], "out", "log_sums"}]}

"order" has the positions of rank 0's tokens, then those of rank 1, and so on. "tokens" is a multiple of 2 * ranks. The
merges have one row and one head of size 3. A part with "second_half" has only the second half of the tokens.
"""

import json
import sys

import torch
from torch.distributed.tensor.experimental._context_parallel._attention import _SDPAMerger
from torch.distributed.tensor.experimental._context_parallel._load_balancer import _HeadTailLoadBalancer


def layouts():
    for ranks in range(1, 6):
        for length in range(1, 4):
            tokens = 2 * ranks * length
            order = _HeadTailLoadBalancer(tokens, ranks, "cpu")._generate_indices()
            yield {"tokens": tokens, "ranks": ranks, "order": order.flatten().tolist()}


def merges():
    for tokens in (2, 8):
        merger = _SDPAMerger(True, seq_dim=2)
        parts = []
        for second_half in (False, False, True, True, False):
            n = tokens // 2 if second_half else tokens
            out, log_sums = torch.randn(1, 1, n, 3), 3 * torch.randn(1, 1, n)
            merger.step(out, log_sums, second_half)
            parts.append({"out": out.flatten().tolist(), "log_sums": log_sums.flatten().tolist(),
                          "second_half": second_half})
        out, log_sums = merger.results()
        yield {"tokens": tokens, "parts": parts, "out": out.flatten().tolist(), "log_sums": log_sums.flatten().tolist()}


torch.manual_seed(int(sys.argv[1]))
print(json.dumps({"layouts": list(layouts()), "merges": list(merges())}))
