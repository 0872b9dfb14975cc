// Mistral: a Llama with a sliding window.
#pragma once

#include "tessera/models/config/family.h"

namespace tessera {

const ModelFamily& mistral_family();

}  // namespace tessera
