// Makes one HTML file about one or several runs, which a browser opens without a network: charts, samples, recipes,
// warnings, restarts. Several runs are drawn in the same charts. A page that is served over HTTP fetches "data.json"
// from the same folder every two seconds and updates itself.
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

// The data of the page as JSON. A run with more than `most_points` steps is thinned out (run_history.h).
std::string page_data(const std::vector<RunHistory>& runs, size_t most_points = 20000);

// The HTML page for `data`, the result of page_data(). Error kConfig if the program was built without the chart
// library.
std::string page_around(std::string_view data);

// page_data() and page_around() in one.
std::string render_page(const std::vector<RunHistory>& runs, size_t most_points = 20000);

}  // namespace tessera::report
