// A MoE layer inside an MPI program. The program owns MPI; moekit gets the subgroup of ranks that
// share the layer's experts, and the program's own messages go on beside it.
//   mpirun -n R mpi_layer MODEL_DIR [LAYER]
#include <moekit/moekit.h>
#include <mpi.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace {

constexpr int64_t kTokens = 6;  // of each rank

std::vector<float> hidden_states(int rank, int64_t hidden) {
  std::vector<float> x(static_cast<size_t>(kTokens * hidden));
  for (size_t i = 0; i < x.size(); ++i) {
    x[i] = std::sin(0.37f * static_cast<float>(i) + static_cast<float>(rank));
  }
  return x;
}

std::vector<float> run(const moekit::Layer& layer, std::vector<float>& x) {
  const int64_t hidden = layer.config().hidden;
  std::vector<float> y(x.size());
  moekit::LayerArgs args;
  args.hidden = moekit::TensorView::contiguous(x.data(), moekit::DType::f32, {kTokens, hidden});
  args.output = moekit::TensorView::contiguous(y.data(), moekit::DType::f32, {kTokens, hidden});
  layer.run(args);
  return y;
}

int run_example(const std::string& model, int index) {
  int world_rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &world_rank);

  // Say that the last rank has other work: the layer's group is the rest of the world, or all of it
  // where there is one rank only.
  int world_size = 1;
  MPI_Comm_size(MPI_COMM_WORLD, &world_size);
  const bool works = world_size == 1 || world_rank + 1 < world_size;
  MPI_Comm experts = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, works ? 0 : MPI_UNDEFINED, world_rank, &experts);

  int same = 1;
  if (works) {
    moekit::PlanOptions alone;
    alone.max_tokens = kTokens;
    moekit::PlanOptions options = alone;
    options.comm = moekit::make_mpi_ranks(&experts);
    const moekit::Layer layer = moekit::Layer::open(model, index, options);
    std::vector<float> x = hidden_states(world_rank, layer.config().hidden);
    const std::vector<float> y = run(layer, x);
    // Slot order makes the sum: one rank with all experts gives the same bits.
    const std::vector<float> expected = run(moekit::Layer::open(model, index, alone), x);
    same = std::memcmp(y.data(), expected.data(), y.size() * sizeof(float)) == 0;
  }  // the layer and its group go before MPI_Finalize

  int all_same = 0;
  MPI_Allreduce(&same, &all_same, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
  if (experts != MPI_COMM_NULL) MPI_Comm_free(&experts);
  if (world_rank == 0) {
    std::printf("%d of %d ranks give %s bits as one rank\n", std::max(1, world_size - 1),
                world_size, all_same ? "the same" : "OTHER");
  }
  return all_same ? EXIT_SUCCESS : EXIT_FAILURE;
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  if (argc < 2) {
    std::fprintf(stderr, "usage: mpirun -n R %s MODEL_DIR [LAYER]\n", argv[0]);
    MPI_Finalize();
    return 2;
  }
  try {
    const int status = run_example(argv[1], argc > 2 ? std::atoi(argv[2]) : -1);
    MPI_Finalize();
    return status;
  } catch (const moekit::Error& e) {
    // Peers have the error too, or get it when they wait for this rank. MPI_Finalize would wait for
    // ranks that may be gone.
    std::fprintf(stderr, "%s: %s\n", to_string(e.code()), e.what());
    std::fflush(nullptr);
    _exit(EXIT_FAILURE);
  }
}
