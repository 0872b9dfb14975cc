// Loading a value of a state dict into a tensor of the model or the optimizer, in place. No communication.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace tessera::detail {

// This rank's part, as `like` (a DTensor) lies, of a tensor that the rank has whole; on the device of `whole`, a view
// of it where the part is one box.
at::Tensor part_of_whole(const at::Tensor& whole, const at::Tensor& like);

// Why load_tensor cannot take `value` for `target`; empty when it can. Values may be on the meta device: those that
// are still to come.
std::string loading_misfit(const at::Tensor& target, const at::Tensor& value);

// Copies, converting dtype and device. The value of a DTensor is a DTensor that lies alike, or a plain tensor of the
// whole. Counts as one write of the target.
void load_tensor(const at::Tensor& target, const at::Tensor& value);

}  // namespace tessera::detail
