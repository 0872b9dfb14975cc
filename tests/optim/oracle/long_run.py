"""Runs torch.optim.Muon or torchao's AdamW8bit for some steps and writes all values as safetensors files.

    long_run.py muon|adamw8bit LIST_OF_OPTIONS_JSON STEPS OUTPUT_FOLDER

The output is NUMBER.safetensors for each entry of the list: start.NAME, gradient.STEP.NAME and end.NAME of each weight;
state.NAME.KEY of the optimizer after the last step, where 8-bit states are their codes and scales. torchao compiles its
update; here the update runs uncompiled, so that roundings are those of the operations in their order.
"""

import json
import sys

import torch
from safetensors.torch import save_file

SHAPES = {"wide": (24, 40), "tall": (192, 64), "square": (64, 64), "small": (5, 7)}


def make(name, parameters, options):
    if name == "muon":
        if "ns_coefficients" in options:
            options["ns_coefficients"] = tuple(options["ns_coefficients"])
        return torch.optim.Muon(parameters, **options)
    from torchao.optim import AdamW8bit
    return AdamW8bit(parameters, **options)


def run(name, options, steps, output):
    generator = torch.Generator().manual_seed(11)
    weights = {k: torch.randn(s, generator=generator).requires_grad_() for k, s in SHAPES.items()}
    out = {f"start.{k}": w.detach().clone() for k, w in weights.items()}
    optimizer = make(name, list(weights.values()), options)
    for step in range(steps):
        for k, w in weights.items():
            # The gradient depends on the weight, so that an error would grow from step to step.
            drawn = torch.randn(w.shape, generator=generator)
            w.grad = drawn + 0.5 * w.detach()
            out[f"gradient.{step}.{k}"] = drawn
        optimizer.step()
    for k, w in weights.items():
        out[f"end.{k}"] = w.detach().clone()
        for key, value in optimizer.state[w].items():
            if hasattr(value, "codes"):
                out[f"state.{k}.{key}_codes"], out[f"state.{k}.{key}_scale"] = value.codes, value.scale
                out[f"map.{'signed' if value.signed else 'unsigned'}"] = value.qmap.clone()
            elif torch.is_tensor(value) and key != "step":
                out[f"state.{k}.{key}"] = value.clone()
    save_file(out, output)


def main():
    torch.compile = lambda function, **_: function
    for number, options in enumerate(json.loads(sys.argv[2])):
        run(sys.argv[1], options, int(sys.argv[3]), f"{sys.argv[4]}/{number}.safetensors")


main()
