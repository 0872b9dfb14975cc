// Fuzz target: any bytes as a file of training records, and each record as a sample. The first byte chooses the format.
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <optional>

#include "tessera/base/error.h"
#include "tessera/data/records/samples.h"
#include "tessera/data/records/sources.h"
#include "tests/fuzz/input_file.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace tessera;
  static const auto tokenizer = text::Tokenizer::from_json(
      R"({"model": {"type": "BPE", "byte_fallback": false, "unk_token": "?", "vocab": {"?": 0, "a": 1}, "merges": []}})",
      "fuzz");
  static const std::optional<text::ChatTemplate> chat = text::ChatTemplate::parse(
      "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}"
      "</{{ m.role }}>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}",
      "fuzz", {.max_steps = 50'000, .max_output_bytes = 1 << 16});
  if (size == 0) return 0;
  // In the kept inputs the first byte has a fixed meaning, so the order of this list must not change.
  static constexpr const char* kFuzzed[] = {"auto",   "text",       "jsonl",      "chat", "sharegpt",
                                            "alpaca", "completion", "preference", "auto"};
  const size_t choice = data[0] % 9;
  const data::SampleMaker maker(tokenizer, chat, {.vocab_size = 2});
  const fuzz::InputFile file(data + 1, size - 1);
  try {
    const auto container = choice == 1   ? data::DataContainer::kText
                           : choice == 8 ? data::DataContainer::kJsonArray
                                         : data::DataContainer::kJsonLines;
    data::read_records({file.path(), container}, {.format = kFuzzed[choice]}, [&](data::TrainingRecord record) {
      const auto sample = maker.make(record);
      if (sample.tokens.size() != sample.loss_mask.size()) std::abort();
    });
  } catch (const Error& error) {
    fuzz::check_message(error.what());
  }
  return 0;
}
