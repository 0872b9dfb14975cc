#include "tessera/serve/server.h"

#include <microhttpd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cctype>
#include <cstring>
#include <ctime>
#include <nlohmann/json.hpp>
#include <string_view>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/base/text/json_numbers.h"
#include "tessera/serve/api_error.h"
#include "tessera/serve/client_watch.h"
#include "tessera/serve/connections.h"
#include "tessera/serve/responses.h"
#include "tessera/serve/thread_priority.h"

namespace tessera::serve {
namespace {

using std::chrono::steady_clock;
using Deadline = steady_clock::time_point;
constexpr std::chrono::milliseconds kClientCheckInterval{200};  // between two checks that the client is still there
constexpr size_t kSmallBody = 64 << 10;  // bytes; a thread that reads a larger body lowers its priority

// Compares in constant time: a wrong token takes as long as the right one, so the time reveals no part of the secret.
bool equal_in_constant_time(std::string_view candidate, std::string_view secret) {
  unsigned difference = candidate.size() == secret.size() ? 0 : 1;
  for (size_t i = 0; i < secret.size(); ++i) {
    difference |=
        static_cast<unsigned char>(secret[i]) ^ static_cast<unsigned char>(i < candidate.size() ? candidate[i] : 0);
  }
  return difference == 0;
}

std::string_view header(MHD_Connection* connection, const char* name) {
  const char* value = MHD_lookup_connection_value(connection, MHD_HEADER_KIND, name);
  return value != nullptr ? std::string_view(value) : std::string_view();
}

// Compares without case, as HTTP requires for authentication schemes and media types.
bool equal_ignoring_case(std::string_view text, std::string_view word) {
  return std::ranges::equal(
      text, word, {}, [](unsigned char c) { return std::tolower(c); }, [](unsigned char c) { return std::tolower(c); });
}

// Whether the media type is JSON; parameters such as "; charset=utf-8" are ignored.
bool is_json(std::string_view content_type) {
  const auto type = content_type.substr(0, content_type.find_first_of("; \t"));
  return equal_ignoring_case(type, "application/json");
}

int socket_of(MHD_Connection* connection) {
  const auto* info = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD);
  return info != nullptr ? info->connect_fd : -1;
}

std::string address_of(MHD_Connection* connection) {
  const auto* info = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CLIENT_ADDRESS);
  return limited_address(info != nullptr ? info->client_addr : nullptr);
}

MHD_Result send_json(MHD_Connection* connection, int status, const Json& json) {
  auto text = dump_json(json) + "\n";
  auto* response = MHD_create_response_from_buffer(text.size(), text.data(), MHD_RESPMEM_MUST_COPY);
  MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE, "application/json");
  if (status == 401) MHD_add_response_header(response, MHD_HTTP_HEADER_WWW_AUTHENTICATE, "Bearer");
  if (status == 503) MHD_add_response_header(response, MHD_HTTP_HEADER_RETRY_AFTER, "1");
  const auto result = MHD_queue_response(connection, static_cast<unsigned>(status), response);
  MHD_destroy_response(response);
  return result;
}

// A request whose body is arriving. libmicrohttpd keeps the pointer between the calls of ServerState::handle.
struct IncomingRequest {
  std::string body{};
  bool takes_interim_answers = false;  // HTTP/1.1: the client accepts "100 Continue"
  bool refused = false;                // an error has been sent already
};

// An answer of the engine and the response that is built from it.
struct PendingReply {
  std::shared_ptr<AnswerQueue> answer;
  Response response;
  Deadline deadline;
  bool is_cut_off = false;  // the deadline has passed and the answer was cut off

  // Waits at most kClientCheckInterval for a piece of the answer (AnswerPiece) and adds it to the response. `chunk`
  // receives the JSON chunk that a streamed response sends for the piece. Returns false when no piece came. After the
  // deadline the answer is cut off; ApiError 504 when it cannot be cut off because it has no token yet. ApiError 500
  // when the engine fails.
  bool wait_for_piece(std::optional<Json>& chunk) {
    const auto piece = answer->next(kClientCheckInterval);
    if (!is_cut_off && !(piece && piece->finish) && steady_clock::now() > deadline) {
      is_cut_off = answer->cut_off();
      if (!is_cut_off) throw ApiError(504, "The request took longer than this server allows.");
    }
    if (!piece) return false;
    if (piece->finish == Finish::kError) throw ApiError(500, piece->error);
    chunk = response.add(*piece);
    if (response.is_finished(piece->choice)) answer->stop(piece->choice);
    return true;
  }
};

// A reply that is streamed as server-sent events.
struct EventStream {
  ClientWatch client;
  PendingReply reply;
  bool with_usage;
  std::string held{};  // events that have not been sent yet
  bool done = false;

  void event(const Json& json) { held += "data: " + dump_json(json) + "\n\n"; }
  // Waits for the next piece of the answer (PendingReply::wait_for_piece) and appends the piece as an event to `held`,
  // the events that are still to be sent. After the last piece it also appends the events that end the stream; an
  // ApiError is appended as an event, too. In both cases it sets `done`. Returns false when no piece came and the
  // client has gone.
  bool wait() {
    try {
      std::optional<Json> chunk;
      if (!reply.wait_for_piece(chunk)) return !client.is_gone([&] { held += ": \n\n"; });  // a comment of the stream
      if (chunk) event(*chunk);
      if (!reply.response.done()) return true;
      if (with_usage) event(reply.response.usage_chunk());
      held += "data: [DONE]\n\n";
    } catch (const ApiError& error) {
      event(error.body());
    }
    done = true;
    return true;
  }
};

// libmicrohttpd calls read_stream() on the connection's thread for the next bytes of a stream. read_stream() may block.
ssize_t read_stream(void* closure, uint64_t, char* buffer, size_t max_bytes) {
  auto& stream = *static_cast<EventStream*>(closure);
  while (stream.held.empty()) {
    if (stream.done) return MHD_CONTENT_READER_END_OF_STREAM;
    if (!stream.wait()) return MHD_CONTENT_READER_END_WITH_ERROR;
  }
  const size_t count = std::min(max_bytes, stream.held.size());
  std::memcpy(buffer, stream.held.data(), count);
  stream.held.erase(0, count);
  return static_cast<ssize_t>(count);
}

void free_stream(void* closure) {
  const std::unique_ptr<EventStream> stream(static_cast<EventStream*>(closure));
  stream->reply.answer->cancel();
}

}  // namespace

struct Server::ServerState {
  using ConnectionStage = Connections::ConnectionStage;

  const ServedModel& served;
  Scheduler& scheduler;
  ServerOptions options;
  Connections connections;
  MHD_Daemon* daemon = nullptr;
  std::atomic<bool> draining = false;
  std::atomic<int64_t> next_id = 1;
  const int64_t created = std::time(nullptr);

  ServerState(const ServedModel& of, Scheduler& by, ServerOptions with)
      : served(of), scheduler(by), options(std::move(with)), connections(of.limits) {}

  // Checks the path, the host or token, the method and the headers of a request before its body is read. ApiError for a
  // request that must be refused.
  void check_request_header(MHD_Connection* connection, std::string_view path, std::string_view method) const;
  Json models(std::string_view path) const;
  MHD_Result get(MHD_Connection* connection, std::string_view path);
  MHD_Result complete(MHD_Connection* connection, Endpoint endpoint, const IncomingRequest& incoming);
  MHD_Result stream(MHD_Connection* connection, PendingReply reply, bool with_usage);
  MHD_Result handle(MHD_Connection* connection, const char* path, const char* method, const char* version,
                    const char* data, size_t* size, void** closure);

  static MHD_Result on_request(void* self, MHD_Connection* connection, const char* path, const char* method,
                               const char* version, const char* data, size_t* size, void** closure) {
    return static_cast<ServerState*>(self)->handle(connection, path, method, version, data, size, closure);
  }
  static MHD_Result on_accept(void* self, const sockaddr* address, socklen_t) {
    return static_cast<ServerState*>(self)->connections.admit(limited_address(address)) ? MHD_YES : MHD_NO;
  }
  static void on_completed(void* self, MHD_Connection* connection, void** closure, MHD_RequestTerminationCode) {
    delete static_cast<IncomingRequest*>(*closure);
    *closure = nullptr;
    static_cast<ServerState*>(self)->connections.enter(connection, ConnectionStage::kIdle);
  }
  static void on_connection(void* self, MHD_Connection* connection, void**, MHD_ConnectionNotificationCode code) {
    auto& connections = static_cast<ServerState*>(self)->connections;
    if (code == MHD_CONNECTION_NOTIFY_CLOSED) return connections.closed(connection);
    connections.opened(connection, socket_of(connection), address_of(connection));
  }
};

void Server::ServerState::check_request_header(MHD_Connection* connection, std::string_view path,
                                               std::string_view method) const {
  const auto& limits = served.limits;
  const bool completes = path == "/v1/chat/completions" || path == "/v1/completions";
  const bool is_query = path == "/health" || path == "/v1/models" || path.starts_with("/v1/models/");
  if (!completes && !is_query) {
    throw ApiError(404,
                   "No such path on this server. Use /v1/chat/completions, /v1/completions, /v1/models or /health.");
  }
  if (options.token.empty()) {
    const auto host = header(connection, MHD_HTTP_HEADER_HOST);
    const auto name = host.starts_with('[') ? host.substr(0, host.find(']') + 1) : host.substr(0, host.find(':'));
    if (!host.empty() && name != "localhost" && name != "127.0.0.1" && name != "[::1]" &&
        name != options.listening.address && name != "[" + options.listening.address + "]") {
      throw ApiError(403,
                     "This server answers only requests whose Host is localhost. Start it with --token-file to use "
                     "other host names.");
    }
  } else if (path != "/health") {
    const auto given = header(connection, MHD_HTTP_HEADER_AUTHORIZATION);
    const size_t space = std::min(given.find(' '), given.size());
    const auto secret = given.substr(std::min(given.find_first_not_of(' ', space), given.size()));
    if (!equal_ignoring_case(given.substr(0, space), "Bearer") || !equal_in_constant_time(secret, options.token)) {
      throw ApiError(401, "Wrong or no token. Send it as 'Authorization: Bearer TOKEN'.", "invalid_api_key");
    }
  }
  if (completes ? method != "POST" : method != "GET" && method != "HEAD") {
    throw ApiError(405, fmt::format("{} needs the method {}", path, completes ? "POST" : "GET"),
                   "method_not_supported");
  }
  if (!completes) return;
  // A request with Transfer-Encoding is refused: HTTP then ignores Content-Length, so the size of the body would not be
  // known before it has arrived.
  if (!header(connection, MHD_HTTP_HEADER_TRANSFER_ENCODING).empty()) {
    throw ApiError(411, "Transfer-Encoding is not supported. Send a body with Content-Length.");
  }
  const auto length = header(connection, MHD_HTTP_HEADER_CONTENT_LENGTH);
  if (length.empty()) throw ApiError(411, "The request has no Content-Length. Send a body with Content-Length.");
  if (length.size() > 15 || std::stoll("0" + std::string(length)) > limits.body_bytes) {
    throw ApiError(413, fmt::format("The body has {} bytes, this server allows at most {}.", length.substr(0, 20),
                                    limits.body_bytes));
  }
  if (!is_json(header(connection, MHD_HTTP_HEADER_CONTENT_TYPE))) {
    throw ApiError(415, "The body must have Content-Type application/json.");
  }
}

// The answer to /v1/models, or to /v1/models/NAME.
Json Server::ServerState::models(std::string_view path) const {
  Json model = {{"id", served.name}, {"object", "model"}, {"created", created}, {"owned_by", "tessera"}};
  if (path == "/v1/models") return {{"object", "list"}, {"data", Json::array({model})}};
  if (served.has_name(path.substr(std::strlen("/v1/models/")))) return model;
  throw ApiError(404, fmt::format("This server has only the model '{}'.", served.name), "model_not_found", "model");
}

MHD_Result Server::ServerState::get(MHD_Connection* connection, std::string_view path) {
  if (path != "/health") return send_json(connection, 200, models(path));
  const auto counts = scheduler.counts();
  return send_json(connection, draining ? 503 : 200,
                   {{"status", draining ? "ending" : "ok"},
                    {"running", counts.running},
                    {"waiting", counts.waiting},
                    {"prompt_tokens", counts.prompt_tokens},
                    {"shared_prompt_tokens", counts.shared_tokens},
                    {"completion_tokens", counts.new_tokens}});
}

// Sends the answer as server-sent events. libmicrohttpd calls read_stream() until the end, and then free_stream(),
// which cancels the answer if it has not ended.
MHD_Result Server::ServerState::stream(MHD_Connection* connection, PendingReply reply, bool with_usage) {
  auto* stream = new EventStream{
      .client = ClientWatch(socket_of(connection)), .reply = std::move(reply), .with_usage = with_usage};
  for (const auto& first : stream->reply.response.first_chunks()) stream->event(first);
  constexpr size_t kBlock = 4096;
  auto* response = MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, kBlock, read_stream, stream, free_stream);
  MHD_add_response_header(response, MHD_HTTP_HEADER_CONTENT_TYPE, "text/event-stream; charset=utf-8");
  MHD_add_response_header(response, MHD_HTTP_HEADER_CACHE_CONTROL, "no-cache");
  const auto result = MHD_queue_response(connection, 200, response);
  MHD_destroy_response(response);
  return result;
}

// Submits the request and waits for the answer on the connection's thread. A stream is sent by read_stream() instead.
MHD_Result Server::ServerState::complete(MHD_Connection* connection, Endpoint endpoint,
                                         const IncomingRequest& incoming) {
  const auto deadline = steady_clock::now() + std::chrono::duration_cast<steady_clock::duration>(
                                                  std::chrono::duration<double>(served.limits.request_seconds));
  if (draining) throw ApiError(503, "The server is shutting down.", "overloaded");
  const auto request = read_request(incoming.body, endpoint, served);
  const auto id = fmt::format("{}-{}", endpoint == Endpoint::kChat ? "chatcmpl" : "cmpl", next_id++);
  PendingReply reply{.answer = scheduler.submit(request, served.tokenizer),
                     .response = Response(endpoint, id, served, request),
                     .deadline = deadline};
  if (request.stream) return stream(connection, std::move(reply), request.stream_usage);
  const int socket = socket_of(connection);
  ClientWatch client(socket);
  const auto probe = [&] {
    constexpr std::string_view kContinue = "HTTP/1.1 100 Continue\r\n\r\n";  // HTTP/1.1 clients ignore it
    if (incoming.takes_interim_answers) ::send(socket, kContinue.data(), kContinue.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  };
  auto looked = steady_clock::now();
  while (!reply.response.done()) {
    std::optional<Json> chunk;
    reply.wait_for_piece(chunk);
    // Every kClientCheckInterval the server checks whether the client has closed its connection. A check only after a
    // wait_for_piece() that returned no piece is not enough, because pieces of the answer may come without a pause.
    if (const auto now = steady_clock::now(); now - looked >= kClientCheckInterval) {
      looked = now;
      if (client.is_gone(probe)) {
        reply.answer->cancel();
        return MHD_NO;
      }
    }
  }
  return send_json(connection, 200, reply.response.full_response());
}

// libmicrohttpd calls handle() several times per request, on the connection's thread: first when the header has arrived
// (*closure is null), then for each part of the body (*size > 0), and last when the body is complete (*size is 0). A
// refused request is answered in the first call, and its body is dropped.
MHD_Result Server::ServerState::handle(MHD_Connection* connection, const char* path, const char* method,
                                       const char* version, const char* data, size_t* size, void** closure) {
  auto* incoming = static_cast<IncomingRequest*>(*closure);
  if (incoming == nullptr) {
    *closure = incoming = new IncomingRequest{.takes_interim_answers = std::string_view(version) == "HTTP/1.1"};
    try {
      check_request_header(connection, path, method);
    } catch (const ApiError& error) {
      incoming->refused = true;
      connections.enter(connection, ConnectionStage::kReply);
      return send_json(connection, error.status(), error.body());
    }
    connections.enter(connection, ConnectionStage::kBody);
    return MHD_YES;
  }
  if (*size > 0) {
    if (!incoming->refused) {
      // The size of the body is checked again while the body arrives, because Content-Length may be wrong, and
      // check_request_header() checks Content-Length only for a POST.
      if (incoming->body.size() + *size > static_cast<size_t>(served.limits.body_bytes)) return MHD_NO;
      const bool was_small = incoming->body.size() <= kSmallBody;
      incoming->body.append(data, *size);
      if (was_small && incoming->body.size() > kSmallBody) lower_thread_priority();
    }
    *size = 0;
    return MHD_YES;
  }
  if (incoming->refused) return MHD_YES;
  const bool completes = std::string_view(method) == "POST";
  connections.enter(connection, completes ? ConnectionStage::kAnswer : ConnectionStage::kReply);
  try {
    if (!completes) return get(connection, path);
    const bool is_text = std::string_view(path) == "/v1/completions";
    return complete(connection, is_text ? Endpoint::kText : Endpoint::kChat, *incoming);
  } catch (const ApiError& error) {
    return send_json(connection, error.status(), error.body());
  } catch (const std::exception& error) {
    log_error("[serve] {}", error.what());
    return send_json(connection, 500, ApiError(500, as_error(error).what()).body());
  }
}

Server::Server(const ServedModel& served, Scheduler& scheduler, ServerOptions options)
    : state_(std::make_unique<ServerState>(served, scheduler, std::move(options))) {
  const auto& limits = served.limits;
  const auto silence = static_cast<unsigned>(limits.request_seconds + limits.read_seconds) + 1;
  const int socket = state_->options.listening.socket.release();
  // libmicrohttpd gets a higher limit than limits.connections, because it still counts a connection that was shut down
  // until its thread has ended.
  const auto places = limits.connections + std::max<int64_t>(limits.connections, 64);
  state_->daemon = MHD_start_daemon(
      MHD_USE_INTERNAL_POLLING_THREAD | MHD_USE_THREAD_PER_CONNECTION | MHD_USE_POLL | MHD_USE_ITC, 0,
      &ServerState::on_accept, state_.get(), &ServerState::on_request, state_.get(), MHD_OPTION_LISTEN_SOCKET, socket,
      MHD_OPTION_CONNECTION_LIMIT, static_cast<unsigned>(places), MHD_OPTION_CONNECTION_MEMORY_LIMIT,
      static_cast<size_t>(limits.header_bytes), MHD_OPTION_CONNECTION_TIMEOUT, silence, MHD_OPTION_NOTIFY_COMPLETED,
      &ServerState::on_completed, state_.get(), MHD_OPTION_NOTIFY_CONNECTION, &ServerState::on_connection, state_.get(),
      MHD_OPTION_STRICT_FOR_CLIENT, 1, MHD_OPTION_END);
  if (state_->daemon == nullptr) {
    ::close(socket);
    raise(ErrorKind::kInternal, "[serve] libmicrohttpd did not start");
  }
}

// MHD_quiesce_daemon() stops accepting connections and returns the listening socket; open connections go on. New
// completion requests on these get 503 from now on. The loop polls the number of connections that are being answered.
bool Server::drain() {
  state_->draining = true;
  const int socket = MHD_quiesce_daemon(state_->daemon);
  if (socket >= 0) ::close(socket);
  const auto end = steady_clock::now() + std::chrono::duration<double>(state_->served.limits.drain_seconds);
  while (state_->connections.count_answering() > 0) {
    if (steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  return true;
}

Server::~Server() {
  if (!state_->draining) {
    const int socket = MHD_quiesce_daemon(state_->daemon);
    if (socket >= 0) ::close(socket);
  }
  state_->draining = true;
  MHD_stop_daemon(state_->daemon);
}

}  // namespace tessera::serve
