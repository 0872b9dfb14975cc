#include "tessera/models/generation/load.h"

#include <map>

#include "tessera/base/error.h"
#include "tessera/base/text/quote.h"
#include "tessera/models/files/weights.h"
#include "tessera/models/generation/row_model.h"

namespace tessera {

std::optional<kernels::WeightFormat> packed_row_dtype(std::string_view dtype) {
  if (dtype == "int8") return kernels::WeightFormat::kInt8;
  if (dtype == "int4") return kernels::WeightFormat::kInt4;
  return std::nullopt;
}

std::shared_ptr<CausalLM> load_for_generation(const std::filesystem::path& dir, const std::string& dtype,
                                              c10::Device device) {
  static const std::map<std::string, c10::ScalarType> names = {
      {"float32", at::kFloat}, {"bfloat16", at::kBFloat16}, {"float16", at::kHalf}};
  const auto named = names.find(dtype);
  const auto packed = packed_row_dtype(dtype);
  TESSERA_CHECK(dtype.empty() || packed || named != names.end(), ErrorKind::kConfig,
                "--dtype: found {}, wanted float32, bfloat16, float16, int8 or int4", quote(dtype));
  TESSERA_CHECK(!packed || device.is_cpu(), ErrorKind::kConfig,
                "--dtype {}: packed weights are supported on the CPU only, found {}. Use bfloat16.", dtype,
                device.str());
  const auto wanted = named == names.end() ? std::nullopt : std::optional(named->second);
  const auto model = from_pretrained(dir, wanted, device);
  if (device.is_cpu()) make_row_model(*model, packed.value_or(stored_row_dtype(*model)));
  return model;
}

}  // namespace tessera
