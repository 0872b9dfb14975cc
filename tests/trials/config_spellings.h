// Compares spellings of config.json for all families with transformers (oracle/config_spellings.py): the log-probs are
// equal, or the result is an error that names a key of docs/format/config.md.
#pragma once

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/formats/safetensors/safetensors_folder.h"
#include "tessera/models/files/weights.h"
#include "tests/support/process.h"
#include "tests/support/temp_folder.h"

namespace tessera::testing {

// The keys in backquotes in the first column of the table under `heading`.
inline std::set<std::string> documented_keys(const std::string& heading) {
  std::ifstream file(source_folder() / "docs/format/config.md");
  std::set<std::string> keys;
  bool inside = false;
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("## ")) inside = line == "## " + heading;
    if (!inside || !line.starts_with("| `")) continue;
    const auto column = line.substr(0, line.find(" | "));
    for (size_t at = column.find('`'); at != std::string::npos; at = column.find('`', at + 1)) {
      const auto end = column.find('`', at + 1);
      keys.insert(column.substr(at + 1, end - at - 1));
      at = end;
    }
  }
  return keys;
}

struct SpellingCounts {
  int equal = 0, refused_by_both = 0, refused_here = 0, taken_here_alone = 0;
  std::set<std::string> keys_of_refusals{};  // documented keys that an error has named
};

class SpellingCheck {
 public:
  explicit SpellingCheck(const std::filesystem::path& folder)
      : folder_(folder), expected_(SafetensorsFile::open(folder / "expected.safetensors")) {}

  void check(const nlohmann::json& spelling) {
    const auto text = spelling.at("config").get<std::string>();
    const bool taken = spelling.contains("row");
    std::string refusal;
    try {
      const auto config = ModelConfig::parse(text, "case");
      const auto found = logprobs(config, spelling.at("weights"));
      if (!taken) {
        ++counts.taken_here_alone;
        return note("taken here alone", spelling.at("error"), text);
      }
      const auto row = expected_->tensor("logprobs")[spelling.at("row").get<int64_t>()];
      const double difference = (found - row).abs().max().item<double>();
      EXPECT_LT(difference, 1e-5) << line_of(spelling);
      const auto dtype = spelling.at("dtype").get<std::string>();
      EXPECT_TRUE(dtype.empty() || dtype_name(config.dtype.value_or(at::kFloat)) == dtype) << line_of(spelling);
      ++counts.equal;
      return;
    } catch (const Error& error) {
      refusal = error.what();
    }
    if (!taken) {
      ++counts.refused_by_both;
      return;
    }
    ++counts.refused_here;
    note("refused here", refusal, text);
    bool named = false;
    for (const auto& key : documented_) {
      if (!names_key(refusal, key)) continue;
      named = true;
      counts.keys_of_refusals.insert(key);
    }
    EXPECT_TRUE(named) << "no documented key in: " << refusal << "\n" << line_of(spelling);
  }

  const std::set<std::string>& documented() const { return documented_; }
  SpellingCounts counts;

 private:
  static std::string line_of(const nlohmann::json& spelling) {
    return nlohmann::json{{"weights", spelling.at("weights")}, {"config", spelling.at("config")}}.dump();
  }

  // True if `text` names `key` as a whole word.
  static bool names_key(const std::string& text, const std::string& key) {
    const auto is_part = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_'; };
    for (size_t at = text.find(key); at != std::string::npos; at = text.find(key, at + 1)) {
      const size_t end = at + key.size();
      if ((at == 0 || !is_part(text[at - 1])) && (end == text.size() || !is_part(text[end]))) return true;
    }
    return false;
  }

  // If TESSERA_SPELLINGS names a file, every case without equal values is written to this file.
  static void note(const char* kind, const std::string& reason, const std::string& text) {
    if (const char* path = std::getenv("TESSERA_SPELLINGS")) {
      std::ofstream(path, std::ios::app) << nlohmann::json{{"kind", kind}, {"reason", reason}, {"config", text}}
                                         << "\n";
    }
  }

  at::Tensor logprobs(const ModelConfig& config, const std::string& weights) {
    const at::NoGradGuard no_grad;
    const auto model = make_model(config, {.dtype = at::kFloat, .device = at::kMeta});
    load_pretrained(*model, folder_ / weights);
    const auto logits = model->logits({.tokens = expected_->tensor("tokens")});
    return at::log_softmax(logits.to(at::kDouble), -1)[0].to(at::kFloat);
  }

  std::filesystem::path folder_;
  std::shared_ptr<const SafetensorsFile> expected_;
  std::set<std::string> documented_ = documented_keys("What transformers takes and Tessera refuses");
};

// Checks the kept cases and `count` random cases.
inline SpellingCounts check_config_spellings(uint64_t seed, int count, double timeout_seconds) {
  const TempFolder folder;
  fmt::print("seed {}, {} spellings\n", seed, count);
  const auto run = run_python("tests/trials/oracle/config_spellings.py",
                              {folder.path().string(), std::to_string(seed), std::to_string(count),
                               (source_folder() / "tests/trials/oracle/config_cases.jsonl").string()},
                              {.timeout_seconds = timeout_seconds});
  EXPECT_EQ(run.exit_code, 0) << run.err;
  const auto level = log_level();
  set_log_level(LogLevel::kError);
  SpellingCheck check(folder.path());
  std::ifstream file(folder / "cases.jsonl");
  for (std::string line; std::getline(file, line);) check.check(nlohmann::json::parse(line));
  set_log_level(level);
  const auto& counts = check.counts;
  fmt::print("{} equal, {} refused by both, {} refused here, {} taken here alone\n", counts.equal,
             counts.refused_by_both, counts.refused_here, counts.taken_here_alone);
  return counts;
}

}  // namespace tessera::testing
