"""Runs torchao's dynamic float8 Linear in emulation, and torch's float8 casts.

    float8_linear.py OUTPUT

OUTPUT is a safetensors file. For DTYPE float32 and bfloat16 it has the inputs DTYPE.x, DTYPE.weight, DTYPE.bias and
DTYPE.grad_y, and the results DTYPE.y, DTYPE.grad_x, DTYPE.grad_weight and DTYPE.grad_bias. For the casts it has
cast.values, and for F8 float8_e4m3fn and float8_e5m2 the bytes cast.F8 and the scale cast.F8.scale.
"""

import sys

import torch
from safetensors.torch import save_file
from torchao.float8.config import Float8LinearConfig
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated

torch.manual_seed(3)
out = {}
for dtype in (torch.float32, torch.bfloat16):
    name = str(dtype).removeprefix("torch.")
    plain = torch.nn.Linear(48, 32).to(dtype)
    linear = Float8Linear.from_float(plain, Float8LinearConfig(emulate=True))
    x = (3 * torch.randn(2, 7, 48)).to(dtype).requires_grad_()
    y = linear(x)
    grad_y = torch.randn_like(y)
    y.backward(grad_y)
    for key, value in (("x", x), ("weight", linear.weight), ("bias", linear.bias), ("grad_y", grad_y), ("y", y),
                       ("grad_x", x.grad), ("grad_weight", linear.weight.grad), ("grad_bias", linear.bias.grad)):
        out[f"{name}.{key}"] = value.detach().contiguous().clone()
values = torch.cat([torch.randn(4000) * s for s in (1e-6, 1e-3, 1.0)] + [torch.tensor([0.0, -0.0, 3.5, -3.5])])
out["cast.values"] = values
for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
    scale = tensor_to_scale(values, dtype)
    name = str(dtype).removeprefix("torch.")
    out[f"cast.{name}.scale"] = scale
    out[f"cast.{name}"] = to_fp8_saturated(values * scale, dtype).view(torch.uint8)
save_file(out, sys.argv[1])
