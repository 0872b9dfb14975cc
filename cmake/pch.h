// The precompiled header of every target that includes libtorch: what nearly all of them need, no more.
#pragma once
#include <ATen/ATen.h>
#include <ATen/core/Tensor.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <unordered_map>
#include <utility>
#include <vector>
