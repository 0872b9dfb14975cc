// Reads the rotary settings of config.json.
#pragma once

#include <optional>

#include "tessera/base/text/json.h"
#include "tessera/models/config/config.h"

namespace tessera {

// Values from outside the object with the rotary settings.
struct RopeDefaults {
  double theta = 10000.0;     // default of rope_theta
  int64_t max_positions = 0;  // max_position_embeddings
  // original_max_position_embeddings outside the object has priority over the key in the object.
  bool parent_original_has_priority = false;
};

// `object` is rope_parameters or rope_scaling, or nullopt. `parent` has the keys outside that object. Error kConfig for
// kinds and values that are not supported.
RopeConfig read_rope(const JsonReader& parent, const std::optional<JsonReader>& object, const RopeDefaults& defaults);

}  // namespace tessera
