// Clients with normal requests, beside hostile clients that try to keep a server from answering.
//
//   const HostileClients hostile(port, {.silent_connections = 256});      // at work while it lives
//   const auto found = answers_to(port, prompts, 20);                     // a client for each prompt, all at once
//
// A hostile client sends nothing, or half a header, or a request of hostile_requests.h whose answer it never reads. The
// client connects again after an answer or a disconnect.
#pragma once

#include <gtest/gtest.h>
#include <poll.h>

#include <atomic>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "tests/serve/hostile_requests.h"
#include "tests/support/http_client.h"

namespace tessera::testing {

struct HostileOptions {
  int silent_connections = 256;
  size_t every = 1;  // only every n-th hostile request is sent
};

class HostileClients {
 public:
  HostileClients(int port, const HostileOptions& options) : port_(port) {
    const auto requests = hostile_requests();
    for (size_t i = 0; i < requests.size(); i += options.every) {
      const auto body = requests[i].body.dump();
      texts_.push_back(
          fmt::format(
              "POST {} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
              requests[i].path, body.size()) +
          body);
    }
    for (int i = 0; i < options.silent_connections; ++i) texts_.push_back(i % 2 == 0 ? "" : "POST /v1/compl");
    thread_ = std::thread([this] { work(); });
    while (!are_there_) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  ~HostileClients() {
    is_ending_ = true;
    thread_.join();
  }
  HostileClients(const HostileClients&) = delete;
  HostileClients& operator=(const HostileClients&) = delete;

 private:
  // Whether data has arrived or the server has closed the connection.
  static bool is_over(int socket) {
    pollfd look{.fd = socket, .events = POLLIN | POLLRDHUP, .revents = 0};
    return ::poll(&look, 1, 0) > 0;
  }
  void work() {
    std::vector<UniqueFd> sockets(texts_.size());
    while (!is_ending_) {
      for (size_t i = 0; i < texts_.size() && !is_ending_; ++i) {
        if (sockets[i].get() >= 0 && !is_over(sockets[i].get())) continue;
        sockets[i] = connect_to(port_);
        send_all(sockets[i].get(), texts_[i]);
      }
      are_there_ = true;
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
  }

  int port_;
  std::vector<std::string> texts_;  // data that each connection sends
  std::atomic<bool> are_there_ = false, is_ending_ = false;
  std::thread thread_;
};

// Greedy texts of `tokens` tokens each, from one client for each prompt. A client without an answer gives "status N".
inline std::vector<std::string> answers_to(int port, const std::vector<std::string>& prompts, int64_t tokens) {
  std::vector<std::string> texts(prompts.size());
  std::vector<std::thread> clients;
  for (size_t i = 0; i < prompts.size(); ++i) {
    clients.emplace_back([&, i] {
      const nlohmann::json body = {
          {"prompt", prompts[i]}, {"max_tokens", tokens}, {"temperature", 0}, {"ignore_eos", true}};
      for (int tries = 0; tries < 100; ++tries) {
        const auto reply = http(port, "POST", "/v1/completions", body.dump());
        if (reply.status == 503) {  // busy: the Retry-After header says 1 s
          std::this_thread::sleep_for(std::chrono::seconds(1));
          continue;
        }
        texts[i] = reply.status == 200 ? nlohmann::json::parse(reply.body)["choices"][0]["text"].get<std::string>()
                                       : fmt::format("status {}", reply.status);
        return;
      }
      texts[i] = "status 503";
    });
  }
  for (auto& client : clients) client.join();
  return texts;
}

}  // namespace tessera::testing
