// Packs single experts into images (expert_image.h), whatever the storage of their matrices.
#pragma once

#include <span>

#include "experts/gpu/expert_image.h"
#include "problem/canonical_layer.h"

namespace moekit::experts::cuda {

/// Throws unsupported for a matrix whose scales have no place in the canonical order.
void check_images(const CanonicalLayer& layer, std::span<const int32_t> local_experts);

/// Writes image.bytes at `to`.
void pack_image(const StoredExpert& expert, const ExpertImage& image, std::byte* to);

}  // namespace moekit::experts::cuda
