// Parser of the JSON header of a safetensors file. It works on parser events and builds no JSON tree.
#pragma once

#include <map>
#include <string>
#include <string_view>

#include "tessera/formats/safetensors/safetensors.h"

namespace tessera {

struct SafetensorsHeader {
  std::map<std::string, SafetensorsEntry, std::less<>> entries;  // begin and end relative to the data
  std::map<std::string, std::string> metadata;
};

// Parses the header of a safetensors file. Error kFormat, with `file_name` in the message, for wrong JSON, keys or
// dtypes, and for data_offsets whose distance is not the byte count of dtype and shape. The caller must check that the
// tensors cover the data section of the file without gap or overlap.
SafetensorsHeader parse_safetensors_header(std::string_view json, const std::string& file_name);

}  // namespace tessera
