// Mistral: a Llama with a sliding window.
#pragma once

#include "tessera/models/family.h"

namespace tessera {

const ModelFamily& mistral_family();

}  // namespace tessera
