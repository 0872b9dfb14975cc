// Qwen3-MoE: a Qwen3 whose layers have experts in place of the MLP, all of them or some.
#pragma once

#include "tessera/models/config/family.h"

namespace tessera {

const ModelFamily& qwen3_moe_family();

}  // namespace tessera
