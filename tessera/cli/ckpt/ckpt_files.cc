#include "tessera/cli/ckpt/ckpt_files.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <set>

#include "tessera/base/error.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/formats/gguf/gguf.h"
#include "tessera/formats/safetensors/safetensors.h"
#include "tessera/formats/tensor_files/finite.h"
#include "tessera/formats/tensor_files/tensor_files.h"
#include "tessera/models/files/weights.h"

namespace tessera::cli {
namespace {

namespace fs = std::filesystem;

std::string dtype_name(c10::ScalarType dtype) {
  // safetensors has no names for complex dtypes, so libtorch's names are used for these.
  return c10::isComplexType(dtype) ? c10::toString(dtype) : std::string(safetensors_dtype_name(dtype));
}

std::vector<ListedTensor> list_files(const TensorFiles& files) {
  std::vector<ListedTensor> result;
  for (const auto& [name, stored] : files.tensors()) {
    result.push_back({name, dtype_name(stored.dtype), stored.shape, stored.size_bytes(), stored.file});
  }
  return result;
}

std::vector<ListedTensor> list_gguf(const fs::path& path) {
  std::vector<ListedTensor> result;
  const auto file = GgufFile::open(path);
  for (const auto& [name, info] : file->tensors()) {
    result.push_back({name, std::string(info.type_name()), info.shape, info.end - info.begin, path.filename()});
  }
  return result;
}

std::string verify_error_prefix(const fs::path& path) { return "[ckpt.verify] " + path.string(); }

void verify_gguf(const fs::path& path, VerifiedFiles& result) {
  const auto file = GgufFile::open(path);
  for (const auto& [name, info] : file->tensors()) {
    if (ggml_type_info(static_cast<uint32_t>(info.type))->decodes) {
      check_finite(file->tensor(name), name, verify_error_prefix(path));
    } else {
      ++result.unread[std::string(info.type_name())];
    }
  }
}

// Compares the names and shapes of the folder's tensors with those of the model that the folder's config.json
// describes. If there is no model to compare with, returns the reason, else an empty text. An error that keeps the
// model from loading is a fault of the verified files and not of the command line, so kConfig becomes kFormat.
std::string compare_with_model(const fs::path& path) {
  try {
    return check_folder(path);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kConfig) throw;
    throw Error(ErrorKind::kFormat, error.what());
  }
}

std::string kind_of_tensor(const StoredTensor& stored) {
  return fmt::format("{} [{}]", dtype_name(stored.dtype), fmt::join(stored.shape, ", "));
}

at::Tensor raw_bytes(const at::Tensor& tensor) { return tensor.reshape({-1}).view(at::kByte); }

// The difference of two tensors of the same dtype and shape; nothing if they are bitwise equal. Bytes are compared
// first, because NaNs differ from themselves; numbers are then compared in float64.
std::optional<TensorDifference> difference_of(const std::string& name, const at::Tensor& a, const at::Tensor& b) {
  if (at::equal(raw_bytes(a), raw_bytes(b))) return std::nullopt;
  TensorDifference found{.name = name, .description = {}};
  const auto wide = [](const at::Tensor& tensor) {
    return tensor.is_complex() ? tensor.to(at::kComplexDouble) : tensor.to(at::kDouble);
  };
  const auto x = wide(a), y = wide(b), distance = (x - y).abs();
  found.largest = distance.max().item<double>();
  // The relative difference is max |a - b| / max |a|. The largest quotient of single elements would be of no use,
  // because it is large for elements near 0.
  const double scale = x.abs().max().item<double>();
  found.relative = scale > 0 ? found.largest / scale : found.largest;
  found.differing = static_cast<uint64_t>(x.ne(y).sum().item<int64_t>());
  return found;
}

}  // namespace

bool is_gguf(const fs::path& path) {
  TESSERA_CHECK(fs::exists(path), ErrorKind::kIo, "[ckpt] {}: does not exist", path.string());
  if (fs::is_directory(path)) return false;
  std::array<char, 4> magic{};
  std::ifstream(path, std::ios::binary).read(magic.data(), magic.size());
  return std::string_view(magic.data(), magic.size()) == "GGUF";
}

std::vector<ListedTensor> list_tensors(const fs::path& path) {
  return is_gguf(path) ? list_gguf(path) : list_files(*TensorFiles::open(path));
}

VerifiedFiles verify_checkpoint(const fs::path& path) {
  VerifiedFiles result;
  const auto count = [&](const std::vector<ListedTensor>& tensors) {
    result.tensors = tensors.size();
    for (const auto& tensor : tensors) result.size_bytes += tensor.size_bytes;
  };
  if (is_gguf(path)) {
    count(list_gguf(path));
    verify_gguf(path, result);
    result.without_model = compare_with_model(path);
    return result;
  }
  const auto files = TensorFiles::open(path);
  count(list_files(*files));
  using Compared = VerifiedFiles::Compared;
  if (files->format() == TensorFiles::Format::kDcp) {
    const auto checkpoint = Checkpoint::open(path);
    result.without_checksum = checkpoint.verify();
    result.compared = checkpoint.has_hashes() ? Compared::kHashes : Compared::kChecksums;
    result.step = checkpoint.step();
  } else if (files->format() == TensorFiles::Format::kTorchSave) {
    result.compared = Compared::kChecksums;  // checked when a whole tensor is read, as in the loop below
  }
  result.without_model = compare_with_model(path);
  for (const auto& [name, stored] : files->tensors()) {
    check_finite(files->tensor(name), name, verify_error_prefix(path));
  }
  return result;
}

ComparedFiles compare_checkpoints(const fs::path& a_path, const fs::path& b_path) {
  TESSERA_CHECK(!is_gguf(a_path) && !is_gguf(b_path), ErrorKind::kConfig,
                "[ckpt.diff] a GGUF file: convert it with 'tessera ckpt convert --to hf' first");
  // A training checkpoint can be compared with an exported model: then only the weights of both are compared.
  auto a = TensorFiles::open(a_path), b = TensorFiles::open(b_path);
  ComparedFiles result;
  const auto a_weights = TensorFiles::open(a_path, {.weights_only = true});
  const auto b_weights = TensorFiles::open(b_path, {.weights_only = true});
  // Whether a path has other tensors than the weights of a model, such as optimizer state.
  const auto is_training_state = [](const TensorFiles& all, const TensorFiles& weights) {
    return !std::ranges::equal(all.tensors(), weights.tensors(),
                               [](const auto& one, const auto& other) { return one.first == other.first; });
  };
  result.weights_only = is_training_state(*a, *a_weights) != is_training_state(*b, *b_weights);
  if (result.weights_only) {
    a = a_weights;
    b = b_weights;
  }
  std::set<std::string> names;
  for (const auto& [name, stored] : a->tensors()) names.insert(name);
  for (const auto& [name, stored] : b->tensors()) names.insert(name);
  for (const auto& name : names) {
    if (!a->contains(name) || !b->contains(name)) {
      result.different.push_back(
          {.name = name, .description = a->contains(name) ? "only in the first" : "only in the second"});
    } else if (const auto& x = a->at(name), &y = b->at(name); x.dtype != y.dtype || x.shape != y.shape) {
      result.different.push_back({.name = name, .description = kind_of_tensor(x) + " and " + kind_of_tensor(y)});
    } else if (auto found = difference_of(name, a->tensor(name), b->tensor(name))) {
      result.different.push_back(std::move(*found));
    } else {
      ++result.equal;
    }
  }
  return result;
}

}  // namespace tessera::cli
