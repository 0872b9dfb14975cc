#include <CLI/CLI.hpp>
#include <cstdio>
#include <string>

#include "tessera/base/error.h"
#include "tessera/cli/flags.h"
#include "tessera/cli/verbs.h"
#include "tessera/comm/watch/flight_record.h"
#include "tessera/comm/watch/torch_records.h"
#include "tessera/comm/watch/trace_report.h"

namespace tessera::cli {

int run_trace(VerbArguments args) {
  const auto app = make_app("trace");
  std::string folder, torch;
  app->add_option("DIR", folder, "Folder of a run's flight records")->option_text(" ");
  app->add_option("--torch", torch, "Write the records for PyTorch's analyzer, torchfrtrace, into this new folder")
      ->option_text("OUT");
  app->footer(
      "A run whose ranks die, call different collectives or time out leaves flight records in trace/ of its folder, or "
      "in\n"
      "TESSERA_TRACE_DIR; SIGUSR2 makes a running rank write its record. This verb prints the rank or the calls at "
      "fault, and\n"
      "the last call of each rank. If some ranks left no record (they were killed), it prints the diagnosis from the "
      "other\n"
      "records, and the exit code is 3.");
  if (const auto code = parse_flags(*app, args)) return *code;
  TESSERA_CHECK(!folder.empty(), ErrorKind::kConfig, "[trace] no folder given. Usage: tessera trace DIR.");
  const auto flight_records = comm::read_flight_records(folder);
  if (!torch.empty()) comm::write_torch_records(flight_records, torch);
  const auto report = comm::explain(flight_records);
  std::fputs(report.text.c_str(), stdout);
  // DIR may hold the flight records of several runs in subfolders. explain() has used those of the last run; their
  // folder is printed if it is not DIR itself.
  const auto records = comm::last_records(folder);
  if (records != folder) std::printf("records: %s\n", records.c_str());
  TESSERA_CHECK(report.missing.empty(), ErrorKind::kFormat,
                "[trace] {}: {} of the ranks left no record, the first of them is rank {}. Was it killed?", folder,
                report.missing.size(), report.missing.front());
  return 0;
}

}  // namespace tessera::cli
