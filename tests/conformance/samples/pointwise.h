// Operands that pointwise operations are defined for; shared by the plain and the _foreach_ forms.
#pragma once

#include <string>

#include "tests/conformance/samples.h"

namespace tessera::testing {

// "add" of "aten::_foreach_add_" and the like.
std::string pointwise_base(std::string name);
at::Tensor pointwise_operand(SampleMaker& make, const std::string& base, const std::string& argument,
                             at::IntArrayRef shape);
c10::IValue pointwise_number(const std::string& base, const std::string& argument);

}  // namespace tessera::testing
