// Lists the MoE layers of a checkpoint.
#include <moekit/checkpoint.h>
#include <moekit/error.h>

#include <cstdio>

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  try {
    const moekit::CheckpointInfo info = moekit::inspect_checkpoint(argv[1]);
    for (const moekit::LayerInfo& layer : info.layers) {
      if (!layer.moe) continue;
      std::printf("%s layer %d: %lld experts, %s\n", info.family.c_str(), layer.index,
                  static_cast<long long>(layer.config.num_experts),
                  to_string(layer.config.gate_up_weights.format));
    }
  } catch (const moekit::Error& e) {
    std::fprintf(stderr, "%s: %s\n", to_string(e.code()), e.what());
    return 1;
  }
  return 0;
}
