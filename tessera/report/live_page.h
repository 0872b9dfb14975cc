// Serves the page of a running run over HTTP, on the loopback address of this host only. The page updates itself.
//
//   const LivePage page(8080, "runs/demo");      // http://127.0.0.1:8080 until it is destroyed
//
// The server has one thread of low priority, which reads the files of the run's folder, never the state of the run. So
// no step waits for it. Reading takes at most 1/50 of a core; the page of a long run is refreshed less often.
// docs/design/report.md. No communication.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>

namespace tessera::report {

class LivePage {
 public:
  // Serves until the object is destroyed. The folder need not exist yet. Error kConfig if the port is in use or may not
  // be bound, or the program was built without the chart library.
  LivePage(uint16_t port, std::filesystem::path run_folder);
  ~LivePage();
  LivePage(const LivePage&) = delete;
  LivePage& operator=(const LivePage&) = delete;

 private:
  struct Server;
  std::unique_ptr<Server> server_;
};

}  // namespace tessera::report
