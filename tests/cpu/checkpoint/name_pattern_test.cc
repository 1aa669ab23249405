// Names in quantization configs: exact, expressions, globs.
#include "checkpoint/name_pattern.h"

#include <gtest/gtest.h>

#include "checkpoint_writer.h"

namespace moekit::checkpoint {
namespace {

constexpr auto kCt = NamePattern::Syntax::compressed_tensors;
constexpr auto kGlob = NamePattern::Syntax::glob;

bool matches(const std::string& pattern, const std::string& name, NamePattern::Syntax syntax) {
  return NamePattern(pattern, syntax).matches(name);
}

struct Row {
  const char* pattern;
  const char* name;
  bool wanted;
};

TEST(NamePatterns, Expressions) {
  for (const Row& row :
       std::vector<Row>{{"re:.*\\.gate$", "model.layers.0.mlp.gate", true},
                        {"re:.*\\.gate$", "model.layers.0.mlp.gate_proj", false},
                        {"re:.*\\.gate$", "model.layers.0.mlp_gate", false},
                        {"re:.*mlp.gate$", "model.layers.0.mlp.gate", true},
                        {"re:.*self_attn.*", "model.layers.0.self_attn.q_proj", true},
                        {"re:.*self_attn.*", "model.layers.0.mlp.experts.0.up_proj", false},
                        {"re:.*experts", "model.layers.0.mlp.experts.0.up_proj", true},
                        {"re:experts", "model.layers.0.mlp.experts.0.up_proj", false},
                        {"re:model", "model.layers.0", true},
                        {"re:.*layers\\.(0|2)\\.mlp.*", "model.layers.2.mlp.gate", true},
                        {"re:.*layers\\.(0|2)\\.mlp.*", "model.layers.1.mlp.gate", false},
                        {"re:^(?!.*experts).*", "model.layers.1.mlp.experts.0.up_proj", false},
                        {"re:^(?!.*experts).*", "model.layers.1.mlp.gate", true},
                        {"re:.*[0-9]+\\.up_proj$", "m.experts.12.up_proj", true},
                        {"re:.*", "anything", true},
                        {"re:.*a\\.*", "xa...", true},
                        {"Linear", "anything", true},
                        {"lm_head", "lm_head", true},
                        {"lm_head", "lm_head_2", false},
                        {"model.layers.1.mlp", "model.layers.1.mlp.gate", true},
                        {"model.layers.1", "model.layers.10.mlp", false}}) {
    EXPECT_EQ(matches(row.pattern, row.name, kCt), row.wanted) << row.pattern << " " << row.name;
  }
}

TEST(NamePatterns, Globs) {
  for (const Row& row :
       std::vector<Row>{{"model.layers.0.self_attn*", "model.layers.0.self_attn.q_proj", true},
                        {"*router*", "m.mlp.router", true},
                        {"*.gate", "m.mlp.gate_proj", false},
                        {"layer?.x", "layer1.x", true},
                        {"a*b*c", "aXbYbZc", true},
                        {"a*b*c", "aXbYbZ", false},
                        {"m.mlp", "m.mlp.gate", true},
                        {"m.mlp", "m.mlp2", false}}) {
    EXPECT_EQ(matches(row.pattern, row.name, kGlob), row.wanted) << row.pattern << " " << row.name;
  }
}

TEST(NamePatterns, HostileExpressionsEnd) {
  const std::string name(200, 'a');
  EXPECT_FALSE(matches("re:(a+)+(a+)+(a+)+b", name, kCt));
  expect_error([] { NamePattern("re:(unclosed", kCt); }, "unsupported", {"unclosed"});
  expect_error([] { NamePattern("re:" + std::string(600, '('), kCt); }, "unsupported",
               {"characters"});
}

}  // namespace
}  // namespace moekit::checkpoint
