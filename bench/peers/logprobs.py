"""Vocabulary-parallel log-probs in PyTorch on local CPU ranks: the peer of bench/logprobs_bench.cc.

    logprobs.py RANKS DTYPE

Answers each request line {"steps": 1} on stdin with {"seconds", "sum", "square", "extra_bytes"}: the time, the sum of
the log-probs, the sum of the squared gradients, and the peak memory beyond the logits and their gradient. The method is
the unchunked one of NeMo RL's model_utils: logits in float32, log-softmax over the ranks, gather, and the softmax saved
for backward. Element (t, v) of the logits is ((t V + v) 7919 mod 10007) / 1000 - 5, where V is the size of the
vocabulary.
"""

import sys
import time

import torch
import torch.distributed as dist

import local_ranks

ROWS, LENGTH, VOCABULARY = 2, 1024, 151936


class DistributedLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, start, end):
        not_local = (target < start) | (target >= end)
        column = (target - start).masked_fill(not_local, 0)
        logits = logits.float()
        maximum = logits.amax(-1, keepdim=True)
        dist.all_reduce(maximum, dist.ReduceOp.MAX)
        logits = logits - maximum
        total = logits.exp().sum(-1, keepdim=True)
        dist.all_reduce(total)
        logprobs = logits - total.log()
        found = logprobs.gather(-1, column.unsqueeze(-1)).squeeze(-1).masked_fill(not_local, 0)
        dist.all_reduce(found)
        ctx.save_for_backward(logprobs.exp(), not_local, column)
        return found

    @staticmethod
    def backward(ctx, grad):
        softmax, not_local, column = ctx.saved_tensors
        grad = grad.unsqueeze(-1)
        result = -softmax * grad
        result.scatter_add_(-1, column.unsqueeze(-1), grad * (~not_local).unsqueeze(-1))
        return result, None, None, None


def memory_of(name):
    for line in open("/proc/self/status"):
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024


def make_worker(rank, ranks, dtype):
    start, end = VOCABULARY // ranks * rank, VOCABULARY // ranks * (rank + 1)
    logits = torch.empty(ROWS * LENGTH, end - start, dtype=getattr(torch, dtype))
    for t in range(ROWS * LENGTH):
        index = torch.arange(t * VOCABULARY + start, t * VOCABULARY + end)
        logits[t] = (index * 7919 % 10007).float() / 1000 - 5
    logits = logits.view(ROWS, LENGTH, end - start).requires_grad_()
    target = (torch.arange(ROWS * LENGTH) * 104729 % VOCABULARY).view(ROWS, LENGTH)

    def work(_):
        logits.grad = None
        with open("/proc/self/clear_refs", "w") as peak:
            peak.write("5")  # resets VmHWM, the peak
        before = memory_of("VmRSS")
        dist.barrier()
        begin = time.perf_counter()
        logprobs = DistributedLogprob.apply(logits, target, start, end)
        logprobs.sum().backward()
        total = logprobs.double().sum().item()
        seconds = time.perf_counter() - begin
        extra_bytes = memory_of("VmHWM") - before - logits.numel() * logits.itemsize
        square = sum(row.float().square().sum().item() for row in logits.grad.flatten(0, 1))
        return seconds, total, square, extra_bytes

    return work


def join_results(_, results):
    return {"seconds": max(each[0] for each in results), "sum": results[0][1],
            "square": sum(each[2] for each in results), "extra_bytes": max(each[3] for each in results)}


if __name__ == "__main__":
    local_ranks.serve(int(sys.argv[1]), make_worker, (sys.argv[2],), join_results)
