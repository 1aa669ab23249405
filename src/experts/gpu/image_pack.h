// Packs single experts into images (expert_image.h), whatever the storage of their matrices.
#pragma once

#include <span>

#include "experts/gpu/expert_image.h"
#include "problem/canonical_layer.h"

namespace moekit::experts::cuda {

/// Throws unsupported for a matrix whose scales have no place in the image's order.
void check_images(const CanonicalLayer& layer, std::span<const int32_t> local_experts,
                  const ExpertImage& image);

/// Writes image.bytes at `to`. Throws unsupported, naming `expert_id`, for weights that panels
/// cannot hold exactly (panel_pack.h).
void pack_image(const StoredExpert& expert, int32_t expert_id, const ExpertImage& image,
                std::byte* to);

}  // namespace moekit::experts::cuda
