// Words of the SPEC grammar: conversions between the values of single keys and their text.
#pragma once

#include <string>

#include "moekit/config.h"

namespace moekit::spec {

/// A whole number in [least, 2^40]. Throws invalid_argument naming `key`.
int64_t parse_count(const std::string& key, const std::string& text, int64_t least);
/// A finite decimal number, the whole text.
double parse_number(const std::string& key, const std::string& text);
/// The shortest text that reads back as the same float or double.
std::string spell_number(float value);
std::string spell_number(double value);

ActivationSpec parse_act(const std::string& text);  ///< "silu", "silu_nogate", "silu@7"
std::string spell(const ActivationSpec& act);

/// Named router recipes with optional "@g8/4" (groups, groups kept) and "@x2.5" (scaling factor).
struct RouterChoice {
  RouterSpec router;
  bool weight_on_input = false;
};
RouterChoice parse_router(const std::string& text);
std::string spell(const RouterChoice& choice);
/// The recipes' names, comma-separated.
std::string router_names();

}  // namespace moekit::spec
