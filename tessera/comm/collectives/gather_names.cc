#include "tessera/comm/collectives/gather_names.h"

#include <sstream>

#include "tessera/base/error.h"
#include "tessera/base/text/quote.h"
#include "tessera/comm/collectives/collectives.h"

namespace tessera::comm {

// The names are sent as lines of one text, hence no name may contain a line break.
std::vector<std::vector<std::string>> gather_names(Group& group, const std::vector<std::string>& names) {
  std::string lines;
  for (const auto& name : names) {
    TESSERA_CHECK(name.find('\n') == std::string::npos, ErrorKind::kInternal,
                  "[comm.gather_names] {}: a name with a line break", quote(name));
    lines += name + "\n";
  }
  std::vector<std::vector<std::string>> out;
  for (const auto& text : all_gather_bytes(group, lines)) {
    std::istringstream in(text);
    auto& own = out.emplace_back();
    for (std::string name; std::getline(in, name);) own.push_back(std::move(name));
  }
  return out;
}

}  // namespace tessera::comm
