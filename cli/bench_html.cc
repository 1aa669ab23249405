#include "bench_html.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>

#include "report.h"

namespace moekit::cli {
namespace {

std::string escaped(const std::string& text) {
  std::string out;
  for (char c : text) {
    switch (c) {
      case '&': out += "&amp;"; break;
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '"': out += "&quot;"; break;
      default: out += c;
    }
  }
  return out;
}

/// One line of a plot: a value for each point, NaN where there is none.
struct Series {
  std::string name, style;
  std::vector<double> values;
};

/// Token counts left to right in equal steps, values upwards on a linear or logarithmic axis.
class Plot {
 public:
  Plot(std::string title, std::string unit, bool logarithmic, const std::vector<int64_t>& tokens)
      : title_(std::move(title)), unit_(std::move(unit)), log_(logarithmic), tokens_(tokens) {}

  void band(std::vector<double> low, std::vector<double> high) {
    low_ = std::move(low);
    high_ = std::move(high);
  }
  void add(Series series) { series_.push_back(std::move(series)); }

  std::string svg() {
    find_range();
    std::string out = fmt::format(
        "<figure><figcaption>{}</figcaption><svg viewBox=\"0 0 {} {}\" role=\"img\" "
        "aria-label=\"{}\">\n",
        escaped(title_), kWidth, kHeight + 22 * ((static_cast<int>(series_.size()) + 3) / 4),
        escaped(title_));
    out += axes();
    if (!low_.empty()) out += band_path();
    for (const Series& s : series_) out += line(s);
    return out + legend() + "</svg></figure>\n";
  }

 private:
  static constexpr int kWidth = 720, kHeight = 320;
  static constexpr double kLeft = 70, kRight = 700, kTop = 12, kBottom = 280;

  double x(size_t i) const {
    if (tokens_.size() == 1) return (kLeft + kRight) / 2;
    return kLeft + 24 +
           (kRight - kLeft - 48) * static_cast<double>(i) / static_cast<double>(tokens_.size() - 1);
  }
  double y(double value) const {
    const double at = log_ ? std::log10(value) : value;
    return kBottom - (kBottom - kTop) * (at - min_) / (max_ - min_);
  }

  void find_range() {
    double low = INFINITY, high = -INFINITY;
    auto take = [&](double value) {
      if (!std::isfinite(value) || (log_ && value <= 0)) return;
      low = std::min(low, value);
      high = std::max(high, value);
    };
    for (const Series& s : series_) std::for_each(s.values.begin(), s.values.end(), take);
    std::for_each(low_.begin(), low_.end(), take);
    std::for_each(high_.begin(), high_.end(), take);
    if (!(low <= high)) low = high = 1;
    min_ = log_ ? std::floor(std::log10(low)) : 0;
    max_ = log_ ? std::ceil(std::log10(high)) : std::max(1.0, high * 1.05);
    if (max_ <= min_) max_ = min_ + 1;
  }

  std::string axes() const {
    std::string out;
    const int steps = log_ ? static_cast<int>(max_ - min_) : 5;
    for (int i = 0; i <= steps; ++i) {
      const double at = min_ + (max_ - min_) * i / steps;
      const double value = log_ ? std::pow(10.0, at) : at;
      const std::string label = unit_ == "us" ? time_text(value) : fmt::format("{:.3g}", value);
      out += fmt::format(
          "<line class=\"grid\" x1=\"{0}\" x2=\"{1}\" y1=\"{2:.1f}\" y2=\"{2:.1f}\"/><text "
          "x=\"{3}\" y=\"{4:.1f}\" text-anchor=\"end\">{5}</text>\n",
          kLeft, kRight, y(value), kLeft - 6, y(value) + 4, label);
    }
    for (size_t i = 0; i < tokens_.size(); ++i) {
      out += fmt::format("<text x=\"{:.1f}\" y=\"{}\" text-anchor=\"middle\">{}</text>\n", x(i),
                         kBottom + 18, tokens_[i]);
    }
    return out + fmt::format(
                     "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">tokens of a rank"
                     "</text>\n",
                     (kLeft + kRight) / 2, kBottom + 36);
  }

  std::string band_path() const {
    std::string forth, back;
    for (size_t i = 0; i < tokens_.size(); ++i) {
      forth += fmt::format("{:.1f},{:.1f} ", x(i), y(high_[i]));
      const size_t j = tokens_.size() - 1 - i;
      back += fmt::format("{:.1f},{:.1f} ", x(j), y(low_[j]));
    }
    return fmt::format("<polygon class=\"band\" points=\"{}{}\"/>\n", forth, back);
  }

  std::string line(const Series& s) const {
    std::string points, dots;
    for (size_t i = 0; i < tokens_.size(); ++i) {
      const double value = s.values[i];
      if (!std::isfinite(value) || (log_ && value <= 0)) continue;
      points += fmt::format("{:.1f},{:.1f} ", x(i), y(value));
      dots += fmt::format(
          "<circle class=\"{}\" cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3\"><title>{} at {} tokens: "
          "{}</title></circle>\n",
          s.style, x(i), y(value), escaped(s.name), tokens_[i],
          unit_ == "us" ? time_text(value) : fmt::format("{:.3g} {}", value, unit_));
    }
    return fmt::format("<polyline class=\"{}\" points=\"{}\"/>\n{}", s.style, points, dots);
  }

  std::string legend() const {
    std::string out;
    for (size_t i = 0; i < series_.size(); ++i) {
      const double left = kLeft + 160 * static_cast<double>(i % 4);
      const double top = kHeight + 12 + 22 * static_cast<double>(i / 4);
      out += fmt::format(
          "<line class=\"{}\" x1=\"{}\" x2=\"{}\" y1=\"{}\" y2=\"{}\"/><text x=\"{}\" "
          "y=\"{}\">{}</text>\n",
          series_[i].style, left, left + 20, top, top, left + 26, top + 4,
          escaped(series_[i].name));
    }
    return out;
  }

  std::string title_, unit_;
  bool log_;
  std::vector<int64_t> tokens_;
  std::vector<double> low_, high_;
  std::vector<Series> series_;
  double min_ = 0, max_ = 1;
};

std::vector<double> each(const std::vector<OrderedJson>& points,
                         const std::function<double(const OrderedJson&)>& value) {
  std::vector<double> values;
  for (const OrderedJson& point : points) values.push_back(value(point));
  return values;
}

double time_of(const OrderedJson& point, const char* key) {
  return point.at("time_us").at(key).get<double>();
}

/// Peers by name, with NaN at the points that they did not run.
std::map<std::string, std::vector<double>> peers_of(const std::vector<OrderedJson>& points) {
  std::map<std::string, std::vector<double>> peers;
  for (size_t i = 0; i < points.size(); ++i) {
    for (const OrderedJson& peer : points[i].at("peers")) {
      auto& times =
          peers.try_emplace(peer.at("name").get<std::string>(), points.size(), NAN).first->second;
      if (peer.at("time_us").is_number()) times[i] = peer.at("time_us").get<double>();
    }
  }
  return peers;
}

std::string plots(const std::vector<OrderedJson>& points) {
  std::vector<int64_t> tokens;
  for (const OrderedJson& point : points) tokens.push_back(point.at("tokens").get<int64_t>());
  Plot time("Time of a call: median, band from p5 to p95", "us", true, tokens);
  time.band(each(points, [](const auto& p) { return time_of(p, "p5"); }),
            each(points, [](const auto& p) { return time_of(p, "p95"); }));
  time.add({"moekit", "own", each(points, [](const auto& p) { return time_of(p, "median"); })});
  time.add({"floor", "floor",
            each(points, [](const auto& p) { return p.at("floor_us").template get<double>(); })});
  int number = 0;
  for (const auto& [name, values] : peers_of(points))
    time.add({name, fmt::format("peer{}", number++ % 3), values});

  Plot fraction("Fraction of the floor: 1 is what bandwidth and matrix peak of this run allow", "",
                false, tokens);
  fraction.add({"moekit", "own", each(points, [](const auto& p) {
                  return p.at("floor_fraction").template get<double>();
                })});
  return time.svg() + fraction.svg();
}

std::string table(const std::vector<OrderedJson>& points) {
  std::string out =
      "<table><thead><tr><th>tokens</th><th>back-end</th><th>median</th><th>p5</th><th>p95</th>"
      "<th>calls</th><th>TFLOP/s</th><th>GB/s</th><th>floor</th><th>of floor</th><th>probe "
      "GB/s</th><th>probe TFLOP/s</th><th>weights</th><th>peers</th></tr></thead><tbody>\n";
  for (const OrderedJson& p : points) {
    std::string peers;
    for (const OrderedJson& peer : p.at("peers")) {
      if (!peer.at("time_us").is_number()) continue;
      peers += fmt::format(
          "{}{} {} {} ({:.2f}x)", peers.empty() ? "" : ", ",
          escaped(peer.at("name").get<std::string>()), escaped(peer.at("dtype").get<std::string>()),
          time_text(peer.at("time_us").get<double>()), peer.at("ratio").get<double>());
    }
    out += fmt::format(
        "<tr><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{:.4f}</td>"
        "<td>{:.1f}</td><td>{}</td><td>{:.2f}</td><td>{:.1f}</td><td>{:.3f}</td><td>{}</td>"
        "<td>{}</td></tr>\n",
        p.at("tokens").get<int64_t>(), escaped(p.at("backend").get<std::string>()),
        time_text(time_of(p, "median")), time_text(time_of(p, "p5")), time_text(time_of(p, "p95")),
        p.at("time_us").at("repeat").get<int64_t>(), p.at("tflops").get<double>(),
        p.at("gbs").get<double>(), time_text(p.at("floor_us").get<double>()),
        p.at("floor_fraction").get<double>(), p.at("probe").at("bandwidth_gbs").get<double>(),
        p.at("probe").at("matrix_tflops").get<double>(),
        p.at("cold").get<bool>() ? "cold" : "cached", peers);
  }
  return out + "</tbody></table>\n";
}

/// Why peers have no time, each reason once.
std::string silent_peers(const std::vector<OrderedJson>& points) {
  std::map<std::string, std::string> reasons;
  for (const OrderedJson& p : points) {
    for (const OrderedJson& peer : p.at("peers")) {
      if (peer.at("reason").is_string())
        reasons[peer.at("reason").get<std::string>()] = peer.at("name").get<std::string>();
    }
  }
  std::string out;
  for (const auto& [reason, name] : reasons)
    out += fmt::format("<p>Not timed: {}: {}</p>\n", escaped(name), escaped(reason));
  return out;
}

constexpr const char* kStyle = R"(<style>
:root { color-scheme: light dark; --ink: #1c2128; --paper: #fff; --rule: #d5d9de; --own: #0b5fa5; --floor: #707a85;
  --a: #b3541e; --b: #1f7a4d; --c: #7a3e9d; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7ea; --paper: #16191d; --rule: #3a4048; --own: #6cb6ff;
  --floor: #9aa4ae; --a: #f0a070; --b: #6fd0a0; --c: #cf9be8; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1100px;
  margin: 2rem auto; padding: 0 1rem; }
figure { margin: 1.5rem 0; } figcaption { font-weight: 600; } svg { width: 100%; max-width: 900px; }
svg text { fill: var(--ink); font-size: 12px; } .grid { stroke: var(--rule); }
polyline { fill: none; stroke-width: 2; } .band { fill: var(--own); opacity: .18; }
.own { stroke: var(--own); } circle.own { fill: var(--own); }
.floor { stroke: var(--floor); stroke-dasharray: 5 4; } circle.floor { fill: var(--floor); }
.peer0 { stroke: var(--a); } circle.peer0 { fill: var(--a); } .peer1 { stroke: var(--b); } circle.peer1 { fill: var(--b); }
.peer2 { stroke: var(--c); } circle.peer2 { fill: var(--c); }
div.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid var(--rule); white-space: nowrap; }
pre { overflow-x: auto; padding: 1rem; border: 1px solid var(--rule); }
</style>
)";

constexpr const char* kHowOnCpu =
    "<p>The floor of a point is the larger of its bytes over the read-bandwidth probe and its "
    "FLOPs over the matrix probe, both taken between the timed calls. A peer's ratio is its time "
    "over moekit's, taken in turns; it computes the same rows in the number format that is "
    "named.</p>\n";

/// Both `timed` and `matrix_source` are ours, not a checkpoint's.
std::string how_on_gpu(const OrderedJson& point) {
  return fmt::format(
      "<p>Timed: {}; a launch of one graph of independent calls, each with its own rows, routing "
      "and the next copy of the weights, over their number. The floor of a point is the larger of "
      "{} us + its bytes over the read-bandwidth probe of this run and its FLOPs over the matrix "
      "rate ({}). A peer's ratio is its time over moekit's, taken one after the other in the same "
      "way; it computes the same rows in the number format that is named.</p>\n",
      escaped(point.at("gpu").at("timed").get<std::string>()),
      point.at("gpu").at("launch_us").get<double>(),
      escaped(point.at("probe").at("matrix_source").get<std::string>()));
}

}  // namespace

std::string bench_html(const OrderedJson& machine, const std::vector<OrderedJson>& points) {
  const OrderedJson& first = points.front();
  std::string out =
      "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" "
      "content=\"width=device-width\"><title>moekit bench</title>\n";
  out += kStyle;
  out +=
      fmt::format("</head><body>\n<h1>moekit bench</h1>\n<p>{} on {}, {} ranks, routing {}.</p>\n",
                  escaped(first.at("problem").get<std::string>()),
                  escaped(first.at("device").get<std::string>()), first.at("ranks").get<int>(),
                  escaped(first.at("routing").get<std::string>()));
  out += plots(points);
  out += "<div class=\"wide\">" + table(points) + "</div>\n" + silent_peers(points);
  out += first.contains("gpu") ? how_on_gpu(first) : std::string(kHowOnCpu);
  out += "<details><summary>The machine</summary><pre>" +
         escaped(machine.dump(2, ' ', false, OrderedJson::error_handler_t::replace)) +
         "</pre></details>\n<details><summary>The points as JSON</summary><pre>";
  for (const OrderedJson& point : points)
    out += escaped(point.dump(-1, ' ', false, OrderedJson::error_handler_t::replace)) + "\n";
  return out + "</pre></details>\n</body></html>\n";
}

}  // namespace moekit::cli
