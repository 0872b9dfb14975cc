// `tessera tokenize`: converts lines of text to lines of token ids, and back.
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <iostream>
#include <string>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/text/number.h"
#include "tessera/base/text/quote.h"
#include "tessera/cli/flags.h"
#include "tessera/models/files/model_path.h"
#include "tessera/text/tokenizer.h"

namespace tessera::cli {
namespace {

// Ids are separated by spaces, tabs or commas. Each one is checked against the vocabulary.
std::vector<text::TokenId> parse_ids(std::string_view line, int64_t line_number, const text::Tokenizer& tokenizer) {
  std::vector<text::TokenId> ids;
  const auto is_space = [](char c) { return c == ' ' || c == '\t' || c == '\r' || c == ','; };
  for (size_t at = 0; at < line.size();) {
    if (is_space(line[at])) {
      ++at;
      continue;
    }
    size_t end = at;
    while (end < line.size() && !is_space(line[end])) ++end;
    const std::string_view word = line.substr(at, end - at);
    const auto id = parse_number<text::TokenId>(word);
    TESSERA_CHECK(id && *id >= 0 && static_cast<size_t>(*id) < tokenizer.vocab_size(), ErrorKind::kFormat,
                  "[tokenize.decode] stdin line {}: found {}, wanted token ids from 0 to {}.", line_number,
                  quote(word, 40), tokenizer.vocab_size() - 1);
    ids.push_back(*id);
    at = end;
  }
  return ids;
}

void print_line(std::string line) {
  line += '\n';
  std::fwrite(line.data(), 1, line.size(), stdout);
}

}  // namespace

int run_tokenize(VerbArguments args) {
  auto app = make_app("tokenize");
  std::string model;
  bool decode = false, no_special = false;
  app->add_option("--model", model, "Hugging Face folder with tokenizer.json")->required()->type_name("DIR");
  app->add_flag("--decode", decode, "Convert ids on stdin to text on stdout");
  app->add_flag("--no-special", no_special,
                "Add no BOS or EOS, and read <|...|> as plain text; with --decode, leave special tokens out");
  app->footer(
      "Each line on stdin becomes one line on stdout: ids separated by spaces, or text.\n"
      "  echo 'In the beginning' | tessera tokenize --model DIR | tessera tokenize --model DIR --decode");
  if (const auto code = parse_flags(*app, args)) return *code;

  const auto tokenizer = text::Tokenizer::from_folder(resolve_model_path(model, "--model"));
  const text::EncodeOptions options{.add_special_tokens = !no_special, .parse_special = !no_special};
  std::ios::sync_with_stdio(false);
  int64_t line_number = 0;
  for (std::string line; std::getline(std::cin, line);) {
    ++line_number;
    print_line(decode ? tokenizer.decode(parse_ids(line, line_number, tokenizer), no_special)
                      : fmt::format("{}", fmt::join(tokenizer.encode(line, options), " ")));
  }
  return 0;
}

}  // namespace tessera::cli
