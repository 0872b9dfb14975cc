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

// Checks everything but the size of the data section. Messages name `file_name`.
SafetensorsHeader parse_safetensors_header(std::string_view json, const std::string& file_name);

}  // namespace tessera
