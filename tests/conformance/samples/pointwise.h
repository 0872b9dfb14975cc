// Operands for which pointwise operations are defined, for the plain and the _foreach_ forms.
#pragma once

#include <string>

#include "tests/conformance/samples.h"

namespace tessera::testing {

// Returns "add" for "aten::_foreach_add_" and similar names.
std::string pointwise_base(std::string name);
at::Tensor pointwise_operand(SampleMaker& make, const std::string& base, const std::string& argument,
                             at::IntArrayRef shape);
c10::IValue pointwise_number(const std::string& base, const std::string& argument);

}  // namespace tessera::testing
