#include "support/problems.h"

namespace moekit::test {
namespace {

// 300 and 170: no multiples of 16, 32 or 128, so every format has partial blocks at the edges.
const std::string kOddLayer = "E=6,k=2,H=300,I=170,tokens=9,";

}  // namespace

std::vector<std::string> problems_of_every_weight_format() {
  std::vector<std::string> specs;
  for (const char* weights : {"bf16", "f16", "f32", "fp8_tensor", "fp8_channel", "fp8_block",
                              "mxfp8", "mxfp8_e5m2", "mxfp4", "nvfp4", "int4_g32", "int4_g128_zp",
                              "int8_g64", "int8_channel", "int4_channel_zp"}) {
    specs.push_back(kOddLayer + "weights=" + weights);
  }
  return specs;
}

std::vector<std::string> problems_of_every_activation_format() {
  std::vector<std::string> specs;
  for (const char* activations :
       {"f32", "bf16", "fp8_tensor", "fp8_token", "fp8_token_ue8m0", "fp8_block", "fp8_block_ue8m0",
        "mxfp8", "mxfp4", "nvfp4", "nvfp4_static", "nvfp4_static_divisor"}) {
    specs.push_back(kOddLayer + "weights=bf16,activations=" + activations);
  }
  return specs;
}

const std::vector<std::string>& small_problems() {
  static const std::vector<std::string> all = [] {
    std::vector<std::string> specs = {
        "E=1,k=1,H=64,I=32,tokens=1",
        "E=2,k=2,H=96,I=96,tokens=3,weights=mxfp4",
        "E=8,k=1,H=64,I=64,tokens=1,router=sigmoid_input",
        "E=16,k=4,H=128,I=48,tokens=0",
        "E=16,k=4,H=256,I=128,tokens=33,routing=hot,weights=fp8_block,activations=fp8_block",
        "E=16,k=4,H=160,I=64,tokens=17,routing=zipf:1.5,weights=nvfp4,activations=nvfp4",
        "E=16,k=4,H=128,I=64,tokens=17,routing=one_rank,placement=round_robin",
        "E=5,k=3,H=160,I=96,tokens=7,act=gelu",
        "E=5,k=3,H=160,I=96,tokens=7,act=gelu_tanh@4",
        "E=5,k=3,H=160,I=96,tokens=7,act=silu@2",
        "E=8,k=4,H=96,I=96,tokens=5,act=swiglu_oai,bias=both,router=topk_softmax_bias,"
        "weights=mxfp4",
        "E=8,k=3,H=128,I=96,shared_I=192,tokens=6,act=relu2,router=sigmoid_bias@g1/1@x2.5,"
        "weights=nvfp4,activations=nvfp4_static",
        "E=8,k=2,H=64,I=40,tokens=4,act=silu_nogate",
        "E=16,k=4,H=192,I=64,shared_I=64,tokens=8,router=sigmoid_bias@g4/2@x2.5,"
        "weights=fp8_channel,activations=fp8_token",
        "E=8,k=3,H=128,I=64,shared_I=96@gate,latent=32,tokens=6,bias=down",
        "E=4,k=2,H=128,I=64,tokens=6,weights=nvfp4/fp8_block,activations=bf16/fp8_block",
    };
    for (const std::string& spec : problems_of_every_weight_format()) specs.push_back(spec);
    for (const std::string& spec : problems_of_every_activation_format()) specs.push_back(spec);
    return specs;
  }();
  return all;
}

}  // namespace moekit::test
