"""PyTorch FSDP2 training steps on local CPU ranks: the peer of bench/train_bench.cc.

    train_step.py MODEL_DIR RANKS ROWS LENGTH

Reads one request a line on stdin, {"steps": N}, and answers one line: {"seconds": S, "loss": L, "peak_bytes": [a rank]}.
Each rank trains on ROWS x LENGTH tokens a step with AdamW (fused), clipping at 1.0, fp32, one thread a rank on a machine
with as many cores as ranks. Tokens are (7919 * index) modulo the vocabulary, as in the other half.
"""

import json
import os
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


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


def rank_main(rank, model_dir, ranks, rows, length, store, requests, answers):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    mesh = dist.init_device_mesh("cpu", (ranks,))
    model = build(model_dir, mesh)
    vocab = model.config.vocab_size
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    step = 0
    while True:
        steps = requests.get()
        if steps is None:
            break
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
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
        answers.put((rank, time.perf_counter() - start, mean.item() / ranks, peak_bytes()))
    dist.destroy_process_group()


def main():
    model_dir, ranks, rows, length = sys.argv[1], *map(int, sys.argv[2:5])
    context = mp.get_context("spawn")
    requests, answers = [context.Queue() for _ in range(ranks)], context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=rank_main, daemon=True,
                                     args=(r, model_dir, ranks, rows, length, folder + "/store", requests[r], answers))
                     for r in range(ranks)]
        for process in processes:
            process.start()
        for line in sys.stdin:
            for queue in requests:
                queue.put(json.loads(line)["steps"])
            results = sorted(answers.get() for _ in range(ranks))
            print(json.dumps({"seconds": max(r[1] for r in results), "loss": results[0][2],
                              "peak_bytes": [r[3] for r in results]}), flush=True)
        for queue in requests:
            queue.put(None)
        for process in processes:
            process.join(10)


if __name__ == "__main__":
    main()
