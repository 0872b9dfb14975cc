// The parts of the page that stand in files of their own (page/) or come from npm, embedded at build.
#pragma once

#include <string_view>

namespace tessera::report {

struct PageParts {
  std::string_view html, style, script;        // of page/
  std::string_view chart_style, chart_script;  // uPlot's; empty where it was not there at build
};
const PageParts& page_parts();

}  // namespace tessera::report
