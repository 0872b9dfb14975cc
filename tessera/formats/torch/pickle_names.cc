#include "tessera/formats/torch/pickle_names.h"

#include <algorithm>
#include <array>

#include "tessera/formats/torch/torch_dtypes.h"

namespace tessera {
namespace {

struct KnownName {
  std::string_view module;
  std::string_view name;
};
constexpr std::string_view kDcpModule = "torch.distributed.checkpoint.metadata";
constexpr std::array kKnownNames = {
    KnownName{"collections", "OrderedDict"},
    KnownName{"_codecs", "encode"},
    KnownName{"builtins", "set"},
    KnownName{"builtins", "bytes"},
    KnownName{"builtins", "complex"},
    KnownName{"pathlib", "PosixPath"},
    KnownName{"torch", "Size"},
    KnownName{"torch", "device"},
    KnownName{"torch.serialization", "_get_layout"},
    KnownName{"torch._utils", "_rebuild_tensor_v2"},
    KnownName{"torch._utils", "_rebuild_tensor_v3"},
    KnownName{"torch._utils", "_rebuild_parameter"},
    KnownName{"torch.storage", "UntypedStorage"},
    KnownName{kDcpModule, "Metadata"},
    KnownName{kDcpModule, "TensorStorageMetadata"},
    KnownName{kDcpModule, "TensorProperties"},
    KnownName{kDcpModule, "ChunkStorageMetadata"},
    KnownName{kDcpModule, "BytesStorageMetadata"},
    KnownName{kDcpModule, "MetadataIndex"},
    KnownName{kDcpModule, "StorageMeta"},
    KnownName{kDcpModule, "_MEM_FORMAT_ENCODING"},
    KnownName{"torch.distributed.checkpoint.filesystem", "_StorageInfo"},
};

}  // namespace

PickleName canonical_pickle_name(std::string_view module, std::string_view name) {
  if (module == "__builtin__") return {"builtins", std::string(name)};
  if (module == "pathlib._local") return {"pathlib", std::string(name)};
  if (module == "torch" && name == "UntypedStorage") return {"torch.storage", std::string(name)};
  // Until torch 2.3 TensorProperties and MEM_FORMAT_ENCODING were in the module of sharded tensors.
  if (module == "torch.distributed._shard.sharded_tensor.metadata") {
    if (name == "TensorProperties") return {std::string(kDcpModule), std::string(name)};
    if (name == "MEM_FORMAT_ENCODING") return {std::string(kDcpModule), "_MEM_FORMAT_ENCODING"};
  }
  return {std::string(module), std::string(name)};
}

bool is_known_pickle_name(const PickleName& name) {
  if (name.module == "torch" && (find_torch_dtype(name.name) || find_torch_storage(name.name))) return true;
  return std::ranges::any_of(
      kKnownNames, [&](const KnownName& known) { return known.name == name.name && known.module == name.module; });
}

}  // namespace tessera
