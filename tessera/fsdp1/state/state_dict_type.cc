#include "tessera/fsdp1/state/state_dict_type.h"

#include <memory>
#include <optional>
#include <vector>

#include "tessera/base/enum_name.h"
#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/fsdp1/fsdp1_state.h"

namespace tessera {
namespace {

// Returns the units below `root` that have parameters.
std::vector<Fsdp1State*> wrapped_units(nn::Module& root, const char* verb) {
  std::vector<Fsdp1State*> units;
  for (const auto& [path, state] : fsdp1_states(root)) {
    if (state->group()) units.push_back(state);
  }
  TESSERA_CHECK(!units.empty(), ErrorKind::kConfig,
                "[fsdp1.{}] no module of this model is wrapped by FSDP1. Call wrap_fsdp1 first.", verb);
  return units;
}

// Returns the settings of the units, which must be equal.
StateDictSettings common_settings(const std::vector<Fsdp1State*>& units, const char* verb) {
  std::optional<StateDictSettings> common;
  for (const auto* unit : units) {
    const auto settings = unit->state_dict_settings ? *unit->state_dict_settings : complete_settings({});
    TESSERA_CHECK(!common || *common == settings, ErrorKind::kConfig,
                  "[fsdp1.{}] All FSDP modules should have the same state_dict_type: found {} and {}, or configs that "
                  "differ. Set it at the root only.",
                  verb, to_string(common->type), to_string(settings.type));
    common = settings;
  }
  return *common;
}

void store_settings(const std::vector<Fsdp1State*>& units, const StateDictSettings& settings) {
  const auto shared = std::make_shared<const StateDictSettings>(settings);
  for (auto* unit : units) unit->state_dict_settings = shared;
}

template <class Config, class Variant>
void fill_config(Variant& config, StateDictType type, const char* config_name, const char* expected_type) {
  if (std::holds_alternative<std::monostate>(config)) config = Config{};
  TESSERA_CHECK(
      std::holds_alternative<Config>(config), ErrorKind::kConfig,
      "[fsdp1.set_state_dict_type] Expected {} of type {} for {}, but got a config of another type. Pass configs "
      "of the state_dict_type.",
      config_name, expected_type, to_string(type));
}

}  // namespace

const char* to_string(StateDictType type) {
  return enum_name(type, {"FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT"}, "");
}

StateDictSettings complete_settings(const StateDictSettings& settings) {
  StateDictSettings full = settings;
  const auto type = settings.type;
  auto& model = full.state_dict_config;
  auto& optim = full.optim_state_dict_config;
  constexpr const char *kModel = "state_dict_config", *kOptim = "optim_state_dict_config";
  switch (type) {
    case StateDictType::kFull:
      fill_config<FullStateDictConfig>(model, type, kModel, "FullStateDictConfig");
      fill_config<FullOptimStateDictConfig>(optim, type, kOptim, "FullOptimStateDictConfig");
      break;
    case StateDictType::kSharded:
      fill_config<ShardedStateDictConfig>(model, type, kModel, "ShardedStateDictConfig");
      fill_config<ShardedOptimStateDictConfig>(optim, type, kOptim, "ShardedOptimStateDictConfig");
      break;
    case StateDictType::kLocal:
      fill_config<LocalStateDictConfig>(model, type, kModel, "LocalStateDictConfig");
      fill_config<LocalOptimStateDictConfig>(optim, type, kOptim, "LocalOptimStateDictConfig");
      break;
  }
  return full;
}

StateDictSettings set_state_dict_type(nn::Module& root, const StateDictSettings& settings) {
  const auto full = complete_settings(settings);
  const auto units = wrapped_units(root, "set_state_dict_type");
  const auto previous = common_settings(units, "set_state_dict_type");
  store_settings(units, full);
  return previous;
}

StateDictSettings get_state_dict_type(nn::Module& root) {
  return common_settings(wrapped_units(root, "get_state_dict_type"), "get_state_dict_type");
}

StateDictTypeScope::StateDictTypeScope(nn::Module& root, const StateDictSettings& settings)
    : root_(root), previous_(set_state_dict_type(root, settings)) {}

// Restores the earlier settings. If the FSDP1 units of the model cannot be found or set any more, the error is logged,
// because a destructor must not throw.
StateDictTypeScope::~StateDictTypeScope() {
  try {
    store_settings(wrapped_units(root_, "state_dict_type"), previous_);
  } catch (const std::exception& error) {
    log_warning("[fsdp1.state_dict_type] the earlier settings could not be restored: {}", error.what());
  }
}

}  // namespace tessera
