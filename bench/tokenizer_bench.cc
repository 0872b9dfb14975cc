// Compares the speed of encoding with the `tokenizers` library, each on one thread. The text is encoded as one long
// string and as separate lines.
#include <algorithm>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "bench/harness.h"
#include "tessera/base/files/file.h"
#include "tessera/text/tokenizer.h"

namespace tessera::bench {
namespace {

using text::TokenId;
using text::Tokenizer;

constexpr size_t kBytes = size_t{1} << 20;

std::vector<std::string_view> lines_of(std::string_view text) {
  std::vector<std::string_view> lines;
  for (size_t at = 0; at <= text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    lines.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  return lines;
}

struct IdHash {
  uint64_t value = 0;
  uint64_t tokens = 0;
  void add(const std::vector<TokenId>& ids) {
    for (const TokenId id : ids) value = value * 31 + static_cast<uint64_t>(id) + 1;
    tokens += ids.size();
  }
};

void compare(Harness& harness, const std::string& name, const std::filesystem::path& folder,
             const std::filesystem::path& text_file) {
  if (!harness.is_selected(name + ", one string") && !harness.is_selected(name + ", separate lines")) return;
  const auto file = folder / "tokenizer.json";
  const Tokenizer tokenizer = Tokenizer::from_json(read_file(file), file.string());
  const std::string whole = read_file(text_file).substr(0, kBytes);
  const auto lines = lines_of(whole);
  const double megabytes = static_cast<double>(whole.size()) / 1e6;
  Peer peer("tokenizer.py", {file.string(), text_file.string(), std::to_string(kBytes)});
  const text::EncodeOptions plain = {.add_special_tokens = false};
  for (const bool by_lines : {false, true}) {
    const auto encode = [&](IdHash* hash) {
      if (!by_lines) {
        const auto ids = tokenizer.encode(whole, plain);
        if (hash) hash->add(ids);
        return;
      }
      for (const auto line : lines) {
        const auto ids = tokenizer.encode(line, plain);
        if (hash) hash->add(ids);
      }
    };
    IdHash ours;
    encode(&ours);
    const Json peer_answer = peer.ask({{"lines", by_lines}, {"hash", true}});
    // Our measurement is repeated until it lasts as long as the peer's, so that other processes disturb both equally.
    const double our_seconds = seconds_of([&] { encode(nullptr); });
    const int repeats = std::clamp(static_cast<int>(peer_answer["seconds"].get<double>() / our_seconds), 1, 100);
    const auto measure = [&] {
      return megabytes * repeats / seconds_of([&] {
               for (int i = 0; i < repeats; ++i) encode(nullptr);
             });
    };
    harness.run({.name = name + (by_lines ? ", separate lines" : ", one string"),
                 .unit = "MB/s",
                 .at_least = 3,
                 .verified =
                     [&] {
                       return peer_answer["hash"].get<uint64_t>() == ours.value &&
                              peer_answer["tokens"].get<uint64_t>() == ours.tokens;
                     },
                 .ours = measure,
                 .peer =
                     [&] {
                       return megabytes / peer.ask({{"lines", by_lines}})["seconds"].get<double>();
                     },
                 .extra = {{"tokens", ours.tokens}}});
  }
}

}  // namespace
}  // namespace tessera::bench

int main(int argc, char** argv) {
  using namespace tessera::bench;
  return bench_main("tokenizer", [&] {
    Harness harness("tokenizer", argc, argv);
    const auto assets = assets_folder();
    for (const char* name : {"qwen3", "llama3", "gemma3"}) {
      compare(harness, name, assets / "tokenizers" / name, assets / "text/kjv.txt");
    }
    compare(harness, "smollm2", assets / "smollm2", assets / "text/kjv.txt");
    return harness.exit_code();
  });
}
