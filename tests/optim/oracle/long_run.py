"""Runs torch.optim.Muon or torchao's AdamW8bit for some steps and writes all values as safetensors files.

    long_run.py muon|adamw8bit LIST_OF_OPTIONS_JSON STEPS OUTPUT_FOLDER

For entry N of the list the script writes N.safetensors. For each weight the file has start.NAME, gradient.STEP.NAME and
end.NAME, and the optimizer's state after the last step as state.NAME.KEY; an 8-bit state is stored as its codes and
scales. The actual gradient of a step is gradient.STEP.NAME plus half the weight. torchao compiles its update with
torch.compile. Here the update runs uncompiled, so that each operation rounds on its own.
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
            # The gradient depends on the weight, so that a wrong step changes the later steps.
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
