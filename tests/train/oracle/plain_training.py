"""Trains a Hugging Face model with plain PyTorch on the batches of a Tessera run, and prints one JSON object per step.

    plain_training.py MODEL_DIR BATCHES.safetensors OPTIONS.json [CHECKPOINT STEP]

CHECKPOINT is the distributed checkpoint that a run saved after STEP. With it, training continues from there with step
STEP + 1.

BATCHES has tokens, labels, positions and document_ids, each [steps, rows, T]. The label of a token is the next token,
or -100 if it is not a label. OPTIONS has lr (a list with one value per step), betas, eps, weight_decay and
max_grad_norm. The loss of a step is the sum over the labels divided by their number. Weight decay does not apply to
norms and biases.
"""

import json
import sys

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from transformers import AutoModelForCausalLM


def block_causal_mask(document_ids):
    same = document_ids[:, :, None] == document_ids[:, None, :]
    causal = torch.ones(same.shape[-2:], dtype=torch.bool).tril()
    allowed = (same & causal)[:, None]
    return torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)


def clip_by_exact_norm(parameters, max_norm):
    """Like clip_grad_norm_, with the squares summed in float64. PyTorch sums them in float32 on the CPU, and for a
    gradient of 28 million elements the relative error of the norm is 1e-4 to 2e-3."""
    grads = [p.grad for p in parameters if p.grad is not None]
    norm = torch.sqrt(sum(g.double().pow(2).sum() for g in grads))
    scale = min(1.0, max_norm / (norm.item() + 1e-6))
    for g in grads:
        g.mul_(scale)
    return norm


def load(model, optimizer, checkpoint):
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    state = {"model": model_state, "optim": optimizer_state}
    dcp.load(state, checkpoint_id=checkpoint)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"], options=options)


def main():
    model_dir, batches_path, options_path = sys.argv[1:4]
    checkpoint, first_step = (sys.argv[4], int(sys.argv[5])) if len(sys.argv) > 4 else (None, 0)
    options = json.load(open(options_path))
    batches = load_file(batches_path)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager")
    model.train()
    decayed = [p for n, p in model.named_parameters() if p.ndim >= 2]
    others = [p for n, p in model.named_parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": options["weight_decay"]}, {"params": others, "weight_decay": 0.0}],
        lr=options["lr"][0], betas=tuple(options["betas"]), eps=options["eps"])
    if checkpoint:
        load(model, optimizer, checkpoint)
    for step, lr in enumerate(options["lr"]):
        if step < first_step:
            continue
        tokens, labels = batches["tokens"][step], batches["labels"][step]
        logits = model(input_ids=tokens, position_ids=batches["positions"][step],
                       attention_mask=block_causal_mask(batches["document_ids"][step]), use_cache=False).logits
        count = (labels != -100).sum()
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=-100,
                                                 reduction="sum") / count
        optimizer.zero_grad()
        loss.backward()
        norm = clip_by_exact_norm(model.parameters(), options["max_grad_norm"])
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        print(json.dumps({"step": step + 1, "loss": loss.item(), "grad_norm": norm.item()}), flush=True)


main()
