// Safetensors files: what is legal, and every fault that must be refused by name.
#include "checkpoint/safetensors.h"

#include <gtest/gtest.h>

#include <cstring>

#include "checkpoint_writer.h"

namespace moekit::checkpoint {
namespace {

std::shared_ptr<const SafetensorsFile> open_bytes(const TempDir& dir, const std::string& bytes) {
  put_text(dir.file("t.safetensors"), bytes);
  return SafetensorsFile::open(dir.file("t.safetensors"));
}

std::string entry(const std::string& name, const std::string& dtype, const std::string& shape,
                  const std::string& offsets) {
  return "\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape +
         ",\"data_offsets\":" + offsets + "}";
}

struct Fault {
  const char* name;
  std::string bytes;
  std::vector<std::string> message;
};

std::string file_of(const std::string& entries, size_t data_bytes) {
  return raw_safetensors("{" + entries + "}", std::string(data_bytes, 'x'));
}

std::vector<Fault> faults() {
  std::string long_header(8, '\0');
  const uint64_t huge = 1ull << 40;
  std::memcpy(long_header.data(), &huge, 8);
  const std::string good = entry("a", "F32", "[2]", "[0,8]");
  return {
      {"empty_file", "", {"0 bytes"}},
      {"seven_bytes", "1234567", {"7 bytes"}},
      {"not_safetensors", "this is a text file, no safetensors at all", {"safetensors"}},
      {"header_too_long", long_header + "{}", {"header"}},
      {"header_beyond_file", raw_safetensors("{}", "").substr(0, 9), {"truncated"}},
      {"no_object", raw_safetensors("[]", ""), {"'{'"}},
      {"malformed_json", raw_safetensors("{\"a\":", ""), {"JSON"}},
      {"text_after_header", raw_safetensors("{} x", ""), {"JSON"}},
      {"duplicate_name",
       file_of(good + "," + entry("a", "F32", "[2]", "[8,16]"), 16),
       {"duplicate", "a"}},
      {"duplicate_metadata", file_of("\"__metadata__\":{},\"__metadata__\":{}", 0), {"duplicate"}},
      {"duplicate_member",
       file_of("\"a\":{\"dtype\":\"F32\",\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]}",
               4),
       {"duplicate", "dtype", "a"}},
      {"short_for_shape",
       file_of(entry("a", "F32", "[1000,1000]", "[0,4]"), 4),
       {"a", "4000000", "[0, 4]"}},
      {"begin_after_end", file_of(entry("a", "F32", "[1]", "[4,0]"), 4), {"a", "[4, 0]"}},
      {"negative_offset", file_of(entry("a", "F32", "[1]", "[-4,0]"), 4), {"a", "-4"}},
      {"fractional_offset", file_of(entry("a", "F32", "[1]", "[0,4.5]"), 4), {"a", "4.5"}},
      {"exponent_offset", file_of(entry("a", "F32", "[1]", "[0,4e0]"), 4), {"a"}},
      {"huge_offset", file_of(entry("a", "F32", "[1]", "[0,99999999999999999999]"), 4), {"a"}},
      {"negative_shape", file_of(entry("a", "F32", "[-1]", "[0,4]"), 4), {"a", "-1"}},
      {"offset_as_text", file_of(entry("a", "F32", "[1]", "[\"0\",4]"), 4), {"a"}},
      {"three_offsets", file_of(entry("a", "F32", "[1]", "[0,4,8]"), 8), {"a"}},
      {"one_offset", file_of(entry("a", "F32", "[0]", "[0]"), 0), {"a"}},
      {"overlap",
       file_of(entry("a", "F32", "[2]", "[0,8]") + "," + entry("b", "F32", "[2]", "[4,12]"), 12),
       {"a", "b", "overlap"}},
      {"same_bytes",
       file_of(entry("a", "F32", "[2]", "[0,8]") + "," + entry("b", "F32", "[2]", "[0,8]"), 8),
       {"overlap"}},
      {"hole",
       file_of(entry("a", "F32", "[1]", "[0,4]") + "," + entry("b", "F32", "[1]", "[8,12]"), 12),
       {"b", "no tensor"}},
      {"hole_in_front", file_of(entry("a", "F32", "[1]", "[4,8]"), 8), {"a", "no tensor"}},
      {"trailing", file_of(entry("a", "F32", "[1]", "[0,4]"), 5), {"trailing"}},
      {"truncated_data", file_of(entry("a", "F32", "[2]", "[0,8]"), 7), {"a", "truncated"}},
      {"overflow",
       file_of(entry("a", "F32", "[4294967296,4294967296,16]", "[0,0]"), 0),
       {"a", "64 bits"}},
      {"overflow_to_zero",
       file_of(entry("a", "F32", "[9223372036854775807,4]", "[0,0]"), 0),
       {"a"}},
      {"unknown_dtype", file_of(entry("a", "F31", "[1]", "[0,4]"), 4), {"a", "F31"}},
      {"half_a_byte", file_of(entry("a", "F4", "[3]", "[0,2]"), 2), {"a"}},
      {"missing_shape", file_of("\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,4]}", 4), {"a"}},
      {"unknown_member",
       file_of("\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4],\"x\":1}", 4),
       {"a", "x"}},
      {"metadata_no_text", file_of("\"__metadata__\":{\"k\":1}", 0), {"string"}},
      {"name_lone_byte", file_of(entry("a\xff", "F32", "[1]", "[0,4]"), 4), {"byte 3", "0xff"}},
      {"name_overlong", file_of(entry("a\xc0\x80", "F32", "[1]", "[0,4]"), 4), {"UTF-8", "0xc0"}},
      {"name_surrogate",
       file_of(entry("a\xed\xa0\x80", "F32", "[1]", "[0,4]"), 4),
       {"UTF-8", "0xed"}},
      {"name_cut_short", file_of(entry("a\xe2\x82", "F32", "[1]", "[0,4]"), 4), {"UTF-8", "0xe2"}},
      {"metadata_lone_byte", file_of("\"__metadata__\":{\"k\":\"\xff\"}", 0), {"UTF-8", "0xff"}},
      {"metadata_name_lone_byte", file_of("\"__metadata__\":{\"\xff\":\"v\"}", 0), {"UTF-8"}},
      {"deep_nesting", raw_safetensors("{\"a\":" + std::string(100000, '['), ""), {}},
  };
}

TEST(Safetensors, EveryFaultIsRefusedByName) {
  for (const Fault& fault : faults()) {
    SCOPED_TRACE(fault.name);
    const TempDir dir;
    expect_error([&] { open_bytes(dir, fault.bytes); }, "corrupt_file", fault.message);
    // What was expected, what came and what to do.
    expect_error([&] { open_bytes(dir, fault.bytes); }, "corrupt_file",
                 {"expected", "came", "fetch"});
  }
}

TEST(Safetensors, NamesBeyondAsciiAreKept) {
  const TempDir dir;
  const auto file =
      open_bytes(dir, file_of(entry("\xc3\xa9\xf0\x9f\x98\x80", "F32", "[1]", "[0,4]"), 4));
  EXPECT_NE(file->find("\xc3\xa9\xf0\x9f\x98\x80"), nullptr);
}

TEST(Safetensors, EmptyAndScalarTensorsAreLegal) {
  const TempDir dir;
  const auto file = open_bytes(dir, file_of(entry("e", "F32", "[0,9223372036854775807]", "[0,0]") +
                                                "," + entry("s", "F32", "[]", "[0,4]") + "," +
                                                entry("t", "BF16", "[3,0]", "[4,4]"),
                                            4));
  ASSERT_EQ(file->entries().size(), 3u);
  EXPECT_EQ(file->find("e")->bytes(), 0);
  EXPECT_EQ(file->find("s")->bytes(), 4);
  EXPECT_EQ(file->find("none"), nullptr);
}

TEST(Safetensors, HeaderOfNothingIsLegal) {
  const TempDir dir;
  EXPECT_TRUE(open_bytes(dir, raw_safetensors("{}", ""))->entries().empty());
  EXPECT_TRUE(open_bytes(dir, raw_safetensors("{\"__metadata__\":{\"a\":\"b\"}}  ", ""))
                  ->entries()
                  .empty());
}

TEST(Safetensors, OddHeaderLengthsAndUnalignedTensorsAreReadExactly) {
  const float f = 1.5f;
  std::string data = "\x01\x02\x03\x04\x05";
  data.append(reinterpret_cast<const char*>(&f), 4);
  const std::string entries =
      entry("u", "U8", "[5]", "[0,5]") + "," + entry("f", "F32", "[1]", "[5,9]");
  for (size_t pad = 0; pad < 8; ++pad) {
    const TempDir dir;
    const auto file =
        open_bytes(dir, raw_safetensors("{" + entries + "}" + std::string(pad, ' '), data));
    float value = 0;
    std::memcpy(&value, file->data(*file->find("f")), 4);
    EXPECT_EQ(value, f) << pad;
    EXPECT_EQ(static_cast<int>(file->data(*file->find("u"))[4]), 5) << pad;
  }
}

TEST(Safetensors, WrittenFilesReadBack) {
  const TempDir dir;
  const TestTensor a = scattered({3, 5}, 1);
  const TestTensor b = tensor_of<int32_t>(DType::i32, {}, {42});
  const std::vector<TensorSource> sources = {{"z \"quoted\"\n", a.dtype, a.shape, a.bytes},
                                             {"b", b.dtype, b.shape, b.bytes}};
  const std::vector<std::pair<std::string, std::string>> metadata = {{"format", "pt"}};
  write_safetensors(dir.file("w.safetensors"), sources, metadata);
  const auto file = SafetensorsFile::open(dir.file("w.safetensors"));
  EXPECT_EQ(file->metadata(), metadata);
  const TensorEntry* entry = file->find("z \"quoted\"\n");
  ASSERT_NE(entry, nullptr);
  EXPECT_EQ(entry->shape, a.shape);
  EXPECT_EQ(std::memcmp(file->data(*entry), a.bytes.data(), a.bytes.size()), 0);
  EXPECT_TRUE(file->find("b")->shape.empty());
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(dir.path()), {}), 1) << "leftovers";
}

TEST(Safetensors, MissingFileIsNamed) {
  expect_error([] { SafetensorsFile::open("/nowhere/x.safetensors"); }, "corrupt_file",
               {"/nowhere/x.safetensors"});
}

}  // namespace
}  // namespace moekit::checkpoint
