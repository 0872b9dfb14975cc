#include "tessera/comm/watch/record_writer.h"

#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "tessera/base/files/file.h"
#include "tessera/base/log.h"

namespace tessera::comm {
namespace {

constexpr std::chrono::milliseconds kLimit{2000};

void publish_in_folder(const std::filesystem::path& path, const std::string& text) {
  std::filesystem::create_directories(path.parent_path());
  publish_file(path, text);
}

}  // namespace

struct RecordWriter::WriterState {
  std::filesystem::path path;
  Publish publish;
  std::mutex mutex;  // guards `next` and `running`
  std::condition_variable idle;
  std::optional<std::string> next;  // a newer record replaces a waiting one: it contains more
  bool running = false;             // a thread is writing
};

RecordWriter::RecordWriter(std::filesystem::path path, Publish publish) : state_(std::make_shared<WriterState>()) {
  state_->path = std::move(path);
  state_->publish = publish ? std::move(publish) : publish_in_folder;
}

// A write that hangs is left behind: its thread is detached and holds the state by a shared pointer.
RecordWriter::~RecordWriter() {
  if (!await(kLimit)) {
    log_warning("[comm.flight_record] {} is not written: the file system does not answer", state_->path.string());
  }
}

// At most one thread writes. WriterState::mutex is held when this thread finds no next text and ends, and when write()
// sets the next text. So either the running thread takes the text, or write() starts a new thread.
void RecordWriter::write(std::string text) {
  if (state_->path.empty()) return;
  const std::lock_guard lock(state_->mutex);
  state_->next = std::move(text);
  if (std::exchange(state_->running, true)) return;
  std::thread([state = state_] {
    for (;;) {
      std::string text;
      {
        const std::lock_guard lock(state->mutex);
        if (!state->next) {
          state->running = false;
          state->idle.notify_all();
          return;
        }
        text = std::move(*std::exchange(state->next, std::nullopt));
      }
      try {
        state->publish(state->path, text);
      } catch (const std::exception& error) {
        log_warning("[comm.flight_record] not written: {}", error.what());
      }
    }
  }).detach();
}

bool RecordWriter::await(std::chrono::milliseconds limit) {
  std::unique_lock lock(state_->mutex);
  return state_->idle.wait_for(lock, limit, [&] { return !state_->running; });
}

}  // namespace tessera::comm
