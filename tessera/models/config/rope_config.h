// Reads the rotary settings of config.json.
#pragma once

#include <optional>

#include "tessera/base/text/json.h"
#include "tessera/models/config/config.h"

namespace tessera {

// Values that read_rope() needs and that are not in rope_parameters or rope_scaling.
struct RopeDefaults {
  double theta = 10000.0;     // default of rope_theta
  int64_t max_positions = 0;  // max_position_embeddings
  // Whether original_max_position_embeddings outside of rope_parameters or rope_scaling has priority over the same key
  // inside.
  bool parent_original_has_priority = false;
};

// Returns the rotary settings of config.json. `object` is the object with these settings, such as rope_parameters or
// rope_scaling; nullopt if there is no such object. `parent` has the keys outside that object. Error kConfig for rope
// types and values that are not supported.
RopeConfig read_rope(const JsonReader& parent, const std::optional<JsonReader>& object, const RopeDefaults& defaults);

}  // namespace tessera
