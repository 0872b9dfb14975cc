"""PyTorch FSDP2 training steps on local CPU ranks: the peer of bench/train_bench.cc.

    train_step.py MODEL_DIR RANKS ROWS LENGTH

Reads one request a line on stdin, {"steps": N}, and answers one line: {"seconds": S, "loss": L, "peak_bytes": [a rank]}.
Each rank trains on ROWS x LENGTH tokens a step with AdamW (fused), clipping at 1.0, fp32, one thread a rank on a machine
with as many cores as ranks. Tokens are (7919 * index) modulo the vocabulary, as in the other half.
"""

import os
import sys
import time

import torch
import torch.distributed as dist

import local_ranks


def peak_bytes():
    for line in open("/proc/self/status"):
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024


def build(model_dir, mesh):
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="sdpa")
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def make_worker(rank, ranks, model_dir, rows, length):
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    model = build(model_dir, dist.init_device_mesh("cpu", (ranks,)))
    vocab = model.config.vocab_size
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    step = 0

    def work(request):
        nonlocal step
        dist.barrier()
        start = time.perf_counter()
        for _ in range(request["steps"]):
            first = (step * ranks + rank) * rows * length
            tokens = ((torch.arange(first, first + rows * length) * 7919) % vocab).view(rows, length)
            labels = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)
            logits = model(input_ids=tokens, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return time.perf_counter() - start, mean.item() / ranks, peak_bytes()

    return work


def joined(_, results):
    return {"seconds": max(seconds for seconds, _, _ in results), "loss": results[0][1],
            "peak_bytes": [peak for _, _, peak in results]}


if __name__ == "__main__":
    model_dir, ranks, rows, length = sys.argv[1], *map(int, sys.argv[2:5])
    local_ranks.serve(ranks, make_worker, (model_dir, rows, length), joined)
