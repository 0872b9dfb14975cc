#include "tessera/models/generation/text_stream.h"

#include <algorithm>

namespace tessera {

StopStrings::StopStrings(std::vector<std::string> stops) : stops_(std::move(stops)) { std::erase(stops_, ""); }

std::string StopStrings::push(std::string_view piece) {
  if (stopped_) return "";
  pending_text_ += piece;
  size_t found = std::string::npos;
  for (const auto& stop : stops_) found = std::min(found, pending_text_.find(stop));
  if (found != std::string::npos) {
    stopped_ = true;
    pending_text_.resize(found);
    return std::exchange(pending_text_, "");
  }
  // Hold back text that may become a stop string: the longest suffix of pending_text_ that is a prefix of a stop
  // string. `kept` only grows in the loop, so at the end it is the maximum over all stop strings.
  size_t kept = 0;  // length of the end of pending_text_ that is held back
  for (const auto& stop : stops_) {
    for (size_t length = std::min(stop.size() - 1, pending_text_.size()); length > kept; --length) {
      if (std::string_view(pending_text_).substr(pending_text_.size() - length) ==
          std::string_view(stop).substr(0, length)) {
        kept = length;
      }
    }
  }
  auto certain = pending_text_.substr(0, pending_text_.size() - kept);
  pending_text_.erase(0, certain.size());
  return certain;
}

std::string StopStrings::finish() { return stopped_ ? "" : std::exchange(pending_text_, ""); }

}  // namespace tessera
