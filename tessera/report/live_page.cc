#include "tessera/report/live_page.h"

#include <microhttpd.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/machine/listen.h"
#include "tessera/report/page.h"
#include "tessera/report/run_follower.h"

namespace tessera::report {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;
constexpr size_t kMostPoints = 2000;                    // steps in data.json, which is sent every two seconds
constexpr size_t kMostRows = 16'384, kMaxEvents = 200;  // kept in memory
constexpr unsigned kMostConnections = 32, kIdleSeconds = 15;
constexpr int kShareOfCore = 50;  // after a refresh of t CPU seconds the next one comes 50 t later at the earliest

UniqueFd listen_on_loopback(uint16_t port) {
  try {
    return listen_at("127.0.0.1", port, ListenScope::kThisHost).socket;
  } catch (const Error& error) {
    const bool in_use = error.kind() == ErrorKind::kComm;
    raise(ErrorKind::kConfig, "[report.live] {} Give another with train.page, or 0 for no page.",
          in_use ? fmt::format("port {} of 127.0.0.1: found it in use.", port) : error.what());
  }
}

// Whether the Host header names loopback. Against DNS rebinding: a foreign page whose name resolves to 127.0.0.1 sends
// its own name as Host and is refused.
bool is_loopback_name(const char* host) {
  if (!host) return false;
  std::string_view name = host;
  if (const size_t colon = name.rfind(':'); colon != name.npos) name = name.substr(0, colon);
  return name == "127.0.0.1" || name == "localhost";
}

double cpu_seconds() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

}  // namespace

struct LivePage::Server {
  explicit Server(fs::path run) : folder(std::move(run)), follower(folder, {.rows = kMostRows, .events = kMaxEvents}) {
    last_history.folder = folder;
    last_history.name = fs::weakly_canonical(folder).filename().string();
  }

  const fs::path folder;
  MHD_Daemon* daemon = nullptr;
  // All members below are used by the thread of the HTTP server only, so they need no lock.
  RunFollower follower;
  RunHistory last_history;        // the last history that could be read
  bool priority_lowered = false;  // the thread has lowered its priority
  // Sizes and modification times of the files that `data` was made from.
  std::vector<std::pair<uintmax_t, fs::file_time_type>> data_file_states;
  std::shared_ptr<const std::string> data;  // data.json
  Clock::time_point next{};                 // no refresh before this time

  std::vector<std::pair<uintmax_t, fs::file_time_type>> file_states() const {
    std::vector<std::pair<uintmax_t, fs::file_time_type>> states;
    for (const char* name : {"metrics.jsonl", "events.jsonl", "recipe.yaml", "recipe.resolved.yaml"}) {
      std::error_code error;
      const auto size = fs::file_size(folder / name, error);
      const auto time = fs::last_write_time(folder / name, error);
      states.emplace_back(error ? 0 : size, error ? fs::file_time_type() : time);
    }
    return states;
  }

  // Reads the history of the run. While metrics.jsonl does not exist, returns the last history that could be read, with
  // the state "starting".
  RunHistory read() {
    std::error_code unknown;
    if (!fs::exists(folder / "metrics.jsonl", unknown) && !unknown) {
      last_history.state = "starting";
      return last_history;
    }
    last_history = follower.history();
    return last_history;
  }

  // Returns data.json. It is made again only if a file of the run has changed and the pause after the last refresh is
  // over; the pause keeps the CPU time of refreshes below 1 / kShareOfCore of one core. If reading fails, the page
  // shows the last history that could be read, with the error as its state.
  std::shared_ptr<const std::string> refreshed_data() {
    if (data && Clock::now() < next) return data;
    auto states = file_states();
    if (data && states == data_file_states) return data;
    const double begun = cpu_seconds();
    try {
      data = std::make_shared<const std::string>(page_data({read()}, kMostPoints));
      data_file_states = std::move(states);
    } catch (const Error& error) {
      auto last = last_history;
      last.state = std::string("cannot be read: ") + error.what();
      data = std::make_shared<const std::string>(page_data({last}, kMostPoints));
      data_file_states.clear();
    }
    // The pause before the next refresh is a multiple of the CPU time that this thread needed for the last refresh.
    // With wall time the pause would be longer on a busy machine, although the refresh used no more CPU time.
    const std::chrono::duration<double> pause((cpu_seconds() - begun) * kShareOfCore);
    next = Clock::now() + std::chrono::duration_cast<Clock::duration>(pause);
    return data;
  }

  MHD_Result send(MHD_Connection* connection, unsigned code, const char* type, const std::string& text) const {
    // libmicrohttpd copies `text`, so the caller may free or replace `text` while the response is still being sent.
    MHD_Response* response =
        MHD_create_response_from_buffer(text.size(), const_cast<char*>(text.data()), MHD_RESPMEM_MUST_COPY);
    if (!response) return MHD_NO;
    MHD_add_response_header(response, "Content-Type", type);
    MHD_add_response_header(response, "Cache-Control", "no-store");
    MHD_add_response_header(response, "X-Content-Type-Options", "nosniff");
    MHD_add_response_header(response, "Cross-Origin-Resource-Policy", "same-origin");
    if (code == MHD_HTTP_METHOD_NOT_ALLOWED) MHD_add_response_header(response, "Allow", "GET, HEAD");
    const auto result = MHD_queue_response(connection, code, response);
    MHD_destroy_response(response);
    return result;
  }

  MHD_Result answer(MHD_Connection* connection, std::string_view url, std::string_view method) {
    constexpr const char* kPlain = "text/plain; charset=utf-8";
    // At the first request, lowers the priority of this thread. It belongs to rank 0's process, whose training threads
    // must get the cores first.
    if (!priority_lowered) {
      ::setpriority(PRIO_PROCESS, static_cast<id_t>(::syscall(SYS_gettid)), 10);
      priority_lowered = true;
    }
    if (method != "GET" && method != "HEAD") {
      return send(connection, MHD_HTTP_METHOD_NOT_ALLOWED, kPlain, "only GET and HEAD\n");
    }
    if (!is_loopback_name(MHD_lookup_connection_value(connection, MHD_HEADER_KIND, "Host"))) {
      return send(connection, MHD_HTTP_FORBIDDEN, kPlain, "wanted Host: 127.0.0.1 or localhost\n");
    }
    try {
      if (url == "/") return send(connection, MHD_HTTP_OK, "text/html; charset=utf-8", page_around(*refreshed_data()));
      if (url == "/data.json") return send(connection, MHD_HTTP_OK, "application/json", *refreshed_data());
    } catch (const std::exception& error) {
      return send(connection, MHD_HTTP_INTERNAL_SERVER_ERROR, kPlain, std::string(error.what()) + "\n");
    }
    return send(connection, MHD_HTTP_NOT_FOUND, kPlain, "there are / and /data.json\n");
  }

  // Callback of libmicrohttpd: called once with the header of a request, then with its body. The connection is closed
  // when a request has a body, because neither / nor /data.json takes one.
  static MHD_Result handle(void* self, MHD_Connection* connection, const char* url, const char* method, const char*,
                           const char*, size_t* upload_bytes, void** state) {
    static char begun;
    if (*state == nullptr) {  // the first call, with the header only
      *state = &begun;
      return MHD_YES;
    }
    if (*upload_bytes != 0) return MHD_NO;
    return static_cast<Server*>(self)->answer(connection, url, method);
  }
};

LivePage::LivePage(uint16_t port, fs::path run_folder) : server_(std::make_unique<Server>(std::move(run_folder))) {
  static_cast<void>(page_around("{}"));  // throws if the program was built without the chart library
  UniqueFd socket = listen_on_loopback(port);
  server_->daemon =
      MHD_start_daemon(MHD_USE_INTERNAL_POLLING_THREAD | MHD_USE_POLL, port, nullptr, nullptr, &Server::handle,
                       server_.get(), MHD_OPTION_LISTEN_SOCKET, socket.get(), MHD_OPTION_CONNECTION_LIMIT,
                       kMostConnections, MHD_OPTION_CONNECTION_TIMEOUT, kIdleSeconds, MHD_OPTION_END);
  TESSERA_CHECK(server_->daemon, ErrorKind::kIo, "[report.live] port {}: the HTTP server does not start: {}", port,
                std::strerror(errno));
  static_cast<void>(socket.release());  // the server closes the socket
}

LivePage::~LivePage() { MHD_stop_daemon(server_->daemon); }

}  // namespace tessera::report
