// Checkpoints that lie: configs with absurd values, indexes that contradict their shards, blocks
// with missing, doubled, misshapen or unknown tensors. Each ends in an error that names the
// culprit.
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "checkpoint_writer.h"
#include "moekit/checkpoint.h"
#include "problem/canonical_layer.h"

namespace moekit {
namespace {

constexpr char kBlock[] = "model.layers.0.mlp.";

TestCheckpoint qwen3(int experts = 2) {
  TestCheckpoint ckpt;
  ckpt.config = R"({"model_type":"qwen3_moe","num_hidden_layers":1,"num_experts":)" +
                std::to_string(experts) +
                R"(,"num_experts_per_tok":1,"norm_topk_prob":true,"hidden_act":"silu",)"
                R"("hidden_size":16,"moe_intermediate_size":8})";
  ckpt.tensors[std::string(kBlock) + "gate.weight"] = scattered({experts, 16}, 99);
  for (int e = 0; e < experts; ++e) {
    const std::string expert = std::string(kBlock) + "experts." + std::to_string(e) + ".";
    ckpt.tensors[expert + "gate_proj.weight"] = scattered({8, 16}, 1);
    ckpt.tensors[expert + "up_proj.weight"] = scattered({8, 16}, 2);
    ckpt.tensors[expert + "down_proj.weight"] = scattered({16, 8}, 3);
  }
  return ckpt;
}

void expect_load_error(const TestCheckpoint& ckpt, const std::string& code,
                       const std::vector<std::string>& parts) {
  const TempDir dir;
  ckpt.write(dir.path());
  expect_error([&] { load_canonical(dir.path(), -1); }, code, parts);
  expect_error([&] { inspect_checkpoint(dir.path()); }, code, parts);
}

std::string replaced(std::string text, const std::string& from, const std::string& to) {
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

struct ConfigFault {
  std::string from, to, code;
  std::vector<std::string> parts;
};

TEST(MalformedConfig, EndsInAnErrorWithTheFigures) {
  const std::vector<ConfigFault> faults = {
      {"\"num_experts_per_tok\":1",
       "\"num_experts_per_tok\":3",
       "corrupt_file",
       {"num_experts_per_tok", "at most 2", "came 3", "correct it"}},
      {"\"hidden_act\":\"silu\"",
       "\"hidden_act\":\"s\xff\"",
       "corrupt_file",
       {"config.json", "UTF-8", "0xff"}},
      {"\"model_type\"",
       "\"\xc0\x80\":1,\"model_type\"",
       "corrupt_file",
       {"config.json", "UTF-8", "0xc0"}},
      {"\"num_experts_per_tok\":1",
       "\"num_experts_per_tok\":0",
       "corrupt_file",
       {"num_experts_per_tok", "0"}},
      {"\"num_experts\":2", "\"num_experts\":0", "corrupt_file", {"num_experts", "0"}},
      {"\"num_experts\":2", "\"num_experts\":-2", "corrupt_file", {"num_experts", "-2"}},
      {"\"num_experts\":2", "\"num_experts\":2.5", "corrupt_file", {"num_experts", "2.5"}},
      {"\"num_experts\":2", "\"num_experts\":\"2\"", "corrupt_file", {"num_experts", "\"2\""}},
      {"\"num_experts\":2", "\"other\":2", "corrupt_file", {"num_experts", "missing"}},
      {"\"num_experts\":2",
       "\"num_experts\":2,\"num_local_experts\":4",
       "corrupt_file",
       {"2", "4", "contradicts"}},
      {"\"num_experts\":2", "\"num_experts\":1000000000000000000", "corrupt_file", {"num_experts"}},
      {"\"num_experts\":2",
       "\"num_experts\":3",
       "corrupt_file",
       {"gate.weight", "[3, 16]", "[2, 16]"}},
      {"\"hidden_size\":16",
       "\"hidden_size\":1000000000000000000",
       "corrupt_file",
       {"hidden_size"}},
      {"\"hidden_size\":16",
       "\"hidden_size\":99999999999999999999999",
       "corrupt_file",
       {"hidden_size"}},
      {"\"hidden_size\":16", "\"hidden_size\":32", "corrupt_file", {"[2, 32]", "[2, 16]"}},
      {"\"moe_intermediate_size\":8",
       "\"moe_intermediate_size\":9",
       "corrupt_file",
       {"[9, 16]", "[8, 16]"}},
      {"\"num_hidden_layers\":1",
       "\"num_hidden_layers\":1000000000000000000",
       "corrupt_file",
       {"num_hidden_layers"}},
      {"\"num_hidden_layers\":1",
       "\"num_hidden_layers\":null",
       "corrupt_file",
       {"num_hidden_layers"}},
      {"\"norm_topk_prob\":true", "\"norm_topk_prob\":1", "corrupt_file", {"norm_topk_prob"}},
      {"\"hidden_act\":\"silu\"", "\"hidden_act\":\"tanh\"", "unsupported", {"tanh", "silu"}},
      {"\"qwen3_moe\"", "\"llama\"", "unsupported", {"llama", "qwen3_moe"}},
      {"\"model_type\":\"qwen3_moe\",", "", "corrupt_file", {"model_type", "missing"}},
      {"\"num_experts\":2",
       "\"num_experts\":2,\"num_experts\":2",
       "corrupt_file",
       {"duplicate", "num_experts"}},
      {"\"num_experts\":2", "\"num_experts\":2,", "corrupt_file", {"JSON"}},
  };
  for (const ConfigFault& fault : faults) {
    SCOPED_TRACE(fault.to);
    TestCheckpoint ckpt = qwen3();
    ckpt.config = replaced(ckpt.config, fault.from, fault.to);
    const TempDir dir;
    ckpt.write(dir.path());
    expect_error([&] { load_canonical(dir.path(), 0); }, fault.code, fault.parts);
  }
}

TEST(MalformedConfig, MissingFilesAreTold) {
  const TempDir dir;
  expect_error([&] { load_canonical(dir.file("none"), 0); }, "invalid_argument", {"none"});
  expect_error([&] { load_canonical(dir.path(), 0); }, "corrupt_file", {"config.json"});
  put_text(dir.file("config.json"), qwen3().config);
  expect_error([&] { load_canonical(dir.path(), 0); }, "corrupt_file", {"model.safetensors"});
  put_text(dir.file("config.json"), "[]");
  expect_error([&] { inspect_checkpoint(dir.path()); }, "corrupt_file", {"config.json", "object"});
}

// ---- the block's tensors

TEST(MalformedBlock, OneExpertOfEightMissing) {
  TestCheckpoint ckpt = qwen3(8);
  for (const char* role : {"gate", "up", "down"}) {
    ckpt.tensors.erase(std::string(kBlock) + "experts.5." + role + "_proj.weight");
  }
  expect_load_error(ckpt, "corrupt_file",
                    {"3 expected tensors are missing", "experts.5.gate_proj.weight"});
}

TEST(MalformedBlock, ExpertNumbersWithAGap) {
  TestCheckpoint ckpt = qwen3(3);
  for (const char* role : {"gate", "up", "down"}) {
    const std::string ending = std::string(".") + role + "_proj.weight";
    auto node = ckpt.tensors.extract(std::string(kBlock) + "experts.2" + ending);
    node.key() = std::string(kBlock) + "experts.10" + ending;
    ckpt.tensors.insert(std::move(node));
  }
  expect_load_error(ckpt, "corrupt_file",
                    {"missing", "experts.2.", "unknown", "experts.10.down_proj.weight"});
}

TEST(MalformedBlock, NamesOfAnotherFamily) {
  TestCheckpoint ckpt = qwen3();
  std::map<std::string, TestTensor> renamed;
  for (auto& [name, tensor] : ckpt.tensors) {
    std::string other = name;
    for (const auto& [from, to] : {std::pair<std::string, std::string>{"gate_proj", "w1"},
                                   {"up_proj", "w3"},
                                   {"down_proj", "w2"}}) {
      const size_t at = other.find(from);
      if (at != std::string::npos) other.replace(at, from.size(), to);
    }
    renamed[other] = tensor;
  }
  ckpt.tensors = renamed;
  expect_load_error(ckpt, "corrupt_file", {"experts.{e}.down_proj", "experts.0.w1.weight"});
}

TEST(MalformedBlock, StackedBf16WherePackedBlocksAreExpected) {
  const TempDir dir;
  std::filesystem::copy(std::string(MOEKIT_FIXTURES) + "/gptoss-bf16", dir.path(),
                        std::filesystem::copy_options::recursive);
  std::ifstream in(dir.file("config.json"));
  std::string text((std::istreambuf_iterator<char>(in)), {});
  text = replaced(text, "\"model_type\"",
                  "\"quantization_config\":{\"quant_method\":\"mxfp4\"},\"model_type\"");
  put_text(dir.file("config.json"), text);
  expect_error([&] { load_canonical(dir.path(), 0); }, "corrupt_file",
               {"experts.gate_up_proj_blocks", "missing", "unknown", "experts.down_proj"});
}

TEST(MalformedBlock, AMissingStackIsOneTensor) {
  const TempDir dir;
  std::filesystem::copy(std::string(MOEKIT_FIXTURES) + "/gptoss-bf16", dir.path(),
                        std::filesystem::copy_options::recursive);
  std::ifstream in(dir.file("config.json"));
  std::string text((std::istreambuf_iterator<char>(in)), {});
  text = replaced(text, "\"model_type\"",
                  "\"quantization_config\":{\"quant_method\":\"mxfp4\"},\"model_type\"");
  put_text(dir.file("config.json"), text);
  try {
    load_canonical(dir.path(), 0);
    FAIL() << "loaded";
  } catch (const Error& e) {
    const std::string message = e.what();
    EXPECT_NE(message.find("4 expected tensors are missing"), std::string::npos) << message;
    for (const char* name :
         {"gate_up_proj_blocks", "gate_up_proj_scales", "down_proj_blocks", "down_proj_scales"}) {
      const size_t at = message.find(name);
      EXPECT_NE(at, std::string::npos) << name << " in " << message;
      EXPECT_EQ(message.find(name, at + 1), std::string::npos) << name << " twice in " << message;
    }
  }
}

TEST(MalformedBlock, UnknownAndMisshapenTensors) {
  TestCheckpoint ckpt = qwen3();
  ckpt.tensors[std::string(kBlock) + "experts.1.up_proj.weight_scale"] = scattered({8, 1}, 1);
  expect_load_error(ckpt, "corrupt_file", {"unknown", "experts.1.up_proj.weight_scale"});

  ckpt = qwen3();
  ckpt.tensors[std::string(kBlock) + "experts.1.down_proj.weight"] = scattered({8, 16}, 1);
  expect_load_error(ckpt, "corrupt_file", {"experts.1.down_proj.weight", "[16, 8]", "[8, 16]"});

  ckpt = qwen3();
  ckpt.tensors[std::string(kBlock) + "experts.1.down_proj.weight"] =
      tensor_of(DType::f8_e4m3, {16, 8}, std::vector<uint8_t>(128));
  expect_load_error(ckpt, "corrupt_file", {"experts.1.down_proj.weight", "F8_E4M3", "BF16"});

  ckpt = qwen3();
  ckpt.tensors.erase(std::string(kBlock) + "gate.weight");
  expect_load_error(ckpt, "corrupt_file", {"missing", "gate.weight"});
}

TEST(MalformedBlock, NoTensorAtAll) {
  TestCheckpoint ckpt = qwen3();
  ckpt.tensors.clear();
  expect_load_error(ckpt, "corrupt_file", {"model.layers.0.mlp."});
}

TEST(MalformedBlock, SymbolicLinksAreFine) {
  const TempDir store, dir;
  qwen3().write(store.path());
  std::filesystem::create_symlink(store.file("model.safetensors"), dir.file("model.safetensors"));
  std::filesystem::create_symlink(store.file("config.json"), dir.file("config.json"));
  EXPECT_EQ(load_canonical(dir.path(), 0)->experts.size(), 2u);
}

// ---- shards

/// Two shards: the router and expert 0, and expert 1.
struct Sharded {
  TempDir dir;
  std::map<std::string, std::string> map;  // tensor -> shard
  TestCheckpoint parts[2];

  Sharded() {
    for (const auto& [name, tensor] : qwen3().tensors) {
      const int part = name.find("experts.1.") != std::string::npos;
      parts[part].tensors[name] = tensor;
      map[name] = shard(part);
    }
  }
  static std::string shard(int i) { return "model-0000" + std::to_string(i + 1) + ".safetensors"; }
  void write() const {
    for (int i = 0; i < 2; ++i) {
      const TempDir one;
      parts[i].write(one.path());
      std::filesystem::copy(one.file("model.safetensors"), dir.file(shard(i)),
                            std::filesystem::copy_options::overwrite_existing);
    }
    put_text(dir.file("config.json"), qwen3().config);
    std::string index = R"({"metadata":{"total_size":1},"weight_map":{)";
    for (const auto& [name, file] : map) {
      index += (index.back() == '{' ? "\"" : ",\"") + name + "\":\"" + file + "\"";
    }
    put_text(dir.file("model.safetensors.index.json"), index + "}}");
  }
  void expect(const std::vector<std::string>& parts_of_message) const {
    expect_error([&] { load_canonical(dir.path(), 0); }, "corrupt_file", parts_of_message);
    expect_error([&] { inspect_checkpoint(dir.path()); }, "corrupt_file", parts_of_message);
  }
};

constexpr char kUp1[] = "model.layers.0.mlp.experts.1.up_proj.weight";

TEST(Shards, LoadThroughTheIndex) {
  Sharded s;
  s.write();
  EXPECT_EQ(load_canonical(s.dir.path(), 0)->experts.size(), 2u);
  put_text(s.dir.file("model.safetensors"), "other files beside the shards are ignored");
  put_text(s.dir.file("extra.safetensors"), "likewise");
  EXPECT_EQ(inspect_checkpoint(s.dir.path(), true).tensors.size(), 7u);
}

TEST(Shards, SameTensorInTwoShards) {
  Sharded s;
  s.parts[0].tensors[kUp1] = s.parts[1].tensors[kUp1];
  s.write();
  s.expect({"duplicate", kUp1, Sharded::shard(0), Sharded::shard(1)});
}

TEST(Shards, MissingShardIsNamed) {
  Sharded s;
  s.write();
  std::filesystem::remove(s.dir.file(Sharded::shard(1)));
  s.expect({Sharded::shard(1), "missing"});
}

TEST(Shards, ListedButAbsentTensor) {
  Sharded s;
  s.parts[1].tensors.erase(kUp1);
  s.write();
  s.expect({kUp1, Sharded::shard(1), "does not hold"});
}

TEST(Shards, PresentButUnlistedTensor) {
  Sharded s;
  s.map.erase(kUp1);
  s.write();
  s.expect({kUp1, Sharded::shard(1), "does not list"});
}

TEST(Shards, OnlyPlainFileNames) {
  for (const char* name : {"../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", ".", "",
                           "a\\\\b.safetensors", "a\\u0000.safetensors"}) {
    SCOPED_TRACE(name);
    Sharded s;
    s.map[kUp1] = name;
    s.write();
    s.expect({"plain file names"});
  }
}

TEST(Shards, MalformedIndexes) {
  const std::vector<std::pair<std::string, std::string>> faults = {
      {"", "JSON"},
      {"{}", "weight_map"},
      {R"({"weight_map":{}})", "weight_map"},
      {R"({"weight_map":[]})", "object"},
      {R"({"weight_map":{"a":1}})", "string"},
      {R"({"weight_map":{"a":"x"},"weight_map":{"a":"x"}})", "duplicate"},
      {R"({"weight_map":{"a":"x","a":"y"}})", "duplicate"},
      {"{\"weight_map\":{\"a\xff\":\"x\"}}", "UTF-8"},
      {"{\"metadata\":{\"k\":[\"\xed\xa0\x80\"]},\"weight_map\":{\"a\":\"x\"}}", "UTF-8"},
  };
  for (const auto& [index, part] : faults) {
    SCOPED_TRACE(index);
    Sharded s;
    s.write();
    put_text(s.dir.file("model.safetensors.index.json"), index);
    s.expect({"index.json", part});
  }
}

TEST(Shards, OnlyTheLayersOwnShardsAreOpened) {
  Sharded s;
  s.map["lm_head.weight"] = "model-00003.safetensors";
  s.write();
  put_text(s.dir.file("model-00003.safetensors"), "damaged");
  EXPECT_EQ(load_canonical(s.dir.path(), 0)->experts.size(), 2u);
  expect_error([&] { inspect_checkpoint(s.dir.path()); }, "corrupt_file", {"model-00003"});
}

TEST(Views, OutliveTheReaderAndTheFiles) {
  std::shared_ptr<const CanonicalLayer> layer;
  {
    const TempDir dir;
    qwen3().write(dir.path());
    layer = load_canonical(dir.path(), 0);
  }
  uint16_t bits = 0;
  std::memcpy(&bits, layer->experts[1].up.codes.data, 2);
  EXPECT_EQ(bf16_to_f32(bits), scatter(2, 0));
}

// ---- damage to real files

/// Flips every bit of the first bytes of a fixture's header in turn: each ends in a clean Error or
/// in a valid load.
TEST(BitFlips, NeverCrash) {
  for (const char* name : {"mixtral-bf16", "gptoss-mxfp4", "qwen3moe-ct-nvfp4"}) {
    const TempDir dir;
    std::filesystem::copy(std::string(MOEKIT_FIXTURES) + "/" + name, dir.path(),
                          std::filesystem::copy_options::recursive);
    std::ifstream in(dir.file("model.safetensors"), std::ios::binary);
    const std::string good((std::istreambuf_iterator<char>(in)), {});
    uint64_t length = 0;
    std::memcpy(&length, good.data(), 8);
    const size_t header = 8 + static_cast<size_t>(length);
    int refused = 0;
    int tried = 0;
    for (size_t at = 0; at < header; at += at < 512 ? 1 : 61) {
      std::string bad = good;
      bad[at] = static_cast<char>(bad[at] ^ (1 << (at % 8)));
      put_text(dir.file("model.safetensors"), bad);
      ++tried;
      try {
        inspect_checkpoint(dir.path());
        load_canonical(dir.path(), -1);
      } catch (const Error& e) {
        ++refused;
        EXPECT_TRUE(e.code() == ErrorCode::corrupt_file || e.code() == ErrorCode::unsupported)
            << e.what();
      }
    }
    EXPECT_GT(refused, tried / 2) << name;
  }
}

}  // namespace
}  // namespace moekit
