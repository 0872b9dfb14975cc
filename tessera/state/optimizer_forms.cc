#include "tessera/state/optimizer_forms.h"

#include <string_view>
#include <unordered_map>
#include <unordered_set>

#include "tessera/base/error.h"
#include "tessera/base/text/quote.h"
#include "tessera/state/detail/flat_key.h"
#include "tessera/state/detail/optimizer_parts.h"
#include "tessera/state/state_dict_structure.h"

namespace tessera {
namespace detail {
namespace {

constexpr std::string_view kStatePrefix = "state.", kGroupsPrefix = "param_groups.";

}  // namespace

FlatKeyReader::FlatKeyReader(const std::vector<std::string>& parameters) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    TESSERA_CHECK(parameters_.emplace(parameters[i], i).second, ErrorKind::kShape,
                  "[state.unflatten_optimizer] parameter {} is in two groups", quote(parameters[i]));
  }
}

std::optional<FlatKey> FlatKeyReader::read(std::string_view key) {
  const bool is_state = key.starts_with(kStatePrefix);
  if (!is_state && !key.starts_with(kGroupsPrefix)) return std::nullopt;
  const auto path = key.substr(is_state ? kStatePrefix.size() : kGroupsPrefix.size());
  // Finds the longest parameter name that is a prefix of `path` and is followed by a dot and more text. The search
  // begins at the last dot and ends soon, because names of states and hyper-parameters seldom have dots.
  for (size_t dot = path.rfind('.'); dot != std::string_view::npos && dot > 0; dot = path.rfind('.', dot - 1)) {
    ++lookups_;
    const auto found = parameters_.find(path.substr(0, dot));
    if (found != parameters_.end()) return FlatKey{is_state, found->second, path.substr(dot + 1)};
  }
  return std::nullopt;
}

}  // namespace detail

namespace {

// Returns the parameter groups of `optimizer_dict`, with each id or name in "params" replaced by the result of `rename`
// for it. `rename` is called for the ids or names in the order of the groups and of their "params".
template <class Rename>
StateList renamed_groups(const StateDict& optimizer_dict, const Rename& rename) {
  StateList groups;
  for (const auto& value : optimizer_dict.at("param_groups").list()) {
    StateDict group = value.dict();
    StateList params;
    for (const auto& param : group.at("params").list()) params.push_back(rename(param));
    group.set("params", std::move(params));
    groups.emplace_back(std::move(group));
  }
  return groups;
}

// Returns {"state": the same entries under new keys, "param_groups": groups}. A key that is not in `keys` stays
// unchanged.
StateDict rekeyed(const StateDict& optimizer_dict, const std::unordered_map<StateKey, StateKey>& keys,
                  StateList groups) {
  StateDict state;
  for (const auto& [key, value] : optimizer_dict.at("state").dict()) {
    const auto found = keys.find(key);
    const StateKey& name = found == keys.end() ? key : found->second;
    TESSERA_CHECK(!state.contains(name), ErrorKind::kShape, "[state.optimizer_dict] two states would have the key {}",
                  quote(to_string(name)));
    state.set(name, value);
  }
  return detail::optimizer_dict_of(std::move(state), std::move(groups));
}

void set_new(StateDict& flat, const std::string& key, const StateValue& value) {
  const size_t before = flat.size();
  flat.set(key, value);
  TESSERA_CHECK(flat.size() > before, ErrorKind::kShape, "[state.flatten_optimizer] two values would have the key {}",
                quote(key));
}

// Flattens nested dicts of a state: {"a": {"b": 1}} at `prefix` becomes the key "prefix.a.b".
void flatten_state(const StateDict& nested, const std::string& prefix, StateDict& out) {
  for (const auto& [key, value] : nested) {
    const auto full = prefix + "." + to_string(key);
    if (value.is_dict()) {
      flatten_state(value.dict(), full, out);
      continue;
    }
    TESSERA_CHECK(
        value.is_tensor() || value.is_sharded() || value.is_bool() || value.is_int() || value.is_double(),
        ErrorKind::kShape,
        "[state.flatten_optimizer] {}: Flattening optimizer state_dict only supports tensor, int, float, dict "
        "states now. Type is {}.",
        quote(full), type_name(value));
    set_new(out, full, value);
  }
}

// Sets `value` at the path "a.b.c" below `nested`, and makes the dicts on the way. `key` is the whole flat key, for
// messages.
void set_nested(StateDict& nested, std::string_view path, const StateValue& value, const std::string& key) {
  const auto dot = path.find('.');
  if (dot == std::string_view::npos) {
    TESSERA_CHECK(!nested.contains(std::string(path)), ErrorKind::kShape,
                  "[state.unflatten_optimizer] {}: there is a value below the same name", quote(key));
    nested.set(std::string(path), value);
    return;
  }
  const std::string step(path.substr(0, dot));
  auto* inner = nested.find(step);
  if (inner == nullptr) inner = &nested.set(step, StateDict());
  TESSERA_CHECK(inner->is_dict(), ErrorKind::kShape, "[state.unflatten_optimizer] {}: {} has a value itself",
                quote(key), quote(step));
  set_nested(inner->dict(), path.substr(dot + 1), value, key);
}

// Throws when two parameters of one group have different hyper-parameters. Both dicts are searched for the keys of the
// other, so a missing key counts as a difference.
void check_same_settings(const StateDict& first, const std::string& name, const StateDict& settings) {
  const auto compare = [&](const StateKey& key) {
    const auto *value = settings.find(key), *other = first.find(key);
    const auto shown = [](const StateValue* held) { return held ? scalar_text(*held) : "missing"; };
    TESSERA_CHECK(value && other && same_values(*value, *other), ErrorKind::kShape,
                  "[state.unflatten_optimizer] All the parameters in the same parameter group should have the same "
                  "saved param_group value. But {}.{} is {} while other(s) is {}.",
                  escape(name), escape(to_string(key)), shown(value), shown(other));
  };
  for (const auto& [key, value] : settings) compare(key);
  for (const auto& [key, value] : first) compare(key);
}

}  // namespace

StateDict optimizer_dict_to_names(const StateDict& by_id, const std::vector<std::string>& names) {
  std::unordered_map<StateKey, StateKey> keys;
  std::unordered_set<std::string_view> seen;
  size_t position = 0;
  auto groups = renamed_groups(by_id, [&](const StateValue& param) -> StateValue {
    TESSERA_CHECK(position < names.size(), ErrorKind::kShape,
                  "[state.optimizer_dict_to_names] the groups have more parameters than the {} names", names.size());
    const auto& name = names[position++];
    TESSERA_CHECK(keys.emplace(to_key(param), name).second, ErrorKind::kShape,
                  "[state.optimizer_dict_to_names] parameter {} is in two groups", quote(to_string(to_key(param))));
    TESSERA_CHECK(seen.insert(name).second, ErrorKind::kShape, "[state.optimizer_dict_to_names] name {} is there twice",
                  quote(name));
    return name;
  });
  TESSERA_CHECK(position == names.size(), ErrorKind::kShape,
                "[state.optimizer_dict_to_names] the groups have {} parameters, found {} names", position,
                names.size());
  return rekeyed(by_id, keys, std::move(groups));
}

StateDict optimizer_dict_to_ids(const StateDict& by_name) {
  std::unordered_map<StateKey, StateKey> keys;
  int64_t id = 0;
  auto groups = renamed_groups(by_name, [&](const StateValue& param) -> StateValue {
    TESSERA_CHECK(keys.emplace(to_key(param), id).second, ErrorKind::kShape,
                  "[state.optimizer_dict_to_ids] parameter {} is in two groups", quote(to_string(to_key(param))));
    return id++;
  });
  return rekeyed(by_name, keys, std::move(groups));
}

StateDict flatten_optimizer_dict(const StateDict& by_name) {
  StateDict flat;
  for (const auto& [name, state] : by_name.at("state").dict()) {
    flatten_state(state.dict(), "state." + to_string(name), flat);
  }
  for (const auto& value : by_name.at("param_groups").list()) {
    const StateDict& group = value.dict();
    for (const auto& param : group.at("params").list()) {
      const auto prefix = "param_groups." + to_string(to_key(param)) + ".";
      for (const auto& [key, setting] : group) {
        if (key == StateKey("params") || key == StateKey("param_names")) continue;
        set_new(flat, prefix + to_string(key), setting);
      }
    }
  }
  return flat;
}

StateDict unflatten_optimizer_dict(const StateDict& flat, const std::vector<std::vector<std::string>>& groups) {
  std::vector<std::string> names;
  for (const auto& group : groups) names.insert(names.end(), group.begin(), group.end());
  detail::FlatKeyReader reader(names);
  std::vector<StateDict> states(names.size()), settings(names.size());
  // One pass over the keys of `flat` first collects the states (`states`) and the hyper-parameters (`settings`) of each
  // parameter. Then the parameter groups are built from `states` and `settings`, in the order of `groups`.
  for (const auto& [key, value] : flat) {
    TESSERA_CHECK(std::holds_alternative<std::string>(key), ErrorKind::kShape,
                  "[state.unflatten_optimizer] found the key {}, wanted text. A dict by id is not flat.",
                  to_string(key));
    const auto& text = std::get<std::string>(key);
    const auto parts = reader.read(text);
    if (!parts) continue;
    if (parts->is_state) {
      set_nested(states[parts->parameter], parts->rest_of_key, value, text);
    } else {
      settings[parts->parameter].set(std::string(parts->rest_of_key), value);
    }
  }
  StateDict state;
  StateList out_groups;
  size_t position = 0;
  for (const auto& group : groups) {
    const size_t begin = position;
    StateList params;
    const StateDict* first = nullptr;
    for (; position < begin + group.size(); ++position) {
      const auto& name = names[position];
      if (settings[position].empty() && states[position].empty()) continue;
      // The hyper-parameters of a group are those of its first saved parameter; the other parameters must have equal
      // hyper-parameters.
      if (first) check_same_settings(*first, name, settings[position]);
      if (!first) first = &settings[position];
      if (!states[position].empty()) state.set(name, std::move(states[position]));
      params.emplace_back(name);
    }
    StateDict merged = first ? *first : StateDict();
    merged.set("params", std::move(params));
    out_groups.emplace_back(std::move(merged));
  }
  return detail::optimizer_dict_of(std::move(state), std::move(out_groups));
}

}  // namespace tessera
