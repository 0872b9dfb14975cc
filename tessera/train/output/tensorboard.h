// TensorBoard event files: scalars and texts that `tensorboard --logdir` shows.
//
//   EventWriter events(run / "tensorboard");
//   events.start_session(resumed_step);            // TensorBoard drops older events after that step
//   events.add_scalar("train/loss", 2.1, 7);
//   events.flush();
//
// The format is TFRecord framing (length, masked CRC-32C, data, masked CRC-32C; little-endian) around protobuf
// messages tensorflow.Event, here encoded by hand: docs/format/tensorboard.md. Not thread-safe.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

#include "tessera/base/files/unique_fd.h"

namespace tessera::train {

class EventWriter {
 public:
  // Makes the folder and in it a new events.out.tfevents.* file. Error kIo.
  explicit EventWriter(const std::filesystem::path& folder);
  ~EventWriter();  // flushes; what cannot be written then is logged
  EventWriter(const EventWriter&) = delete;
  EventWriter& operator=(const EventWriter&) = delete;

  // Says that events of steps after `step` in earlier files of the folder did not happen.
  void start_session(int64_t step);
  // NaN and infinities are kept: TensorBoard marks them.
  void add_scalar(std::string_view tag, double value, int64_t step);
  // Shown as Markdown under TEXT.
  void add_text(std::string_view tag, std::string_view text, int64_t step);
  // Writes what was added. Error kIo.
  void flush();

  const std::filesystem::path& path() const { return path_; }

 private:
  void add_event(int64_t step, std::string_view body);

  std::filesystem::path path_;
  UniqueFd file_;
  std::string pending_;
};

}  // namespace tessera::train
