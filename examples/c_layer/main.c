/* A MoE layer from C: first one whose weights stand in this program's memory, held against plain
 * loops; then, when a model directory is given, its first MoE layer in steps, with the reasons of
 * its plan. c_layer [MODEL_DIR] Build: cc main.c $(pkg-config --cflags --libs moekit) -lm */
#include <math.h>
#include <moekit/c_api.h>
#include <stdio.h>
#include <stdlib.h>

enum { kExperts = 4, kTopK = 2, kHidden = 64, kInter = 32, kTokens = 5 };

static int failed(const char* what, moekit_status status) {
  if (status == MOEKIT_OK) return 0;
  fprintf(stderr, "%s: %s: %s\n", what, moekit_status_name(status), moekit_last_error());
  return 1;
}

/* A row-major float32 tensor on the CPU; `shape` must stay alive. */
static moekit_tensor f32_tensor(float* data, int32_t ndim, const int64_t* shape) {
  moekit_tensor t = {0};
  t.data = data;
  t.device.device_type = 1;
  t.ndim = ndim;
  t.dtype.code = MOEKIT_DTYPE_FLOAT;
  t.dtype.bits = 32;
  t.dtype.lanes = 1;
  t.shape = shape;
  return t;
}

static void fill(float* data, int count, float scale, int seed) {
  for (int i = 0; i < count; ++i) data[i] = scale * sinf(0.71f * (float)i + (float)seed);
}

static float gate_up[kExperts][2 * kInter][kHidden], down[kExperts][kHidden][kInter];
static float hidden[kTokens][kHidden], output[kTokens][kHidden], weights[kTokens][kTopK];
static int32_t ids[kTokens][kTopK];

/* Column n of token t by the definition: sum over slots of weight * down . (silu(gate . x) * (up .
 * x)). */
static double expected(int t, int n) {
  double sum = 0;
  for (int slot = 0; slot < kTopK; ++slot) {
    const int e = ids[t][slot];
    double y = 0;
    for (int i = 0; i < kInter; ++i) {
      double g = 0, u = 0;
      for (int h = 0; h < kHidden; ++h) {
        g += (double)gate_up[e][i][h] * hidden[t][h];
        u += (double)gate_up[e][kInter + i][h] * hidden[t][h];
      }
      y += down[e][n][i] * (g / (1 + exp(-g)) * u);
    }
    sum += weights[t][slot] * y;
  }
  return sum;
}

static int layer_in_memory(void) {
  fill(&gate_up[0][0][0], kExperts * 2 * kInter * kHidden, 0.2f, 1);
  fill(&down[0][0][0], kExperts * kHidden * kInter, 0.2f, 2);
  fill(&hidden[0][0], kTokens * kHidden, 1.0f, 3);
  for (int t = 0; t < kTokens; ++t) {
    for (int slot = 0; slot < kTopK; ++slot) {
      ids[t][slot] = (t + slot) % kExperts;
      weights[t][slot] = slot == 0 ? 0.75f : 0.25f;
    }
  }

  moekit_config config;
  moekit_plan_options options;
  if (failed("config", moekit_config_init(&config, sizeof config))) return 1;
  if (failed("options", moekit_plan_options_init(&options, sizeof options))) return 1;
  config.num_experts = kExperts;
  config.top_k = kTopK;
  config.hidden = kHidden;
  config.inter = kInter;
  config.gate_up_weights.format = config.down_weights.format = MOEKIT_WEIGHT_F32;
  config.gate_up_input.format = config.down_input.format = MOEKIT_INPUT_F32;
  options.max_tokens = kTokens;

  const int64_t gate_up_shape[3] = {kExperts, 2 * kInter, kHidden};
  const int64_t down_shape[3] = {kExperts, kHidden, kInter};
  const moekit_tensor gate_up_codes = f32_tensor(&gate_up[0][0][0], 3, gate_up_shape);
  const moekit_tensor down_codes = f32_tensor(&down[0][0][0], 3, down_shape);
  const moekit_matrix gate_up_matrix = {.codes = &gate_up_codes};
  const moekit_matrix down_matrix = {.codes = &down_codes};
  const moekit_layer_tensors tensors = {.struct_size = sizeof tensors,
                                        .matrix_size = sizeof(moekit_matrix),
                                        .gate_up_stacked = &gate_up_matrix,
                                        .down_stacked = &down_matrix};
  moekit_layer* layer = NULL;
  if (failed("create", moekit_layer_create(&config, &tensors, &options, &layer))) return 1;

  const int64_t rows[2] = {kTokens, kHidden}, slots[2] = {kTokens, kTopK};
  const moekit_tensor x = f32_tensor(&hidden[0][0], 2, rows);
  const moekit_tensor y = f32_tensor(&output[0][0], 2, rows);
  const moekit_tensor w = f32_tensor(&weights[0][0], 2, slots);
  moekit_tensor i = f32_tensor((float*)&ids[0][0], 2, slots);
  i.dtype.code = MOEKIT_DTYPE_INT;
  const moekit_run_args args = {
      .struct_size = sizeof args, .hidden = &x, .topk_ids = &i, .topk_weights = &w, .output = &y};
  const moekit_status status = moekit_layer_run(layer, &args);
  moekit_layer_free(layer);
  if (failed("run", status)) return 1;

  double worst = 0;
  for (int t = 0; t < kTokens; ++t) {
    for (int n = 0; n < kHidden; ++n) worst = fmax(worst, fabs(output[t][n] - expected(t, n)));
  }
  printf("layer in memory: largest difference from plain loops %.2g\n", worst);
  return worst < 1e-4 ? 0 : 1;
}

static int layer_of_checkpoint(const char* model_dir) {
  moekit_plan_options options;
  moekit_plan_options_init(&options, sizeof options);
  options.max_tokens = kTokens;
  moekit_layer* layer = NULL;
  if (failed("open", moekit_layer_open(model_dir, -1, &options, &layer))) return 1;

  moekit_config config = {.struct_size = sizeof config};
  char* plan = NULL;
  moekit_workspace* workspace = NULL;
  moekit_call* call = NULL;
  float* x = NULL;
  float* y = NULL;
  int bad = failed("config", moekit_layer_config(layer, &config)) ||
            failed("explain", moekit_layer_explain(layer, &plan)) ||
            failed("workspace", moekit_workspace_create(layer, &workspace));
  if (!bad) {
    printf("%s\n", plan);
    const int count = (int)(kTokens * config.hidden);
    x = malloc((size_t)count * sizeof *x);
    y = malloc((size_t)count * sizeof *y);
    bad = x == NULL || y == NULL;
    if (!bad) fill(x, count, 1.0f, 4);
  }
  if (!bad) {
    const int64_t rows[2] = {kTokens, config.hidden};
    const moekit_tensor hidden_states = f32_tensor(x, 2, rows), result = f32_tensor(y, 2, rows);
    const moekit_run_args args = {.struct_size = sizeof args,
                                  .hidden = &hidden_states,
                                  .output = &result,
                                  .workspace = workspace};
    /* Work of your own may stand between the steps. */
    bad = failed("dispatch", moekit_layer_dispatch(layer, &args, &call)) ||
          failed("experts", moekit_call_experts(call)) ||
          failed("combine", moekit_call_combine(call));
    double squares = 0;
    for (int64_t n = 0; n < kTokens * config.hidden; ++n) squares += (double)y[n] * y[n];
    if (!bad)
      printf("layer of the checkpoint: rms %.6f\n",
             sqrt(squares / (kTokens * (double)config.hidden)));
  }
  moekit_call_free(call);
  moekit_workspace_free(workspace);
  moekit_string_free(plan);
  moekit_layer_free(layer);
  free(x);
  free(y);
  return bad;
}

int main(int argc, char** argv) {
  if (moekit_abi_version() >> 16 != MOEKIT_ABI_MAJOR) {
    fprintf(stderr, "this program needs ABI %d of libmoekit\n", MOEKIT_ABI_MAJOR);
    return 1;
  }
  if (layer_in_memory()) return 1;
  return argc > 1 ? layer_of_checkpoint(argv[1]) : 0;
}
