// One HTML file of one run, or of several laid over each other, that opens without a network: charts, samples, recipes,
// warnings, restarts. A page served over HTTP asks for "data.json" beside it every few seconds and draws what is new.
//
//   write_file("report.html", render_page({read_run("runs/a"), read_run("runs/b")}));
//
// No communication.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tessera/report/run_history.h"

namespace tessera::report {

// What the page draws, as JSON. Rows beyond `most_points` a run are thinned out (run_history.h).
std::string page_data(const std::vector<RunHistory>& runs, size_t most_points = 20000);

// The page with what page_data() gave in it. Error kConfig as below.
std::string page_around(std::string_view data);

// Error kConfig where the program was built without the chart library.
std::string render_page(const std::vector<RunHistory>& runs, size_t most_points = 20000);

}  // namespace tessera::report
