// Tests of `.metadata`, the metadata file of DCP: written metadata reads back equal, and inconsistent metadata is
// refused with a reason.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <random>

#include "tessera/formats/torch/box_cover.h"
#include "tessera/formats/torch/dcp_metadata.h"
#include "tessera/formats/torch/pickler.h"
#include "tests/formats/file_bytes.h"

namespace tessera {
namespace {

using testing::error_of;
using ::testing::HasSubstr;

DcpMetadata small_metadata() {
  DcpMetadata metadata;
  metadata.entries = {
      {"w",
       DcpTensor{.dtype = c10::ScalarType::BFloat16, .size = {5, 3}, .chunks = {{{0, 0}, {3, 3}}, {{3, 0}, {2, 3}}}}},
      {"e", DcpTensor{.size = {1}, .chunks = {{{0}, {1}}, {{1}, {0}}}, .requires_grad = true}},
      {"opt.step", DcpTensor{.size = {}, .chunks = {{{}, {}}}, .pin_memory = true, .memory_format = 2}},
      {"Gr\u00f6\u00dfe", std::nullopt}};
  metadata.planner_data.emplace();
  *metadata.planner_data = {
      {"w", {"w"}}, {"e", {"e"}}, {"opt.step", {"opt", int64_t{0}, "step"}}, {"Gr\u00f6\u00dfe", {}}};
  metadata.storage_data = {{{"w", {{0, 0}}, 0}, {"__0_0.distcp", 0, 1577}},
                           {{"e", {{0}}, 0}, {"__0_0.distcp", 1577, 1513}},
                           {{"opt.step", std::vector<int64_t>{}, 0}, {"sub/__0_1.distcp", 0, 7, {"stream.zstd/1"}}},
                           {{"Gr\u00f6\u00dfe", std::nullopt, std::nullopt}, {"__0_0.distcp", 3090, 1261}},
                           {{"w", {{3, 0}}, 1}, {"__1_0.distcp", 0, 1577}},
                           {{"e", {{1}}, 1}, {"__1_0.distcp", int64_t{1} << 40, 1513}}};
  metadata.storage_meta = DcpStorageMeta{.checkpoint_id = "/tmp/dcp/ck",
                                         .checkpoint_id_is_path = true,
                                         .save_id = "7405",
                                         .load_id = std::nullopt,
                                         .modules = {"m"}};
  metadata.version = "1.0.0";
  return metadata;
}

std::string check_refusal(const std::function<void(DcpMetadata&)>& change, const DcpParseOptions& options = {}) {
  auto metadata = small_metadata();
  change(metadata);
  return error_of(ErrorKind::kFormat, [&] { metadata.check("m", options); });
}

TEST(DcpMetadata, DumpsReadBackEqual) {
  const auto metadata = small_metadata();
  EXPECT_EQ(DcpMetadata::parse(metadata.dump(), "m"), metadata);
  auto bare = metadata;
  bare.planner_data.reset();
  bare.storage_meta.reset();
  bare.version.reset();
  EXPECT_EQ(DcpMetadata::parse(bare.dump(), "m"), bare);
  EXPECT_NE(bare, metadata);
  for (const auto* id : {"/", ".", "a", "a/b", "//a/b", "/a"}) {
    bare.storage_meta = DcpStorageMeta{.checkpoint_id = id, .checkpoint_id_is_path = true};
    EXPECT_EQ(DcpMetadata::parse(bare.dump(), "m"), bare) << id;
  }
  bare.storage_meta = DcpStorageMeta{.checkpoint_id = "s3://b//c/./d"};
  EXPECT_EQ(DcpMetadata::parse(bare.dump(), "m"), bare);
  EXPECT_EQ(DcpMetadata::parse(DcpMetadata{}.dump(), "m"), DcpMetadata{});
}

TEST(DcpMetadata, LookupsFindEntriesPathsAndRecords) {
  const auto metadata = small_metadata();
  const DcpLookup lookup(metadata);
  EXPECT_EQ(lookup.at("w").tensor->size, (std::vector<int64_t>{5, 3}));
  EXPECT_EQ(lookup.storage("w", {3, 0}).relative_path, "__1_0.distcp");
  EXPECT_EQ(lookup.storage("opt.step", {}).length, 7U);
  EXPECT_EQ(lookup.storage("Gr\u00f6\u00dfe").offset, 3090U);
  EXPECT_EQ(lookup.find_storage("opt.step"), nullptr);  // an object has no offset, a scalar tensor ()
  EXPECT_EQ(lookup.find_path("opt.step")->size(), 3U);
  EXPECT_EQ(lookup.find("x"), nullptr);
  EXPECT_THAT(error_of(ErrorKind::kFormat, [&] { lookup.at("x\n"); }), HasSubstr("holds no 'x\\n'"));
  EXPECT_THAT(error_of(ErrorKind::kFormat, [&] { lookup.storage("w", {1, 0}); }), HasSubstr("'w' at [1, 0]"));
}

TEST(DcpMetadata, ChunksCoverTheirTensorExactly) {
  const auto chunks = [](std::vector<DcpChunk> with) {
    return [with](DcpMetadata& m) { m.entries[0].tensor->chunks = with; };
  };
  EXPECT_THAT(check_refusal(chunks({{{0, 0}, {3, 3}}})), HasSubstr("'w': element [3, 0] is in 0 of its 1 chunks"));
  EXPECT_THAT(check_refusal(chunks({{{0, 0}, {3, 3}}, {{2, 0}, {3, 3}}})), HasSubstr("element [2, 0] is in 2 of"));
  // The volumes of the chunks add up to the tensor's volume, but the boxes overlap.
  EXPECT_THAT(check_refusal(chunks({{{0, 0}, {3, 3}}, {{1, 0}, {2, 3}}})), HasSubstr("element [1, 0] is in 2 of"));
  EXPECT_THAT(check_refusal(chunks({{{0, 0}, {5, 2}}, {{0, 1}, {5, 1}}})), HasSubstr("element [0, 1] is in 2 of"));
  EXPECT_THAT(check_refusal(chunks({})), HasSubstr("element [0, 0] is in 0 of its 0 chunks"));
  EXPECT_THAT(check_refusal(chunks({{{0, 0}, {6, 3}}})), HasSubstr("is not inside the tensor of size [5, 3]"));
  EXPECT_THAT(check_refusal(chunks({{{6, 0}, {0, 3}}})), HasSubstr("is not inside"));
  EXPECT_THAT(check_refusal(chunks({{{0}, {5}}})), HasSubstr("is not inside"));
  EXPECT_THAT(check_refusal(chunks({{{1, 0}, {std::numeric_limits<int64_t>::max(), 3}}})), HasSubstr("is not inside"));
  EXPECT_THAT(check_refusal([](DcpMetadata& m) {
                m.entries[2].tensor->chunks.push_back({{}, {}});
              }),
              HasSubstr("element [] is in 2 of its 2 chunks"));
  // The metadata of one rank may have gaps, but no overlaps.
  auto part = small_metadata();
  part.entries[0].tensor->chunks.pop_back();
  EXPECT_NO_THROW(part.check("m", {.allow_gaps = true}));
  EXPECT_THAT(check_refusal(chunks({{{0, 0}, {3, 3}}, {{2, 0}, {3, 3}}}), {.allow_gaps = true}),
              HasSubstr("the chunks at [0, 0] and at [2, 0] overlap"));
  EXPECT_THAT(error_of(ErrorKind::kFormat, [&] { part.dump(); }), HasSubstr("is in 0 of"));
  EXPECT_EQ(DcpMetadata::parse(part.dump({.allow_gaps = true}), "m", {.allow_gaps = true}), part);
}

// Counts element by element. find_cover_defect() must find the same defect from the corners of the boxes.
std::optional<CoverDefect> first_defect_by_counting(const std::vector<int64_t>& size,
                                                    const std::vector<DcpChunk>& boxes) {
  std::vector<int64_t> element(size.size(), 0);
  for (;;) {
    int64_t covered = 0;
    for (const auto& box : boxes) {
      bool inside = true;
      for (size_t dim = 0; dim < size.size(); ++dim) {
        inside = inside && box.offsets[dim] <= element[dim] && element[dim] < box.offsets[dim] + box.sizes[dim];
      }
      covered += inside;
    }
    if (covered != 1) return CoverDefect{element, covered};
    size_t dim = size.size();
    while (dim > 0 && ++element[dim - 1] == size[dim - 1]) element[--dim] = 0;
    if (dim == 0) return std::nullopt;
  }
}

TEST(DcpMetadata, FirstCoverDefectMatchesCountingEveryElement) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  int sound = 0, broken = 0;
  for (int round = 0; round < 3000; ++round) {
    std::vector<int64_t> size(1 + random() % 3);
    for (auto& extent : size) extent = 1 + static_cast<int64_t>(random() % 5);
    std::vector<DcpChunk> boxes{{std::vector<int64_t>(size.size(), 0), size}};
    for (uint32_t cut = random() % 5; cut > 0; --cut) {  // cuts a box in two; one half may be empty
      auto& box = boxes[random() % boxes.size()];
      const size_t dim = random() % size.size();
      auto upper = box;
      const int64_t at = static_cast<int64_t>(random()) % (box.sizes[dim] + 1);
      box.sizes[dim] = at;
      upper.offsets[dim] += at;
      upper.sizes[dim] -= at;
      boxes.push_back(upper);
    }
    if (random() % 2) {  // moves a box, makes one empty, or repeats one
      auto& box = boxes[random() % boxes.size()];
      const size_t dim = random() % size.size();
      if (const auto what = random() % 3; what == 0 && box.offsets[dim] > 0) {
        --box.offsets[dim];
      } else if (what == 1) {
        box.sizes[dim] = 0;
      } else {
        boxes.push_back(DcpChunk(box));
      }
    }
    const auto found = find_cover_defect(size, boxes, "m");
    const auto wanted = first_defect_by_counting(size, boxes);
    ASSERT_EQ(found.has_value(), wanted.has_value());
    if (found) {
      ASSERT_EQ(found->element, wanted->element);
      ASSERT_EQ(found->covered_by, wanted->covered_by);
    }
    const auto overlap = find_overlap(boxes, "m");
    if (!found) {
      ASSERT_FALSE(overlap);
    }
    if (found && found->covered_by > 1) {
      ASSERT_TRUE(overlap);
    }
    (found ? broken : sound) += 1;
  }
  EXPECT_GT(sound, 500);
  EXPECT_GT(broken, 500);
}

TEST(DcpMetadata, TensOfThousandsOfChunksAreCheckedFast) {
  DcpMetadata metadata;
  DcpTensor grid{.size = {20'000, 30'000}};
  for (int64_t row = 0; row < 200; ++row) {
    for (int64_t column = 0; column < 150; ++column) {
      grid.chunks.push_back({{row * 100, column * 200}, {100, 200}});
      metadata.storage_data.push_back({{"w", grid.chunks.back().offsets, std::nullopt}, {"__0_0.distcp", 0, 1}});
    }
  }
  metadata.entries = {{"w", grid}};
  const auto bytes = metadata.dump();
  EXPECT_EQ(DcpMetadata::parse(bytes, "m"), metadata);
  EXPECT_EQ(DcpMetadata::parse(bytes, "m", {.allow_gaps = true}), metadata);
  metadata.entries[0].tensor->chunks[17'000].sizes[1] = 199;
  EXPECT_THAT(error_of(ErrorKind::kFormat, [&] { metadata.check("m"); }), HasSubstr("element [11300, 10199] is in 0"));
}

TEST(DcpMetadata, ChunksCutAlongManyDimensionsAreCheckedOrRefusedQuickly) {
  const auto halves = [](size_t dims) {  // the whole box, cut once along every dim, except for one corner
    std::vector<DcpChunk> boxes;
    std::vector<int64_t> offsets(dims, 0), sizes(dims, 2);
    for (size_t dim = 0; dim < dims; ++dim) {
      sizes[dim] = 1;
      boxes.push_back({offsets, sizes});
      offsets[dim] = 1;
    }
    boxes.push_back({offsets, sizes});
    return boxes;
  };
  EXPECT_FALSE(find_cover_defect(std::vector<int64_t>(12, 2), halves(12), "m"));
  auto broken = halves(12);
  broken.pop_back();
  EXPECT_EQ(find_cover_defect(std::vector<int64_t>(12, 2), broken, "m")->element, std::vector<int64_t>(12, 1));
  EXPECT_THAT(error_of(ErrorKind::kFormat, [&] { find_cover_defect(std::vector<int64_t>(40, 2), halves(40), "m"); }),
              HasSubstr("cut along 40 dimensions"));
}

TEST(DcpMetadata, EveryChunkRequiresARecordInsideTheFolder) {
  EXPECT_THAT(check_refusal([](DcpMetadata& m) { m.storage_data.pop_back(); }),
              HasSubstr("'e': no record holds its chunk at [1]"));
  EXPECT_THAT(check_refusal([](DcpMetadata& m) { m.storage_data.erase(m.storage_data.begin() + 3); }),
              HasSubstr("no record holds it"));
  EXPECT_THAT(check_refusal([](DcpMetadata& m) { m.storage_data.push_back(m.storage_data[0]); }),
              HasSubstr("7 records are listed, but only 6"));
  EXPECT_THAT(check_refusal([](DcpMetadata& m) { m.entries.push_back(m.entries[0]); }),
              HasSubstr("'w' is there twice"));
  EXPECT_THAT(check_refusal([](DcpMetadata& m) {
                m.planner_data->push_back({"w", {}});
              }),
              HasSubstr("'w' has two paths"));
  for (const auto* path : {"", "/etc/passwd", "../x", "a/../../x", "a//b", "./a", "a/", "a\\b"}) {
    EXPECT_THAT(check_refusal([&](DcpMetadata& m) { m.storage_data[0].second.relative_path = path; }),
                HasSubstr("is no path inside the checkpoint's folder"))
        << path;
  }
  EXPECT_THAT(check_refusal([](DcpMetadata& m) { m.storage_data[0].second.length = ~uint64_t{0}; }),
              HasSubstr("a record at bytes 0 + 18446744073709551615"));
}

TEST(DcpMetadata, InvalidSizesAreRefused) {
  const auto size = [](std::vector<int64_t> with) {
    return [with](DcpMetadata& m) { m.entries[0].tensor->size = with; };
  };
  EXPECT_THAT(check_refusal(size({-1, 3})), HasSubstr("a tensor of size [-1, 3]"));
  EXPECT_THAT(check_refusal(size({int64_t{1} << 32, int64_t{1} << 31})), HasSubstr("more than 2^63 bytes"));
  EXPECT_THAT(check_refusal(size(std::vector<int64_t>(65, 1))), HasSubstr("65 dimensions"));
  EXPECT_THAT(check_refusal([](DcpMetadata& m) { m.entries[0].tensor->memory_format = 3; }),
              HasSubstr("memory format 3"));
  EXPECT_THAT(check_refusal([](DcpMetadata& m) { m.entries[0].tensor->dtype = c10::ScalarType::QInt8; }),
              HasSubstr("cannot be saved"));
}

// The parts of a pickled metadata, which tests assemble incorrectly.
PickleValue dcp_class(const char* name) { return PickleValue::global("torch.distributed.checkpoint.metadata", name); }
PickleValue dcp_size(PickleValue::Items items) {
  return PickleValue::call(PickleValue::global("torch", "Size"), {PickleValue::tuple(std::move(items))});
}

struct MetadataParts {
  PickleValue layout = "torch.strided";
  PickleValue properties = PickleValue();  // None: the tuple that current torch writes
  PickleValue size = dcp_size({2});
  PickleValue sizes = dcp_size({2});
  PickleValue offset = dcp_size({0});
  PickleValue fqn = "w";
  PickleValue path = "__0_0.distcp";
  PickleValue position = 0;
  PickleValue planner_data = nullptr;
  std::vector<PickleValue::Pair> more = {};
};

PickleValue metadata_value(const MetadataParts& from) {
  const auto layout = PickleValue::call(PickleValue::global("torch.serialization", "_get_layout"), {from.layout});
  const auto float32 = PickleValue::global("torch", "float32");
  const auto format = PickleValue::call(dcp_class("_MEM_FORMAT_ENCODING"), {0});
  const auto properties =
      from.properties.is_none() ? PickleValue::tuple({float32, layout, false, format, false}) : from.properties;
  const auto chunk = PickleValue::instance(dcp_class("ChunkStorageMetadata"),
                                           PickleValue::dict({{"offsets", dcp_size({0})}, {"sizes", from.sizes}}));
  const auto tensor = PickleValue::instance(
      dcp_class("TensorStorageMetadata"),
      PickleValue::dict({{"properties", PickleValue::instance(dcp_class("TensorProperties"), properties)},
                         {"size", from.size},
                         {"chunks", PickleValue::list({chunk})}}));
  const auto index = PickleValue::instance(
      dcp_class("MetadataIndex"), PickleValue::dict({{"fqn", from.fqn}, {"index", 0}, {"offset", from.offset}}));
  const auto info = PickleValue::instance(
      PickleValue::global("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
      PickleValue::dict({{"relative_path", from.path}, {"offset", from.position}, {"length", 9}}));
  std::vector<PickleValue::Pair> state{{"state_dict_metadata", PickleValue::dict({{"w", tensor}})},
                                       {"planner_data", from.planner_data},
                                       {"storage_data", PickleValue::dict({{index, info}})}};
  state.insert(state.end(), from.more.begin(), from.more.end());
  return PickleValue::instance(dcp_class("Metadata"), PickleValue::dict(std::move(state)));
}

std::string parse_refusal(const PickleValue& root) {
  const auto bytes = pickle(root, {.protocol = 4});
  return error_of(ErrorKind::kFormat, [&] { DcpMetadata::parse(bytes, "m"); });
}

TEST(DcpMetadata, OlderFormatsAreRead) {
  const auto parse = [](const MetadataParts& parts) {
    return DcpMetadata::parse(pickle(metadata_value(parts), {.protocol = 2}), "m");
  };
  const auto plain = parse({});  // without storage_meta and version
  EXPECT_EQ(plain.entries[0].tensor->dtype, c10::ScalarType::Float);
  EXPECT_FALSE(plain.planner_data || plain.storage_meta || plain.version);
  const auto as_dict = parse(
      {.properties = PickleValue::dict({{"dtype", PickleValue::global("torch", "int8")}, {"requires_grad", true}})});
  EXPECT_EQ(as_dict.entries[0].tensor->dtype, c10::ScalarType::Char);
  EXPECT_TRUE(as_dict.entries[0].tensor->requires_grad);
  // Until torch 2.3 another module held two of the classes.
  auto bytes = pickle(metadata_value({}), {.protocol = 2});
  const std::string now = "ctorch.distributed.checkpoint.metadata\nTensorProperties\n";
  const auto at = bytes.find(now);
  ASSERT_NE(at, bytes.npos);
  bytes.replace(at, now.size(), "ctorch.distributed._shard.sharded_tensor.metadata\nTensorProperties\n");
  EXPECT_EQ(DcpMetadata::parse(bytes, "m"), plain);
}

TEST(DcpMetadata, UnexpectedPickledObjectsAreRefused) {
  EXPECT_THAT(parse_refusal(PickleValue::list({})), HasSubstr("found a list of 0 values, wanted a torch.distributed"));
  EXPECT_THAT(parse_refusal(PickleValue::instance(dcp_class("Metadata"), nullptr)),
              HasSubstr("state_dict_metadata is missing"));
  EXPECT_THAT(parse_refusal(metadata_value({.layout = "torch.sparse_coo"})), HasSubstr("not strided"));
  EXPECT_THAT(parse_refusal(metadata_value({.properties = PickleValue::tuple({1})})),
              HasSubstr("1 properties, wanted 5"));
  EXPECT_THAT(parse_refusal(metadata_value({.properties = PickleValue::dict({{"layout", 1}})})),
              HasSubstr("dtype is missing"));
  EXPECT_THAT(parse_refusal(metadata_value({.size = "x"})), HasSubstr("wanted a torch.Size"));
  EXPECT_THAT(parse_refusal(metadata_value({.size = dcp_size({-1})})), HasSubstr("found -1, wanted 0 or more"));
  EXPECT_THAT(parse_refusal(metadata_value({.sizes = dcp_size({true})})), HasSubstr("found True, wanted an integer"));
  EXPECT_THAT(parse_refusal(metadata_value({.fqn = 1})), HasSubstr("found 1, wanted text"));
  EXPECT_THAT(parse_refusal(metadata_value({.fqn = "other"})), HasSubstr("no record holds its chunk at [0]"));
  EXPECT_THAT(parse_refusal(metadata_value({.offset = nullptr})), HasSubstr("no record holds its chunk"));
  EXPECT_THAT(parse_refusal(metadata_value({.path = "../x"})), HasSubstr("no path inside"));
  EXPECT_THAT(parse_refusal(metadata_value({.position = -1})), HasSubstr("found -1"));
  EXPECT_THAT(parse_refusal(metadata_value({.planner_data = PickleValue::dict({{"w", 3}})})),
              HasSubstr("its path is 3"));
  EXPECT_THAT(parse_refusal(metadata_value({.planner_data = PickleValue::dict({{"w", PickleValue::tuple({0.5})}})})),
              HasSubstr("0.5 in its path"));
  EXPECT_THAT(parse_refusal(metadata_value({.more = {{"version", 1}}})), HasSubstr("found 1, wanted text"));
  EXPECT_THAT(parse_refusal(metadata_value({.more = {{"storage_meta", 1}}})), HasSubstr("StorageMeta"));
}

}  // namespace
}  // namespace tessera
