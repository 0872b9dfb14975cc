// Writes the flight records of one rank on a thread of its own, since the folder may be on a file system that hangs: a
// watch, an error and the end of a process wait for it within limits only.
//
//   RecordWriter writer(folder / flight_record_name(3));
//   writer.write(to_json(record));                       // returns at once
//   writer.await(std::chrono::seconds(2));               // false: not yet on disk
//
// A write that hangs outlives the writer, which owns nothing that the thread uses. Thread-safe.
#pragma once

#include <chrono>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>

namespace tessera::comm {

class RecordWriter {
 public:
  // Puts the text at the path; publish_file in a folder made for it, unless a test says otherwise.
  using Publish = std::function<void(const std::filesystem::path& path, const std::string& text)>;

  // An empty path: nothing is written. Failures are logged.
  explicit RecordWriter(std::filesystem::path path, Publish publish = nullptr);
  ~RecordWriter();  // waits up to 2 s
  RecordWriter(const RecordWriter&) = delete;
  RecordWriter& operator=(const RecordWriter&) = delete;

  void write(std::string text);
  // Until everything is written. False after the limit.
  bool await(std::chrono::milliseconds limit);

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace tessera::comm
