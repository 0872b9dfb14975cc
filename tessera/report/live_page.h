// The page of a run that is at work, over HTTP on this host's loopback alone: it grows without being loaded again.
//
//   const LivePage page(8080, "runs/demo");      // http://127.0.0.1:8080 until it is destroyed
//
// One thread of its own at low priority, which reads what the run has written to its folder; it takes at most a
// fiftieth of a core for that, so that the page of a long run is refreshed less often, and no step waits for it.
// docs/design/report.md. No communication.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>

namespace tessera::report {

class LivePage {
 public:
  // Error kConfig: the port is in use or not ours to take; a program without the charts. The folder may come later.
  LivePage(uint16_t port, std::filesystem::path run_folder);
  ~LivePage();
  LivePage(const LivePage&) = delete;
  LivePage& operator=(const LivePage&) = delete;

 private:
  struct Server;
  std::unique_ptr<Server> server_;
};

}  // namespace tessera::report
