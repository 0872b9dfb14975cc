"""Wraps models with PyTorch's FullyShardedDataParallel on RANKS local ranks.

    fsdp1.py RANKS

Answers each JSON line on stdin with a JSON line, the list of the answers of all ranks.

Request: {"use_orig_params": bool, "strategy": "FULL_SHARD" | "SHARD_GRAD_OP" | "NO_SHARD", "steps": n,
"param_dtype": NAME | null, "reduce_dtype": NAME | null,
"units": [{"nested": bool, "parameters": [{"shape": [...], "order": [...], "frozen": bool,
"like": [unit, index] | null}]}]}

A unit is a module with parameters. "nested" wraps the unit itself with FSDP. "order" lists the dims of a parameter from
the outermost to the innermost in memory. "like" makes the parameter shared with an earlier one. In memory order,
element i of parameter p of unit u is sin(i + 10 p + 100 u). The loss is the sum over parameters of
(p * (initial p + 0.5)).sum() ** 2. A step is a step of AdamW (lr 0.01, weight decay 0.1).

Answer of a rank: [{"fqns", "shared", "numels_with_padding", "is_padding", "infos", "padding", "shard", "requires_grad"}
of each unit with parameters].
"""

import os
import sys
import warnings

import torch
import torch.nn as nn

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "../../../bench/peers"))
from local_ranks import serve  # noqa: E402


class Unit(nn.Module):
    def forward(self, start):
        return sum((getattr(self, name) * (value + 0.5)).sum() ** 2 for name, value in start.items())


class Model(nn.Module):
    def forward(self, start):
        return sum(unit(start[name]) for name, unit in self.named_children())


def build(units):
    model, start = Model(), {}
    for u, spec in enumerate(units):
        unit = Unit()
        start[f"u{u}"] = {}
        for p, parameter in enumerate(spec["parameters"]):
            if parameter["like"]:
                other, index = parameter["like"]
                value = getattr(getattr(model, f"u{other}") if other != u else unit, f"p{index}")
            else:
                memory_shape = [parameter["shape"][d] for d in parameter["order"]]
                numel = torch.Size(memory_shape).numel()
                data = torch.sin(torch.arange(numel, dtype=torch.float64) + 10 * p + 100 * u).float().view(memory_shape)
                inverse_order = [parameter["order"].index(d) for d in range(len(memory_shape))]
                value = nn.Parameter(data.permute(inverse_order), requires_grad=not parameter["frozen"])
            unit.register_parameter(f"p{p}", value)
            start[f"u{u}"][f"p{p}"] = value.detach().clone()
        model.add_module(f"u{u}", unit)
    return model, start


def describe(module):
    handle = module._handle
    flat = handle.flat_param
    return {"fqns": list(flat._fqns),
            "shared": [[(f"{s.module_name}." if s.module_name else "") + s.param_name,
                        (f"{s.prim_module_name}." if s.prim_module_name else "") + s.prim_param_name]
                       for s in flat._shared_param_infos],
            "numels_with_padding": list(flat._numels_with_padding),
            "is_padding": [bool(x) for x in flat._is_padding_mask],
            "infos": [[int(x or 0) for x in info] for info in flat._shard_param_infos],
            "padding": flat._shard_numel_padded,
            "requires_grad": flat.requires_grad,
            "shard": flat.detach().tolist()}


def make_worker(rank, ranks):
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy

    def work(request):
        warnings.simplefilter("ignore")
        model, start = build(request["units"])
        options = dict(device_id=torch.device("cpu"), use_orig_params=request["use_orig_params"],
                       sharding_strategy=ShardingStrategy[request["strategy"]])
        dtypes = {key: getattr(torch, request[key]) for key in ("param_dtype", "reduce_dtype") if request[key]}
        if dtypes:
            options["mixed_precision"] = MixedPrecision(**dtypes)
        for u, spec in enumerate(request["units"]):
            if spec["nested"]:
                setattr(model, f"u{u}", FullyShardedDataParallel(getattr(model, f"u{u}"), **options))
        model = FullyShardedDataParallel(model, **options)
        if request["steps"]:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
        for _ in range(request["steps"]):
            model(start).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [describe(module) for module in FullyShardedDataParallel.fsdp_modules(model) if module._handle]

    return work


if __name__ == "__main__":
    serve(int(sys.argv[1]), make_worker, (), lambda request, results: results)
