// Rotary settings in config.json.
#pragma once

#include <optional>

#include "tessera/base/json.h"
#include "tessera/models/config.h"

namespace tessera::detail {

// `object` is rope_parameters or rope_scaling, or none; theta: where it does not say. `top` may give the original
// context and a partial factor beside it. Error kConfig for kinds and values that are not supported.
RopeConfig read_rope(const JsonReader& top, const std::optional<JsonReader>& object, double theta,
                     int64_t max_positions);

}  // namespace tessera::detail
