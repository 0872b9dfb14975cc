// optimizer.groups of a recipe: parameters, by the pattern of their names, with settings of their own.
//
//   groups:
//     - "model.embed_tokens.* lr=1.0e-5 weight_decay=0"
//     - "*.mlp.* lr=2.0e-4 betas=0.9,0.99"
//
// A pattern is matched against the whole name as a file name is (*, ?, [...]; a * crosses dots). A parameter is of the
// first group that means it.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tessera/nn/module.h"
#include "tessera/optim/optimizer.h"

namespace tessera::train {

struct GroupSetting {
  std::string pattern;
  std::optional<double> lr;  // after the warm-up; it follows the schedule as the others do
  std::optional<double> weight_decay;
  optim::Hyperparameters settings;  // betas, eps, momentum
};

// Error kConfig: no pattern, a setting that is unknown, twice or no number, none at all.
GroupSetting parse_group_setting(const std::string& text);

// Whether a group may be without parameters: those of a pipeline's stage may.
enum class EmptyGroups { kError, kLeftOut };
// What an optimizer of this lr and weight decay takes; parameters whose slot has no decay have none unless their group
// says so. Error kConfig for a pattern that means no parameter that is trained and no earlier group has, and for an lr
// beside optimizer.lr 0.
std::vector<optim::ParameterGroup> parameter_groups(const std::vector<std::string>& texts, nn::Module& model, double lr,
                                                    double weight_decay, EmptyGroups empty = EmptyGroups::kError);

}  // namespace tessera::train
