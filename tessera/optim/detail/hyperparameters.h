// Reads and changes the hyperparameters of a parameter group.
#pragma once

#include <string_view>

#include "tessera/optim/optimizer.h"

namespace tessera::optim::detail {

// Returns the value of the setting `name`, or nullptr when no setting has this name.
const Hyperparameter* find_hyperparameter(const Hyperparameters& settings, std::string_view name);
// Replaces a setting, or adds it at the end.
void set_hyperparameter(Hyperparameters& settings, std::string_view name, Hyperparameter value);

// Return the value of the setting `name`: a number, two numbers, or true or false. Error kConfig when the setting is
// missing or has another type. number_of() accepts integers, too.
double number_of(const Hyperparameters& settings, std::string_view name);
std::pair<double, double> pair_of(const Hyperparameters& settings, std::string_view name);
bool flag_of(const Hyperparameters& settings, std::string_view name);

}  // namespace tessera::optim::detail
