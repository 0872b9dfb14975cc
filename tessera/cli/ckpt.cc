#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/base/quote.h"
#include "tessera/cli/ckpt_files.h"
#include "tessera/cli/flags.h"
#include "tessera/cli/verbs.h"

namespace tessera::cli {
namespace {

constexpr size_t kShownName = 500;  // bytes of a name in a listing

void print(const std::string& text) {
  TESSERA_CHECK(std::fwrite(text.data(), 1, text.size(), stdout) == text.size(), ErrorKind::kIo,
                "[ckpt] the result could not be written to the standard output");
}

void print_verified(const std::string& path, const VerifiedFiles& verified) {
  std::string line = fmt::format("{}: {} tensors, {} bytes, ", path, verified.tensors, verified.size_bytes);
  if (verified.unread.empty()) {
    print(line + "all good\n");
    return;
  }
  size_t count = 0;
  std::vector<std::string> types;
  for (const auto& [type, tensors] : verified.unread) {
    count += tensors;
    types.push_back(fmt::format("{} of {}", tensors, type));
  }
  print(line +
        fmt::format("structure is good; the values of {} tensors were not checked, as this version cannot decode "
                    "their type ({})\n",
                    count, fmt::join(types, ", ")));
}

void list_as_json(const std::vector<ListedTensor>& tensors, uint64_t total_bytes) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const auto& tensor : tensors) {
    list.push_back({{"name", tensor.name},
                    {"dtype", tensor.dtype},
                    {"shape", tensor.shape},
                    {"bytes", tensor.size_bytes},
                    {"file", tensor.file}});
  }
  const nlohmann::ordered_json json = {{"tensors", list}, {"total_bytes", total_bytes}};
  // GGUF names may be any bytes; what is no UTF-8 is shown as U+FFFD.
  print(json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n");
}

void print_table(const std::vector<ListedTensor>& tensors, uint64_t total_bytes) {
  constexpr size_t kMaxWidth = 80;  // longer names stick out
  size_t name_width = 4;
  for (const auto& tensor : tensors) {
    name_width = std::max(name_width, std::min(kMaxWidth, escape(tensor.name, kShownName).size()));
  }
  for (const auto& tensor : tensors) {
    print(fmt::format("{:<{}}  {:<7}  {:<16}  {:>12}  {}\n", escape(tensor.name, kShownName), name_width, tensor.dtype,
                      fmt::format("[{}]", fmt::join(tensor.shape, ", ")), tensor.size_bytes,
                      escape(tensor.file, kShownName)));
  }
  print(fmt::format("{} tensors, {} bytes\n", tensors.size(), total_bytes));
}

void list(const std::string& path, bool as_json) {
  const auto tensors = list_tensors(path);
  uint64_t total_bytes = 0;
  for (const auto& tensor : tensors) total_bytes += tensor.size_bytes;
  as_json ? list_as_json(tensors, total_bytes) : print_table(tensors, total_bytes);
}

}  // namespace

int run_ckpt(VerbArguments args) {
  auto app = make_app("ckpt");
  app->require_subcommand(1);
  app->fallthrough();
  std::string path, source, destination;
  bool json = false;
  ConvertOptions convert;
  auto* ls = app->add_subcommand("ls", "List the tensors of a folder, a safetensors or GGUF file, or a checkpoint");
  ls->add_option("PATH", path, "What to list")->required();
  ls->add_flag("--json", json, "One JSON object: name, dtype, shape, bytes and file of each tensor");
  auto* verify =
      app->add_subcommand("verify", "Read everything and check structure, hashes and that values are finite");
  verify->add_option("PATH", path, "What to check")->required();
  auto* change = app->add_subcommand("convert", "GGUF file to Hugging Face folder, or folder to GGUF file");
  change->add_option("SRC", source, "A GGUF file or a Hugging Face folder")->required();
  change->add_option("DST", destination, "Must not exist yet")->required();
  change->add_option("--to", convert.to, "hf or gguf; by default the other one")->type_name("FORMAT");
  change->add_option("--dtype", convert.dtype, "float32, bfloat16, float16, and q8_0 for GGUF; by default that of SRC")
      ->type_name("DTYPE");
  if (const auto code = parse_flags(*app, args)) return *code;
  if (ls->parsed()) {
    list(path, json);
  } else if (verify->parsed()) {
    print_verified(path, verify_checkpoint(path));
  } else {
    convert_checkpoint(source, destination, convert);
  }
  return 0;
}

}  // namespace tessera::cli
