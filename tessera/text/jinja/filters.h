// How filters are written: a function of the input and the arguments, named in one of two tables.
#pragma once

#include <string_view>
#include <utility>
#include <vector>

#include "tessera/text/jinja/evaluator.h"

namespace tessera::text::jinja {

using Filter = Value (*)(Evaluator&, const Value& input, const Arguments&);

// The filters over lists and dicts (filters_sequence.cc).
const std::vector<std::pair<std::string_view, Filter>>& sequence_filters();

}  // namespace tessera::text::jinja
