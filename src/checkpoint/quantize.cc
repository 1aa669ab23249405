// quantize_checkpoint of moekit/checkpoint.h: reads every MoE layer, encodes its experts, and
// writes a directory beside the final one, which it becomes by a rename.
#include <dirent.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "base/check.h"
#include "base/file.h"
#include "base/thread_pool.h"
#include "checkpoint/error_codes.h"
#include "checkpoint/layer_loader.h"
#include "checkpoint/quantize_target.h"
#include "moekit/checkpoint.h"
#include "quant/block.h"
#include "quant/stored_codec.h"

namespace moekit {
namespace checkpoint {
namespace {

/// Names of a directory's entries, sorted.
std::vector<std::string> names_in(const std::string& directory) {
  std::vector<std::string> names;
  DIR* listing = opendir(directory.c_str());
  MOEKIT_CHECK(listing != nullptr, "{}: cannot list this directory: {}", directory,
               std::strerror(errno));
  while (const dirent* entry = readdir(listing)) {
    const std::string_view name = entry->d_name;
    if (name != "." && name != "..") names.emplace_back(name);
  }
  closedir(listing);
  std::ranges::sort(names);
  return names;
}

/// A directory that is removed with its files unless it became the result.
class NewDirectory {
 public:
  explicit NewDirectory(const std::string& path) {
    final_ = path;
    while (final_.size() > 1 && final_.back() == '/') final_.pop_back();
    // The rename at the end replaces an empty directory, nothing else.
    MOEKIT_CHECK(
        access(final_.c_str(), F_OK) != 0 || (is_directory(final_) && names_in(final_).empty()),
        "--out {}: expected a path that does not exist or an empty directory", path);
    temporary_ = fmt::format("{}.tmp-{}", final_, getpid());
    MOEKIT_CHECK(mkdir(temporary_.c_str(), 0777) == 0, "{}: cannot make this directory: {}",
                 temporary_, std::strerror(errno));
  }
  NewDirectory(const NewDirectory&) = delete;
  NewDirectory& operator=(const NewDirectory&) = delete;
  ~NewDirectory() {
    if (temporary_.empty()) return;
    for (const std::string& file : files_) unlink((temporary_ + "/" + file).c_str());
    rmdir(temporary_.c_str());
  }

  /// The path under which to write `file`.
  std::string path(const std::string& file) {
    files_.push_back(file);
    return temporary_ + "/" + file;
  }
  void commit() {
    MOEKIT_CHECK(std::rename(temporary_.c_str(), final_.c_str()) == 0,
                 "{}: cannot rename {} to it: {}", final_, temporary_, std::strerror(errno));
    temporary_.clear();
  }

 private:
  std::string final_;
  std::string temporary_;
  std::vector<std::string> files_;
};

std::string file_of(const Tensor& tensor) {
  return tensor.file->path().substr(tensor.file->path().rfind('/') + 1);
}

/// One matrix to quantize: its name in the new files and its values in the old ones.
struct Part {
  std::string module;
  StoredMatrix matrix;
  StoredVector bias;  ///< to write beside it; empty: none, or copied as it is
};

/// Matrices that share nvfp4's global: gate and up, or down alone.
struct Group {
  std::vector<Part> parts;
  std::string file;
};

/// Everything that one output file holds.
struct OutputFile {
  std::vector<Tensor> copied;
  std::vector<Group> groups;
};

class Quantizer {
 public:
  Quantizer(const std::string& model_dir, const QuantizeOptions& options)
      : target_(find_target(options.scheme)),
        options_(options),
        source_(model_dir),
        threads_(options.num_threads > 0 ? options.num_threads : usable_cpus()) {
    MOEKIT_CHECK_AS(kUnsupported, source_.quant().method() == kPlain,
                    "{}: the model is quantized already ({} {}); start from its unquantized form",
                    model_dir, source_.quant().method_name(), source_.quant().format());
    for (const Tensor& tensor : source_.files().with_prefix("")) {
      tensors_.emplace(tensor.name(), tensor);
    }
    const std::vector<LayerKind>& kinds = source_.model().layers;
    for (size_t i = 0; i < kinds.size(); ++i) {
      if (kinds[i] != LayerKind::dense) plan_layer(static_cast<int>(i));
    }
    MOEKIT_CHECK_AS(kUnsupported, !layers_.empty(), "{}: no layer has experts to quantize",
                    model_dir);
    for (const auto& [name, tensor] : tensors_) {
      report_.bytes_before += tensor.entry->bytes();
      if (replaced_.contains(name)) continue;
      files_[file_of(tensor)].copied.push_back(tensor);
      ++report_.tensors_copied;
      ignore(tensor);
    }
    // A head that is tied to the embedding has no tensor, but loaders do see a module.
    if (!tensors_.contains("lm_head.weight")) report_.ignored.push_back("lm_head");
  }

  QuantizeReport write(NewDirectory& out) {
    std::map<std::string, std::string> index;
    size_t done = 0;
    for (const auto& [name, file] : files_) {
      write_tensors(out, name, file, index);
      ++done;
      if (options_.progress) {
        options_.progress(
            fmt::format("{} of {} files, {} matrices", done, files_.size(), report_.matrices));
      }
    }
    if (is_file(source_.files().directory() + "/model.safetensors.index.json")) {
      write_index(out.path("model.safetensors.index.json"), index);
    }
    write_config(out.path("config.json"));
    copy_others(out);
    return std::move(report_);
  }

 private:
  /// The layout in which compressed-tensors keeps the experts: a matrix each, under the names that
  /// the source has where it is one a matrix already.
  const ExpertLayout& target_layout(const ExpertLayout& from) const {
    const Family& family = *source_.model().family;
    if (!from.stacked) return from;
    for (const LayoutChoice& choice : family.layouts) {
      const bool fits = choice.layout != nullptr && (choice.methods & kCompressedTensors) != 0;
      if (fits && !choice.layout->stacked) return *choice.layout;
    }
    fail(kUnsupported, "experts of {} ({}) have no form in compressed-tensors that is covered",
         source_.model().model_type, from.name);
  }

  void plan_layer(int number) {
    Checkpoint::LoadedLayer loaded = source_.load(number, true);
    const CanonicalLayer& layer = *loaded.canonical;
    const ExpertLayout& from = *loaded.layout;
    const ExpertLayout& to = target_layout(from);
    const std::string block = source_.model().block(number);
    const int64_t count = static_cast<int64_t>(layer.experts.size());
    for (int64_t e = 0; e < count; ++e) {
      const StoredExpert& expert = layer.experts[static_cast<size_t>(e)];
      const std::string file = replace_source(block, from, e);
      auto module = [&](std::string_view name) { return block + fill(name, "e", e); };
      add_expert(expert, module(to.gate), module(to.up), module(to.down), file, from.stacked);
    }
    if (layer.config.shared.inter > 0) {
      const ExpertLayout& shared = *source_.model().family->shared_layout;
      const std::string prefix = fmt::format("{}{}.", block, source_.model().family->shared);
      const std::string file = replace_source(prefix, shared, 0);
      auto module = [&](std::string_view name) { return prefix + std::string(name); };
      add_expert(layer.shared, module(shared.gate), module(shared.up), module(shared.down), file,
                 false);
    }
    layers_.push_back(std::move(loaded.canonical));
  }

  /// Notes the source tensors of an expert as replaced; returns the file of its up matrix.
  std::string replace_source(const std::string& prefix, const ExpertLayout& layout,
                             int64_t expert) {
    for (const std::string_view name : {layout.gate, layout.up, layout.down}) {
      if (name.empty()) continue;
      const std::string module = prefix + fill(name, "e", expert);
      replaced_.insert(layout.bare ? module : module + ".weight");
      if (layout.stacked && layout.bare) replaced_.insert(module + "_bias");
    }
    const std::string up = prefix + fill(layout.up, "e", expert);
    return file_of(tensors_.at(layout.bare ? up : up + ".weight"));
  }

  void add_expert(const StoredExpert& expert, const std::string& gate, const std::string& up,
                  const std::string& down, const std::string& file, bool with_biases) {
    auto part = [&](const std::string& module, const StoredMatrix& m, const StoredVector& bias) {
      return Part{module, m, with_biases ? bias : StoredVector{}};
    };
    Group inputs{{part(up, expert.up, expert.up_bias)}, file};
    if (!expert.gate.empty()) inputs.parts.push_back(part(gate, expert.gate, expert.gate_bias));
    files_[file].groups.push_back(std::move(inputs));
    files_[file].groups.push_back({{part(down, expert.down, expert.down_bias)}, file});
  }

  /// Two-dimensional weights that are no embedding are what loaders take for linear layers.
  void ignore(const Tensor& tensor) {
    constexpr std::string_view kEnding = ".weight";
    const std::string& name = tensor.name();
    if (!name.ends_with(kEnding) || tensor.entry->shape.size() != 2) return;
    const std::string module = name.substr(0, name.size() - kEnding.size());
    for (const std::string_view embedding : {"embed_tokens", "embeddings", "wte"}) {
      if (module.ends_with(embedding)) return;
    }
    report_.ignored.push_back(module);
  }

  std::vector<float> decode(const StoredMatrix& m) {
    std::vector<float> w(static_cast<size_t>(m.rows * m.cols));
    auto row = [&](int64_t r, int) {
      quant::decode_weights(m, r, 0, m.cols, w.data() + r * m.cols);
    };
    threads_.parallel_for(m.rows, row);
    return w;
  }

  /// As the tools write them: scales in the type of the weights.
  static DType scale_dtype(const StoredMatrix& m) { return m.codes.unit; }

  void write_tensors(NewDirectory& out, const std::string& name, const OutputFile& file,
                     std::map<std::string, std::string>& index) {
    std::vector<TensorSource> sources;
    std::vector<std::unique_ptr<QuantizedMatrix>> matrices;
    std::vector<std::unique_ptr<std::vector<std::byte>>> biases;
    for (const Tensor& tensor : file.copied) {
      sources.push_back({tensor.name(),
                         tensor.entry->dtype,
                         tensor.entry->shape,
                         {tensor.data(), static_cast<size_t>(tensor.entry->bytes())}});
    }
    for (const Group& group : file.groups) {
      std::vector<std::vector<float>> values;
      float amax = 0;
      for (const Part& part : group.parts) {
        values.push_back(decode(part.matrix));
        amax = std::max(
            amax, quant::abs_max(values.back().data(), static_cast<int64_t>(values.back().size())));
      }
      for (size_t i = 0; i < group.parts.size(); ++i) {
        const Part& part = group.parts[i];
        matrices.push_back(std::make_unique<QuantizedMatrix>(
            target_, part.module, values[i].data(), part.matrix.rows, part.matrix.cols,
            scale_dtype(part.matrix), amax, threads_));
        matrices.back()->append_to(sources);
        if (!part.bias.empty()) biases.push_back(add_bias(part, sources));
        ++report_.matrices;
      }
    }
    if (sources.empty()) return;
    sort_as_tools_do(sources);
    for (const TensorSource& source : sources) {
      index[source.name] = name;
      report_.bytes_after += static_cast<int64_t>(source.data.size());
    }
    const std::pair<std::string, std::string> metadata[] = {{"format", "pt"}};
    write_safetensors(out.path(name), sources, metadata);
  }

  static std::unique_ptr<std::vector<std::byte>> add_bias(const Part& part,
                                                          std::vector<TensorSource>& sources) {
    const StoredVector& b = part.bias;
    const auto unit = static_cast<size_t>(bytes_of(b.dtype));
    auto bytes = std::make_unique<std::vector<std::byte>>(static_cast<size_t>(b.size) * unit);
    for (int64_t i = 0; i < b.size; ++i) {
      std::memcpy(bytes->data() + static_cast<size_t>(i) * unit,
                  b.data + (b.first + b.step * i) * static_cast<int64_t>(unit), unit);
    }
    sources.push_back({part.module + ".bias", b.dtype, {b.size}, *bytes});
    return bytes;
  }

  /// By type, then by name: the order of the safetensors library.
  static void sort_as_tools_do(std::vector<TensorSource>& sources) {
    constexpr DType kOrder[] = {
        DType::u64,     DType::i64, DType::f64, DType::f32,     DType::u32,     DType::i32,
        DType::bf16,    DType::f16, DType::u16, DType::i16,     DType::f8_e8m0, DType::f8_e4m3,
        DType::f8_e5m2, DType::i8,  DType::u8,  DType::f4_e2m1, DType::boolean};
    auto rank = [&](DType dtype) { return std::ranges::find(kOrder, dtype) - kOrder; };
    std::ranges::sort(sources, [&](const TensorSource& a, const TensorSource& b) {
      return a.dtype != b.dtype ? rank(a.dtype) < rank(b.dtype) : a.name < b.name;
    });
  }

  void write_index(const std::string& path, const std::map<std::string, std::string>& index) {
    std::string text =
        fmt::format("{{\n  \"metadata\": {{\n    \"total_size\": {}\n  }},\n  \"weight_map\": {{",
                    report_.bytes_after);
    const char* separator = "";
    for (const auto& [tensor, file] : index) {
      text += fmt::format("{}\n    {}: {}", separator, json_quote(tensor), json_quote(file));
      separator = ",";
    }
    write_file_atomically(path, text + "\n  }\n}\n");
  }

  /// The old config with one member more; every other byte stays.
  void write_config(const std::string& path) {
    const std::string from = source_.files().directory() + "/config.json";
    std::string text = read_file(from, 64 << 20);
    const Json parsed = Json::parse(text, from);
    MOEKIT_CHECK_AS(kUnsupported, parsed.find("quantization_config") == nullptr,
                    "{}: quantization_config is there, though empty; remove it", from);
    const size_t end = text.rfind('}');
    text.erase(end);
    while (!text.empty() && std::strchr(" \t\r\n", text.back()) != nullptr) text.pop_back();
    text += fmt::format(",\n  \"quantization_config\": {}\n}}\n",
                        quantization_config(target_, report_.ignored));
    write_file_atomically(path, text);
  }

  /// Tokenizer, templates, licence: all plain files that hold no weights.
  void copy_others(NewDirectory& out) {
    const std::string& directory = source_.files().directory();
    for (const std::string& name : names_in(directory)) {
      const bool written = name == "config.json" || name == "model.safetensors.index.json" ||
                           name.ends_with(".safetensors");
      const std::string from = directory + "/" + name;
      if (written || !is_file(from)) continue;
      const MappedFile file(from);
      AtomicFile copy(out.path(name));
      copy.write(file.data(), file.size());
      copy.commit();
    }
  }

  const Target& target_;
  const QuantizeOptions& options_;
  Checkpoint source_;
  ThreadPool threads_;
  std::map<std::string, Tensor> tensors_;
  std::set<std::string> replaced_;
  std::map<std::string, OutputFile> files_;
  std::vector<std::shared_ptr<CanonicalLayer>> layers_;  ///< keep what parts point into
  QuantizeReport report_;
};

}  // namespace
}  // namespace checkpoint

QuantizeReport quantize_checkpoint(const std::string& model_dir, const std::string& out_dir,
                                   const QuantizeOptions& options) {
  checkpoint::Quantizer quantizer(model_dir, options);
  checkpoint::NewDirectory out(out_dir);
  QuantizeReport report = quantizer.write(out);
  out.commit();
  return report;
}

}  // namespace moekit
