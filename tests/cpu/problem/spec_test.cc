#include "problem/spec.h"

#include <gtest/gtest.h>

#include <cmath>

#include "moekit/error.h"

namespace moekit {
namespace {

std::string message_of(const std::string& text) {
  try {
    parse_spec(text);
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::invalid_argument);
    return e.what();
  }
  ADD_FAILURE() << text << " was accepted";
  return "";
}

TEST(Spec, NamesTakeOverrides) {
  const ProblemSpec s = parse_spec("qwen3-30b-a3b:weights=fp8_block,tokens=512");
  EXPECT_EQ(s.config.num_experts, 128);
  EXPECT_EQ(s.config.top_k, 8);
  EXPECT_EQ(s.config.hidden, 2048);
  EXPECT_EQ(s.config.inter, 768);
  EXPECT_EQ(s.config.gate_up_weights.format, WeightFormat::fp8_block);
  EXPECT_EQ(s.config.down_weights.format, WeightFormat::fp8_block);
  EXPECT_EQ(s.config.gate_up_input.format, ActivationFormat::bf16);
  EXPECT_EQ(s.config.router.scoring, Scoring::softmax);
  EXPECT_EQ(s.config.router.renormalize, Renormalize::sum);
  EXPECT_EQ(s.tokens, 512);
  EXPECT_EQ(to_string(s), "qwen3-30b-a3b:weights=fp8_block,tokens=512");
}

TEST(Spec, AllKeys) {
  const ProblemSpec s = parse_spec(
      "E=64,k=4,H=256,I=96,shared_I=48@gate,latent=128,act=silu@7,bias=down,"
      "router=sigmoid_bias@g8/4@x2.5,weights=int4_g32_zp/mxfp8,activations=fp8_block_ue8m0/nvfp4,"
      "tokens=0,routing=zipf:1.25,placement=round_robin");
  const MoeConfig& c = s.config;
  EXPECT_EQ(c.shared.inter, 48);
  EXPECT_TRUE(c.shared.sigmoid_gate);
  EXPECT_EQ(c.latent, 128);
  EXPECT_EQ(c.routed_width(), 128);
  EXPECT_EQ(c.activation.limit, 7.0f);
  EXPECT_FALSE(c.has_gate_up_bias);
  EXPECT_TRUE(c.has_down_bias);
  EXPECT_EQ(c.router.num_groups, 8);
  EXPECT_EQ(c.router.topk_groups, 4);
  EXPECT_EQ(c.router.scaling_factor, 2.5f);
  EXPECT_TRUE(c.router.has_selection_bias);
  EXPECT_EQ(c.gate_up_weights, (WeightScheme{WeightFormat::int4_group, 32, true}));
  EXPECT_EQ(c.down_weights, (WeightScheme{WeightFormat::mxfp8}));
  EXPECT_EQ(c.shared.gate_up_weights, c.gate_up_weights);
  EXPECT_TRUE(c.gate_up_input.ue8m0_scale);
  EXPECT_EQ(c.down_input, (ActivationScheme{ActivationFormat::nvfp4}));
  EXPECT_EQ(s.tokens, 0);
  EXPECT_EQ(s.routing, (RoutingPattern{RoutingKind::zipf, 1.25}));
  EXPECT_EQ(s.placement, "round_robin");
  EXPECT_EQ(spec_values(parse_spec(to_string(s))), spec_values(s));
}

TEST(Spec, EveryValuePrintsWhatItParsesFrom) {
  const char* items[] = {"weights=bf16",
                         "weights=f16",
                         "weights=f32",
                         "weights=fp8_tensor",
                         "weights=fp8_channel",
                         "weights=fp8_block",
                         "weights=mxfp8",
                         "weights=mxfp8_e5m2",
                         "weights=mxfp4",
                         "weights=nvfp4",
                         "weights=int4_g128",
                         "weights=int8_g64",
                         "weights=int8_channel",
                         "weights=int4_channel_zp",
                         "weights=nvfp4/bf16",
                         "activations=f32",
                         "activations=fp8_tensor",
                         "activations=fp8_token",
                         "activations=fp8_token_ue8m0",
                         "activations=fp8_block",
                         "activations=mxfp8",
                         "activations=mxfp4",
                         "activations=nvfp4",
                         "activations=nvfp4_static",
                         "activations=nvfp4_static_divisor",
                         "act=gelu",
                         "act=gelu_tanh",
                         "act=swiglu_oai",
                         "act=swiglu_oai@3.5",
                         "act=relu2",
                         "act=silu_nogate",
                         "act=gelu_nogate",
                         "act=gelu_tanh_nogate",
                         "bias=both",
                         "bias=gate_up",
                         "router=softmax",
                         "router=softmax_pnorm",
                         "router=topk_softmax",
                         "router=topk_softmax_bias",
                         "router=sigmoid",
                         "router=sigmoid_bias@x2.827",
                         "router=sqrt_softplus_bias",
                         "routing=zipf:0.1",
                         "routing=hot",
                         "routing=one_rank"};
  for (const std::string item : items) {
    const std::string text = "E=8,k=2,H=64,I=32," + item;
    const std::string printed = to_string(parse_spec(text));
    EXPECT_NE(printed.find(item), std::string::npos) << printed;
    EXPECT_EQ(to_string(parse_spec(printed)), printed);
  }
  EXPECT_EQ(to_string(parse_spec("E=8,k=1,H=64,I=32,router=sigmoid_input")),
            "E=8,k=1,H=64,I=32,router=sigmoid_input,weights=bf16,tokens=16");
}

TEST(Spec, NamedProblemsAreTheReleasedShapes) {
  ASSERT_EQ(named_problems().size(), 7u);
  for (const ProblemSpec& s : named_problems()) {
    EXPECT_EQ(spec_values(parse_spec(s.name)), spec_values(s));
    EXPECT_EQ(parse_spec(to_string(s)).name, s.name);
    EXPECT_NE(to_string(s).find("weights="), std::string::npos);
  }
  const MoeConfig gpt_oss = parse_spec("gpt-oss-120b").config;
  EXPECT_EQ(gpt_oss.activation.kind, ActivationKind::swiglu_oai);
  EXPECT_EQ(gpt_oss.activation.limit, 7.0f);
  EXPECT_TRUE(gpt_oss.has_gate_up_bias && gpt_oss.has_down_bias);
  EXPECT_TRUE(gpt_oss.router.has_logit_bias);
  EXPECT_EQ(gpt_oss.router.weight, RouterWeight::softmax_selected);
  const MoeConfig deepseek = parse_spec("deepseek-v3").config;
  EXPECT_EQ(deepseek.router.epsilon, 1e-20f);
  EXPECT_EQ(deepseek.router.group_score, GroupScore::top2_sum);
  EXPECT_EQ(deepseek.shared.inter, 2048);
  EXPECT_FALSE(parse_spec("nemotron-3-nano").config.activation.gated);
}

TEST(Spec, RefusalsNameTheKeyAndTheValue) {
  const struct {
    const char* text;
    const char* part;
  } bad[] = {
      {"", "got ''"},
      {"qwen4", "qwen3-30b-a3b"},
      {"qwen3-30b-a3b:", "key=value"},
      {"qwen3-30b-a3b:tokens", "'tokens'"},
      {"qwen3-30b-a3b:tokens=", "tokens takes"},
      {"qwen3-30b-a3b:tokens=-1", "'-1'"},
      {"qwen3-30b-a3b:tokens=1.5", "'1.5'"},
      {"qwen3-30b-a3b:tokens=99999999999999999999", "tokens takes"},
      {"qwen3-30b-a3b:speed=9", "'speed'"},
      {"qwen3-30b-a3b:k=2,k=3", "twice"},
      {"E=8,k=2,H=64", "I is missing"},
      {"E=8,k=9,H=64,I=32", "k = 9 must not exceed E = 8"},
      {"E=8,k=0,H=64,I=32", "k takes"},
      {"E=8,k=2,H=64,I=32,weights=fp6", "'fp6'"},
      {"E=8,k=2,H=64,I=32,weights=int4_g0", "group"},
      {"E=8,k=2,H=64,I=32,weights=fp8_block_zp", "'fp8_block_zp'"},
      {"E=8,k=2,H=64,I=32,activations=nvfp4_divisor", "'nvfp4_divisor'"},
      {"E=8,k=2,H=64,I=32,activations=mxfp8_ue8m0", "'mxfp8_ue8m0'"},
      {"E=8,k=2,H=64,I=32,act=relu2@3", "relu2@3"},
      {"E=8,k=2,H=64,I=32,act=tanh", "'tanh'"},
      {"E=8,k=2,H=64,I=32,bias=yes", "'yes'"},
      {"E=8,k=2,H=64,I=32,router=best", "'best'"},
      {"E=8,k=2,H=64,I=32,router=sigmoid_bias@y3", "'@y3'"},
      {"E=10,k=2,H=64,I=32,router=sigmoid_bias@g4/2", "10 experts in 4 groups"},
      {"E=8,k=2,H=64,I=32,router=sigmoid_bias@g4/5", "got 5"},
      {"E=8,k=5,H=64,I=32,router=sigmoid_bias@g4/2", "4 experts of the kept groups"},
      {"E=8,k=2,H=64,I=32,router=sigmoid_input", "k = 1"},
      {"E=8,k=2,H=64,I=32,routing=zipf:x", "'x'"},
      {"E=8,k=2,H=64,I=32,routing=cold", "'cold'"},
      {"E=1048576,k=1,H=1099511627776,I=1048576", "64 bits"},
  };
  for (const auto& b : bad) {
    const std::string message = message_of(b.text);
    EXPECT_NE(message.find(b.part), std::string::npos) << b.text << ": " << message;
  }
}

}  // namespace
}  // namespace moekit
