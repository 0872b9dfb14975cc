"""PyTorch training steps on local CPU ranks, with several ranks under FSDP2: the peer of bench/train_bench.cc.

    train_step.py MODEL_DIR RANKS ROWS LENGTH [VARIANT [CLIP]]

VARIANT is one of:
    float32      the default
    bfloat16     FSDP2's mixed precision, with reductions in float32
    packed       rows of documents of 200 tokens, which transformers masks by their position ids
    ADAPTER_DIR  trains only this PEFT adapter

CLIP is the norm to which gradients are clipped, by default 1.0; 0 disables clipping. If TESSERA_PEER_COMPILES is set in
the environment, each layer is compiled with torch.compile, as in torchtitan.

Answers each request line {"steps": N} on stdin with the line {"seconds": S, "loss": L, "peak_bytes": [ONE PER RANK]}.
Each rank trains on ROWS x LENGTH tokens per step with fused AdamW. The cores are divided among the ranks. Tokens are
(7919 * index) modulo the vocabulary size, as in our ranks.
"""

import contextlib
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import local_ranks


def peak_bytes():
    for line in open("/proc/self/status"):
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024


def build(model_dir, mesh, variant="float32"):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="sdpa")
    if os.path.isdir(variant):
        from peft import PeftModel
        model = PeftModel.from_pretrained(model, variant, is_trainable=True)
    if os.environ.get("TESSERA_PEER_COMPILES"):
        for layer in model.model.layers:
            layer.compile()
    if mesh.size() > 1:
        bf16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        precision = bf16 if variant == "bfloat16" else MixedPrecisionPolicy()
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=precision)
        fully_shard(model, mesh=mesh, mp_policy=precision)
    return model


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def make_step_worker(model, optimizers, clip, rows, length, data_ranks, data_rank,
                     scope=contextlib.nullcontext, document_length=0):
    """Returns the function that answers {"steps": N}. A step trains on `rows` rows of this rank. `data_ranks` ranks
    have different rows, and this rank is number `data_rank` among them. Forward and backward run within scope()."""
    vocab = model.config.vocab_size
    step = 0
    # Without explicit positions the model would number only this rank's part of a row.
    positions = torch.arange(length)[None]
    if document_length:
        positions = positions % document_length

    def work(request):
        nonlocal step
        dist.barrier()
        start = time.perf_counter()
        for _ in range(request["steps"]):
            first = (step * data_ranks + data_rank) * rows * length
            tokens = ((torch.arange(first, first + rows * length) * 7919) % vocab).view(rows, length)
            labels = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)
            if document_length:
                labels = labels.masked_fill(positions == document_length - 1, -100)
            with scope():
                logits = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100)
                loss.backward()
            clip()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            step += 1
        mean = (loss.full_tensor() if isinstance(loss, DTensor) else loss).detach().clone()
        dist.all_reduce(mean)
        return time.perf_counter() - start, mean.item() / dist.get_world_size(), peak_bytes()

    return work


def make_worker(rank, ranks, model_dir, rows, length, variant="float32", max_norm="1"):
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    model = build(model_dir, dist.init_device_mesh("cpu", (ranks,)), variant)
    trained = [p for p in model.parameters() if p.requires_grad]
    clip = lambda: torch.nn.utils.clip_grad_norm_(trained, float(max_norm)) if float(max_norm) > 0 else None
    return make_step_worker(model, [adamw(trained)], clip, rows, length, ranks, rank,
                            document_length=200 if variant == "packed" else 0)


def join_results(_, results):
    return {"seconds": max(seconds for seconds, _, _ in results), "loss": results[0][1],
            "peak_bytes": [peak for _, _, peak in results]}


if __name__ == "__main__":
    model_dir, ranks, rows, length = sys.argv[1], *map(int, sys.argv[2:5])
    local_ranks.serve(ranks, make_worker, (model_dir, rows, length, *sys.argv[5:]), join_results)
