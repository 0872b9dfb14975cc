// The parts of the page: the files of page/, and the chart library from npm. The build embeds them into the program.
#pragma once

#include <string_view>

namespace tessera::report {

struct PageParts {
  std::string_view html, style, script;        // files of page/
  std::string_view chart_style, chart_script;  // uPlot; empty if npm could not provide it at build time
};
const PageParts& page_parts();

}  // namespace tessera::report
