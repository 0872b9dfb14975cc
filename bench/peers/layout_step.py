"""PyTorch pipeline and FSDP2 training steps on local CPU ranks: the peer of bench/layouts_bench.cc.

    layout_step.py MODEL_DIR RANKS ROWS LENGTH SCHEDULE|dp MICRO_BATCHES

Reads one request a line on stdin, {"steps": N}, and answers one line: {"seconds": S, "loss": L, "peak_bytes": [a rank]}.
The ranks together train on ROWS x LENGTH tokens a step with AdamW (fused), clipping at 1.0, fp32. SCHEDULE is one of
torch.distributed.pipelining (1F1B, Interleaved1F1B, ...): transformers' layers as stages, one a rank, or two where the
schedule wants several. dp: the model under FSDP2, each rank with its share of the rows. Tokens are
(7919 * index) modulo the vocabulary, as in the other half.
"""

import os
import sys
import time

import torch
import torch.distributed as dist

import local_ranks
import train_step
from train_step import adamw, joined, peak_bytes


class Stage(torch.nn.Module):
    """Layers [first, end) of a Llama, behind the embedding if they are the first and before norm and head if the last."""

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
    kind = get_schedule_class(schedule)
    several = issubclass(kind, PipelineScheduleMulti)
    stages = ranks * (2 if several else 1)
    count = len(model.model.layers)
    firsts = [count * stage // stages for stage in range(stages + 1)]
    v_style = schedule in ("ZBVZeroBubble", "DualPipeV")
    own = [rank] if not several else [rank, stages - 1 - rank] if v_style else [rank, rank + ranks]
    parts = [PipelineStage(Stage(model, firsts[s], firsts[s + 1]), s, stages, torch.device("cpu")) for s in own]
    vocab = model.config.vocab_size
    parameters = [p for part in parts for p in part.submod.parameters()]
    del model
    schedule = kind(parts if several else parts[0], micro_batches, loss_fn=loss_of)
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
            inputs = (tokens,) if 0 in own else ()
            if stages - 1 in own:
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


def make_worker(rank, ranks, model_dir, rows, length, how, micro_batches):
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    if how == "dp":
        return train_step.make_worker(rank, ranks, model_dir, rows // ranks, length)
    return pipeline_worker(rank, ranks, model_dir, rows, length, how, micro_batches)


if __name__ == "__main__":
    model_dir, ranks, rows, length, how = sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5]
    local_ranks.serve(ranks, make_worker, (model_dir, rows, length, how, int(sys.argv[6])), joined)
