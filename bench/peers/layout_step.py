"""PyTorch pipeline and FSDP2 training steps on local CPU ranks: the peer of bench/layouts_bench.cc.

    layout_step.py MODEL_DIR RANKS ROWS LENGTH SCHEDULE|dp MICRO_BATCHES

Answers each request line {"steps": N} on stdin with the line {"seconds": S, "loss": L, "peak_bytes": [ONE PER RANK]}.
The ranks together train on ROWS x LENGTH tokens per step in fp32, with fused AdamW and gradient clipping at 1.0.

SCHEDULE is a schedule of torch.distributed.pipelining (1F1B, Interleaved1F1B, ...). The stages are transformers'
layers: one stage per rank, or two for schedules with several stages per rank. dp is the model under FSDP2, where each
rank has its share of the rows. Tokens are (7919 * index) modulo the vocabulary size, as in our ranks.
"""

import os
import sys
import time

import torch
import torch.distributed as dist

import local_ranks
import train_step
from train_step import adamw, join_results, peak_bytes


class Stage(torch.nn.Module):
    """Layers [first, end) of a Llama. The first stage also has the embedding, and the last the norm and the head."""

    def __init__(self, model, first, end):
        super().__init__()
        body = model.model
        self.embed = body.embed_tokens if first == 0 else None
        self.layers = torch.nn.ModuleList(body.layers[first:end])
        last = end == len(body.layers)
        self.norm, self.head = (body.norm, model.lm_head) if last else (None, None)
        self.rotary = body.rotary_emb

    def forward(self, x):
        x = self.embed(x) if self.embed is not None else x
        angles = self.rotary(x, torch.arange(x.shape[1])[None])
        for layer in self.layers:
            x = layer(x, position_embeddings=angles, attention_mask=None)
        return self.head(self.norm(x)) if self.head is not None else x


def loss_of(logits, labels):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def clip_over_stages(parameters):
    total = torch.nn.utils.get_total_norm([p.grad for p in parameters]).square()
    dist.all_reduce(total)
    torch.nn.utils.clip_grads_with_norm_(parameters, 1.0, total.sqrt())


def pipeline_worker(rank, ranks, model_dir, rows, length, schedule, micro_batches):
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="sdpa")
    schedule_class = get_schedule_class(schedule)
    several = issubclass(schedule_class, PipelineScheduleMulti)
    stages = ranks * (2 if several else 1)
    count = len(model.model.layers)
    firsts = [count * stage // stages for stage in range(stages + 1)]
    v_style = schedule in ("ZBVZeroBubble", "DualPipeV")
    stage_ids = [rank] if not several else [rank, stages - 1 - rank] if v_style else [rank, rank + ranks]
    stage_modules = [PipelineStage(Stage(model, firsts[s], firsts[s + 1]), s, stages, torch.device("cpu"))
                     for s in stage_ids]
    vocab = model.config.vocab_size
    parameters = [p for stage_module in stage_modules for p in stage_module.submod.parameters()]
    del model
    schedule = schedule_class(stage_modules if several else stage_modules[0], micro_batches, loss_fn=loss_of)
    optimizer = adamw(parameters)
    step = 0

    def work(request):
        nonlocal step
        dist.barrier()
        start = time.perf_counter()
        for _ in range(request["steps"]):
            first = step * rows * length
            tokens = ((torch.arange(first, first + rows * length) * 7919) % vocab).view(rows, length)
            losses = []
            inputs = (tokens,) if 0 in stage_ids else ()
            if stages - 1 in stage_ids:
                labels = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)
                schedule.step(*inputs, target=labels, losses=losses)
            else:
                schedule.step(*inputs)
            clip_over_stages(parameters)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
        loss = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        dist.all_reduce(loss)
        return time.perf_counter() - start, loss.item(), peak_bytes()

    return work


def make_worker(rank, ranks, model_dir, rows, length, layout, micro_batches):
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    if layout == "dp":
        return train_step.make_worker(rank, ranks, model_dir, rows // ranks, length)
    return pipeline_worker(rank, ranks, model_dir, rows, length, layout, micro_batches)


if __name__ == "__main__":
    model_dir, ranks, rows, length, layout = sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5]
    local_ranks.serve(ranks, make_worker, (model_dir, rows, length, layout, int(sys.argv[6])), join_results)
