// Language models from Hugging Face folders and GGUF files: loading, saving, adapters, generation, conversion.
// transformers: AutoModelForCausalLM; PEFT: LoRA and DoRA.
//
//   const auto model = from_pretrained("SmolLM2-135M-Instruct", at::kBFloat16);
//   save_pretrained(*model, "out", "SmolLM2-135M-Instruct");
#pragma once

#include "tessera/models/adapters/adapters.h"
#include "tessera/models/config/config.h"
#include "tessera/models/config/end_tokens.h"
#include "tessera/models/decoder/causal_lm.h"
#include "tessera/models/decoder/decoder.h"
#include "tessera/models/files/model_path.h"
#include "tessera/models/files/weights.h"
#include "tessera/models/generation/engine.h"
#include "tessera/models/generation/generate.h"
#include "tessera/models/generation/load.h"
#include "tessera/models/gguf/gguf_convert.h"
#include "tessera/nn.h"
