// moekit: the fused Mixture-of-Experts layer. Includes the whole public C++ API.
//
//   moekit::PlanOptions options;
//   options.max_tokens = 16;
//   moekit::Layer layer = moekit::Layer::open("/models/Qwen3-30B-A3B", -1, options);
//
//   std::vector<float> hidden(16 * layer.config().hidden), output(hidden.size());
//   moekit::LayerArgs args;
//   args.hidden = moekit::TensorView::contiguous(hidden.data(), moekit::DType::f32, {16,
//   layer.config().hidden}); args.output = moekit::TensorView::contiguous(output.data(),
//   moekit::DType::f32, {16, layer.config().hidden}); layer.run(args);
#pragma once

#if __cplusplus < 202002L
#error "moekit's C++ headers need C++20: compile with -std=c++20"
#endif

#include "moekit/allocator.h"
#include "moekit/checkpoint.h"
#include "moekit/communicator.h"
#include "moekit/config.h"
#include "moekit/describe.h"
#include "moekit/dtype.h"
#include "moekit/error.h"
#include "moekit/export.h"
#include "moekit/layer.h"
#include "moekit/placement.h"
#include "moekit/plan.h"
#include "moekit/quant.h"
#include "moekit/tensor.h"
#include "moekit/tensor_file.h"
#include "moekit/trace.h"
