// Where a text stops being JSON, for readers that name a line and a column.
//
//   if (const auto fault = find_json_fault(record)) fail(place_of(fault->byte), fault->reason);
//
// Builds nothing. Thread-safe.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

namespace tessera {

struct JsonFault {
  size_t byte = 0;  // from 1: the last one that was read
  std::string reason;
};

// Nothing for JSON, however deep or large.
std::optional<JsonFault> find_json_fault(std::string_view text);

}  // namespace tessera
