"""Runs torch.optim and torch.distributed.checkpoint.state_dict on a tiny module and prints one JSON object.

    state_dicts.py train      for adamw and sgd: takes three steps with random gradients, prints the optimizer state in
                              three forms (parameter ids, parameter names, flattened), and takes two more steps
    state_dicts.py resume     reads a list of {"optimizer", "form", "weights", "gradients", "state"} from standard
                              input. For each entry it loads the weights and the state, takes a step for each of the
                              gradients, and prints the resulting weights

Modules a, b and c are those of AffineNet in tests/state/values.h; c is frozen. In JSON, tensors are {"shape", "values"}
and tuples are {"tuple"}.
"""

import json
import sys
import warnings

import torch
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict, get_optimizer_state_dict,
                                                     set_optimizer_state_dict)

warnings.filterwarnings("ignore")
OPTIONS = {
    "adamw": dict(lr=0.1, betas=(0.8, 0.95), eps=1e-6),
    "sgd": dict(lr=0.1, momentum=0.9, dampening=0.25),
}
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)
        self.c = torch.nn.Linear(2, 2, bias=False)
        self.c.weight.requires_grad_(False)
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)


def show(value):
    if torch.is_tensor(value):
        return {"shape": list(value.shape), "values": value.detach().flatten().tolist()}
    if isinstance(value, tuple):
        return {"tuple": [show(v) for v in value]}
    if isinstance(value, list):
        return [show(v) for v in value]
    if isinstance(value, dict):
        return {str(k): show(v) for k, v in value.items()}
    return value


def read(value):
    if isinstance(value, dict):
        if set(value) == {"shape", "values"}:
            return torch.tensor(value["values"]).reshape(value["shape"])
        if set(value) == {"tuple"}:
            return tuple(read(v) for v in value["tuple"])
        return {int(k) if k.lstrip("-").isdigit() else k: read(v) for k, v in value.items()}
    return [read(v) for v in value] if isinstance(value, list) else value


def make(name, net):
    groups = [{"params": [net.a.weight, net.b.weight, net.c.weight], "weight_decay": 0.3},
              {"params": [net.a.bias, net.b.bias], "weight_decay": 0.0, "lr": 0.05}]
    return (torch.optim.AdamW if name == "adamw" else torch.optim.SGD)(groups, **OPTIONS[name])


def steps(net, optimizer, gradients):
    trained = {n: p for n, p in net.named_parameters() if p.requires_grad}
    for drawn in gradients:
        for name, parameter in trained.items():
            parameter.grad = read(drawn[name]).clone()
        optimizer.step()
        optimizer.zero_grad()


def train(name):
    torch.manual_seed(3)
    net = Net()
    optimizer = make(name, net)
    gradients = [{n: show(torch.randn(p.shape)) for n, p in net.named_parameters()} for _ in range(5)]
    out = {"start": show(get_model_state_dict(net)), "gradients": gradients}
    steps(net, optimizer, gradients[:3])
    out["weights"] = show(get_model_state_dict(net))
    out["ids"] = show(optimizer.state_dict())
    out["names"] = show(get_optimizer_state_dict(net, optimizer))
    out["flat"] = show(get_optimizer_state_dict(net, optimizer, options=FLAT))
    steps(net, optimizer, gradients[3:])
    out["end"] = show(get_model_state_dict(net))
    return out


def resume(entry):
    net = Net()
    net.load_state_dict(read(entry["weights"]))
    optimizer = make(entry["optimizer"], net)
    state, form = read(entry["state"]), entry["form"]
    if form == "ids":
        optimizer.load_state_dict(state)
    else:
        set_optimizer_state_dict(net, optimizer, state, options=FLAT if form == "flat" else None)
    steps(net, optimizer, entry["gradients"])
    return show(net.state_dict())


if sys.argv[1] == "train":
    print(json.dumps({name: train(name) for name in OPTIONS}))
else:
    print(json.dumps([resume(entry) for entry in json.load(sys.stdin)]))
