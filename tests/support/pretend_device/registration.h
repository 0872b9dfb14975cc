// The parts of the pretend device that install() registers, one function per file. Internal to the pretend device.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

namespace tessera::pretend {

void register_guard();
void register_hooks();
void register_fallback();
void register_operations();
void register_copies();
void register_attention();
void register_normalization();
void register_log_sigmoid();
void register_float8();
void register_backend();
void register_graphs();

c10::DeviceIndex current_device();
const at::Generator& default_generator(int device);
// The CPU generator behind a generator of the device.
at::Generator host_generator(const at::Generator& generator);

// A CPU tensor over the bytes of `tensor`, with its sizes and strides. The storage of the result does not own the
// bytes.
at::Tensor host_view(const at::Tensor& tensor);

}  // namespace tessera::pretend
