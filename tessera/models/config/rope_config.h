// Rotary settings in config.json.
#pragma once

#include <optional>

#include "tessera/base/text/json.h"
#include "tessera/models/config/config.h"

namespace tessera {

// What stands beside the object of rotary settings.
struct RopeSurroundings {
  double theta = 10000.0;               // where the object does not say
  int64_t max_positions = 0;            // max_position_embeddings
  bool original_beside_object = false;  // original_max_position_embeddings beside the object counts, and before it
};

// `object` is rope_parameters or rope_scaling, or none; `beside` holds the keys beside it. Error kConfig for kinds and
// values that are not supported.
RopeConfig read_rope(const JsonReader& beside, const std::optional<JsonReader>& object,
                     const RopeSurroundings& surroundings);

}  // namespace tessera
