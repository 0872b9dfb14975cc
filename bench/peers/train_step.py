"""PyTorch training steps on local CPU ranks, under FSDP2 where there are several: the peer of bench/train_bench.cc.

    train_step.py MODEL_DIR RANKS ROWS LENGTH [float32|bfloat16|packed|ADAPTER_DIR [CLIP]]

bfloat16: FSDP2's mixed precision, with reductions in float32. packed: rows of documents of 200 tokens, which transformers
masks by their positions. ADAPTER_DIR: only this adapter of PEFT's is trained. CLIP: the norm that gradients are clipped
at, 1.0; 0: they are not. With TESSERA_PEER_COMPILES in its environment layers are compiled (torch.compile), as torchtitan
does it.

Reads one request a line on stdin, {"steps": N}, and answers one line: {"seconds": S, "loss": L, "peak_bytes": [a rank]}.
Each rank trains on ROWS x LENGTH tokens a step with AdamW (fused), clipping at 1.0, fp32, one thread a rank on a machine
with as many cores as ranks. Tokens are (7919 * index) modulo the vocabulary, as in the other half.
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


def build(model_dir, mesh, how="float32"):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="sdpa")
    if os.path.isdir(how):
        from peft import PeftModel
        model = PeftModel.from_pretrained(model, how, is_trainable=True)
    if os.environ.get("TESSERA_PEER_COMPILES"):
        for layer in model.model.layers:
            layer.compile()
    if mesh.size() > 1:
        precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if how == "bfloat16" else MixedPrecisionPolicy()
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=precision)
        fully_shard(model, mesh=mesh, mp_policy=precision)
    return model


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def stepper(model, optimizers, clip, own, length, data_ranks, data_rank, scope=contextlib.nullcontext, document=0):
    """Answers {"steps": N}: trains on `own` rows of this rank, of those that have rows of their own; forward and backward
    run within scope()."""
    vocab = model.config.vocab_size
    step = 0
    positions = torch.arange(length)[None]  # those that the model makes up have the length of a rank's part
    if document:
        positions = positions % document

    def work(request):
        nonlocal step
        dist.barrier()
        start = time.perf_counter()
        for _ in range(request["steps"]):
            first = (step * data_ranks + data_rank) * own * length
            tokens = ((torch.arange(first, first + own * length) * 7919) % vocab).view(own, length)
            labels = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)
            if document:
                labels = labels.masked_fill(positions == document - 1, -100)
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


def make_worker(rank, ranks, model_dir, rows, length, how="float32", max_norm="1"):
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    model = build(model_dir, dist.init_device_mesh("cpu", (ranks,)), how)
    trained = [p for p in model.parameters() if p.requires_grad]
    clip = lambda: torch.nn.utils.clip_grad_norm_(trained, float(max_norm)) if float(max_norm) > 0 else None
    return stepper(model, [adamw(trained)], clip, rows, length, ranks, rank, document=200 if how == "packed" else 0)


def joined(_, results):
    return {"seconds": max(seconds for seconds, _, _ in results), "loss": results[0][1],
            "peak_bytes": [peak for _, _, peak in results]}


if __name__ == "__main__":
    model_dir, ranks, rows, length = sys.argv[1], *map(int, sys.argv[2:5])
    local_ranks.serve(ranks, make_worker, (model_dir, rows, length, *sys.argv[5:]), joined)
