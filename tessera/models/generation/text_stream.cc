#include "tessera/models/generation/text_stream.h"

#include <algorithm>

namespace tessera {

StopStrings::StopStrings(std::vector<std::string> stops) : stops_(std::move(stops)) { std::erase(stops_, ""); }

std::string StopStrings::push(std::string_view piece) {
  if (stopped_) return "";
  held_ += piece;
  size_t found = std::string::npos;
  for (const auto& stop : stops_) found = std::min(found, held_.find(stop));
  if (found != std::string::npos) {
    stopped_ = true;
    held_.resize(found);
    return std::exchange(held_, "");
  }
  size_t kept = 0;  // bytes at the end with which a stop string begins
  for (const auto& stop : stops_) {
    for (size_t length = std::min(stop.size() - 1, held_.size()); length > kept; --length) {
      if (std::string_view(held_).substr(held_.size() - length) == std::string_view(stop).substr(0, length)) {
        kept = length;
      }
    }
  }
  auto certain = held_.substr(0, held_.size() - kept);
  held_.erase(0, certain.size());
  return certain;
}

std::string StopStrings::finish() { return stopped_ ? "" : std::exchange(held_, ""); }

}  // namespace tessera
