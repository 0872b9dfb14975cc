"""Runs a PyTorch optimizer and prints its inputs and results as one JSON object.

    optimizers.py adamw|sgd OPTIONS_JSON

Two 3x4 weights and a bias of size 4 take five steps with random gradients. The second weight has no gradient in steps 1
and 3 (counted from 0). Weight decay applies to the weights and not to the bias. OPTIONS_JSON has the optimizer's
keyword arguments.
"""

import json
import sys

import torch


def main():
    name, options = sys.argv[1], json.loads(sys.argv[2])
    generator = torch.Generator().manual_seed(11)
    shapes = [(3, 4), (3, 4), (4,)]
    parameters = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    start = [p.detach().clone() for p in parameters]
    decay = options.pop("weight_decay")
    groups = [{"params": parameters[:2], "weight_decay": decay}, {"params": parameters[2:], "weight_decay": 0.0}]
    if "betas" in options:
        options["betas"] = tuple(options["betas"])
    optimizer = (torch.optim.AdamW if name == "adamw" else torch.optim.SGD)(groups, **options)
    gradients = []
    for step in range(5):
        drawn = [torch.randn(shape, generator=generator) for shape in shapes]
        gradients.append([g.flatten().tolist() if i != 1 or step % 2 == 0 else None for i, g in enumerate(drawn)])
        for i, p in enumerate(parameters):
            p.grad = drawn[i].clone() if gradients[-1][i] is not None else None
        optimizer.step()
    flat = lambda tensors: [t.detach().flatten().tolist() for t in tensors]
    state = [{k: v.flatten().tolist() for k, v in optimizer.state[p].items() if torch.is_tensor(v)} for p in parameters]
    print(json.dumps({"start": flat(start), "gradients": gradients, "end": flat(parameters), "state": state}))


main()
