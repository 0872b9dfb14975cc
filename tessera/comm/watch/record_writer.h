// Writes the flight records of one rank on a thread of its own, because the folder may be on a file system that hangs.
// The watchdog, errors and the end of the process wait for a write only for a limited time.
//
//   RecordWriter writer(folder / flight_record_name(3));
//   writer.write(to_json(record));                       // returns at once
//   writer.await(std::chrono::seconds(2));               // false: not yet on disk
//
// A thread that hangs may outlive the RecordWriter: the thread and the writer share the state that it uses.
// Thread-safe.
#pragma once

#include <chrono>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>

namespace tessera::comm {

class RecordWriter {
 public:
  // Writes `text` to `path`. The default makes the folder and calls publish_file(); tests replace it.
  using Publish = std::function<void(const std::filesystem::path& path, const std::string& text)>;

  // Makes a writer for the file `path`. If `path` is empty, write() writes nothing. An error of `publish` is logged.
  explicit RecordWriter(std::filesystem::path path, Publish publish = nullptr);
  ~RecordWriter();  // waits up to 2 s
  RecordWriter(const RecordWriter&) = delete;
  RecordWriter& operator=(const RecordWriter&) = delete;

  // Starts to write `text` and returns at once. If a write is under way, `text` is written after it; a newer text
  // replaces one that is still waiting.
  void write(std::string text);
  // Waits until no text is left to write. Returns false if this takes longer than `limit`.
  bool await(std::chrono::milliseconds limit);

 private:
  struct WriterState;
  std::shared_ptr<WriterState> state_;
};

}  // namespace tessera::comm
