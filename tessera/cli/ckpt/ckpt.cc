#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/base/text/json_numbers.h"
#include "tessera/base/text/quote.h"
#include "tessera/checkpoint/folder.h"
#include "tessera/checkpoint/write_dcp.h"
#include "tessera/cli/ckpt/ckpt_convert.h"
#include "tessera/cli/ckpt/ckpt_files.h"
#include "tessera/cli/flags.h"
#include "tessera/cli/verbs.h"
#include "tessera/formats/tensor_files/tensor_files.h"

namespace tessera::cli {
namespace {

constexpr size_t kShownName = 500;  // bytes of a name in a listing

void print(const std::string& text) {
  TESSERA_CHECK(std::fwrite(text.data(), 1, text.size(), stdout) == text.size(), ErrorKind::kIo,
                "[ckpt] the result could not be written to the standard output");
}

// Returns a sentence that says which checks were made, and which checks were not possible.
std::string shown_result(const VerifiedFiles& verified) {
  size_t count = 0;
  std::vector<std::string> types;
  for (const auto& [type, tensors] : verified.unread) {
    count += tensors;
    types.push_back(fmt::format("{} of {}", tensors, type));
  }
  if (count > 0) {
    return fmt::format(
        "structure is good; the values of {} tensors were not checked, because this version cannot decode "
        "their type ({})",
        count, fmt::join(types, ", "));
  }
  using Compared = VerifiedFiles::Compared;
  if (verified.compared == Compared::kHashes) return "all good, every file has the hash that the run stored";
  if (verified.compared == Compared::kNothing) {
    return "all good; the format has no checksums, so a changed value is not detected";
  }
  if (verified.without_checksum == 0) {
    return "all good; it has no hashes, so the checksums of its records were compared";
  }
  return fmt::format(
      "structure is good; it has no hashes, and the values of {} records were not checked, because they have no "
      "checksum either",
      verified.without_checksum);
}

void print_verified(const std::string& path, const VerifiedFiles& verified) {
  const bool has_step = verified.compared == VerifiedFiles::Compared::kHashes;
  const auto model =
      verified.without_model.empty() ? std::string("; names and shapes are those of its config.json")
      : has_step                     ? ""  // the hashes prove that the files are as the run wrote them
                 : fmt::format("; names and shapes were not compared with a model's: {}", verified.without_model);
  print(fmt::format("{}: {} tensors, {} bytes, {}{}{}\n", path, verified.tensors, verified.size_bytes,
                    has_step ? fmt::format("step {}, ", verified.step) : "", shown_result(verified), model));
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
  // Names in GGUF files may be any bytes; invalid UTF-8 is shown as U+FFFD.
  print(dump_json(json) + "\n");
}

void print_table(const std::vector<ListedTensor>& tensors, uint64_t total_bytes) {
  constexpr size_t kMaxWidth = 80;  // longer names do not widen the column
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

// Prints the differences. Returns the exit code: 0 if all tensors are bitwise equal, else 1.
int print_comparison(const ComparedFiles& compared) {
  for (const auto& each : compared.different) {
    const auto name = escape(each.name, kShownName);
    if (!each.description.empty()) {
      print(fmt::format("{}: {}\n", name, each.description));
    } else {
      print(fmt::format("{}: {} elements differ, at most by {:.3g}, {:.3g} of the largest\n", name, each.differing,
                        each.largest, each.relative));
    }
  }
  print(fmt::format("{} tensors are equal, {} differ{}\n", compared.equal, compared.different.size(),
                    compared.weights_only ? " (weights alone)" : ""));
  return compared.different.empty() ? 0 : 1;
}

// The newest checkpoint if `path` is the folder of a run, else `path`.
std::string resolve_checkpoint(const std::string& path) {
  auto checkpoint = CheckpointFolder::resolve_latest(path).string();
  if (checkpoint != path) log_info("[ckpt] {}: its newest checkpoint is {}", path, checkpoint);
  return checkpoint;
}

// Returns resolve_checkpoint(path), except for a folder that holds adapters and no model: then the file
// adapter_model.safetensors in it.
std::string resolve_checkpoint_or_adapters(const std::string& path) {
  const auto adapters = std::filesystem::path(path) / "adapter_model.safetensors";
  const bool alone = std::filesystem::is_regular_file(adapters) && !TensorFiles::has_tensors(path);
  return alone ? adapters.string() : resolve_checkpoint(path);
}

void list(const std::string& path, bool as_json) {
  const auto tensors = list_tensors(path);
  uint64_t total_bytes = 0;
  for (const auto& tensor : tensors) total_bytes += tensor.size_bytes;
  as_json ? list_as_json(tensors, total_bytes) : print_table(tensors, total_bytes);
}

}  // namespace

int run_ckpt(VerbArguments args) {
  // fallthrough(): --log-level may also follow the subcommand.
  auto app = make_app("ckpt");
  app->require_subcommand(1);
  app->fallthrough();
  std::string path, source, destination;
  bool json = false;
  ConvertOptions convert;
  const std::string any =
      "A checkpoint, a run's folder (its newest checkpoint), PyTorch's distributed checkpoint, a Hugging Face folder, "
      "or a safetensors, torch.save or GGUF file";
  const std::string listed = any + "; a folder of LoRA adapters";
  auto* ls = app->add_subcommand("ls", "List the tensors of a checkpoint or model");
  ls->add_option("PATH", path, listed)->required();
  ls->add_flag("--json", json, "One JSON object: name, dtype, shape, bytes and file of each tensor");
  auto* verify =
      app->add_subcommand("verify",
                          "Read all files and check structure, hashes, that values are finite, and, if there is a "
                          "config.json, that its model finds its tensors; reports which checks were not possible");
  verify->add_option("PATH", path, listed)->required();
  auto* diff = app->add_subcommand("diff", "Compare two checkpoints tensor by tensor; exits with 1 if they differ");
  diff->add_option("A", source, any + "; no GGUF file")->required();
  diff->add_option("B", destination, "The other one, in the same forms as A")->required();
  auto* change = app->add_subcommand(
      "convert", "Convert between Hugging Face folders, GGUF, distributed checkpoints and torch.save, on the CPU");
  change->add_option("SRC", source, "A Hugging Face folder, GGUF file, distributed checkpoint or torch.save file")
      ->required();
  change->add_option("DST", destination, "Path of the result, which must not exist yet")->required();
  change->add_option("--to", convert.to, "hf, gguf, dcp or torch; by default hf, or gguf for a Hugging Face folder")
      ->type_name("FORMAT");
  change
      ->add_option("--dtype", convert.dtype,
                   "float32, bfloat16, float16, or for GGUF also q8_0; by default that of SRC, or float32 if the "
                   "matrices of SRC have several dtypes or are quantised")
      ->type_name("DTYPE");
  change->add_option("--config", convert.config, "Folder whose config.json and tokenizer are copied to DST")
      ->type_name("DIR");
  change
      ->add_option("--adapter", convert.adapter,
                   "Folder of LoRA adapters of PEFT, which are merged into the weights of a Hugging Face folder")
      ->type_name("DIR");
  int ranks = 1;
  auto* cut =
      app->add_subcommand("reshard", "Write a distributed checkpoint with the files of another number of ranks");
  cut->add_option("SRC", source, "A run's or PyTorch's distributed checkpoint")->required();
  cut->add_option("DST", destination, "Path of the result, which must not exist yet")->required();
  cut->add_option("--ranks", ranks, "Number of files, one per rank")->required()->type_name("N");
  if (const auto code = parse_flags(*app, args)) return *code;
  if (ls->parsed()) {
    list(resolve_checkpoint_or_adapters(path), json);
  } else if (verify->parsed()) {
    const auto checkpoint = resolve_checkpoint_or_adapters(path);
    print_verified(checkpoint, verify_checkpoint(checkpoint));
  } else if (diff->parsed()) {
    return print_comparison(compare_checkpoints(resolve_checkpoint(source), resolve_checkpoint(destination)));
  } else if (cut->parsed()) {
    reshard(resolve_checkpoint(source), destination, ranks);
  } else if (const auto remark = convert_checkpoint(resolve_checkpoint(source), destination, convert);
             !remark.empty()) {
    log_warning("[ckpt.convert] {}", remark);
  }
  return 0;
}

}  // namespace tessera::cli
