// optimizer.groups of a recipe: parameter groups that are chosen by a name pattern and have their own settings.
//
//   groups:
//     - "model.embed_tokens.* lr=1.0e-5 weight_decay=0"
//     - "*.mlp.* lr=2.0e-4 betas=0.9,0.99"
//
// A pattern is matched against the whole parameter name like a shell pattern (*, ?, [...]; a * also matches dots). A
// parameter belongs to the first group whose pattern matches its name.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tessera/nn/module.h"
#include "tessera/optim/optimizer.h"

namespace tessera::train {

struct GroupSetting {
  std::string pattern;
  std::optional<double> lr;  // peak learning rate, after the warm-up; scaled by the schedule like optimizer.lr
  std::optional<double> weight_decay;
  optim::Hyperparameters settings;  // betas, eps, momentum
};

// Parses one item of optimizer.groups. Error kConfig: no pattern, no setting, or a setting that is unknown, repeated or
// not a number.
GroupSetting parse_group_setting(const std::string& text);

// How parameter_groups() treats a group without parameters: as an error, or as absent. In a pipeline stage a group may
// be empty because its parameters belong to other stages.
enum class EmptyGroups { kError, kLeftOut };
// Makes the parameter groups of an optimizer from `texts`, the items of optimizer.groups. `lr` and `weight_decay` are
// the optimizer's own settings. A parameter whose ParameterSlot::decay is false (norms, biases) has no weight decay,
// unless its item sets weight_decay. Error kConfig if an item sets lr while `lr` is 0; with EmptyGroups::kError also if
// a pattern matches no trained parameter except those of earlier items.
std::vector<optim::ParameterGroup> parameter_groups(const std::vector<std::string>& texts, nn::Module& model, double lr,
                                                    double weight_decay, EmptyGroups empty = EmptyGroups::kError);

}  // namespace tessera::train
