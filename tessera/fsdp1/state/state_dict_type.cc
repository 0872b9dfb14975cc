#include "tessera/fsdp1/state/state_dict_type.h"

#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "tessera/base/enum_name.h"
#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/fsdp1/fully_sharded_data_parallel.h"

namespace tessera {
namespace {

using Attachment = nn::Module::Attachment;

// By the sharding state of a unit, which dies with its module.
struct SettingsTable {
  std::mutex mutex;
  std::vector<std::pair<std::weak_ptr<Attachment>, StateDictSettings>> rows;

  StateDictSettings* find(const std::shared_ptr<Attachment>& unit) {
    for (auto& [key, settings] : rows) {
      if (!key.owner_before(unit) && !unit.owner_before(key)) return &settings;
    }
    return nullptr;
  }
};

SettingsTable& settings_table() {
  static SettingsTable table;
  return table;
}

std::vector<std::shared_ptr<Attachment>> unit_attachments(nn::Module& root, const char* verb) {
  std::vector<std::shared_ptr<Attachment>> units;
  const auto modules = root.named_modules();
  for (const auto& handle : flat_parameter_handles(root)) {
    std::string name = handle->prefix();
    if (!name.empty()) name.pop_back();
    for (const auto& [path, module] : modules) {
      if (path == name && module->sharding()) units.push_back(module->sharding());
    }
  }
  TESSERA_CHECK(!units.empty(), ErrorKind::kConfig,
                "[fsdp1.{}] no module of this model is wrapped by FSDP1. Call wrap_fsdp1 first.", verb);
  return units;
}

// Of the units, which must agree.
StateDictSettings common_settings(SettingsTable& table, const std::vector<std::shared_ptr<Attachment>>& units,
                                  const char* verb) {
  std::optional<StateDictSettings> common;
  for (const auto& unit : units) {
    const auto* own = table.find(unit);
    const auto settings = own ? *own : complete_settings({});
    TESSERA_CHECK(!common || *common == settings, ErrorKind::kConfig,
                  "[fsdp1.{}] All FSDP modules should have the same state_dict_type: found {} and {}, or configs that "
                  "differ. Set it at the root only.",
                  verb, to_string(common->type), to_string(settings.type));
    common = settings;
  }
  return *common;
}

void store_settings(SettingsTable& table, const std::vector<std::shared_ptr<Attachment>>& units,
                    const StateDictSettings& settings) {
  std::erase_if(table.rows, [](const auto& row) { return row.first.expired(); });
  for (const auto& unit : units) {
    if (auto* own = table.find(unit)) {
      *own = settings;
    } else {
      table.rows.emplace_back(unit, settings);
    }
  }
}

template <class Config, class Variant>
void fill_config(Variant& config, StateDictType type, const char* what, const char* wanted) {
  if (std::holds_alternative<std::monostate>(config)) config = Config{};
  TESSERA_CHECK(std::holds_alternative<Config>(config), ErrorKind::kConfig,
                "[fsdp1.set_state_dict_type] Expected {} of type {} but got that of another type than {}. Pass configs "
                "of the state_dict_type.",
                what, wanted, to_string(type));
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
  const auto units = unit_attachments(root, "set_state_dict_type");
  auto& table = settings_table();
  const std::lock_guard lock(table.mutex);
  const auto before = common_settings(table, units, "set_state_dict_type");
  store_settings(table, units, full);
  return before;
}

StateDictSettings get_state_dict_type(nn::Module& root) {
  const auto units = unit_attachments(root, "get_state_dict_type");
  auto& table = settings_table();
  const std::lock_guard lock(table.mutex);
  return common_settings(table, units, "get_state_dict_type");
}

StateDictTypeScope::StateDictTypeScope(nn::Module& root, const StateDictSettings& settings)
    : root_(root), before_(set_state_dict_type(root, settings)) {}

StateDictTypeScope::~StateDictTypeScope() {
  try {
    const auto units = unit_attachments(root_, "state_dict_type");
    auto& table = settings_table();
    const std::lock_guard lock(table.mutex);
    store_settings(table, units, before_);
  } catch (const std::exception& error) {
    log_warning("[fsdp1.state_dict_type] the settings before could not be restored: {}", error.what());
  }
}

}  // namespace tessera
