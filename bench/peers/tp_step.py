"""PyTorch tensor-parallel and FSDP2 training steps on local CPU ranks: the peer of bench/tp_bench.cc.

    tp_step.py MODEL_DIR RANKS ROWS LENGTH dp|tp|sp

Answers each request line {"steps": N} on stdin with the line {"seconds": S, "loss": L, "peak_bytes": [ONE PER RANK]}.
The ranks together train on ROWS x LENGTH tokens per step in fp32, with fused AdamW and gradient clipping at 1.0.
Layouts:

    dp  FSDP2; each rank has its share of the rows
    tp  parallelize_module, with logits sharded over the vocabulary and loss_parallel; every rank has all rows
    sp  tp with sequence parallelism

Tokens are (7919 * index) modulo the vocabulary size, as in our ranks.
"""

import contextlib
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import parallel

import local_ranks
import train_step
from train_step import adamw, join_results, make_step_worker


def plan(sequence_parallel):
    columns, rows = parallel.ColwiseParallel, parallel.RowwiseParallel
    layer = {"self_attn.q_proj": columns(), "self_attn.k_proj": columns(), "self_attn.v_proj": columns(),
             "self_attn.o_proj": rows(), "mlp.gate_proj": columns(), "mlp.up_proj": columns(), "mlp.down_proj": rows()}
    whole = {"model.embed_tokens": rows(input_layouts=Replicate()),
             "lm_head": columns(output_layouts=Shard(-1), use_local_output=False)}
    if sequence_parallel:
        gathered = dict(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        layer.update({"input_layernorm": parallel.SequenceParallel(),
                      "post_attention_layernorm": parallel.SequenceParallel(),
                      "self_attn": parallel.PrepareModuleInput(
                          input_kwarg_layouts={"hidden_states": Shard(1)},
                          desired_input_kwarg_layouts={"hidden_states": Replicate()}),
                      "mlp": parallel.PrepareModuleInput(**gathered),
                      "self_attn.o_proj": rows(output_layouts=Shard(1)),
                      "mlp.down_proj": rows(output_layouts=Shard(1))})
        whole.update({"model.embed_tokens": rows(input_layouts=Replicate(), output_layouts=Shard(1)),
                      "model.norm": parallel.SequenceParallel(),
                      "lm_head": columns(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)})
    return layer, whole


def build(model_dir, ranks, layout):
    from transformers import AutoModelForCausalLM

    mesh = dist.init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    if layout == "dp":
        return train_step.build(model_dir, mesh)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="sdpa")
    layer_plan, whole_plan = plan(layout == "sp")
    parallel.parallelize_module(model, mesh, whole_plan)
    for layer in model.model.layers:
        parallel.parallelize_module(layer, mesh, layer_plan)
    return model


def clip(groups):
    norms = [torch.nn.utils.get_total_norm([p.grad for p in group]) for group in groups]
    norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = torch.linalg.vector_norm(torch.stack(norms))
    for group in groups:
        torch.nn.utils.clip_grads_with_norm_(group, 1.0, total)


def make_worker(rank, ranks, model_dir, rows, length, layout):
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    model = build(model_dir, ranks, layout)
    parameters = list(model.parameters())
    groups = [[p for p in parameters if isinstance(p, DTensor)], [p for p in parameters if not isinstance(p, DTensor)]]
    groups = [group for group in groups if group]
    data_ranks, data_rank = (ranks, rank) if layout == "dp" else (1, 0)
    return make_step_worker(model, [adamw(group) for group in groups], lambda: clip(groups), rows // data_ranks, length,
                            data_ranks, data_rank, parallel.loss_parallel if layout != "dp" else contextlib.nullcontext)


if __name__ == "__main__":
    model_dir, ranks, rows, length = sys.argv[1], *map(int, sys.argv[2:5])
    local_ranks.serve(ranks, make_worker, (model_dir, rows, length, sys.argv[5]), join_results)
