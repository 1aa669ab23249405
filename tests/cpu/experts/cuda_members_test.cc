// What the CUDA members take, as a table: one problem that all take, and one reason a line against
// it. No GPU and no plug-in is needed: the target is written into the problem.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

#include "engine/plan.h"
#include "experts/gpu/members.h"
#include "kernels/common/limits.h"
#include "problem/spec.h"

namespace moekit::experts {
namespace {

using Codes = std::vector<ReasonCode>;
using enum ReasonCode;

Problem problem_of(const std::string& spec, const std::string& arch = "90a") {
  const ProblemSpec parsed = parse_spec(spec);
  PlanOptions options;
  options.max_tokens = parsed.tokens;
  options.hidden_dtype = DType::bf16;
  options.combine_dtype = DType::bf16;
  options.batch_invariant = false;
  Problem p = engine::make_problem(engine::hollow_layer(parsed.config), options);
  p.device.type = DeviceType::cuda;
  p.gpu.arch = device::parse_arch(arch);
  p.gpu.in_build = true;
  p.gpu.targets = device::kUsualTargets;
  return p;
}

Codes codes_of(const Experts& member, const Problem& problem) {
  Codes codes;
  const Support support = member.supports(problem);
  for (const Reason& reason : support.reasons()) codes.push_back(reason.code);
  return codes;
}

const std::string kBase = "E=16,k=4,H=128,I=256,tokens=8";

struct Case {
  const char* name;
  std::function<Problem()> problem;
  Codes sm90, decode, reference;
};

Problem changed(const std::string& spec, const std::function<void(Problem&)>& change) {
  Problem p = problem_of(spec);
  change(p);
  return p;
}

std::vector<Case> cases() {
  const auto spec = [](const std::string& more) {
    return [more] { return problem_of(kBase + "," + more); };
  };
  const auto change = [](const std::function<void(Problem&)>& edit) {
    return [edit] { return changed(kBase, edit); };
  };
  const auto arch = [](const std::string& name) {
    return [name] { return problem_of(kBase, name); };
  };
  const std::string block = "weights=fp8_block,activations=fp8_block";
  return {
      {"bf16", spec("act=silu"), {}, {}, {}},
      {"fp8 blocks", spec(block), {}, {}, {}},
      {"bias", spec("bias=1"), {}, {}, {}},
      {"clamped swiglu", spec("act=swiglu_oai"), {}, {}, {}},
      {"bf16 without a gate", spec("act=relu2"), {}, {}, {}},
      {"fp8 without a gate", spec(block + ",act=relu2"), {activation_function}, {}, {}},
      {"fp8 weights, bf16 rows",
       spec("weights=fp8_block"),
       {activation_format},
       {activation_format},
       {}},
      {"ue8m0 scales",
       spec("weights=fp8_block,activations=fp8_block_ue8m0"),
       {activation_format},
       {activation_format},
       {}},
      {"mxfp4", spec("weights=mxfp4"), {}, {}, {}},
      {"nvfp4", spec("weights=nvfp4"), {}, {}, {}},
      {"mxfp8", spec("weights=mxfp8"), {}, {}, {}},
      {"GPT-OSS", spec("weights=mxfp4,act=swiglu_oai,bias=1"), {}, {}, {}},
      {"nvfp4 without a gate", spec("weights=nvfp4,act=relu2"), {}, {}, {}},
      {"mxfp8 in e5m2", spec("weights=mxfp8_e5m2"), {weight_format}, {weight_format}, {}},
      {"nvfp4 rows",
       spec("weights=nvfp4,activations=nvfp4"),
       {activation_format},
       {activation_format},
       {}},
      {"mxfp8 rows",
       spec("weights=mxfp8,activations=mxfp8"),
       {activation_format},
       {activation_format},
       {}},
      {"fp8 rows for mxfp4",
       spec("weights=mxfp4,activations=fp8_block"),
       {activation_format},
       {activation_format},
       {}},
      {"two formats", spec("weights=mxfp4/bf16"), {weight_format}, {weight_format}, {}},
      {"wide mxfp4 rows",
       [] { return problem_of("E=16,k=4,H=7168,I=256,tokens=8,weights=mxfp4", "120a"); },
       {ReasonCode::arch},
       {shape},
       {}},
      {"f16", spec("weights=f16"), {weight_format}, {weight_format}, {}},
      {"int4", spec("weights=int4_g32"), {weight_format}, {weight_format}, {weight_format}},
      {"odd hidden",
       [] { return problem_of("E=16,k=4,H=136,I=256,tokens=8"); },
       {shape},
       {shape},
       {shape}},
      {"half a step",
       [] { return problem_of("E=16,k=4,H=144,I=272,tokens=8"); },
       {shape},
       {shape},
       {}},
      {"half a scale group",
       [] { return problem_of("E=16,k=4,H=144,I=256,tokens=8,weights=mxfp4"); },
       {shape},
       {shape},
       {shape}},
      {"nine tokens", [] { return problem_of("E=16,k=4,H=128,I=256,tokens=9"); }, {}, {shape}, {}},
      {"seventy slots",
       [] { return problem_of("E=16,k=10,H=128,I=256,tokens=7"); },
       {},
       {shape},
       {}},
      {"wide rows",
       [] { return problem_of("E=16,k=4,H=16384,I=256,tokens=8"); },
       {},
       {shape, shape},
       {}},
      {"rows beyond the shared memory of 12.0",
       [] { return problem_of("E=16,k=4,H=8192,I=256,tokens=8", "120a"); },
       {ReasonCode::arch},
       {shape},
       {}},
      {"the same rows on 9.0",
       [] { return problem_of("E=16,k=4,H=8192,I=256,tokens=8", "90a"); },
       {},
       {},
       {}},
      {"5000 experts",
       [] { return problem_of("E=5000,k=4,H=128,I=256,tokens=8"); },
       {shape},
       {},
       {}},
      {"the CPU",
       change([](Problem& p) { p.device.type = DeviceType::cpu; }),
       {ReasonCode::device},
       {ReasonCode::device},
       {ReasonCode::device}},
      {"no plug-in",
       change([](Problem& p) { p.gpu.in_build = false; }),
       {not_in_build},
       {not_in_build},
       {not_in_build}},
      {"no plug-in, no GPU",
       change([](Problem& p) {
         p.gpu.in_build = false;
         p.gpu.arch.reset();
       }),
       {not_in_build},
       {not_in_build},
       {not_in_build}},
      {"no GPU",
       change([](Problem& p) { p.gpu.arch.reset(); }),
       {ReasonCode::device},
       {ReasonCode::device},
       {ReasonCode::device}},
      {"Ampere", arch("86"), {ReasonCode::arch}, {}, {}},
      {"Turing", arch("75"), {ReasonCode::arch}, {ReasonCode::arch}, {ReasonCode::arch}},
      {"B200", arch("100a"), {ReasonCode::arch}, {}, {}},
      {"B300", arch("103a"), {ReasonCode::arch}, {ReasonCode::arch}, {ReasonCode::arch}},
      {"RTX 5090", arch("120a"), {ReasonCode::arch}, {}, {}},
      {"f32 combine",
       change([](Problem& p) { p.combine_dtype = DType::f32; }),
       {combine},
       {combine},
       {}},
      {"batch invariant", change([](Problem& p) { p.batch_invariant = true; }), {}, {combine}, {}},
      {"f32 rows", change([](Problem& p) { p.hidden_dtype = DType::f32; }), {}, {}, {}},
      {"f32 rows to quantize",
       [block] {
         return changed(kBase + "," + block, [](Problem& p) { p.hidden_dtype = DType::f32; });
       },
       {},
       {rows_format},
       {}},
      {"two ranks",
       change([](Problem& p) { p.num_ranks = 2; }),
       {parallel},
       {parallel},
       {parallel}},
      {"two slices", change([](Problem& p) { p.tp_size = 2; }), {parallel}, {parallel}, {parallel}},
      {"movable experts",
       change([](Problem& p) { p.slots_per_rank = 16; }),
       {layout},
       {layout},
       {layout}},
      {"weight on input",
       change([](Problem& p) { p.config.weight_on_input = true; }),
       {reduce_duty},
       {reduce_duty},
       {reduce_duty}},
      {"static scales",
       change([](Problem& p) {
         p.config.gate_up_input = {ActivationFormat::fp8_tensor, true};
       }),
       {activation_format},
       {activation_format},
       {activation_format}},
      {"all at once",
       [] {
         return changed("E=5000,k=10,H=136,I=256,tokens=9,weights=int8_channel", [](Problem& p) {
           p.gpu.arch = device::parse_arch("75");
           p.num_ranks = 2;
         });
       },
       {ReasonCode::arch, weight_format, shape, shape, parallel},
       {ReasonCode::arch, weight_format, shape, shape, parallel},
       {ReasonCode::arch, weight_format, shape, parallel}},
  };
}

TEST(CudaMembers, EveryReasonIsGiven) {
  for (const Case& c : cases()) {
    const Problem problem = c.problem();
    EXPECT_EQ(codes_of(sm90_experts(), problem), c.sm90) << c.name;
    EXPECT_EQ(codes_of(cuda_decode_experts(), problem), c.decode) << c.name;
    EXPECT_EQ(codes_of(cuda_ref_experts(), problem), c.reference) << c.name;
  }
}

TEST(CudaMembers, BucketsOfFewTokensTakeTheDecodeChain) {
  Problem p = problem_of("E=16,k=10,H=128,I=256,tokens=512");
  const auto first = [&](int64_t tokens) { return sm90_experts().candidates(p, tokens).front(); };
  EXPECT_EQ(first(1), device::kDecodeChain);
  EXPECT_EQ(first(6), device::kDecodeChain);
  EXPECT_EQ(first(7), device::kSplitChain);  // 70 slots
  EXPECT_EQ(first(512), device::kSplitChain);
  p.batch_invariant = true;
  EXPECT_EQ(first(1), device::kSplitChain);
  EXPECT_EQ(sm90_experts().candidates(p, 1).size(), 1u);
  // Rings of panels leave less shared memory to the rows.
  for (const auto& [weights, most] : {std::pair{"bf16", 8}, {"mxfp4", 6}, {"mxfp8", 5}}) {
    p = problem_of(std::string("E=16,k=4,H=12288,I=256,tokens=512,weights=") + weights);
    EXPECT_EQ(first(most), device::kDecodeChain) << weights;
    EXPECT_EQ(first(most + 1), device::kSplitChain) << weights;
  }
}

TEST(CudaMembers, LargeCallsOfFp8TakeTheSplitChain) {
  const std::string fp8 = ",tokens=512,weights=fp8_block,activations=fp8_block";
  Problem p = problem_of("E=8,k=2,H=4096,I=14336" + fp8);  // 176 MB an expert
  const auto first = [&](int64_t tokens) { return sm90_experts().candidates(p, tokens).front(); };
  EXPECT_EQ(first(1), device::kDecodeChain);
  EXPECT_EQ(first(2), device::kSplitChain);
  EXPECT_EQ(sm90_experts().candidates(p, 2).back(), device::kDecodeChain);
  p = problem_of("E=128,k=8,H=2048,I=768" + fp8);  // 5 MB: it is bytes times tokens that decide
  EXPECT_EQ(first(4), device::kDecodeChain);
  EXPECT_EQ(first(8), device::kSplitChain);
  p = problem_of("E=8,k=2,H=4096,I=14336,tokens=512");  // bf16
  EXPECT_EQ(first(8), device::kDecodeChain);
}

TEST(CudaMembers, TextsNameFiguresAndWhatToDo) {
  const auto text = [](const Experts& member, const Problem& problem) {
    const Support support = member.supports(problem);
    return support.ok() ? std::string() : support.reasons().front().text;
  };
  EXPECT_EQ(text(sm90_experts(), problem_of(kBase, "120a")),
            "its kernels are made for 90a (Hopper), the plan is for 120a");
  EXPECT_EQ(text(cuda_decode_experts(), problem_of("E=16,k=4,H=128,I=256,tokens=9")),
            "calls have up to 9 tokens, at most 8 fit");
  const auto both = [](const std::string& pair) {
    return "; this layer has " + pair + " (gate and up) and " + pair + " (down)";
  };
  EXPECT_EQ(text(sm90_experts(), problem_of(kBase + ",weights=mxfp8_e5m2")),
            "takes weights in bf16, fp8_block, mxfp4, nvfp4 or mxfp8 (e4m3), gate and up in the "
            "format of down" +
                both("mxfp8_e5m2 weights with bf16 activations"));
  EXPECT_EQ(text(sm90_experts(), problem_of(kBase + ",weights=nvfp4,activations=nvfp4")),
            "takes nvfp4 weights with bf16 activations (--activations bf16)" +
                both("nvfp4 weights with nvfp4 activations"));
  EXPECT_EQ(text(cuda_decode_experts(), problem_of(kBase + ",weights=fp8_block")),
            "takes fp8_block weights with fp8_block activations (f32 scales)" +
                both("fp8_block weights with bf16 activations"));
}

}  // namespace
}  // namespace moekit::experts
