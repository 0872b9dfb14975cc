#include "tessera/models/config/rope_config.h"

#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/base/text/json.h"
#include "tessera/base/text/quote.h"

namespace tessera {
namespace {

constexpr int64_t kMostPositions = int64_t{1} << 40;

RopeKind parse_rope_kind(const std::string& kind, const std::string& name) {
  if (kind == "default") return RopeKind::kDefault;
  if (kind == "linear") return RopeKind::kLinear;
  if (kind == "dynamic") return RopeKind::kDynamic;
  if (kind == "yarn") return RopeKind::kYarn;
  if (kind == "llama3") return RopeKind::kLlama3;
  raise(ErrorKind::kConfig, "{}: rope type {} is not supported: wanted default, linear, dynamic, yarn or llama3", name,
        quote(kind));
}

void read_llama3(const JsonReader& in, RopeConfig& rope) {
  rope.low_freq_factor = in.number("low_freq_factor", std::nullopt, 1e-6, 1e9);
  rope.high_freq_factor = in.number("high_freq_factor", std::nullopt, 1e-6, 1e9);
  TESSERA_CHECK(rope.low_freq_factor < rope.high_freq_factor, ErrorKind::kConfig,
                "{}: low_freq_factor {} is not below high_freq_factor {}", in.name(), rope.low_freq_factor,
                rope.high_freq_factor);
}

void read_yarn(const JsonReader& in, RopeConfig& rope) {
  if (in.has("attention_factor")) rope.attention_factor = in.number("attention_factor", std::nullopt, 0, 1e6);
  rope.beta_fast = in.number("beta_fast", 32.0, 1e-6, 1e9);
  rope.beta_slow = in.number("beta_slow", 1.0, 1e-6, 1e9);
  rope.mscale = in.number("mscale", 0.0, 0, 1e6);
  rope.mscale_all_dim = in.number("mscale_all_dim", 0.0, 0, 1e6);
  // transformers reads a null `truncate` as false.
  rope.truncate = in.boolean("truncate", !in.value().contains("truncate"));
}

void check_partial_factor(const JsonReader& in, double factor) {
  TESSERA_CHECK(factor == 1.0, ErrorKind::kConfig,
                "{}: a partial_rotary_factor other than 1 is not supported. Use a model with full rotary dims.",
                in.name());
}

}  // namespace

// Keys in `object` have priority over the same keys in `parent`. With defaults.parent_original_has_priority, `parent`
// has priority for original_max_position_embeddings.
RopeConfig read_rope(const JsonReader& parent, const std::optional<JsonReader>& object, const RopeDefaults& defaults) {
  RopeConfig rope;
  const int64_t max_positions = defaults.max_positions;
  rope.theta = defaults.theta;
  rope.original_max_position_embeddings = max_positions;
  const double parent_factor = parent.number("partial_rotary_factor", 1.0, 0, 1e3);
  if (!object) {
    check_partial_factor(parent, parent_factor);
    return rope;
  }
  if (!object->is_object()) object->fail("an object");
  const JsonReader& in = *object;
  rope.kind = parse_rope_kind(in.string("rope_type", in.string("type", "default")), in.name());
  rope.theta = in.number("rope_theta", rope.theta, 1.0, 1e18);
  check_partial_factor(in, in.number("partial_rotary_factor", parent_factor, 0, 1e3));
  if (rope.kind == RopeKind::kDefault) return rope;
  constexpr const char* kOriginal = "original_max_position_embeddings";
  rope.original_max_position_embeddings = in.integer(kOriginal, max_positions, 1, kMostPositions);
  if (defaults.parent_original_has_priority) {
    rope.original_max_position_embeddings =
        parent.integer(kOriginal, rope.original_max_position_embeddings, 1, kMostPositions);
  }
  // For yarn the factor may be missing; it is then max_position_embeddings / original_max_position_embeddings.
  const bool derived = rope.kind == RopeKind::kYarn && !in.has("factor");
  rope.factor = derived
                    ? static_cast<double>(max_positions) / static_cast<double>(rope.original_max_position_embeddings)
                    : in.number("factor", std::nullopt, 1e-6, 1e9);
  if (rope.kind == RopeKind::kLlama3) read_llama3(in, rope);
  if (rope.kind == RopeKind::kYarn) read_yarn(in, rope);
  return rope;
}

}  // namespace tessera
